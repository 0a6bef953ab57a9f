from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from microsdpa.errors import InvalidArgument
from microsdpa.evidence import regress, results
from microsdpa.evidence.inputs import Case
from microsdpa.runtime import launcher
from microsdpa_cli import app as cli
from microsdpa_cli import running

CASE = Case(1, 8, 512, 512, 64)
ERROR = {"max_abs": 1e-4, "rmse": 1e-5, "rel_l1": 1e-4, "cosine": 1.0, "tolerance": {"max_abs": 2e-4}}


def row(impl: str, samples: list[float], **fields: Any) -> results.Row:
    middle = sorted(samples)[len(samples) // 2]
    measured = {"median_us": middle, "min_us": min(samples), "samples_us": samples, "error": ERROR}
    return results.row(CASE, **({"impl": impl} | measured | fields))


def result(*rows: results.Row, suite: str = "mission", gpu: str | None = "NVIDIA H200") -> results.Result:
    made = results.make(suite, "microsdpa bench", list(rows))
    made["environment"] = made["environment"] | {"gpu": gpu}
    return made | {"checksum": results.checksum(made)}


def around(middle: float) -> list[float]:
    return [middle * (1 + 0.002 * (i - 4)) for i in range(9)]


OLD = result(row("microsdpa", around(10.0)), row("torch", around(9.0)))


@pytest.mark.parametrize(
    ("new_us", "outcome", "status"),
    [
        (12.0, "slower", "failed"),
        (8.0, "faster", "passed"),
        (10.01, "tie", "passed"),
        (10.3, "within threshold", "passed"),
    ],
)
def test_a_change_is_called_what_its_interval_allows(new_us: float, outcome: str, status: str) -> None:
    step = regress.step(OLD, result(row("microsdpa", around(new_us)), row("torch", around(9.9))), 0.05)
    assert step.status == status
    assert step.table[1][-1] == outcome
    assert "peers took 1.100 times as long" in step.summary


def test_a_noisy_slowdown_is_not_confirmed() -> None:
    noisy = [8.0, 9.0, 10.0, 12.0, 14.0, 15.0, 9.5]
    assert regress.step(OLD, result(row("microsdpa", noisy)), 0.05).status == "passed"


def test_a_peer_that_slows_down_does_not_fail_us() -> None:
    assert (
        regress.step(OLD, result(row("microsdpa", around(10.0)), row("torch", around(20.0))), 0.05).status == "passed"
    )


def test_a_row_that_is_lost_fails_and_one_that_is_new_does_not() -> None:
    lost = results.row(CASE, impl="microsdpa", status="wrong", reason="differs")
    assert regress.step(OLD, result(lost), 0.05).status == "failed"
    more = result(row("microsdpa", around(10.0)), row("microsdpa", around(5.0), variant="alone"))
    outcomes = {change.impl: change.outcome for change in regress.compare(OLD, more, 0.05)}
    assert outcomes == {"microsdpa": "tie", "microsdpa alone": "not measured", "torch": "not measured"}
    assert regress.compare(result(lost), OLD, 0.05)[0].outcome == "gained"


@pytest.mark.parametrize(
    ("new", "threshold", "message"),
    [
        (result(suite="small"), 0.05, "two files of one suite, got mission and small"),
        (result(gpu="NVIDIA L4"), 0.05, "two files of one gpu, got NVIDIA H200 and NVIDIA L4"),
        (OLD, 1.5, r"threshold: expected a fraction in \[0, 1\)"),
    ],
)
def test_what_cannot_be_compared_is_refused(new: results.Result, threshold: float, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        regress.compare(OLD, new, threshold)


def test_the_command_compares_two_files_and_fails_on_a_slowdown(tmp_path: Path) -> None:
    old = results.write(OLD, tmp_path / "old")
    new = results.write(result(row("microsdpa", around(12.0)), row("torch", around(9.0))), tmp_path / "new")
    slower = CliRunner().invoke(cli.app, ["regress", str(old), str(new)])
    assert slower.exit_code == running.EXIT_FAILED
    assert "1 lost or confirmed slower by more than 5%" in slower.stdout
    assert CliRunner().invoke(cli.app, ["regress", str(old), str(new), "--threshold", "0.5"]).exit_code == 0
    assert CliRunner().invoke(cli.app, ["regress", str(new), str(old)]).exit_code == 0


def test_a_hand_edited_file_is_refused(tmp_path: Path) -> None:
    old = results.write(OLD, tmp_path)
    old.write_text(old.read_text().replace("10.0", "9.99"))
    outcome = CliRunner().invoke(cli.app, ["regress", str(old), str(old)])
    assert isinstance(outcome.exception, results.ResultFileError)
    assert "checksum" in str(outcome.exception)


@pytest.mark.skipif(launcher.device_error() is None, reason="this machine has a GPU")
def test_a_fresh_run_needs_a_gpu(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(cli.app, ["regress", str(results.write(OLD, tmp_path))])
    assert outcome.exit_code == running.EXIT_CANNOT_RUN
    assert "timings need a GPU" in outcome.stdout
