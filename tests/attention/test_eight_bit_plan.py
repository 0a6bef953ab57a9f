"""plan() and explain() of calls with 8-bit operands, in the emulator; tests/runtime has their launches."""

from __future__ import annotations

import pytest
import torch

import microsdpa
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.evidence.inputs import Case, make
from microsdpa.kernels.problem import OPERANDS, Operands
from microsdpa.kernels.quantize.spec import SCHEMES

CASE = Case(1, 2, 20, 24, 32)


@pytest.mark.parametrize("precision", OPERANDS)
def test_a_plan_computes_what_sdpa_does(precision: Operands) -> None:
    plan = microsdpa.plan(*make(CASE), precision=precision, return_lse=True, is_causal=True, impl="emulate")
    tensors = make(Case(1, 2, 20, 24, 32, seed=4))
    expected = microsdpa.sdpa(*tensors, precision=precision, return_lse=True, is_causal=True, impl="emulate")
    assert all(torch.equal(a, b) for a, b in zip(plan(*tensors), expected, strict=True))
    assert plan.explanation.runs.startswith("emulate:ada/mma_8bit")


def test_a_plan_refuses_what_sdpa_does() -> None:
    with pytest.raises(InvalidArgument, match="precision: expected None or one of 'fp8'"):
        microsdpa.plan(*make(CASE), precision="fp4", impl="emulate")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedProblem, match="8-bit attention runs on CUDA tensors"):
        microsdpa.plan(*make(CASE), precision="fp8")


@pytest.mark.parametrize("precision", OPERANDS)
def test_explain_names_both_kernels(precision: Operands) -> None:
    found = microsdpa.explain(*make(CASE), precision=precision, impl="emulate")
    assert found.runs.startswith("emulate:ada/mma_8bit")
    assert found.quantizer is not None
    assert dict(found.quantizer.template_args)["TERMS"] == str(SCHEMES[precision].query_terms)
    assert found.quantizer.expression in str(found)
    named = microsdpa.explain(*make(CASE), precision=precision, impl="emulate:ladder/11")
    assert named.runs == "emulate:ladder/11_8bit_cp_async"


def test_explain_of_quantized_values_and_of_nothing() -> None:
    q, k, v = (microsdpa.quantize(x, "e4m3", "head") for x in make(CASE))
    scales = {"q_scale": q.scale, "k_scale": k.scale, "v_scale": v.scale}
    found = microsdpa.explain(q.values, k.values, v.values, **scales, impl="emulate")
    assert found.quantizer is None
    assert "quantizes" not in str(found)
    with pytest.raises(InvalidArgument, match="v_scale: expected a scale for 8-bit values, got None"):
        microsdpa.explain(q.values, k.values, v.values, q_scale=q.scale, k_scale=k.scale, impl="emulate")
    query, key, value = make(CASE)
    empty = microsdpa.explain(query, key[:, :, :0], value[:, :, :0], precision="fp8", impl="emulate")
    assert "nothing to compute" in empty.reason


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_the_output_has_the_memory_order_of_the_query(order: tuple[int, ...]) -> None:
    query = torch.randn(2, 16, 4, 32).half().permute(order)
    out = microsdpa.sdpa(query, query, query, precision="int8_fp16", impl="emulate")
    assert isinstance(out, torch.Tensor)
    assert out.stride() == query.stride()


def test_explain_notes_where_quantizing_takes_longer_than_attention() -> None:
    found = microsdpa.explain(*make(CASE), precision="fp8", impl="emulate:hopper/latency_8bit")
    assert "quantizing takes longer" in found.note
    assert found.note in str(found)
    assert not microsdpa.explain(*make(CASE), precision="fp8", impl="emulate").note
