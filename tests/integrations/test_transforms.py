"""Calls inside torch.func's transforms and torch.jit.trace: each works, or says what there is none of."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import microsdpa
from microsdpa.attention import plan as plans
from microsdpa.attention import varlen
from microsdpa.attention.explain import Explanation
from microsdpa.evidence.inputs import Case, make
from microsdpa.execution import autograd, forward

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore::torch.jit.TracerWarning")
IMPLS = ["auto", "emulate"]
CASE = Case(1, 4, 9, 12, 16, heads_kv=2, causal="lower_right")
Call = Callable[..., torch.Tensor]


def _call(impl: str, **more: Any) -> Call:
    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found = microsdpa.sdpa(query, key, value, causal="lower_right", enable_gqa=True, impl=impl, **more)
        assert isinstance(found, torch.Tensor)
        return found

    return call


def _gradients(call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Those of torch.autograd."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(call(*leaves).float().sum(), leaves)


@pytest.mark.parametrize("impl", IMPLS)
def test_torch_func_grad_is_autograds_gradient(impl: str) -> None:
    tensors, call = make(CASE), _call(impl)
    found = torch.func.grad(lambda *t: call(*t).float().sum(), argnums=(0, 1, 2))(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, _gradients(call, *tensors), strict=True))
    out, pull = torch.func.vjp(call, *tensors)
    assert torch.equal(out, call(*tensors))
    assert all(torch.equal(a, b) for a, b in zip(pull(torch.ones_like(out)), found, strict=True))


def test_gradients_of_masks_and_of_the_lse() -> None:
    query, key, value = make(Case(1, 2, 9, 12, 16))
    mask, sinks = torch.randn(9, 12), torch.randn(2)

    def lse(mask: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        found = microsdpa.sdpa(query, key, value, attn_mask=mask, sinks=sinks, return_lse=True)
        return found[1].sum()

    leaves = mask.clone().requires_grad_(), sinks.clone().requires_grad_()
    expected = torch.autograd.grad(lse(*leaves), leaves)
    found = torch.func.grad(lse, argnums=(0, 1))(mask, sinks)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_vmap_and_grad_in_both_orders(impl: str) -> None:
    """Also where a transform's own tensors do not say that one around it wants a gradient."""
    query, key, value = make(CASE)
    call = _call(impl)
    batch = torch.stack([query, query * 0.5, -query])
    apart = torch.stack([call(one, key, value) for one in batch])
    assert torch.equal(torch.vmap(lambda one: call(one, key, value))(batch), apart)
    expected = torch.stack([_gradients(call, one, key, value)[0] for one in batch])
    inside = torch.vmap(torch.func.grad(lambda one: call(one, key, value).float().sum()))(batch)
    around = torch.func.grad(lambda b: torch.vmap(lambda one: call(one, key, value))(b).float().sum())(batch)
    assert torch.equal(inside, expected)
    assert torch.equal(around, expected)


def test_a_jacobian_is_right() -> None:
    query, key, value = make(Case(1, 1, 3, 5, 8))
    jacobian = torch.func.jacrev(lambda one: _call("auto")(one, key, value))(query)
    expected = _gradients(_call("auto"), query, key, value)[0]
    torch.testing.assert_close(jacobian.sum(dim=(0, 1, 2, 3)), expected, rtol=1e-2, atol=1e-2)


def _second_order(query: torch.Tensor, call: Call) -> None:
    first = torch.func.grad(lambda one: call(one, query, query).float().sum())
    torch.func.grad(lambda one: first(one).float().square().sum())(query)


def _through_an_inner_gradient(query: torch.Tensor, call: Call) -> None:
    inner = torch.func.grad(lambda key, one: call(one, key, query).float().sum())
    torch.func.grad(lambda one: inner(query, one).float().square().sum())(query)


def _dual(query: torch.Tensor, call: Call) -> None:
    with torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(query, query), query, query)


