"""hopper/throughput_8bit in the emulator: right for every kind of scale, free of races and of bank conflicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import tree

from microsdpa import quantize, reference
from microsdpa.attention.quantize import Format, Granularity, Quantized, expand_scale
from microsdpa.emulate import run
from microsdpa.emulate.run import EmulationError, Schedule
from microsdpa.evidence import compare, verify_eight_bit
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.short_sums import lost_of_scores
from microsdpa.evidence.verify_eight_bit import allowed_in_place
from microsdpa.execution.quantized import Place, attending
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.throughput_8bit import spec as hopper_fp8
from microsdpa.kernels.hopper.throughput_8bit.spec import Tiles, specification, throughput
from microsdpa.kernels.problem import Operands, Problem
from microsdpa.kernels.select import select

CTAS = 3
"""Fewer than there are query tiles, so that each takes several."""

# A case, the granularity of K's scales and the rows of their blocks.
CASES: list[tuple[Case, Granularity, int]] = [
    (Case(1, 3, 256, 384, 64), "tensor", 0),
    (Case(2, 4, 170, 350, 64, heads_kv=2, causal="lower_right", layout="bshd"), "head", 0),
    (Case(1, 7, 130, 100, 64, scale=20.0), "head", 0),  # query tiles of one tile of keys
    (Case(1, 3, 300, 260, 64, scale=0.0, causal="upper_left"), "block", 256),
    (Case(1, 3, 300, 60, 128), "head", 0),
    (Case(1, 1, 70, 8400, 64), "head", 0),  # sums of the tensor cores are moved to the output twice
    (Case(1, 1, 70, 4400, 128, scale=3.0, kind="outliers"), "head", 0),  # and corrected there
    (Case(1, 1, 70, 4400, 256, kind="mean"), "head", 0),
    (Case(1, 3, 200, 400, 128, scale=0.0), "head", 0),
    (Case(1, 3, 300, 260, 128, causal="upper_left"), "block", 16),
    (Case(1, 3, 130, 300, 128, scale=-0.3, kind="outliers"), "block", 1),
    (Case(1, 3, 300, 170, 128, causal="lower_right", dtype="bfloat16"), "head", 0),  # rows without a key
    (Case(1, 4, 130, 200, 256, heads_kv=2, causal="lower_right"), "head", 0),
]


# The same with Q and K in INT8.
INT8_CASES: list[tuple[Case, Granularity, int]] = [
    (Case(2, 4, 170, 350, 64, heads_kv=2, causal="lower_right", layout="bshd"), "block", 1),
    (Case(1, 7, 130, 100, 64, scale=-1.0, kind="mean"), "head", 0),
    (Case(1, 3, 130, 300, 128, scale=0.3, kind="outliers"), "block", 1),
    (Case(1, 3, 300, 170, 128, causal="lower_right", dtype="bfloat16"), "block", 16),
    (Case(1, 4, 130, 150, 256, scale=-0.3, kind="outliers"), "block", 1),
]


def problem_of(case: Case, key_block: int, operands: Operands = "fp8") -> Problem:
    return Problem(
        *(case.batch, case.heads, case.kv_heads, case.seqlen_q, case.seqlen_k, case.head_dim, case.dtype),
        causal=case.causal,
        target="sm_90a",
        operands=operands,
        key_block=key_block,
    )


def attend(
    spec: KernelSpec,
    problem: Problem,
    case: Case,
    quantized: tuple[Quantized, Quantized, Quantized],
    root: Path | None = None,
) -> tuple[torch.Tensor, ...]:
    """(output, LSE) of two schedules, the same bits in both; `root`: of other sources."""
    names = ("query", "key", "value")
    inputs = {name: x.values for name, x in zip(names, quantized, strict=True)}
    inputs |= {f"{name}_scale": x.scale for name, x in zip(names, quantized, strict=True)}
    query = make(case)[0]
    found = []
    for schedule in (Schedule(0, late=True), Schedule(1, late=False)):
        outputs = {"out": torch.full_like(query, torch.nan), "lse": torch.full(query.shape[:3], torch.nan)}
        places = {name: Place.of(name, tensor) for name, tensor in (inputs | outputs).items()}
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        launch = attending(spec, problem, places, scale)
        report = run.one_kernel(
            *(spec, launch.grid, launch.filled, inputs, outputs), schedule=schedule, count_banks=True, root=root
        )
        assert report.bank_conflicts == 0
        found.append(tuple(outputs.values()))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    return found[0]


def check(
    case: Case,
    granularity: Granularity,
    block: int,
    tiles: Tiles | None = None,
    operands: Operands = "fp8",
    root: Path | None = None,
) -> None:
    query, key, value = make(case)
    format: Format = "e4m3" if operands == "fp8" else "int8"
    quantized = (
        quantize(query, format, "block", block=32),
        quantize(key, format, granularity, block=max(block, 1)),
        quantize(value, "e4m3", "channel" if block else "head"),
    )
    problem = problem_of(case, block, operands)
    spec = throughput(problem) if tiles is None else specification(problem, tiles)
    assert isinstance(spec, KernelSpec)
    out, lse = attend(replace(spec, max_ctas=CTAS), problem, case, quantized, root)
    plain = [x.dequantize() for x in quantized]
    scales = tuple(expand_scale(x.scale, x.granularity, x.block, x.values.shape) for x in quantized[:2])
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    lost = None
    if operands == "fp8":
        lost = lost_of_scores((quantized[0].values, quantized[1].values), (scales[0], scales[1]), scale)
    expected, expected_lse = reference.oracle(*plain, causal=case.causal, scale=case.scale, attn_mask=lost)
    wrong = allowed_in_place(plain, case, spec, lost)
    if wrong is None:  # half a step of E4M3 for every probability, of which the largest is 256
        magnitude, _ = reference.oracle(plain[0], plain[1], plain[2].abs(), causal=case.causal, scale=case.scale)
        everything = plain[2].abs().sum(dim=2, keepdim=True).repeat_interleave(case.heads // case.kv_heads, dim=1)
        wrong = magnitude * 2**-4 + everything * 2**-18
    bound = wrong + compare.UNIT_ROUNDOFF[out.dtype] * expected.abs() + 1e-4
    assert ((out.double() - expected).abs() <= bound).all()
    largest = float(expected_lse.where(expected_lse.isfinite(), 0.0).abs().max())
    assert compare.measure(lse, expected_lse).max_abs <= 2e-6 * max(1.0, largest)


@pytest.mark.parametrize(("case", "granularity", "block"), CASES, ids=str)
def test_right_in_every_order(case: Case, granularity: Granularity, block: int) -> None:
    check(case, granularity, block)


@pytest.mark.parametrize(("case", "granularity", "block"), INT8_CASES, ids=str)
def test_right_in_every_order_with_int8(case: Case, granularity: Granularity, block: int) -> None:
    check(case, granularity, block, operands="int8_fp8")


@pytest.mark.parametrize(
    "tiles", [Tiles(128, 2, 3), Tiles(96, 3, 4, promoted_keys=4096), Tiles(192, 2, 2, value_stages=1)], ids=str
)
def test_other_tiles(tiles: Tiles) -> None:
    check(Case(1, 4, 300, 450, 64, heads_kv=2, causal="lower_right"), "head", 0, tiles)


@pytest.mark.parametrize(
    ("head_dim", "tiles", "operands"),
    [
        (64, Tiles(64, 4, 3, promoted_keys=128), "fp8"),
        (64, Tiles(64, 4, 3, promoted_keys=128), "int8_fp8"),
        (128, Tiles(96, 3, 2, promoted_keys=192), "int8_fp8"),
        (256, Tiles(96, 2, 2, 2, 96), "fp8"),
        (256, Tiles(96, 2, 3, 2, 192), "int8_fp8"),
    ],
)
def test_scales_of_keys_in_place(head_dim: int, tiles: Tiles, operands: Operands) -> None:
    check(Case(1, 4, 300, 350, head_dim, heads_kv=2, causal="lower_right"), "block", 1, tiles, operands)


@pytest.mark.parametrize(
    ("case", "tiles"),
    [
        (Case(1, 3, 300, 500, 256, kind="outliers", scale=-0.2), Tiles(64, 2, 3, 2, 128)),  # three tiles a CTA
        (Case(1, 3, 300, 300, 256, causal="lower_right", dtype="bfloat16", layout="bshd"), Tiles(64, 2, 3, 2, 2048)),
        (Case(1, 5, 130, 60, 256), Tiles(64, 2, 3, 2, 2048)),  # query tiles of one tile of keys
        (Case(1, 4, 300, 700, 256, kind="outliers", causal="upper_left"), Tiles(96, 2, 3, 2, 192)),
    ],
    ids=str,
)
def test_wide_heads_with_other_tiles(case: Case, tiles: Tiles) -> None:
    check(case, "head", 0, tiles)


def test_sums_in_the_output_want_a_proxy_fence_ahead_of_its_copies(tmp_path: Path) -> None:
    """Sums of many keys lie where O is to come, until a bulk copy brings it."""
    file = "hopper/throughput_8bit/wide_promoting.cuh"
    sources = tree(tmp_path, {file: ("    if constexpr (PROMOTES) fence_proxy_async_global();", "")})
    with pytest.raises(EmulationError, match=r"bulk tensor store of global memory .* no fence\.proxy\.async\.global"):
        check(Case(1, 1, 70, 200, 256), "head", 0, Tiles(64, 2, 3, 2, 128), root=sources)


@pytest.mark.parametrize("case", [Case(1, 2, 270, 200, 64, causal="upper_left"), Case(1, 1, 70, 1300, 128)], ids=str)
def test_two_terms_in_place(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_fp8, "chip_of", lambda target: replace(chip_of(target), sms=1))
    outcome = verify_eight_bit.check(case, "fp8", "cpu", "hopper/throughput_8bit")
    assert not outcome.failure


def test_auto_takes_it_where_it_fills_the_chip() -> None:
    few, many = problem_of(Case(1, 4, 512, 4096, 64), 1), problem_of(Case(32, 8, 512, 512, 64), 1)
    assert "16 tiles of 128 queries are too few" in dict(select(few, "auto").reasons)["hopper/throughput_8bit"]
    assert select(many, "auto").spec.name == "hopper/throughput_8bit"
