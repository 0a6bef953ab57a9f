"""plan() and explain() of calls with 8-bit operands, in the emulator; tests/runtime has their launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.evidence.inputs import Case, make
from microsdpa.kernels.problem import PRECISIONS, Precision
from microsdpa.kernels.quantize.spec import SCHEMES

CASE = Case(1, 2, 20, 24, 32)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_plan_computes_what_sdpa_does(precision: Precision) -> None:
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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_explain_names_both_kernels(precision: Precision) -> None:
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


IMPL = "emulate:hopper/latency_8bit"


def values(seed: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Quantized values of a case, and their scales."""
    made = [microsdpa.quantize(x, "e4m3", "head") for x in make(replace(CASE, seed=seed))]
    return [x.values for x in made], {f"{name}_scale": x.scale for name, x in zip("qkv", made, strict=True)}


def test_a_plan_for_quantized_values_keeps_its_scales_or_takes_others() -> None:
    (given, scales), (others, of_others) = values(0), values(1)
    mask = torch.rand(CASE.seqlen_q, CASE.seqlen_k, generator=torch.Generator().manual_seed(5)) < 0.7
    options: dict[str, Any] = {"impl": IMPL, "enable_gqa": True, "return_lse": True}
    plain = microsdpa.plan(*given, **scales, **options)
    masked = microsdpa.plan(*given, **scales, **options, attn_mask=mask, softcap=9.0)
    for plan, masks in ((plain, {}), (masked, {"attn_mask": mask})):
        rest = options | ({"softcap": 9.0} if masks else {})
        for tensors, of_tensors, named in ((given, scales, {}), (others, scales, {}), (others, of_others, of_others)):
            found = plan(*tensors, **masks, **named)
            expected = microsdpa.sdpa(*tensors, **of_tensors, **masks, **rest)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert plan.explanation.runs == IMPL
    with pytest.raises(InvalidArgument, match=r"v_scale: expected a torch.Tensor, got NoneType"):
        plain(*given, q_scale=scales["q_scale"], k_scale=scales["k_scale"])
    with pytest.raises(InvalidArgument, match=r"q_scale: expected shape .*, as the plan has"):
        plain(*given, **(scales | {"q_scale": torch.ones(())}))


def test_the_output_of_a_plan_has_the_type_that_it_was_made_for() -> None:
    given, scales = values(0)
    out = torch.empty_like(given[0], dtype=torch.bfloat16)
    options: dict[str, Any] = {"impl": IMPL, "enable_gqa": True}
    plan = microsdpa.plan(*given, **scales, **options, out=out)
    expected = microsdpa.sdpa(*given, **scales, **options, out=out.clone())
    assert torch.equal(plan(*given), expected)  # type: ignore[arg-type]
    assert plan(*given, out=out) is out


def compiled(call: Any, *given: Any) -> tuple[Any, list[str]]:
    """What a compiled call gives, and the functions of its graph."""
    names: list[str] = []

    def look(graph: Any, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    return torch.compile(call, backend=look, fullgraph=True)(*given), [n for n in names if "getitem" not in n]


@pytest.mark.parametrize("out", [None, torch.bfloat16])
def test_compiled_quantized_values_are_one_operator(out: torch.dtype | None) -> None:
    given, scales = values(0)
    scales["v_scale"] = 0.5
    mask = torch.ones(CASE.seqlen_k, dtype=torch.bool)

    def call(*tensors: torch.Tensor) -> Any:
        result = None if out is None else torch.empty_like(tensors[0], dtype=out)
        options: dict[str, Any] = {"impl": IMPL, "enable_gqa": True, "return_lse": True, "out": result}
        return microsdpa.sdpa(*tensors, **scales, **options, attn_mask=mask)

    found, names = compiled(call, *given)
    assert all(torch.equal(a, b) for a, b in zip(found, call(*given), strict=True))
    assert "microsdpa.attention_eight_bit" in names


def test_a_compiled_precision_is_one_operator_without_a_gradient() -> None:
    tensors = make(CASE)

    def call(*given: torch.Tensor) -> Any:
        options: dict[str, Any] = {"impl": IMPL, "enable_gqa": True, "is_causal": True, "window": (5, -1)}
        return microsdpa.sdpa(*given, precision="int8_fp8", **options)

    found, names = compiled(call, *tensors)
    assert torch.equal(found, call(*tensors))
    assert names == ["microsdpa.attention_eight_bit"]
    with pytest.raises(Exception, match="Observed exception") as caught:
        compiled(call, tensors[0].requires_grad_(), *tensors[1:])
    assert "UnsupportedProblem" in str(caught.value)
