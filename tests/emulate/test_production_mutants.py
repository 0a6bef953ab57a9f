"""Mutations of the production kernels, each of which a case of the tests beside it catches: here, that it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from harness import Replacement

from microsdpa import reference
from microsdpa.call.masks import Masks
from microsdpa.emulate import run
from microsdpa.emulate.run import EmulationError, Schedule
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make, make_masks
from microsdpa.evidence.verify import problem_of
from microsdpa.jit.source import KERNELS_DIR
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.ampere.mma import tiles as ampere_tiles
from microsdpa.kernels.ampere.mma.spec import specification
from microsdpa.kernels.ampere.mma.tiles import Tiling
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

WRONG = "wrong answer"
Configure = Callable[[Problem], KernelSpec]


def tiled(tiling: Tiling) -> Configure:
    return lambda problem: specification(problem, tiling)


def named(kernel: str) -> Configure:
    return lambda problem: select(problem, kernel).spec


@dataclass(frozen=True)
class Mutant(Replacement):
    """One replacement in one file, the call that shows it, and what the emulator says of it, or WRONG."""

    case: Case
    kernel: Configure
    said: str
    target: str = "sm_90a"
    jump: float = 0.0


WAIT = "  if (PROGRAMMATIC) grid_dependency_wait();\n"
WAIT_OF_MMA = WAIT.replace("(PROGRAMMATIC)", "(PROGRAMMATIC && !MASKS::RANGED)")
AHEAD = "before griddepcontrol.wait"
CLUSTERED = replace(ampere_tiles.DECODE_DEEP, clustered=True)
STREAM, SMALL = ampere_tiles.STREAM_DEEP, Tiling(64, 1, 2)
MASKED = "first_key + BLOCK_N > min(seen_first, params.seqlen_k)"
MUTANTS = [
    Mutant("stream: wait", "ampere/stream/kernel.cu", WAIT, "", Case(1, 1, 140, 330, 64), tiled(STREAM), AHEAD),
    Mutant("mma: wait", "ampere/mma/kernel.cu", WAIT_OF_MMA, "", Case(1, 1, 50, 170, 64), tiled(SMALL), AHEAD),
    Mutant(
        *("mma: wait for ranges", "ampere/mma/kernel.cu", WAIT, "", Case(1, 2, 5, 200, 64, masks=("documents",))),
        *(named("ampere/mma"), AHEAD),
    ),
    Mutant(
        *("merge: wait", "ampere/combine/kernel.cu", "    grid_dependency_wait();\n", "", Case(1, 2, 5, 700, 64)),
        *(tiled(replace(ampere_tiles.DECODE_DEEP, split=4)), AHEAD),
    ),
    Mutant(
        *("general: wait", "ampere/general/kernel.cu", WAIT, "", Case(1, 1, 40, 90, 64, masks=("bool",))),
        *(named("ampere/general"), AHEAD),
    ),
    Mutant(
        *(
            "cluster: bytes of uneven units",
            "ampere/mma/kernel.cu",
            "own_units * SPLIT * shared",
            "units_each * SPLIT * shared",
        ),
        *(Case(1, 2, 1, 300, 96), tiled(replace(CLUSTERED, split=16)), "deadlock"),
    ),
    Mutant(
        *("maximum kept for 2^20", "common/online_softmax.cuh", "SLACK = 8.0f", "SLACK = 20.0f"),
        *(Case(1, 1, 16, 320, 64), named("ampere/general"), WRONG),
        jump=17.0,
    ),
    Mutant(
        *("overflow at 64 times the limit", "common/online_softmax.cuh", "LIMIT = 16384.0f", "LIMIT = 1048576.0f"),
        *(Case(1, 1, 16, 320, 64), tiled(SMALL), WRONG),
        jump=17.0,
    ),
    Mutant(
        *("mma: tail of one key", "ampere/mma/kernel.cu", MASKED, MASKED.replace("BLOCK_N >", "BLOCK_N - 1 >")),
        *(Case(1, 1, 50, 127, 64), tiled(SMALL), WRONG),
    ),
    Mutant(
        *("mma: window's first tile", "ampere/mma/kernel.cu", "arguments.masks.lowest);"),
        *(
            "arguments.masks.lowest + BLOCK_N - 1);",
            Case(1, 2, 3, 200, 64, causal="lower_right", masks=("window",)),
        ),
        *(named("ampere/mma"), WRONG),
    ),
    Mutant(
        *("general: window's first tile", "ampere/general/kernel.cu", "params.masks.lowest) : 0;"),
        *(
            "params.masks.lowest + BLOCK_N - 1) : 0;",
            Case(1, 2, 40, 200, 64, causal="lower_right", masks=("window",)),
        ),
        *(named("ampere/general"), WRONG),
    ),
    *(
        Mutant(*(f"{kernel}: {name}", f"ampere/{kernel}/kernel.cu", old, new), case, named(f"ampere/{kernel}"), WRONG)
        for kernel, case in (
            ("general", Case(1, 2, 40, 200, 64, masks=("documents",))),
            ("mma", Case(1, 2, 3, 200, 64, masks=("documents",))),
        )
        for name, old, new in (
            ("a range's first tile", "(first_seen, range.first)", "(first_seen, range.first + BLOCK_N)"),
            ("a range's last tile", ", range.last)", ", range.last - BLOCK_N)"),
        )
    ),
    *(
        Mutant(*(f"ranges: {name}", "common/masks.cuh", old, new), case, named("ampere/general"), WRONG)
        for case in (Case(1, 2, 40, 200, 64, masks=("documents",)),)
        for name, old, new in (
            ("first key", "~below(range[t][half].first - start)", "~below(range[t][half].first + 1 - start)"),
            ("last key", "below(range[t][half].last - start)", "below(range[t][half].last + 1 - start)"),
            (
                "the other half's row",
                "range[t][half] = range_at(params, mask(first, t, half))",
                "range[t][half] = range_at(params, mask(first, t, 0))",
            ),
        )
    ),
]


def verdict(mutant: Mutant, root: Path, schedule: Schedule) -> str:
    case = mutant.case
    (query, key, value), masks = make(case), make_masks(case)
    if mutant.jump:
        query, key = torch.ones_like(query), torch.zeros_like(key)
        key[:, :, 150] = mutant.jump * 0.6931 / 8.0
    problem = problem_of(case, mutant.target)
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:3], torch.nan)
    try:
        spec = mutant.kernel(problem)
        run.attention(
            *(spec, problem, (query, key, value, out, lse), case.scale),
            schedule=schedule,
            masks=Masks(**masks),
            root=root,
        )
    except EmulationError as error:
        return error.problem
    expected, _ = reference.oracle(query, key, value, causal=case.causal, scale=case.scale, **masks)
    plain, _ = reference.eager(query, key, value, causal=case.causal, scale=case.scale, **masks)
    return "" if compare.tolerance(plain, expected, out.dtype).admits(compare.measure(out, expected)) else WRONG


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutation_of_a_production_kernel_is_caught(tmp_path: Path, mutant: Mutant) -> None:
    root = mutant.tree(tmp_path)
    for schedule in (Schedule(0, late=True), Schedule(1, late=False)):
        assert verdict(mutant, KERNELS_DIR, schedule) == ""
        said = verdict(mutant, root, schedule)
        assert re.search(mutant.said, said), said or "it passed"
