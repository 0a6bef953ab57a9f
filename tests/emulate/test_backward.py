"""Gradients by backward in the emulator: right, free of races and bank conflicts, the same bits each time."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_calls import check, expected
from harness import Replacement

from microsdpa.emulate.run import EmulationError, Schedule, scheduled
from microsdpa.evidence.cases import MASKINGS
from microsdpa.evidence.fuzz_calls import Call
from microsdpa.evidence.fuzz_check import check as check_call
from microsdpa.evidence.inputs import Case
from microsdpa.execution import gradients
from microsdpa.kernels.backward.spec import Tiling

CASES = [
    Case(1, 2, 70, 100, 64),
    Case(1, 2, 70, 100, 64, causal="upper_left", dtype="bfloat16"),
    Case(1, 4, 100, 70, 32, heads_kv=2, causal="lower_right"),  # rows that see nothing
    Case(2, 4, 70, 150, 32, heads_kv=1, causal="lower_right", layout="bshd"),
    Case(1, 1, 70, 40, 8),
    Case(1, 2, 70, 100, 36, layout="unaligned", causal="upper_left"),
    Case(1, 1, 40, 90, 1),
    Case(1, 1, 70, 100, 128, causal="lower_right"),
    Case(1, 2, 40, 90, 72, dtype="bfloat16", scale=-0.2),
    Case(1, 2, 40, 40, 64, scale=0.0, causal="upper_left"),
    Case(1, 1, 70, 100, 256, causal="upper_left"),
    Case(1, 1, 30, 40, 192, dtype="bfloat16"),
    *(Case(2, 4, 40, 90, 32, heads_kv=2, causal=causal, masks=masks) for causal, masks in MASKINGS),
    Case(1, 2, 70, 150, 64, masks=("bool", "window", "softcap", "alibi", "sinks"), dtype="bfloat16"),
    Case(1, 2, 70, 150, 40, masks=("additive", "sinks"), causal="lower_right", layout="unaligned"),
    Case(1, 2, 70, 150, 64, masks=("left padding, numbers",)),
    Case(2, 4, 70, 150, 32, heads_kv=2, masks=("documents",)),
    Case(2, 2, 150, 150, 32, causal="upper_left", masks=("documents",)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_right_in_two_orders(case: Case) -> None:
    check(expected(case, through_lse=True))


TILINGS = [
    (Case(1, 1, 140, 150, 64, causal="upper_left"), Tiling(row_tiles=2, step=16)),
    (Case(1, 1, 140, 150, 64), Tiling(step=64)),
    (Case(1, 1, 140, 150, 128, causal="upper_left"), Tiling(warps=8, block_walk=32, ctas=1)),
    (Case(1, 1, 70, 100, 256), Tiling(block_walk=32, stages=1, ctas=1)),
    (Case(1, 1, 70, 100, 256), Tiling(block_walk=32, ctas=1)),
    *(
        (case, Tiling(step=64, wgmma=True, bulk="unaligned" not in case.layout))
        for case in (
            Case(1, 1, 140, 150, 64, causal="upper_left"),
            Case(2, 2, 70, 150, 64, heads_kv=1, dtype="bfloat16", layout="bshd"),
            Case(1, 2, 70, 150, 64, heads_kv=1, masks=("bool", "softcap", "window", "alibi", "sinks")),
            Case(1, 1, 70, 150, 32, causal="lower_right", masks=("additive",), layout="unaligned"),
            Case(1, 1, 100, 70, 96, causal="lower_right"),
            Case(1, 1, 150, 300, 64, masks=("documents",)),
            Case(1, 1, 70, 300, 64, masks=("padding",)),
            Case(1, 1, 70, 150, 72, masks=("bool",)),  # tiles of 96 columns
            Case(1, 2, 100, 150, 80, heads_kv=1, causal="upper_left", masks=("softcap",)),
            Case(1, 1, 70, 100, 44, masks=("additive",), layout="unaligned"),
        )
    ),
    (Case(1, 1, 140, 150, 128, causal="lower_right"), Tiling(warps=8, step=64, ctas=1, wgmma=True, bulk=True)),
    (Case(1, 1, 70, 100, 256, causal="upper_left"), Tiling(block_walk=32, warps=8, ctas=1, wgmma=True, bulk=True)),
    (
        Case(1, 2, 150, 300, 64, heads_kv=1, causal="lower_right"),
        Tiling(block_walk=128, step=64, wgmma=True, bulk=True),
    ),
    (Case(1, 1, 70, 100, 128), Tiling(step=64, wgmma=True)),
    *((Case(1, 1, 70, 100, d, masks=("bool",)), Tiling(warps=8, block_walk=32, wgmma=True)) for d in (144, 168, 232)),
]


@pytest.mark.parametrize(("case", "tiling"), TILINGS, ids=str)
def test_a_tiling_is_right_without_bank_conflicts(case: Case, tiling: Tiling) -> None:
    reports = check(expected(case), tiling, "sm_90a")
    assert reports[1].bank_conflicts == 0


@pytest.mark.parametrize(
    "shape", [(1,), (90,), (40, 1), (2, 1, 1, 90), (2, 4, 40, 90), (4, 1, 1), (2, 1, 40, 1), (1, 4, 40, 90)]
)
def test_the_gradient_of_a_mask_is_summed_where_it_is_broadcast(shape: tuple[int, ...]) -> None:
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    check(expected(Case(2, 4, 40, 90, 32, heads_kv=2, causal="upper_left"), {"attn_mask": mask}))


def test_slopes_of_heads_are_summed_over_the_batch() -> None:
    check(expected(Case(2, 4, 40, 90, 32, heads_kv=2), {"alibi_slopes": torch.rand(4)}))


def test_rows_of_the_lowest_number_have_the_gradient_of_their_mean() -> None:
    """The LSE of such a row has lost the logarithm of its sum."""
    mask = torch.zeros(40, 90)
    mask[3], mask[5, 20:], mask[7], mask[8] = torch.finfo(torch.float32).min, -1e30, -1e9, -torch.inf
    mask[20:30] = -65504.0
    check(expected(Case(1, 2, 40, 90, 32), {"attn_mask": mask}))
    check(expected(Case(1, 2, 40, 90, 32), {"attn_mask": mask, "sinks": torch.tensor([1.0, -60000.0])}))


def test_gradients_of_the_lse_alone_need_no_gradient_of_the_output() -> None:
    wanted = expected(Case(1, 2, 40, 90, 32), through_lse=True)
    only = expected(Case(1, 2, 40, 90, 32))
    check(wanted)
    check(only)
    assert not torch.equal(wanted.of.made["grad_query"], only.of.made["grad_query"])
    assert torch.equal(wanted.of.made["grad_value"], only.of.made["grad_value"])


def test_only_what_is_seen_is_multiplied() -> None:
    """A causal mask, a window and a padding mask spare the products of what nobody sees."""
    products = []
    for causal, masks in (
        (None, {}),
        ("upper_left", {}),
        ("upper_left", {"window": (63, 0)}),
        (None, {"attn_mask": torch.arange(512) < 64}),
    ):
        wanted = expected(Case(1, 1, 512, 512, 32, causal=causal), masks)  # type: ignore[arg-type]
        products.append(gradients.emulate(wanted.of)[1].counters["tensor_instructions"])
    whole, half, window, padded = products
    assert half < 0.6 * whole
    assert window < 0.3 * whole
    assert padded == whole / 8


@dataclass(frozen=True)
class Mutant(Replacement):
    """One replacement in one file, the call that shows it, and what is said of it."""

    case: Case
    said: str


KERNEL = "backward/kernel.cu"
MUTANTS = [
    Mutant(
        *("no wait for the kernel ahead", KERNEL, "if (PROGRAMMATIC) grid_dependency_wait();", ""),
        *(Case(1, 1, 40, 90, 64), "before griddepcontrol.wait"),
    ),
    Mutant(
        *("no barrier ahead of a tile's next use", KERNEL),
        *("__syncthreads();  // the tile is there, and nobody reads the one before it any more", ""),
        *(Case(1, 1, 200, 200, 64), "race|nothing has written"),
    ),
    Mutant(
        *("owned tiles are written over too early", KERNEL),
        *("__syncthreads();  // also where nothing is walked over, the owned tiles are there to be written over", ""),
        *(Case(1, 1, 40, 200, 32, causal="upper_left"), "race"),
    ),
    Mutant(
        *("the last head of a group is left out", KERNEL, "const int turns = tiles * group;"),
        *("const int turns = tiles * max(1, group - 1);", Case(1, 4, 40, 90, 32, heads_kv=2), "grad_key is off"),
    ),
    Mutant(
        *("the tile of the first query that sees a key", KERNEL, "first_tile = begin / C::BLOCK_WALK;"),
        "first_tile = (begin + C::BLOCK_WALK - 1) / C::BLOCK_WALK;",
        *(Case(1, 1, 150, 150, 32, causal="upper_left", masks=("window",)), "is off"),
    ),
    Mutant(
        *("the soft cap's derivative", "backward/scoring.cuh", "bend = 1.0f - bent * bent;", "bend = 1.0f;"),
        *(Case(1, 2, 40, 90, 32, masks=("softcap",)), "grad_query is off"),
    ),
    Mutant(
        *("the sign of the LSE's gradient", "backward/terms.cu", "terms.delta = sum - (", "terms.delta = sum + ("),
        *(Case(1, 2, 40, 90, 32), "grad_query is off"),
    ),
    Mutant(
        *("rows that see no key", "backward/terms.cu"),
        *("lse == negative_infinity() ? -negative_infinity() : lse", "lse"),
        *(Case(1, 2, 40, 2, 32, masks=("additive",)), "grad_.* is off"),
    ),
]


def verdict(mutant: Mutant, schedule: Schedule, **options: Any) -> str:
    wanted = expected(mutant.case, through_lse=True)
    try:
        with scheduled(schedule):
            gradients.emulate(wanted.of, None, "sm_90a", **options)
    except EmulationError as error:
        return error.problem
    return wanted.wrong()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutation_is_caught(tmp_path: Path, mutant: Mutant) -> None:
    root = mutant.tree(tmp_path)
    said = []
    for schedule in (Schedule(0, late=True), Schedule(1, late=False)):
        assert verdict(mutant, schedule) == ""
        said.append(verdict(mutant, schedule, root=root))
    assert any(re.search(mutant.said, one) for one in said), said


@pytest.mark.parametrize("graded", ["s", "a"])
@pytest.mark.parametrize("rotary", [0, 16])
def test_a_gradient_of_a_mask_alone_beside_a_block_mask(graded: str, rotary: int) -> None:
    """The forward kernels read a block mask's summary beside it, which the backward kernels do not know."""
    made = Call(door="backward", seqlen_q=40, seqlen_k=70, blocks="mask_mod", sinks="inputs", alibi="head")
    assert check_call(dataclasses.replace(made, graded=graded, rotary=rotary), "cpu").failure == ""
