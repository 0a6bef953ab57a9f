"""Errors travel whole: through pickle and copy, from the workers of a pool, and into a graph that is traced."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable

import pytest
import torch

import microsdpa
from microsdpa.emulate.run import EmulationError

ERRORS = [
    microsdpa.MicrosdpaError("words"),
    microsdpa.InvalidArgument("scale", expected="a number", got="'1'", hint="pass one"),
    microsdpa.UnsupportedProblem("dropout", nearest="none of it"),
    microsdpa.CompileError("it failed", log="line 1\nline 2", source="/a/file.cu"),
    microsdpa.CompileError("it failed", log="", source=None),
    EmulationError("ladder/01_scalar", "a race"),
]


@pytest.mark.parametrize(
    "way",
    [copy.copy, copy.deepcopy, *(lambda e, p=p: pickle.loads(pickle.dumps(e, p)) for p in range(6))],
    ids=["copy", "deepcopy", *(f"pickle{p}" for p in range(6))],
)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_copied_with_its_fields(error: Exception, way: Callable[[Exception], Exception]) -> None:
    error.__notes__ = ["a note"]
    found = way(error)
    assert type(found) is type(error)
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))


def _refused(scale: float) -> torch.Tensor:
    tensor = torch.zeros(1, 1, 4, 16, dtype=torch.float16)
    result = microsdpa.sdpa(tensor, tensor, tensor, scale=scale)
    assert isinstance(result, torch.Tensor)
    return result


def test_the_error_of_a_worker_arrives() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply_async(_refused, (float("nan"),))
        with pytest.raises(microsdpa.InvalidArgument, match="expected a finite number, got nan") as caught:
            result.get(timeout=120)
    assert caught.value.argument == "scale"


def _caught(tensor: torch.Tensor, *, named: bool) -> torch.Tensor:
    """A step that a caller takes when a call is refused."""
    try:
        if named:
            raise microsdpa.InvalidArgument("scale", expected="a number", got="'1'", hint="pass one")
        raise microsdpa.UnsupportedProblem("dropout", nearest="none of it")
    except microsdpa.InvalidArgument as error:
        return tensor + len(error.argument)
    except microsdpa.UnsupportedProblem as error:
        return tensor - len(error.reason)


@pytest.mark.parametrize("named", [True, False], ids=["InvalidArgument", "UnsupportedProblem"])
def test_a_graph_may_catch_an_error(named: bool) -> None:
    torch._dynamo.reset()
    traced = torch.compile(_caught, backend="eager", fullgraph=True)
    tensor = torch.zeros(2)
    torch.testing.assert_close(traced(tensor, named=named), _caught(tensor, named=named))
