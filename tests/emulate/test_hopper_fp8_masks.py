"""hopper/throughput_8bit under masks, in the emulator: each one and all together, in every order, beside the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from microsdpa import UnsupportedProblem, explain, quantize, reference, sdpa
from microsdpa.emulate.run import Schedule, scheduled
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, Masking, make, make_masks
from microsdpa.kernels.problem import MaskKind, Problem
from microsdpa.kernels.select import select

IMPL = "emulate:hopper/throughput_8bit"
KINDS: tuple[tuple[Masking, ...], ...] = (
    ("window",),
    ("softcap",),
    ("alibi",),
    ("sinks",),
    ("documents",),
    ("window", "alibi", "sinks"),
    ("documents", "window", "softcap", "alibi", "sinks"),
)
SHAPES = [
    Case(1, 2, 200, 400, 64),
    Case(1, 2, 250, 300, 128, heads_kv=1, causal="lower_right", dtype="bfloat16"),
    Case(1, 1, 130, 250, 256, scale=-0.1),
]
# Every kind meets the first shape, and one of the others in turn. All masks together meet every shape.
MASKED = [(SHAPES[0], masks) for masks in KINDS]
MASKED += [(SHAPES[1 + i % 2], masks) for i, masks in enumerate(KINDS[:-1])]
MASKED += [(case, KINDS[-1]) for case in SHAPES[1:]]
ORDERS = Schedule(0, late=True), Schedule(1, late=False)


def values(case: Case, format: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Quantized values, their scales, and what both stand for."""
    query, key, value = make(case)
    of_key = {"granularity": "block", "block": 1} if format == "int8" else {"granularity": "head"}
    made = [
        quantize(query, format, "block", block=1),
        quantize(key, format, **of_key),
        quantize(value, "e4m3", "channel"),
    ]
    scales = {f"{name}_scale": x.scale for name, x in zip("qkv", made, strict=True)}
    return [x.values for x in made], scales, [x.dequantize().double() for x in made]


def check(case: Case, format: str) -> None:
    """P as E4M3 is off by a sixteenth of itself, or by 2^-14 of a row's largest; a tensor core's sum keeps 14 bits."""
    tensors, scales, plain = values(case, format)
    masks: dict[str, Any] = make_masks(case) | {"causal": case.causal, "scale": case.scale}
    results = []
    for order in ORDERS:
        with scheduled(order):
            out = torch.full_like(make(case)[0], torch.nan)
            given = {**scales, **masks, "enable_gqa": True}
            results.append(sdpa(*tensors, **given, return_lse=True, out=out, impl=IMPL))  # type: ignore[arg-type]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    out, lse = results[0]
    expected, expected_lse = reference.oracle(*plain, **masks)
    everything = plain[2].abs().sum(dim=2, keepdim=True).repeat_interleave(case.heads // case.kv_heads, dim=1)
    magnitude, _ = reference.oracle(plain[0], plain[1], plain[2].abs(), **masks)
    lost = 0.0 if format == "int8" else 2**-8
    bound = (2**-4 + lost + 2**-10) * magnitude + 2**-14 * everything
    bound += compare.UNIT_ROUNDOFF[out.dtype] * expected.abs() + 1e-4
    assert ((out.double() - expected).abs() <= bound).all()
    assert compare.measure(out, expected).rel_l1 <= 0.05
    largest = float(expected_lse.where(expected_lse.isfinite(), 0.0).abs().max())
    assert compare.measure(lse, expected_lse).max_abs <= (3e-6 + lost) * max(1.0, largest)


@pytest.mark.parametrize(("case", "masks"), MASKED, ids=str)
def test_masks_are_right_in_every_order(case: Case, masks: tuple[Masking, ...]) -> None:
    check(replace(case, masks=masks), "int8")


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_one_scale_of_a_head_and_all_masks(case: Case) -> None:
    check(replace(case, masks=KINDS[-1]), "e4m3")


@pytest.mark.parametrize("masks", [("window",), ("alibi",)], ids=", ".join)
def test_sums_that_are_moved_away(masks: tuple[Masking, ...]) -> None:
    """More keys than the tensor cores add up before their sum is moved."""
    check(Case(1, 1, 70, 2300, 64, masks=masks), "int8")


def test_rows_without_a_key_are_zeros() -> None:
    case = Case(1, 1, 64, 100, 64)
    tensors, scales, _ = values(case, "e4m3")
    ranges = torch.tensor([0, 100], dtype=torch.int32).repeat(64, 1)
    ranges[5] = torch.tensor([50, 50])
    out, lse = sdpa(*tensors, **scales, attn_mask=ranges, return_lse=True, impl=IMPL)  # type: ignore[arg-type]
    assert (out[:, :, 5] == 0.0).all()
    assert lse[0, 0, 5] == -torch.inf
    assert lse[0, 0, 4].isfinite()


def test_masks_that_it_does_not_read_are_refused() -> None:
    tensors, scales, _ = values(Case(1, 1, 64, 100, 64), "e4m3")
    with pytest.raises(UnsupportedProblem, match="reads no masks but ranges of keys, not a bool mask"):
        sdpa(*tensors, **scales, attn_mask=torch.ones(100, dtype=torch.bool), impl=IMPL)  # type: ignore[arg-type]
    inputs = make(Case(1, 1, 64, 100, 256))
    with pytest.raises(UnsupportedProblem, match="two terms a query"):
        explain(*inputs, precision="fp8", window=(3, 0), impl=IMPL)


def test_the_choice_under_masks() -> None:
    """Large calls run here, and those with masks in memory in hopper/latency_8bit as long as their keys fit."""
    sizes = 4, 16, 16, 4096, 512, 128, "float16"
    large = Problem(*sizes, mask=MaskKind(left=True), target="sm_90a", operands="int8_fp8")  # type: ignore[arg-type]
    assert select(large).spec.name == "hopper/throughput_8bit"
    assert select(replace(large, batch=1, heads=2, heads_kv=2, seqlen_k=256)).spec.name == "hopper/latency_8bit"
    assert select(replace(large, mask=MaskKind("bool"), seqlen_k=256)).spec.name == "hopper/latency_8bit"
    assert (
        select(replace(large, mask=MaskKind("int32"), seqlen_q=1, seqlen_k=9000)).spec.name == "hopper/throughput_8bit"
    )
