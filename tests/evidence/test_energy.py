"""The energy of a call: from steps of the driver's counter to a column of the tables."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from microsdpa.evidence import bench, energy, environment, nvml, render, results, suites, timing, worker
from microsdpa.evidence.inputs import Case

CASE = Case(1, 16, 4096, 4096, 128)


def test_power_is_that_between_steps_after_the_gpu_has_settled() -> None:
    steps = [(0.0, 0.0), (0.05, 5.0), (0.15, 40.0), (0.25, 110.0), (0.35, 180.0)]
    assert energy.mean_power(steps) == pytest.approx(700.0)
    assert energy.mean_power(steps[:3]) is None
    assert energy.mean_power([]) is None
    assert energy.of_call(700.0, 1000.0) == pytest.approx(700.0)


def test_a_counter_that_moves_in_steps_gives_the_power_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(uuid: str) -> float:
        assert uuid == "GPU-1"
        return 350.0 * (time.perf_counter() // 0.02 * 0.02)

    monkeypatch.setattr(environment, "gpu_uuid", lambda: "GPU-1")
    monkeypatch.setattr(nvml, "energy", counted)
    repeated = []
    found = energy.watts(lambda: repeated.append(time.sleep(0.005)))
    assert found == pytest.approx(350.0, rel=0.2)
    assert len(repeated) > 10


def test_the_state_of_a_gpu_is_the_mean_of_readings_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = iter([1500.0, 1530.0, 1560.0, *[0.0] * 100])  # it has ended at the fourth reading
    ended = threading.Event()

    def state(uuid: str) -> dict[str, float]:
        clock = next(clocks)
        if not clock:
            ended.set()
            time.sleep(0.05)
        return {"sm_clock_mhz": clock} | ({"power_w": 600.0} if clock != 1530.0 else {})

    monkeypatch.setattr(environment, "gpu_uuid", lambda: "GPU-1")
    monkeypatch.setattr(nvml, "state", state)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    assert environment.gpu_state(ended.wait, 0.0) == {"sm_clock_mhz": 1530.0}


def test_without_a_counter_there_is_no_power_and_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_uuid", lambda: "GPU-1")
    monkeypatch.setattr(nvml, "energy", lambda uuid: None)
    assert energy.watts(pytest.fail) is None


def _runner() -> timing.GraphRunner:
    runner = timing.GraphRunner.__new__(timing.GraphRunner)
    runner.graph = SimpleNamespace(replay=lambda: None)  # type: ignore[assignment]
    return runner


def test_rivals_alone_have_their_energy_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "watts", lambda repeat: 600.0)
    one = bench.CaseBench(CASE, energy=True)
    measured = {"microsdpa": [200.0], "cudnn": [220.0], "slow": [2000.0], bench.EMPTY_KERNEL: [1.0]}
    runners: dict[str, timing.Runner] = {name: _runner() for name in measured}
    found = one._energies("graph", runners, measured, lambda name, turn: turn())
    energies = {name: fields["energy_mj"] for name, fields in found.items() if fields}
    assert energies == pytest.approx({"microsdpa": 120.0, "cudnn": 132.0})
    short = {name: [samples[0] / 100] for name, samples in measured.items()}
    assert not any(one._energies("graph", runners, short, lambda name, turn: turn()).values())
    assert not any(one._energies("cold", runners, measured, lambda name, turn: turn()).values())
    one.energy = False
    assert not any(one._energies("graph", runners, measured, lambda name, turn: turn()).values())


def test_suites_of_long_calls_measure_it_and_processes_are_told() -> None:
    asked = {name for name in suites.names() if suites.load(name).energy}
    assert asked == {"prefill", "prefill_fp8", "real", "schedule"}
    for name in ("prefill", "small"):
        (_, job, _), *_ = worker.jobs(suites.load(name), ["graph"], "auto", "all")
        assert job["energy"] == (name == "prefill")


def test_tables_show_it_beside_the_best_peer() -> None:
    def row(impl: str, microseconds: float, **fields: Any) -> results.Row:
        samples = [microseconds] * 20
        timed = {"median_us": microseconds, "min_us": microseconds, "samples_us": samples}
        return results.row(CASE, **({"impl": impl, "version": "1", "variant": ""} | timed | fields))

    rows = [row("microsdpa", 200.0, energy_mj=120.0), row("torch CUDNN", 220.0, energy_mj=132.04)]
    result = results.make("prefill", "microsdpa bench --suite prefill", rows)
    head, line = render.timing_lines(result, "graph")
    assert head[-2:] == ["best peer / microsdpa", render.ENERGY]
    assert line[-1] == "120 / 132"
    for one in rows:
        one.pop("energy_mj", None)
    assert render.ENERGY not in render.timing_lines(results.make("prefill", "bench", rows), "graph")[0]
