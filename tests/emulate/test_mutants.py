"""Deliberately broken kernels: the emulator must catch each of them, in every schedule. docs/emulator.md lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness import hopper_product, row_sums, tree
from mutants import HOPPER, MUTANTS, ROW_SUMS, SCALAR, WRONG, Mutant

from microsdpa import reference
from microsdpa.emulate import run
from microsdpa.emulate.run import EmulationError, Schedule
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

SCHEDULES = [Schedule(seed, late) for seed in range(5) for late in (True, False)]


def scalar_is_right(root: Path, schedule: Schedule) -> bool:
    for causal in ("lower_right", None):
        query, key, value = make(Case(1, 2, 37, 45, 32))
        problem = Problem(1, 2, 2, 37, 45, 32, "float16", causal, target="sm_89")  # type: ignore[arg-type]
        spec = select(problem, "ladder/01_scalar").spec
        out = torch.full_like(query, torch.nan)
        run.attention(spec, problem, (query, key, value, out, None), None, schedule=schedule, root=root)
        expected, _ = reference.oracle(query, key, value, causal=causal)
        eager, _ = reference.eager(query, key, value, causal=causal)
        if not compare.tolerance(eager, expected, query.dtype).admits(compare.measure(out, expected)):
            return False
    return True


def verdict(root: Path, file: str, schedule: Schedule) -> str:
    """What the emulator says of a source tree: an error, WRONG, or nothing."""
    try:
        if file == ROW_SUMS:
            right = row_sums(root, 75, schedule)[0]
        elif file == HOPPER:
            right = hopper_product(root, 300, schedule)[0]
        else:
            right = scalar_is_right(root, schedule)
    except EmulationError as error:
        return error.problem
    return "" if right else WRONG


@pytest.mark.parametrize("file", [ROW_SUMS, SCALAR, HOPPER])
def test_the_unbroken_kernels_pass_in_every_schedule(tmp_path: Path, file: str) -> None:
    root = tree(tmp_path)
    assert [verdict(root, file, schedule) for schedule in SCHEDULES] == [""] * len(SCHEDULES)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught_in_every_schedule(tmp_path: Path, mutant: Mutant) -> None:
    root = mutant.tree(tmp_path)
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
