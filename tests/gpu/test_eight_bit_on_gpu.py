"""Calls with 8-bit operands on a GPU: plans, captures, values with scales. Their accuracy: verify and accuracy."""

from __future__ import annotations

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.attention.quantize import expand_scale
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.peers import MicrosdpaEightBit
from microsdpa.evidence.short_sums import lost_of_scores
from microsdpa.execution import forward
from microsdpa.kernels import EIGHT_BIT_FAMILIES, family_named
from microsdpa.kernels.problem import PRECISIONS, Precision
from microsdpa.runtime import launcher

pytestmark = pytest.mark.gpu
CASE = Case(2, 4, 200, 300, 64, heads_kv=2, causal="lower_right")


def attend(case: Case, precision: Precision, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    result = microsdpa.sdpa(  # type: ignore[call-overload]
        *make(case, "cuda"), causal=case.causal, enable_gqa=True, precision=precision, return_lse=True, **options
    )
    assert isinstance(result, tuple)
    return result


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_repeated_call_is_not_validated_again(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    first, lse = attend(CASE, precision)
    plans = launcher._library.plan_count()
    monkeypatch.setattr(forward, "check", lambda *_: pytest.fail("validated again"))
    for _ in range(3):
        again, lse_again = attend(CASE, precision)
        assert torch.equal(first, again)
        assert torch.equal(lse, lse_again)
    assert launcher._library.plan_count() == plans
    other, _ = attend(Case(2, 4, 200, 300, 64, heads_kv=2, causal="lower_right", seed=5), precision)
    expected, _ = reference.oracle(
        *make(Case(2, 4, 200, 300, 64, heads_kv=2, causal="lower_right", seed=5)), causal="lower_right"
    )
    assert compare.measure(other.cpu(), expected).rel_l1 <= 0.06


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_capture_may_be_the_first_call_and_replays_see_new_values(precision: Precision) -> None:
    launcher._library.clear_plans()
    query, key, value = make(Case(1, 3, 130, 77, 128), "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = microsdpa.sdpa(query, key, value, precision=precision, return_lse=True)
    fresh = make(Case(1, 3, 130, 77, 128, seed=3), "cuda")
    for tensor, new in zip((query, key, value), fresh, strict=True):
        tensor.copy_(new)
    expected = microsdpa.sdpa(*fresh, precision=precision, return_lse=True)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_on_quantized_values_alone_is_captured(precision: Precision) -> None:
    """What a benchmark times: a launch outside of any plan is on the current stream too."""
    case = Case(1, 3, 130, 77, 64)
    tensors = make(case, "cuda")
    out = torch.zeros_like(tensors[0])
    call = MicrosdpaEightBit(precision, is_quantized=True).bind(case, tensors, out)
    call()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(out, microsdpa.sdpa(*tensors, precision=precision))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_plan_object_computes_what_sdpa_does(layout: str, precision: Precision) -> None:
    case = Case(2, 4, 100, 90, 32, dtype="bfloat16", layout=layout)  # type: ignore[arg-type]
    plan = microsdpa.plan(*make(case, "cuda"), precision=precision)
    tensors = make(Case(2, 4, 100, 90, 32, dtype="bfloat16", layout=layout, seed=9), "cuda")  # type: ignore[arg-type]
    expected = microsdpa.sdpa(*tensors, precision=precision)
    found, out = plan(*tensors), torch.empty_like(tensors[0])
    assert torch.equal(found, expected)  # type: ignore[arg-type]
    assert found.stride() == expected.stride() == torch.empty_like(tensors[0]).stride()  # type: ignore[union-attr]
    assert plan(*tensors, out=out) is out
    assert torch.equal(out, expected)  # type: ignore[arg-type]
    assert plan.explanation.quantizer is not None


ROUNDING_P_TO_HALF = ("ladder/08_fp8_scalar", "ladder/09_fp8_mma")


@pytest.mark.parametrize("rung", sorted(family.name for family in EIGHT_BIT_FAMILIES))
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_every_rung_on_quantized_values(rung: str, head_dim: int) -> None:
    case = Case(2, 4, 130, 200, head_dim, heads_kv=2, causal="lower_right")
    query, key, value = make(case)
    made = (
        microsdpa.quantize(query, "e4m3", "head"),
        microsdpa.quantize(key, "e4m3", "block", block=16),
        microsdpa.quantize(value, "e4m3", "channel"),
    )
    scales = {name: x.scale.cuda() for name, x in zip(("q_scale", "k_scale", "v_scale"), made, strict=True)}
    quantized = [x.values.cuda() for x in made]
    try:
        out, lse = microsdpa.sdpa(*quantized, causal=case.causal, enable_gqa=True, return_lse=True, impl=rung, **scales)
    except microsdpa.UnsupportedProblem as refusal:
        pytest.skip(str(refusal))
    plain = [x.dequantize() for x in made]
    family, lost = family_named(rung), None
    if family is not None and "fp8" in family.short_sums:
        of_query, of_key = (expand_scale(x.scale, x.granularity, x.block, x.values.shape) for x in made[:2])
        lost = lost_of_scores((made[0].values, made[1].values), (of_query, of_key), head_dim**-0.5)
    expected, expected_lse = reference.oracle(*plain, causal=case.causal, attn_mask=lost)
    assert compare.measure(out.cpu(), expected).rel_l1 <= (2e-3 if rung in ROUNDING_P_TO_HALF else 0.026)
    assert compare.measure(lse.cpu(), expected_lse).max_abs <= 1e-3


def test_quantized_values_are_checked_once_and_may_have_numbers_for_scales() -> None:
    query, key, value = make(Case(1, 4, 64, 200, 64, heads_kv=2), "cuda")
    q, k, v = (microsdpa.quantize(x, "e4m3", "head") for x in (query, key, value))
    scales = {"q_scale": q.scale, "k_scale": k.scale, "v_scale": v.scale}
    first = microsdpa.sdpa(q.values, k.values, v.values, enable_gqa=True, **scales)
    plans = launcher._library.plan_count()
    for _ in range(2):
        assert torch.equal(microsdpa.sdpa(q.values, k.values, v.values, enable_gqa=True, **scales), first)
    assert launcher._library.plan_count() == plans
    expected, _ = reference.oracle(*(x.dequantize().cpu() for x in (q, k, v)))
    assert compare.measure(first.cpu(), expected).rel_l1 <= 0.026
    numbers = microsdpa.sdpa(q.values, k.values, v.values, enable_gqa=True, q_scale=0.01, k_scale=0.02, v_scale=0.5)
    ones = torch.ones((), device="cuda")
    same = microsdpa.sdpa(
        *(q.values, k.values, v.values), enable_gqa=True, q_scale=0.01 * ones, k_scale=0.02 * ones, v_scale=0.5 * ones
    )
    assert torch.equal(numbers, same)  # type: ignore[arg-type]
    k.scale[0, 1] = -1
    with pytest.raises(microsdpa.InvalidArgument, match="k_scale: expected positive finite scales, got -1"):
        microsdpa.sdpa(q.values, k.values, v.values, enable_gqa=True, **scales)


def test_a_call_does_not_synchronise() -> None:
    tensors = make(CASE, "cuda")
    microsdpa.sdpa(*tensors, enable_gqa=True, precision="fp8")
    torch.cuda.set_sync_debug_mode("error")
    try:
        microsdpa.sdpa(*tensors, enable_gqa=True, precision="fp8", return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_explain_names_both_kernels() -> None:
    tensors = make(CASE, "cuda")
    microsdpa.sdpa(*tensors, enable_gqa=True, precision="int8_fp8")
    found = microsdpa.explain(*tensors, enable_gqa=True, precision="int8_fp8")
    assert found.compiled
    assert "quantize_query_key_value" in str(found)
