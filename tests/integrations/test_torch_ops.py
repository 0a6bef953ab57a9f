"""torch.ops.microsdpa on the CPU: gradients against FP64, opcheck, and torch.compile without a graph break."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import microsdpa
from microsdpa import reference
from microsdpa.evidence.cases import MASKINGS
from microsdpa.evidence.inputs import Case, make, make_masks

CASES = [
    *(Case(2, 4, 20, 33, 16, heads_kv=2, causal=causal, masks=masks) for causal, masks in MASKINGS),
    Case(2, 2, 20, 33, 16),
    Case(1, 4, 33, 20, 24, heads_kv=1, causal="lower_right", dtype="bfloat16"),
    Case(1, 2, 20, 20, 16, causal="upper_left", layout="bshd"),
]


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_fp64(case: Case, with_lse: bool) -> None:
    named = dict(zip(("query", "key", "value"), make(case), strict=True)) | make_masks(case)
    ours = {n: t.detach().clone() if isinstance(t, torch.Tensor) else t for n, t in named.items()}
    exact = {n: t.double() if isinstance(t, torch.Tensor) and t.dtype != torch.bool else t for n, t in named.items()}
    leaves = [n for n, t in named.items() if isinstance(t, torch.Tensor) and t.dtype != torch.bool]
    for n in leaves:
        ours[n].requires_grad_()
        exact[n].requires_grad_()
    out, lse = microsdpa.sdpa(**ours, causal=case.causal, enable_gqa=True, return_lse=True)
    expected, expected_lse = reference.oracle(**exact, causal=case.causal)
    weight = torch.randn(out.shape, dtype=torch.float64)
    lse_weight = torch.randn(lse.shape, dtype=torch.float64) if with_lse else torch.zeros(lse.shape).double()
    seen = expected_lse.detach().isfinite()
    (out.double() * weight).sum().add((lse.double() * lse_weight)[seen].sum()).backward()
    # What is hidden has score -inf, of which FP64's softmax has NaN for a gradient where a row sees nothing.
    (expected * weight)[seen].sum().add((expected_lse * lse_weight)[seen].sum()).backward()
    for n in leaves:
        want, got = exact[n].grad, ours[n].grad.double()
        if not seen.all() and n != "value":
            want = want.nan_to_num(0.0)
        # Plain arithmetic in the tensors' type rounds P, O and the gradient: a few units of the largest element.
        unit = torch.finfo(named[n].dtype if named[n].dtype != torch.float32 else named["query"].dtype).eps
        assert (got - want).abs().max() <= 4 * unit * max(1.0, float(want.abs().max())), n


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[8], CASES[10]], ids=str)
def test_opcheck(case: Case) -> None:
    tensors, masks = make(case), make_masks(case)
    arguments = (
        *(t.requires_grad_() for t in tensors),
        *(masks.get(n) for n in ("attn_mask", "alibi_slopes", "sinks")),
        *(case.causal, None, True, list(masks.get("window", (-1, -1))), masks.get("softcap"), "auto"),
    )
    torch.library.opcheck(torch.ops.microsdpa.attention, arguments)
    plain = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
    torch.library.opcheck(torch.ops.microsdpa.attention_output, plain)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_compile_without_a_graph_break(dynamic: bool, grad: bool) -> None:
    def model(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Any:
        plain = microsdpa.sdpa(query, key, value, causal="lower_right", enable_gqa=True)
        masked, lse = microsdpa.sdpa(query, key, value, attn_mask=mask, softcap=2.0, enable_gqa=True, return_lse=True)
        return plain + masked, lse

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen_q, seqlen_k in ((12, 20), (17, 33), (9, 40)):
        tensors = [t.requires_grad_(grad) for t in make(Case(2, 4, seqlen_q, seqlen_k, 16, heads_kv=2))]
        mask = torch.rand(seqlen_q, seqlen_k) < 0.7
        results = []
        for function in (model, compiled):
            out, lse = function(*tensors, mask)
            gradients = torch.autograd.grad(out.float().square().sum(), tensors) if grad else ()
            results.append((out, lse, *gradients))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_refusal_is_the_same_in_a_compiled_function() -> None:
    query, key, value = make(Case(1, 2, 8, 8, 16))
    compiled = torch.compile(lambda *a: microsdpa.sdpa(*a, softcap=-1.0), fullgraph=True, backend="eager")
    with pytest.raises(microsdpa.InvalidArgument, match="softcap"):
        compiled(query, key, value)


def test_a_second_order_gradient_is_refused() -> None:
    tensors = [t.requires_grad_() for t in make(Case(1, 1, 8, 8, 16))]
    (first,) = torch.autograd.grad(microsdpa.sdpa(*tensors).sum(), tensors[:1], create_graph=True)
    with pytest.raises(microsdpa.UnsupportedProblem, match="no second-order gradient"):
        torch.autograd.grad(first.sum(), tensors)


def test_an_output_cannot_be_given_where_autograd_needs_one() -> None:
    query, key, value = make(Case(1, 1, 8, 8, 16))
    with pytest.raises(microsdpa.InvalidArgument, match="autograd needs a new output"):
        microsdpa.sdpa(query.requires_grad_(), key, value, out=torch.empty_like(query))
    with torch.no_grad():
        assert not microsdpa.sdpa(query, key, value).requires_grad


def test_the_emulated_kernels_have_the_gradient_too() -> None:
    tensors = make(Case(1, 2, 20, 33, 32))
    found = []
    for impl in ("auto", "emulate"):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        found.append(torch.autograd.grad(microsdpa.sdpa(*leaves, impl=impl).square().sum(), leaves))
    for exact, emulated in zip(*found, strict=True):
        assert not torch.equal(exact, emulated)  # the emulator ran: the kernels round P and dS
        torch.testing.assert_close(emulated, exact, rtol=1e-2, atol=4e-3)


def test_tracers_see_one_operator_whatever_device_their_tensors_claim() -> None:
    """A tracer's tensor on a GPU has no memory there: it must not be launched upon."""
    with FakeTensorMode():
        query, key = (torch.empty(2, 4, n, 64, dtype=torch.float16, device="cuda") for n in (20, 33))
        out, lse = microsdpa.sdpa(query, key, key, causal="lower_right", return_lse=True)
        assert (out.shape, out.device, lse.shape, lse.dtype) == (query.shape, query.device, (2, 4, 20), torch.float32)
        assert microsdpa.sdpa(query, key, key, softcap=2.0).shape == query.shape
    tensors = make(Case(1, 2, 12, 12, 16))
    graph = make_fx(lambda *t: microsdpa.sdpa(*t, is_causal=True))(*tensors)
    graph.graph.eliminate_dead_code()  # an output that was asked for before the tracer was noticed
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.microsdpa.attention_output.default]
    assert torch.equal(graph(*tensors), microsdpa.sdpa(*tensors, is_causal=True))


def test_what_is_no_tensor_is_refused_in_words() -> None:
    with pytest.raises(microsdpa.InvalidArgument, match=r"query: expected a torch\.Tensor"):
        microsdpa.sdpa([1.0], None, None)  # type: ignore[arg-type]


def test_the_operator_without_a_gradient_says_so() -> None:
    query, key, value = make(Case(1, 1, 8, 8, 16))
    with pytest.raises(microsdpa.UnsupportedProblem, match="attention_output has no gradient"):
        torch.ops.microsdpa.attention_output(query.requires_grad_(), key, value)
    with torch.no_grad():
        assert torch.equal(torch.ops.microsdpa.attention_output(query, key, value), microsdpa.sdpa(query, key, value))
