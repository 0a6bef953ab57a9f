"""Deliberately broken kernels: the emulator must catch each of them, in every schedule. docs/emulator.md lists them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from harness import row_sums, tree

from microsdpa import reference
from microsdpa.emulate import run
from microsdpa.emulate.run import EmulationError, Schedule
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.problem import Problem
from microsdpa.select import select

SCHEDULES = [Schedule(seed, late) for seed in range(5) for late in (True, False)]
WRONG = "wrong answer"

ROW_SUMS, SCALAR, SOFTMAX, TILE = "test/row_sums.cu", "ladder/01_scalar.cu", "core/softmax.cuh", "core/tile.cuh"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A replacement in one file, and what the emulator must say: a part of its error, or WRONG."""

    name: str
    file: str
    old: str
    new: str
    caught_by: str


MUTANTS = [
    Mutant(
        "wait removed",
        ROW_SUMS,
        "    microsdpa::cp_async_wait<1>();\n",
        "",
        "in flight: a wait is missing|nothing has written|race",
    ),
    Mutant(
        "wait that lets one more group be in flight", ROW_SUMS, "cp_async_wait<1>", "cp_async_wait<2>", "in flight|race"
    ),
    Mutant(
        "commit removed",
        ROW_SUMS,
        "    }\n    microsdpa::cp_async_commit();\n",
        "    }\n",
        "in flight: a wait is missing",
    ),
    Mutant(
        "barrier after the wait removed",
        ROW_SUMS,
        "    microsdpa::cp_async_wait<1>();\n    __syncthreads();\n",
        "    microsdpa::cp_async_wait<1>();\n",
        "in flight|race|nothing has written",
    ),
    Mutant(
        "barrier before the next copy removed",
        ROW_SUMS,
        "    __syncthreads();  // the next tile's copy overwrites what slower warps still read\n",
        "",
        "race: this writes .* read at",
    ),
    Mutant(
        "stale stage read", ROW_SUMS, "shared.key[tile % 2]", "shared.key[(tile + 1) % 2]", "in flight|race|nothing"
    ),
    Mutant(
        "copy into the stage in use", ROW_SUMS, "shared.key[(tile + 1) % 2],", "shared.key[tile % 2],", "in flight|race"
    ),
    Mutant(
        "swizzle mismatch",
        ROW_SUMS,
        "keys + swizzled(n * 8 + lane % 8, step * 2 + lane / 8 % 2)",
        "keys + (n * 8 + lane % 8) * DIM + (step * 2 + lane / 8 % 2) * 8",
        WRONG,
    ),
    Mutant("unmasked tail", ROW_SUMS, "if (key >= params.keys) score", "if (false) score", WRONG),
    Mutant("tail read past the end", ROW_SUMS, "row < valid_rows;", "true;", "outside every buffer: at byte .* of key"),
    Mutant(
        "reduction over mixed rows",
        ROW_SUMS,
        "x + __shfl_xor_sync(0xffffffffu, x, 2)",
        "x + __shfl_xor_sync(0xffffffffu, x, 4)",
        WRONG,
    ),
    Mutant("maximum not shared", ROW_SUMS, "return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));", "return x;", WRONG),
    Mutant("no rescaling", ROW_SUMS, "sum[half] * microsdpa::ex2_approx(maximum[half] - largest)", "sum[half]", WRONG),
    Mutant(
        "lanes disagree on a shuffle",
        ROW_SUMS,
        "float quad_sum(float x) {\n",
        "float quad_sum(float x) {\n  if (threadIdx.x % 32 == 7) x += __shfl_xor_sync(0xffffffffu, x, 1);\n",
        "divergent warp",
    ),
    Mutant(
        "misaligned row",
        ROW_SUMS,
        "row * DIM + (chunk ^ (row % 8)) * 8; }",
        "row * DIM + (chunk ^ (row % 8)) * 8 + 4; }",
        "misaligned",
    ),
    Mutant(
        "scalar: barrier after the copy removed",
        SCALAR,
        "    __syncthreads();\n\n    float score[ROWS];",
        "    float score[ROWS];",
        "nothing has written|race: this reads",
    ),
    Mutant(
        "scalar: barrier before the next copy removed",
        SCALAR,
        "    __syncthreads();  // the next copy overwrites what slower warps still read\n",
        "",
        "race: this",
    ),
    Mutant("scalar: unmasked tail", SCALAR, "lane < valid_keys && ", "", WRONG),
    Mutant(
        "scalar: causal mask off by one", SCALAR, "first_key + lane <= first_row", "first_key + lane < first_row", WRONG
    ),
    Mutant("scalar: mixed rows", SCALAR, "state[r].update(", "state[0].update(", WRONG),
    Mutant(
        "scalar: phantom keys score 0",
        SCALAR,
        "params.scale_log2 : negative_infinity()",
        "params.scale_log2 : 0.0f",
        WRONG,
    ),
    Mutant("scalar: store past the last row", SCALAR, "if (row >= params.seqlen_q) break;", "", "outside every buffer"),
    Mutant("scalar: load past the last key", TILE, "if (row < valid_rows) load", "load", "outside every buffer"),
    Mutant(
        "scalar: reduction stops early",
        SOFTMAX,
        "x += __shfl_xor_sync(FULL_WARP, x, offset);",
        "if (offset > 1) x += __shfl_xor_sync(FULL_WARP, x, offset);",
        WRONG,
    ),
]


def scalar_is_right(root: Path, schedule: Schedule) -> bool:
    for causal in ("lower_right", None):
        query, key, value = make(Case(1, 2, 37, 45, 32))
        problem = Problem(1, 2, 2, 37, 45, 32, "float16", causal, target="sm_89")  # type: ignore[arg-type]
        spec = select(problem, "ladder/01_scalar").spec
        out = torch.full_like(query, torch.nan)
        run.attention(spec, problem, query, key, value, out, None, None, schedule=schedule, root=root)
        expected, _ = reference.oracle(query, key, value, causal=causal)
        eager, _ = reference.eager(query, key, value, causal=causal)
        if not compare.tolerance(eager, expected, query.dtype).admits(compare.measure(out, expected)):
            return False
    return True


def verdict(root: Path, file: str, schedule: Schedule) -> str:
    """What the emulator says of a source tree: an error, WRONG, or nothing."""
    try:
        right = row_sums(root, 75, schedule)[0] if file == ROW_SUMS else scalar_is_right(root, schedule)
    except EmulationError as error:
        return error.problem
    return "" if right else WRONG


@pytest.mark.parametrize("file", [ROW_SUMS, SCALAR])
def test_the_unbroken_kernels_pass_in_every_schedule(tmp_path: Path, file: str) -> None:
    root = tree(tmp_path)
    assert [verdict(root, file, schedule) for schedule in SCHEDULES] == [""] * len(SCHEDULES)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught_in_every_schedule(tmp_path: Path, mutant: Mutant) -> None:
    root = tree(tmp_path, {mutant.file: (mutant.old, mutant.new)})
    for schedule in SCHEDULES:
        said = verdict(root, mutant.file, schedule)
        assert re.search(mutant.caught_by, said), f"{schedule}: {said or 'it passed'}"


def test_the_documentation_lists_every_mutant() -> None:
    page = (Path(__file__).parents[2] / "docs/emulator.md").read_text()
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \| (.+?) \|$", page, re.MULTILINE)
    assert [(name, file) for name, file, _ in rows] == [(m.name, m.file) for m in MUTANTS]
    assert [result for *_, result in rows] == [
        "by comparison with the oracle" if m.caught_by == WRONG else "named, with its line" for m in MUTANTS
    ]
