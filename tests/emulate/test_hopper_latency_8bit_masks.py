"""hopper/latency with 8-bit operands under masks, in the emulator: each mask, in every order, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from microsdpa import UnsupportedProblem, quantize, reference, sdpa
from microsdpa.attention.quantize import Quantized
from microsdpa.emulate.run import Schedule, scheduled
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, Masking, make, make_masks
from microsdpa.evidence.short_sums import lost_of_scores

IMPL = "emulate:hopper/latency_8bit"
KINDS: tuple[tuple[Masking, ...], ...] = (
    ("bool",),
    ("padding",),
    ("left padding, numbers",),
    ("additive",),
    ("float32",),
    ("window",),
    ("documents",),
    ("softcap",),
    ("alibi",),
    ("sinks",),
    ("bool", "window", "softcap", "alibi", "sinks"),
    ("float32", "window", "softcap", "alibi", "sinks"),
)
SHAPES = [
    Case(1, 1, 64, 512, 64),  # two rounds of two CTAs, a mask that bulk copies bring
    Case(1, 2, 70, 300, 64, heads_kv=1, causal="lower_right", dtype="bfloat16"),  # rows that threads read
    Case(1, 1, 33, 700, 64, scale=-0.2),  # three rounds
    Case(2, 1, 40, 112, 128, causal="lower_right"),  # one round
]
# Several masks together meet every shape. Of masks alone, those that no several have meet two shapes, others one.
ALONE = {("left padding, numbers",), ("additive",), ("documents",)}
MASKED = [
    (SHAPES[(i + step) % 4], masks)
    for i, masks in enumerate(KINDS)
    for step in (range(4) if len(masks) > 1 else (0, 2) if masks in ALONE else (0,))
]
ORDERS = Schedule(0, late=True), Schedule(1, late=False)


def quantized_of(case: Case, format: Any, block: int) -> list[Quantized]:
    query, key, value = make(case)
    return [
        quantize(query, format, "block", block=32),
        quantize(key, format, "block", block=block) if block else quantize(key, format, "head"),
        quantize(value, "e4m3", "channel"),
    ]


def rows_of(scale: torch.Tensor, seqlen: int, block: int) -> torch.Tensor:
    """Scales of rows, [B, H, S, 1]."""
    return scale[..., None, None] if scale.dim() == 2 else scale.repeat_interleave(block, 2)[:, :, :seqlen, None]


def check(case: Case, format: str, block: int) -> None:
    """P is rounded to FP16, of which a probability loses 2^-11 of itself, and the output to its type."""
    quantized, masks = quantized_of(case, format, block), make_masks(case)
    query = make(case)[0]
    scales = {f"{name}_scale": x.scale for name, x in zip("qkv", quantized, strict=True)}
    given = {"causal": case.causal, "scale": case.scale, "enable_gqa": True, **masks}
    results = []
    for order in ORDERS:
        with scheduled(order):
            out = torch.full_like(query, torch.nan)
            values = (x.values for x in quantized)
            results.append(sdpa(*values, **scales, **given, return_lse=True, out=out, impl=IMPL))  # type: ignore[arg-type]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    out, lse = results[0]
    plain = [x.dequantize().double() for x in quantized]
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    if format == "e4m3" and "softcap" not in case.masks:
        # What wgmma loses of the products is added to their scores, and to numbers of a mask that are there.
        wide = rows_of(quantized[0].scale, case.seqlen_q, 32), rows_of(quantized[1].scale, case.seqlen_k, block or 1)
        lost = lost_of_scores((quantized[0].values, quantized[1].values), wide, scale)
        masks["attn_mask"] = with_lost(masks.get("attn_mask"), lost)
    masks |= {"causal": case.causal, "scale": case.scale}
    expected, expected_lse = reference.oracle(*plain, **masks)
    magnitude, _ = reference.oracle(plain[0], plain[1], plain[2].abs(), **masks)
    slack = 2**-7 if format == "e4m3" and "softcap" in case.masks else 0.0
    bound = (2**-10 + slack) * magnitude + compare.UNIT_ROUNDOFF[out.dtype] * expected.abs() + 1e-4
    assert ((out.double() - expected).abs() <= bound).all()
    largest = float(expected_lse.where(expected_lse.isfinite(), 0.0).abs().max())
    assert compare.measure(lse, expected_lse).max_abs <= slack + 2e-6 * max(1.0, largest)


def with_lost(mask: torch.Tensor | None, lost: torch.Tensor) -> torch.Tensor:
    """A mask of numbers that adds `lost` [B, H, S_q, S_k] as well."""
    if mask is None:
        return lost
    if mask.dtype == torch.int32:
        keys = torch.arange(lost.shape[-1])
        mask = (keys >= mask[..., :1]) & (keys < mask[..., 1:])
    return lost.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else lost + mask.double()


@pytest.mark.parametrize(("case", "masks"), MASKED, ids=str)
def test_masks_are_right_in_every_order(case: Case, masks: tuple[Masking, ...]) -> None:
    check(replace(case, masks=masks), "int8", 1)


@pytest.mark.parametrize(
    ("block", "masks"),
    [(0, ("bool",)), (0, ("additive", "sinks")), (16, ("additive", "sinks")), (16, ("window", "softcap"))],
    ids=str,
)
def test_e4m3_and_scales_of_other_rows(block: int, masks: tuple[Masking, ...]) -> None:
    check(replace(SHAPES[1], masks=masks), "e4m3", block)


@pytest.mark.parametrize("masks", [("bool", "window"), ("float32",), ("alibi",)], ids=", ".join)
def test_scores_that_need_a_second_pass(masks: tuple[Masking, ...]) -> None:
    check(Case(1, 1, 64, 500, 64, scale=3.0, kind="outliers", masks=masks), "int8", 1)


@pytest.mark.parametrize(
    ("precision", "masks"),
    [
        *(("fp8", ("bool",)), ("fp8", ("softcap", "sinks"))),
        *(("int8_fp8", ("softcap", "sinks")), ("int8_fp8", ("documents", "alibi"))),
    ],
    ids=str,
)
def test_tensors_are_quantized_and_masked(precision: Any, masks: tuple[Masking, ...]) -> None:
    """Smoothing K moves all scores of a row, which a soft cap and a sink do not let pass."""
    case = Case(1, 2, 70, 300, 64, kind="mean", masks=masks)
    inputs, given = make(case), make_masks(case)
    out, lse = sdpa(*inputs, **given, precision=precision, return_lse=True, impl=IMPL)
    expected, expected_lse = reference.oracle(*inputs, **given)
    rows = expected_lse.isfinite()
    assert compare.measure(out, expected).rmse <= 0.02
    assert float((lse - expected_lse)[rows].abs().max()) <= 0.06
    assert (out[~rows] == 0.0).all()


def test_rows_without_a_key_are_zeros() -> None:
    case = Case(1, 1, 64, 200, 64)
    quantized = quantized_of(case, "e4m3", 0)
    scales = {f"{name}_scale": x.scale for name, x in zip("qkv", quantized, strict=True)}
    mask = torch.ones(64, 200, dtype=torch.bool)
    mask[5] = False
    for attn_mask in (mask, torch.zeros(64, 200).masked_fill(~mask, -torch.inf)):
        values = [x.values for x in quantized]
        out, lse = sdpa(*values, **scales, attn_mask=attn_mask, return_lse=True, impl=IMPL)  # type: ignore[arg-type]
        assert (out[:, :, 5] == 0.0).all()
        assert lse[0, 0, 5] == -torch.inf
        assert lse[0, 0, 4].isfinite()


def test_more_keys_than_fit_are_refused_in_words() -> None:
    case = Case(1, 1, 64, 3000, 64)
    quantized = quantized_of(case, "e4m3", 0)
    scales = {f"{name}_scale": x.scale for name, x in zip("qkv", quantized, strict=True)}
    with pytest.raises(UnsupportedProblem, match="3000 keys do not fit the shared memory"):
        sdpa(*(x.values for x in quantized), **scales, window=(9, 0), impl=IMPL)  # type: ignore[arg-type]


def test_numbers_of_another_type_are_refused() -> None:
    quantized = quantized_of(SHAPES[0], "e4m3", 0)
    scales = {f"{name}_scale": x.scale for name, x in zip("qkv", quantized, strict=True)}
    mask = torch.zeros(64, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"attn_mask: expected torch.bool or torch.float16"):
        sdpa(*(x.values for x in quantized), **scales, attn_mask=mask, impl=IMPL)  # type: ignore[arg-type]
