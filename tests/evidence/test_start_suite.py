"""Suite start without a GPU: a process on the CPU, what makes a row wrong, and how rows are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from microsdpa.evidence import doors, render, results, start
from microsdpa.evidence.inputs import Case, make

CASE = Case(1, 2, 192, 192, 16)
FURTHER = {"sdpa(document_ids)", "sdpa(block_mask)", "sdpa_varlen", "sdpa(window), requires grad"}
GRADED = next(one for one in start.STARTS if one.door == "requires grad")


@pytest.fixture
def _cpu_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU no kernel of this library has a signature."""

    def fields(door: doors.Door, impl: str, _: Any) -> dict[str, Any]:
        return {"impl": impl, "door": door.name}

    monkeypatch.setattr(doors, "fields_of", fields)


@pytest.mark.usefixtures("_cpu_fields")
def test_processes_time_their_first_calls_and_are_judged() -> None:
    kept: list[int] = []
    starts = (start.STARTS[0], GRADED)
    rows = start.run(CASE, keep=lambda found: kept.append(len(found)), device="cpu", starts=starts, rounds=1)
    assert [row["reason"] for row in rows if row["status"] != "ok"] == []
    assert [(row["impl"], row["door"], row["case"], row["direction"]) for row in rows] == [
        ("microsdpa", "import microsdpa", "", "forward"),
        ("microsdpa", "requires grad", "filled cache", "forward"),
        ("microsdpa", "requires grad", "filled cache, the backward pass after it", "backward"),
        ("torch", "requires grad", "filled cache", "forward"),
        ("torch", "requires grad", "filled cache, the backward pass after it", "backward"),
    ]
    assert all(row["median_us"] > 0 and len(row["samples_us"]) == 1 for row in rows)
    assert rows[0]["error"] is None
    assert all(row["error"]["max_abs"] is not None for row in rows[1:])
    assert kept == [1, 5]
    results.validate(results.make("start", "microsdpa bench", rows), "the suite's file")


def _stand_in(monkeypatch: pytest.MonkeyPatch, wrong_output: bool = False, **timed: Any) -> list[str]:
    """Processes that are not started; gives the list of those that would have been."""
    asked: list[str] = []

    def process(_: start.Server, one: start.Start, impl: str, device: str, place: Path) -> dict[str, Any]:
        asked.append(impl)
        if timed.get("fails") == impl:
            raise start.ProcessFailed("the process ended with 1: no such thing")
        query, key, value = make(CASE)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        torch.save([out * 1.1 if wrong_output else out], place / f"{impl}.pt")
        return {"first_us": 1000.0 + len(asked), "imported": timed.get("imported", [])}

    monkeypatch.setattr(start, "process", process)
    return asked


@pytest.mark.usefixtures("_cpu_fields")
def test_what_an_eager_call_may_not_import_makes_its_row_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _stand_in(monkeypatch, imported=["sympy"])
    eager, compiled = start.STARTS[2], start.STARTS[-1]
    assert (eager.eager, compiled.eager) == (True, False)
    ours, torchs, *of_compiled = start.run(CASE, device="cpu", starts=(eager, compiled))
    assert asked == [doors.OURS, doors.TORCHS] * 2 * (start.ROUNDS + 1)
    assert (ours["status"], ours["reason"]) == ("wrong", "the call imported sympy")
    assert [row["status"] for row in (torchs, *of_compiled)] == ["ok"] * 3


@pytest.mark.usefixtures("_cpu_fields")
def test_a_wrong_output_and_a_process_that_fails_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch, wrong_output=True)
    rows = start.run(CASE, device="cpu", starts=(start.STARTS[2],), rounds=1)
    assert [row["status"] for row in rows] == ["wrong", "wrong"]
    assert all("differs from the oracle" in row["reason"] for row in rows)
    asked = _stand_in(monkeypatch, fails=doors.TORCHS)
    rows = start.run(CASE, device="cpu", starts=(start.STARTS[2],), rounds=3)
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("ok", ""),
        ("unavailable", "the process ended with 1: no such thing"),
    ]
    assert asked.count(doors.TORCHS) == 1


def test_a_process_that_ends_with_an_error_says_its_last_line(tmp_path: Path) -> None:
    with start.Server() as server:
        for _ in range(2):  # the server goes on
            with pytest.raises(start.ProcessFailed, match=r"ended with 1: FileNotFoundError: .*inputs\.pt"):
                start.process(server, GRADED, doors.TORCHS, "cpu", tmp_path)


def test_a_process_that_takes_too_long_is_ended_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save([*make(CASE), torch.ones(1, 2, 192, 16)], tmp_path / "inputs.pt")
    with start.Server() as server:
        torch.save(None, tmp_path / "option.pt")
        monkeypatch.setattr(start, "SECONDS", 0.0)
        with pytest.raises(start.ProcessFailed, match=r"was ended after 0\.0 s"):
            start.process(server, GRADED, doors.TORCHS, "cpu", tmp_path)
        monkeypatch.setattr(start, "SECONDS", 60.0)
        assert start.process(server, GRADED, doors.TORCHS, "cpu", tmp_path)["first_us"] > 0


@pytest.mark.usefixtures("_cpu_fields")
def test_further_arguments_are_those_of_the_case() -> None:
    further = [one for one in start.STARTS if one.door in FURTHER]
    rows = start.run(CASE, device="cpu", starts=tuple(further), rounds=1)
    assert {row["door"] for row in rows} == FURTHER
    assert {(row["status"], row["reason"]) for row in rows} == {("ok", "")}


@pytest.mark.usefixtures("_cpu_fields")
def test_a_table_has_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch)
    rows = start.run(CASE, device="cpu", starts=(start.STARTS[2],), rounds=1)
    lines = render.timing_lines(results.make("start", "microsdpa bench", rows), "start", "ms")
    assert lines[0][1:3] == ["microsdpa", "torch"]
    assert lines[1][:3] == ["sdpa, filled cache: (1, 2, 192, 192, 16), float16", "1.0", "1.0"]
