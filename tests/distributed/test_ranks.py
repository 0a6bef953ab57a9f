"""Attention over four processes, on CPU tensors: every case of ranks.py on every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "ranks.py"
WORLD = 4
KINDS = "same", "lengths differ", "two ranks", "empty ranks"
SINGLE = (
    *("errors", "groups", "lengths", "explained", "through_the_emulator", "groups_end", "absent_rank"),
    *("context_parallel_of_torch", "context_parallel_of_diffusers"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What came of every case, by rank: one start of the processes runs them all."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(WORLD)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(said)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_one_process(found: list[dict[str, str]], kind: str) -> None:
    for rank, cases in enumerate(found):
        names = [name for name in cases if name.startswith(f"{kind} ") and name not in SINGLE]
        assert names or (kind == "two ranks" and rank > 1)
        wrong = {name: cases[name] for name in names if cases[name]}
        assert not wrong, f"rank {rank}: {len(wrong)} of {len(names)}: {next(iter(wrong.items()))}"


@pytest.mark.parametrize("name", SINGLE)
def test_case(found: list[dict[str, str]], name: str) -> None:
    if name.endswith("diffusers"):
        pytest.importorskip("diffusers", reason="diffusers is of the extra integrations")
    for rank, cases in enumerate(found):
        assert cases[name] == "", f"rank {rank}"
