"""Random calls through every door, on a GPU; `microsdpa verify --fuzz 10000` makes more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from microsdpa.evidence import fuzz, fuzz_check, results
from microsdpa.evidence.fuzz_calls import DOORS

pytestmark = pytest.mark.gpu


def test_random_calls_through_every_door(tmp_path: Path) -> None:
    step = fuzz.step(300, 0, output=tmp_path)
    assert step.status == "passed", step.summary
    rows = results.read(next(tmp_path.rglob(f"{fuzz.SUITE}.json")))["rows"]
    assert {row["door"] for row in rows} == set(DOORS)


def test_a_wrong_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_check, "_copied", lambda result: (result[0] * 1.5, result[1]))
    assert fuzz_check.check(fuzz_check.Call(seqlen_q=20, seqlen_k=20), "cuda").kind == "output"
