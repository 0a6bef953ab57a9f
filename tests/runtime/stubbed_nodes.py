"""The kernels of gradients' nodes in torch's own dispatcher, without a GPU; test_launcher.py runs this file."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import tensor
from stub_harness import _clean, library, register
from stub_harness import call as arguments_of_call

from microsdpa.call.call import NO_TENSORS
from microsdpa.call.options import Options
from microsdpa.errors import InvalidArgument
from microsdpa.execution import nodes
from microsdpa.runtime import launcher

__all__ = ["_clean"]

if torch.version.cuda is None:
    ctypes.CDLL(str(Path(os.environ["LD_LIBRARY_PATH"].partition(":")[0]) / "stub_torch_cuda.so"))

CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "cuDNN": (nodes.CUDNN, (None, True, 0.0, True), {"scale": 0.5}),
    "cuDNN, bias": (nodes.CUDNN, (torch.zeros(1, 2, 8, 8).half(), True, 0.0, False), {}),
    "flash": (nodes.FLASH, (0.0, False), {"scale": None}),
    "flash, causal": (nodes.FLASH, (0.0, True), {"scale": 0.25}),
}


@pytest.fixture(autouse=True)
def _registered() -> None:
    for _ in range(2):  # the second time nothing is left to do
        assert launcher.register_nodes(nodes.BACKEND, nodes.CUDNN, nodes.FLASH, 0, 1)


def tensors() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, 8, 16).half().requires_grad_() for _ in range(3))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_a_plan_gives_nothing_and_its_tensors_back(name: str) -> None:
    operator, arguments, options = CALLS[name]
    call, keys = nodes.calls()[operator]
    inputs = tensors()
    given = [*inputs, *(a for a in arguments if isinstance(a, torch.Tensor))]
    before = [t._use_count() for t in given]
    for _ in range(3):
        # Random state and masks have no tensors either: torch shows those as None, or not at all.
        assert not any(isinstance(t, torch.Tensor) for t in call(keys, *inputs, *arguments, **options))
    assert [t._use_count() for t in given] == before


def test_what_is_wrong_with_a_call_comes_from_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "operator_for", lambda *_: (nodes.CUDNN, True))
    with pytest.raises(InvalidArgument, match="softcap"):
        nodes.attend(tensors(), NO_TENSORS, Options(softcap=-1.0))  # type: ignore[arg-type]


def test_what_cannot_be_said_of_a_call_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at most 4 dimensions, got 5"):
        launcher.expect_node(0, tensor((1, 1, 1, 2, 2), 0x100000), 1)
    with pytest.raises(ValueError, match="expected one below 64, got 64"):
        launcher.set_node_constants(64, 0, 0, 0, 0)


def test_a_node_is_allowed_for_a_plan_that_is_there() -> None:
    assert not launcher.allow_node(1, *arguments_of_call())
    register(arguments_of_call())
    assert launcher.allow_node(1, *arguments_of_call())
    assert launcher.launch(*arguments_of_call()) is True  # it is the same plan for everybody else
    assert library.plan_count() == 1
    assert not launcher.allow_node(1, *arguments_of_call(options=6))
