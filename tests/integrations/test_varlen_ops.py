"""sdpa_varlen as operators: whole graphs of torch.compile, and what tracers see, with CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import microsdpa
from microsdpa.attention import varlen
from varlen_space import Form, appending, call

FORMS = {
    "decode": Form(group=4),
    "packed": Form(torch.float16, 40, 2, 30, "packed", False, (True, True)),
    "dense": Form(keys="dense", queries=7, softcap=True, alibi=True),
    "sinks": Form(torch.float16, queries=3, sinks=torch.float32, window=(True, False)),
}


def compiled(**options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(lambda given: microsdpa.sdpa_varlen(**given, **options), fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_whole_graph(name: str, return_lse: bool) -> None:
    given = call(FORMS[name], 3)
    expected = microsdpa.sdpa_varlen(**given, return_lse=return_lse)
    got = compiled(return_lse=return_lse)(given)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("rotary", "norms"), [(0, ()), (16, ()), (16, ("q_norm", "k_norm"))])
def test_a_cache_is_written_in_a_graph(rotary: int, norms: tuple[str, ...]) -> None:
    eager, traced = (appending(FORMS["decode"], 3, rotary, norms=norms) for _ in range(2))
    before = eager["key"].clone()
    expected = microsdpa.sdpa_varlen(**eager)
    got = compiled()(traced)
    assert torch.equal(got, expected)
    assert torch.equal(traced["key"], eager["key"])
    assert torch.equal(traced["value"], eager["value"])
    assert not torch.equal(eager["key"], before)


def test_an_output_is_written_in_a_graph() -> None:
    given = call(FORMS["decode"], 3)
    into = torch.full_like(given["query"], torch.nan)
    got = compiled(out=into)(given)
    assert torch.equal(into, microsdpa.sdpa_varlen(**given))
    assert torch.equal(got, into)


def test_a_graph_asks_for_bits_that_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    eager = varlen.sdpa_varlen
    monkeypatch.setattr(varlen, "sdpa_varlen", lambda *a, **k: asked.append(k["batch_invariant"]) or eager(*a, **k))
    compiled(batch_invariant=True)(call(FORMS["decode"], 3))
    compiled()(call(FORMS["decode"], 3))
    assert asked == [True, False]


def test_one_of_two_new_tensors_is_refused_while_tracing() -> None:
    given = appending(FORMS["decode"], 3) | {"new_value": None}
    with pytest.raises(Exception, match=r"InvalidArgument.*new_key, new_value"):
        compiled()(given)


def _arguments(given: dict[str, Any], appends: bool) -> tuple[Any, ...]:
    names = ["query", "key", "value", *(["new_key", "new_value"] if appends else [])]
    names += ["query_offsets", "key_offsets", "lengths", "page_table", "max_queries", "rotary_cos", "rotary_sin"]
    rest = False, given["causal"], given.get("scale"), True, [-1, -1], None, None, None, "auto", False, None, None
    return *(given.get(name) for name in names), *rest


@pytest.mark.parametrize("appends", [False, True])
def test_the_operators_are_what_torch_wants_of_operators(appends: bool) -> None:
    given = appending(FORMS["decode"], 3) if appends else call(FORMS["decode"], 3)
    operator = torch.ops.microsdpa.attention_varlen_append if appends else torch.ops.microsdpa.attention_varlen
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator.default, _arguments(given, appends), test_utils=tests)