REFUSED: dict[str, tuple[Callable[[torch.Tensor, Call], Any], str]] = {
    "second order": (_second_order, "second-order"),
    "second order, of another input": (_through_an_inner_gradient, "second-order"),
    "jvp": (lambda q, call: torch.func.jvp(lambda one: call(one, q, q), (q,), (q,)), "forward-mode"),
    "a dual tensor": (_dual, "forward-mode"),
    "hessian": (
        lambda q, call: torch.func.hessian(lambda one: call(one, q, q).float().sum())(q),
        "forward-mode|second",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("impl", IMPLS)
def test_what_there_is_none_of_is_refused(name: str, impl: str) -> None:
    run, message = REFUSED[name]
    query = make(Case(1, 2, 9, 9, 16))[0]
    with pytest.raises(microsdpa.UnsupportedProblem, match=message):
        run(query, lambda *t: microsdpa.sdpa(*t, impl=impl))  # type: ignore[arg-type,return-value]


def test_a_dual_level_without_duals_is_none_of_it() -> None:
    query = make(Case(1, 2, 9, 9, 16))[0]
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(microsdpa.sdpa(query, query, query), microsdpa.sdpa(query, query, query))


def test_the_operator_refuses_what_it_would_lose() -> None:
    query = make(Case(1, 2, 9, 9, 16))[0]
    operators = torch.ops.microsdpa.attention, torch.ops.microsdpa.attention_output
    with pytest.raises(microsdpa.UnsupportedProblem, match=r"no gradient under torch\.func; .*microsdpa\.sdpa"):
        torch.func.grad(lambda q: operators[0](q, q, q)[0].float().sum())(query)
    for operator in operators:
        with (
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(microsdpa.UnsupportedProblem, match="forward-mode"),
        ):
            operator(torch.autograd.forward_ad.make_dual(query, query), query, query)


def _jvp(query: torch.Tensor, call: Call) -> None:
    torch.func.jvp(lambda one: call(one, query, query), (query,), (query,))


@pytest.mark.parametrize("transform", [_dual, _jvp])
@pytest.mark.parametrize("make_one", [plans.make_plan, plans.make_masked_plan])
def test_a_plan_refuses_a_tangent_before_it_launches(make_one: Any, transform: Any) -> None:
    query = make(Case(1, 2, 9, 9, 16))[0]
    layout = plans.Layout.of(query)
    expected = plans.Expected(dict.fromkeys(("query", "key", "value", "out"), layout), False, {"return_lse": False})
    launches: list[Any] = []
    plan = make_one(lambda *call: launches.append(call) or True, expected, Explanation("stub", "a test"))
    assert plan(query, query, query) is not None
    assert len(launches) == 1
    with pytest.raises(microsdpa.UnsupportedProblem, match="forward-mode"):
        transform(query, plan)
    assert len(launches) == 1


@pytest.mark.parametrize("precision", ["fp8", None])
@pytest.mark.parametrize("transform", [_dual, _jvp])
def test_a_tangent_is_lost_by_no_launch(precision: Any, transform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by one of 8-bit operands, nor by one of sequences of many lengths."""
    launches: list[Any] = []
    for module in (forward, varlen):
        monkeypatch.setattr(module, "_launch", lambda *call: launches.append(call) or True)
    query = make(Case(1, 2, 9, 9, 16))[0]
    calls: Call = functools.partial(microsdpa.sdpa, precision=precision) if precision else microsdpa.sdpa_varlen
    calls(query, query, query)
    assert len(launches) == 1
    with pytest.raises(microsdpa.UnsupportedProblem, match=r"forward-mode|transforms of torch\.func"):
        transform(query, calls)
    assert len(launches) == 1


@pytest.mark.parametrize("precision", ["fp8", "int8_fp8"])
def test_calls_with_8_bit_operands_are_refused(precision: Any) -> None:
    query = make(Case(1, 2, 9, 9, 32))[0]

    def call(one: torch.Tensor) -> Any:
        return microsdpa.sdpa(one, query, query, precision=precision, impl="emulate")

    with pytest.raises(microsdpa.UnsupportedProblem, match=r"transforms of torch\.func do not see"):
        torch.vmap(call)(query[None])
    with pytest.raises(microsdpa.UnsupportedProblem, match=r"torch\.jit\.trace does not see"):
        torch.jit.trace(call, query)


@pytest.mark.parametrize("door", ["sdpa", "emulate", "enable()", "plan"])
def test_a_traced_call_is_in_the_graph(door: str) -> None:
    """And is made again for other tensors, of other shapes unless it is a plan's."""
    query, key, value = make(Case(1, 2, 9, 12, 16))
    other = make(Case(1, 2, 9, 12, 16, seed=1) if door == "plan" else Case(2, 3, 20, 33, 32, seed=1))
    calls: dict[str, Call] = {
        "sdpa": lambda q, k, v: microsdpa.sdpa(q, k, v),  # type: ignore[dict-item,return-value]
        "emulate": lambda q, k, v: microsdpa.sdpa(q, k, v, impl="emulate"),  # type: ignore[dict-item,return-value]
        "enable()": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        "plan": lambda q, k, v: microsdpa.plan(query, key, value)(q, k, v),  # type: ignore[dict-item,return-value]
    }
    with microsdpa.enabled(strict=True, impl="emulate" if door == "enable()" else "auto"):
        traced = torch.jit.trace(calls[door], (query, key, value))
        expected = calls[door](*other)
    assert str(traced.graph).count("microsdpa::attention(") == 1
    assert torch.equal(traced(*other), expected) or door == "enable()"
    torch.testing.assert_close(traced(*other), F.scaled_dot_product_attention(*other), rtol=5e-3, atol=5e-3)


def test_a_traced_call_has_a_gradient() -> None:
    tensors = tuple(tensor.requires_grad_() for tensor in make(CASE))
    traced = torch.jit.trace(_call("auto"), tensors)
    assert "microsdpa::attention(" in str(traced.graph)
    found = torch.autograd.grad(traced(*tensors).float().sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, _gradients(_call("auto"), *tensors), strict=True))


def test_tracing_is_noticed_while_it_lasts() -> None:
    seen: list[bool] = []
    inputs = make(Case(1, 1, 2, 2, 8))

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(autograd.is_traced(inputs))
        return x + 1

    torch.jit.trace(function, torch.zeros(1), check_trace=False)
    assert seen == [True]
    assert not autograd.is_traced(inputs)


@pytest.mark.parametrize("masked", [False, True])
def test_a_plan_says_why_it_is_not_pickled(masked: bool) -> None:
    query, key, value = make(Case(1, 2, 9, 12, 16))
    mask = {"attn_mask": torch.zeros(9, 12)} if masked else {}
    plan = microsdpa.plan(query, key, value, **mask)
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"belongs to its process; .* call plan\(\) there"):
        pickle.dumps(plan)
    assert copy.copy(plan) is plan
    assert copy.deepcopy(plan) is plan
