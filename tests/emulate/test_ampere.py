"""Tilings of ampere/mma that no small problem selects, in the emulator: right, free of races and bank conflicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import check_in_every_order

from microsdpa import reference
from microsdpa.call.masks import Masks
from microsdpa.emulate import run
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.verify import problem_of
from microsdpa.kernels.ampere.mma import tiles as ampere_tiles
from microsdpa.kernels.ampere.mma.spec import specification
from microsdpa.kernels.ampere.mma.tiles import Tiling
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

RUNS = [
    (Case(1, 1, 140, 200, 64, causal="lower_right"), ampere_tiles.STREAM, 1),
    (Case(1, 2, 140, 330, 64), ampere_tiles.STREAM_DEEP, 1),
    (Case(1, 1, 140, 650, 64, causal="lower_right"), ampere_tiles.STREAM_DEEP, 1),
    (Case(1, 1, 100, 270, 64, kind="outliers", scale=-0.3), ampere_tiles.STREAM_DEEP, 1),
    (Case(1, 2, 100, 270, 64, heads_kv=1, causal="upper_left", scale=100.0), ampere_tiles.STREAM_DEEP, 1),
    (Case(1, 1, 60, 20, 16, causal="upper_left"), ampere_tiles.STREAM_DEEP, 1),
    (Case(1, 1, 200, 100, 64, causal="lower_right"), ampere_tiles.STREAM_LEAN, 1),
    (Case(1, 1, 70, 300, 64, causal="lower_right"), ampere_tiles.PAIRED, 1),
    (Case(1, 1, 40, 500, 64), ampere_tiles.TINY_512, 1),
    (Case(1, 1, 40, 64, 32, causal="upper_left"), ampere_tiles.TINY_64, 1),
    (Case(1, 1, 40, 120, 128, dtype="bfloat16"), ampere_tiles.TINY_128, 1),
    (Case(1, 1, 100, 200, 128, dtype="bfloat16", causal="upper_left"), ampere_tiles.STREAM_LARGE_STEP, 1),
    (Case(1, 1, 300, 400, 128, causal="lower_right"), ampere_tiles.STREAM_WIDE, 1),
    (Case(1, 1, 60, 130, 80), ampere_tiles.STREAM_SMALL_STEP, 1),
    (Case(1, 1, 130, 200, 96), ampere_tiles.STREAM_LEAN_128, 1),
    (Case(1, 1, 40, 100, 48), Tiling(32, 1, 2), 1),
    (Case(1, 1, 40, 70, 256), ampere_tiles.LARGE_HEADS, 1),
    (Case(1, 8, 5, 100, 64, heads_kv=2, causal="lower_right"), ampere_tiles.DECODE, 4),
    (Case(1, 2, 5, 700, 64), replace(ampere_tiles.DECODE, split=4), 1),
    (Case(2, 4, 3, 500, 128, heads_kv=2, causal="lower_right"), replace(ampere_tiles.DECODE_LEAN, split=2), 2),
    (Case(1, 8, 1, 1100, 64, heads_kv=2), replace(ampere_tiles.DECODE_DEEP, split=4), 4),
    (Case(1, 4, 2, 700, 128, heads_kv=2, causal="lower_right"), ampere_tiles.DECODE_DEEP, 2),
    (Case(1, 2, 1, 410, 256, heads_kv=1), replace(ampere_tiles.DECODE_LARGE_HEADS, split=2), 2),
    (Case(1, 2, 3, 170, 192, dtype="bfloat16"), ampere_tiles.DECODE_LARGE_HEADS_LEAN, 1),
    (Case(1, 4, 3, 700, 128, heads_kv=2), replace(ampere_tiles.DECODE_WIDE, split=2), 2),
    (Case(1, 1, 50, 700, 64, causal="lower_right"), replace(ampere_tiles.PAIRED, split=4), 1),
    (Case(1, 1, 70, 200, 256), replace(ampere_tiles.LARGE_HEADS, split=2), 1),
    (Case(2, 8, 1, 500, 64, heads_kv=2, masks=("left padding",)), ampere_tiles.DECODE_LEAN, 4),
    (Case(1, 4, 3, 700, 128, heads_kv=2, masks=("additive", "sinks")), replace(ampere_tiles.DECODE_WIDE, split=2), 2),
    (Case(1, 4, 5, 410, 64, causal="lower_right", masks=("window", "alibi")), replace(ampere_tiles.DECODE, split=4), 1),
    (Case(1, 1, 50, 170, 64, scale=-0.3), Tiling(64, 1, 2), 1),
    (Case(1, 1, 50, 70, 64, scale=0.0, causal="upper_left"), Tiling(64, 1, 2), 1),
    (Case(1, 1, 50, 270, 64, kind="outliers"), Tiling(64, 1, 2), 1),
    (Case(1, 1, 50, 270, 64, scale=100.0), Tiling(64, 1, 2), 1),
]


@pytest.mark.parametrize(("case", "tiling", "pack"), RUNS, ids=str)
def test_a_tiling_is_right_without_bank_conflicts(case: Case, tiling: Tiling, pack: int) -> None:
    problem = problem_of(case, "sm_80")
    check_in_every_order(specification(problem, tiling, pack), problem, case)


PARTS_OF_ODD_ROWS = [
    (Case(1, 12, 1, 700, 80, heads_kv=4, causal="lower_right"), replace(ampere_tiles.DECODE_DEEP, split=4), 3),
    (Case(2, 2, 5, 600, 48, dtype="bfloat16", layout="bshd"), ampere_tiles.DECODE_WIDE, 1),
    (Case(1, 4, 3, 410, 112, heads_kv=1, masks=("left padding",)), replace(ampere_tiles.DECODE, split=2), 4),
    (Case(1, 2, 2, 300, 208, causal="lower_right"), replace(ampere_tiles.DECODE_LARGE_HEADS, split=2), 1),
    (Case(1, 1, 50, 500, 16, causal="lower_right"), replace(ampere_tiles.PAIRED, split=2), 1),
]


@pytest.mark.parametrize(("case", "tiling", "pack"), PARTS_OF_ODD_ROWS, ids=str)
def test_parts_of_keys_are_added_up_in_rows_of_any_multiple_of_16(case: Case, tiling: Tiling, pack: int) -> None:
    """A warp reads the parts of rows that end within its 128 columns: a few bank conflicts at the end of a CTA."""
    problem = problem_of(case, "sm_80")
    check_in_every_order(specification(problem, tiling, pack), problem, case, conflicts=True)


ZEROS_BESIDE_A_ROW = [
    (Case(1, 12, 1, 700, 72, heads_kv=4, causal="lower_right"), replace(ampere_tiles.DECODE_DEEP, split=4), 3),
    (Case(2, 2, 5, 600, 40, dtype="bfloat16", layout="bshd"), ampere_tiles.DECODE_WIDE, 1),
    (Case(1, 4, 3, 410, 104, heads_kv=1, masks=("left padding",)), replace(ampere_tiles.DECODE, split=2), 4),
    (Case(1, 2, 2, 300, 136, kind="outliers"), replace(ampere_tiles.DECODE_LARGE_HEADS, split=2), 1),
    (Case(1, 1, 20, 70, 248, causal="upper_left"), ampere_tiles.LARGE_HEADS, 1),
    (Case(1, 1, 40, 60, 24), ampere_tiles.TINY_64, 1),
    (Case(1, 1, 50, 500, 8, causal="lower_right"), replace(ampere_tiles.PAIRED, split=2), 1),
    (Case(1, 1, 50, 130, 88, scale=-0.3), ampere_tiles.SMALL, 1),
    (Case(1, 1, 140, 200, 40, causal="lower_right"), ampere_tiles.STREAM, 1),
    (Case(1, 1, 140, 330, 56), ampere_tiles.STREAM_DEEP, 1),
    (Case(1, 1, 60, 130, 72), ampere_tiles.STREAM_SMALL_STEP, 1),
    (Case(1, 1, 130, 100, 120, dtype="bfloat16", causal="upper_left"), ampere_tiles.STREAM_LEAN_128, 1),
]


@pytest.mark.parametrize(("case", "tiling", "pack"), ZEROS_BESIDE_A_ROW, ids=str)
def test_rows_that_zeros_fill_up_to_a_multiple_of_16(case: Case, tiling: Tiling, pack: int) -> None:
    problem = problem_of(case, "sm_80")
    check_in_every_order(specification(problem, tiling, pack), problem, case, conflicts=True)


CLUSTERS_OF_ROWS_WITH_ZEROS = [
    (Case(1, 2, 1, 130, 8), 16, 1),
    (Case(1, 4, 3, 300, 72, heads_kv=2, causal="lower_right"), 8, 2),
]


@pytest.mark.parametrize(("case", "split", "pack"), CLUSTERS_OF_ROWS_WITH_ZEROS, ids=str)
def test_clusters_merge_rows_that_zeros_fill_up(case: Case, split: int, pack: int) -> None:
    problem = problem_of(case, "sm_90a")
    tiling = replace(ampere_tiles.DECODE_DEEP, split=split, clustered=True)
    check_in_every_order(specification(problem, tiling, pack), problem, case, conflicts=True)


PROGRAMMATIC = [
    (Case(1, 1, 140, 330, 64), ampere_tiles.STREAM_DEEP),
    (Case(1, 1, 50, 170, 64), Tiling(64, 1, 2)),
    (Case(1, 2, 5, 700, 64), replace(ampere_tiles.DECODE_DEEP, split=4)),
    (Case(1, 2, 1, 500, 64, masks=("left padding",)), ampere_tiles.DECODE_DEEP),
]


@pytest.mark.parametrize(("case", "tiling"), PROGRAMMATIC, ids=str)
def test_launches_that_begin_before_the_one_ahead_has_ended(case: Case, tiling: Tiling) -> None:
    """On sm_90 alone, where a launch is programmatic, a kernel has to wait for the one ahead."""
    problem = problem_of(case, "sm_90a")
    spec = specification(problem, tiling)
    assert all(stage.programmatic for stage in spec.stages)
    check_in_every_order(spec, problem, case)


def test_a_general_launch_that_begins_before_the_one_ahead_has_ended() -> None:
    case = Case(1, 1, 40, 90, 64, masks=("bool",))
    problem = problem_of(case, "sm_90a")
    spec = select(problem, "ampere/general").spec
    assert spec.programmatic
    check_in_every_order(spec, problem, case)


CLUSTERED = replace(ampere_tiles.DECODE_DEEP, clustered=True)


@pytest.mark.parametrize(
    ("case", "tiling", "pack"),
    [
        (Case(1, 8, 1, 1100, 64, heads_kv=2), replace(CLUSTERED, split=4), 4),
        (Case(1, 2, 1, 130, 64), replace(CLUSTERED, split=16), 1),  # one unit each, and parts without keys
        (Case(1, 2, 1, 300, 96), replace(CLUSTERED, split=16), 1),  # two units each, and the last parts none
        (Case(1, 2, 3, 300, 32), replace(CLUSTERED, split=16), 1),
        (Case(2, 4, 7, 500, 64, heads_kv=2, causal="lower_right"), replace(CLUSTERED, split=2), 2),
        (Case(1, 4, 5, 70, 64, heads_kv=1, causal="upper_left"), replace(CLUSTERED, split=8), 4),  # two tiles of rows
        (Case(1, 4, 2, 700, 128, heads_kv=2, dtype="bfloat16", kind="outliers"), replace(CLUSTERED, split=8), 2),
        (Case(1, 1, 3, 40, 64, scale=-0.3), replace(CLUSTERED, split=8), 1),
        (Case(1, 2, 1, 1100, 64), replace(ampere_tiles.DECODE_WIDE, split=4, clustered=True), 1),
        (Case(1, 2, 1, 300, 256, heads_kv=1), replace(ampere_tiles.DECODE_LARGE_HEADS, split=4, clustered=True), 2),
        (Case(2, 8, 1, 1101, 64, heads_kv=2, masks=("left padding",)), replace(CLUSTERED, split=4), 4),
        (Case(1, 4, 5, 300, 64, heads_kv=1, masks=("float32", "sinks")), replace(CLUSTERED, split=8), 4),
    ],
    ids=str,
)
def test_the_parts_of_a_cluster_are_merged_in_every_order(case: Case, tiling: Tiling, pack: int) -> None:
    problem = problem_of(case, "sm_90a")
    check_in_every_order(specification(problem, tiling, pack), problem, case)


def test_keys_that_a_mask_hides_are_not_loaded() -> None:
    case = Case(1, 4, 1, 2048, 64, heads_kv=1)
    tensors, loaded = make(case), []
    for hidden in (0, 1536):
        masks = Masks(attn_mask=torch.arange(2048) >= hidden)
        problem = replace(case.problem("sm_80"), mask=masks.kind)
        spec = specification(problem, ampere_tiles.DECODE, 4)
        report = run.attention(spec, problem, (*tensors, torch.empty_like(tensors[0]), None), None, masks=masks)
        loaded.append(report.counters["async_copy_bytes"])
    assert loaded[1] < loaded[0] / 3  # the last quarter, and the first tile of each warp


@pytest.mark.parametrize("keys", [300, 320, 512])
@pytest.mark.parametrize("tiling", [Tiling(64, 1, 1), ampere_tiles.STREAM, ampere_tiles.STREAM_DEEP], ids=str)
def test_a_probability_that_grows_too_large_is_taken_back(tiling: Tiling, keys: int) -> None:
    """Scores of later keys exceed the first ones by far more than FP16 holds: the reference has to move."""
    query = torch.ones(1, 1, 16, 64).half()
    key, value = torch.zeros(1, 1, keys, 64).half(), torch.randn(1, 1, keys, 64).half()
    key[:, :, 150] = 1.0
    key[:, :, 290] = 4.0
    problem = Problem(1, 1, 1, 16, keys, 64, "float16", target="sm_80")
    out, lse = torch.empty_like(query), torch.empty(1, 1, 16)
    spec = specification(problem, tiling)
    run.attention(spec, problem, (query, key, value, out, lse), None)
    expected, expected_lse = reference.oracle(query, key, value)
    torch.testing.assert_close(out.double(), expected.double(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-5, atol=1e-5)
