"""hopper/throughput_8bit_qk under masks, in the emulator: each one and all together, in every order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from microsdpa import UnsupportedProblem, explain, quantize, reference, sdpa
from microsdpa.attention.quantize import Granularity
from microsdpa.emulate.run import Schedule, scheduled
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, Masking, make, make_masks
from microsdpa.kernels.problem import MaskKind, Problem
from microsdpa.kernels.select import select

IMPL = "emulate:hopper/throughput_8bit_qk"
ALL: tuple[Masking, ...] = ("documents", "window", "softcap", "alibi", "sinks")
KINDS: tuple[tuple[Masking, ...], ...] = (
    ("window",),
    ("softcap",),
    ("alibi",),
    ("sinks",),
    ("documents",),
    ("window", "alibi", "sinks"),
    ALL,
)
SHAPES = [
    Case(1, 2, 200, 400, 64),
    Case(1, 2, 250, 300, 128, heads_kv=1, causal="lower_right", dtype="bfloat16"),
    Case(1, 1, 130, 250, 128, scale=-0.1),
]
# Every kind meets the first shape, and one of the others in turn. All masks together meet every shape.
MASKED = [(SHAPES[0], masks) for masks in KINDS]
MASKED += [(SHAPES[1 + i % 2], masks) for i, masks in enumerate(KINDS[:-1])]
MASKED += [(case, KINDS[-1]) for case in SHAPES[1:]]
ORDERS = Schedule(0, late=True), Schedule(1, late=False)


def check(case: Case, granularity: Granularity) -> None:
    """INT8 values of Q and K, and V as it is: P is rounded to 16 bits."""
    query, key, value = make(case)
    q, k = quantize(query, "int8", "block", block=1), quantize(key, "int8", granularity, block=1)
    masks: dict[str, Any] = make_masks(case) | {"causal": case.causal, "scale": case.scale}
    given = {"q_scale": q.scale, "k_scale": k.scale, "enable_gqa": True, "return_lse": True, **masks}
    results = []
    for order in ORDERS:
        with scheduled(order):
            out = torch.full_like(query, torch.nan)
            results.append(sdpa(q.values, k.values, value, **given, out=out, impl=IMPL))  # type: ignore[arg-type]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    out, lse = results[0]
    plain = q.dequantize().double(), k.dequantize().double(), value.double()
    expected, expected_lse = reference.oracle(*plain, **masks)
    magnitude, _ = reference.oracle(plain[0], plain[1], plain[2].abs(), **masks)
    roundoff = compare.UNIT_ROUNDOFF[out.dtype]  # of every probability, and of the output
    assert ((out.double() - expected).abs() <= 2 * roundoff * magnitude + roundoff * expected.abs() + 1e-4).all()
    largest = float(expected_lse.where(expected_lse.isfinite(), 0.0).abs().max())
    assert compare.measure(lse, expected_lse).max_abs <= 3e-6 * max(1.0, largest)


@pytest.mark.parametrize(("case", "masks"), MASKED, ids=str)
def test_masks_are_right_in_every_order(case: Case, masks: tuple[Masking, ...]) -> None:
    check(replace(case, masks=masks), "block")


@pytest.mark.parametrize("case", SHAPES[:2], ids=str)
def test_one_scale_of_a_head_and_all_masks(case: Case) -> None:
    check(replace(case, masks=ALL), "head")


@pytest.mark.parametrize("masks", [("window",), ("softcap",), ("sinks",), ALL], ids=", ".join)
def test_two_terms_a_query(masks: tuple[Masking, ...]) -> None:
    """What precision="int8_fp16" makes, which is other values beside a soft cap or sinks."""
    case = Case(1, 2, 200, 330, 64, masks=masks)
    tensors, given = make(case), make_masks(case)
    found = sdpa(*tensors, **given, precision="int8_fp16", impl=IMPL)
    assert isinstance(found, torch.Tensor)
    assert compare.measure(found, reference.oracle(*tensors, **given)[0]).rel_l1 <= 0.012
    spec = explain(*tensors, **given, precision="int8_fp16", impl=IMPL).spec
    assert spec is not None
    assert dict(spec.template_args)["TERMS"] == "2"


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5])], ids=["no sink", "a sink"])
def test_rows_without_a_key_or_without_one_in_the_first_tile(sinks: torch.Tensor | None) -> None:
    query, key, value = make(Case(1, 1, 64, 200, 64))
    q, k = quantize(query, "int8", "block", block=1), quantize(key, "int8", "head")
    ranges = torch.tensor([0, 200], dtype=torch.int32).repeat(64, 1)
    ranges[5], ranges[6] = torch.tensor([50, 50]), torch.tensor([150, 200])
    masks = {"attn_mask": ranges, "sinks": sinks}
    scales = {"q_scale": q.scale, "k_scale": k.scale}
    out, lse = sdpa(q.values, k.values, value, **scales, **masks, return_lse=True, impl=IMPL)  # type: ignore[arg-type]
    assert (out[:, :, 5] == 0.0).all()
    assert lse[0, 0, 5] == (-torch.inf if sinks is None else 0.5)
    expected, expected_lse = reference.oracle(q.dequantize(), k.dequantize(), value, **masks)  # type: ignore[arg-type]
    assert compare.measure(out, expected).max_abs <= 2e-3
    assert compare.measure(lse, expected_lse).max_abs <= 2e-5


def test_masks_that_it_does_not_read_are_refused() -> None:
    tensors = make(Case(1, 1, 64, 100, 64))
    mask = torch.ones(100, dtype=torch.bool)
    with pytest.raises(UnsupportedProblem, match="reads no masks but ranges of keys, not a bool mask"):
        sdpa(*tensors, attn_mask=mask, precision="int8_fp16", impl=IMPL)


@pytest.mark.parametrize("queries", [1, 128, 4096])
def test_the_choice_under_masks(queries: int) -> None:
    """No other kernel has masks beside V of 16 bits: few tiles run here too."""
    sizes = 1, 8, 8, queries, 4096, 128, "float16"
    problem = Problem(*sizes, mask=MaskKind(left=True), target="sm_90a", operands="int8_fp16")  # type: ignore[arg-type]
    assert select(problem).spec.name == "hopper/throughput_8bit_qk"
    assert select(replace(problem, query_terms=2)).spec.name == "hopper/throughput_8bit_qk"
