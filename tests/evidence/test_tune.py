"""`microsdpa tune`: which configurations are measured, and what the choice costs, with a timer that pretends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from microsdpa import reference
from microsdpa.evidence import environment, graphs, render, results, survey, timing, tune
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers import Call, Tensors
from microsdpa.evidence.suites import Suite
from microsdpa.kernels import configurations
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

REAL_BENCH = tune.CaseBench
SMALL, WIDE = Case(1, 2, 64, 64, 64), Case(1, 2, 96, 64, 128, causal="upper_left")
FASTEST = "hopper/latency, two CTAs a tile"


class Runner(timing.Runner):
    turns = 3

    def __init__(self, call: Call) -> None:
        self.us = call.us

    def turn(self) -> list[float]:
        return [self.us] * 5


def times(problem: Problem) -> dict[str, float]:
    """What each configuration is said to take: 10 us, the fastest one 8."""
    return {label: 8.0 if label == FASTEST else 10.0 for label in configurations(problem)}


@pytest.fixture
def on_a_pretended_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def bind(self: tune.Configuration, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        class Bound:
            us = times(case.problem("sm_90a")).get(self.variant, 10.0)

            def __call__(inner) -> torch.Tensor:
                found = reference.oracle(*tensors, causal=case.causal)[0].half()
                return found * 2 if case == WIDE and "streaming" in self.variant else found

        return Bound()

    described = environment.describe() | {"gpu": "NVIDIA H200", "target": "sm_90a", "driver": "1", "cuda": "13.0"}
    empty = type("Empty", (), {"us": 0.6})()
    monkeypatch.setattr(tune.Configuration, "bind", bind)
    monkeypatch.setattr(tune, "load", lambda name: Suite(name, "", (SMALL, WIDE)))
    monkeypatch.setattr(tune, "CaseBench", lambda case: REAL_BENCH(case, device="cpu"))
    monkeypatch.setattr(survey, "compile_kernel", lambda spec, target: None)
    monkeypatch.setattr(launcher, "device_error", lambda: None)
    monkeypatch.setattr(launcher, "target_of_device", lambda: "sm_90a")
    monkeypatch.setattr(graphs, "empty_kernel", lambda: empty)
    monkeypatch.setattr(graphs, "programmatic_launches", lambda enabled: torch.no_grad())
    monkeypatch.setattr(environment, "describe", lambda: described)
    monkeypatch.setattr(environment, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(timing, "prepare", lambda mode, calls: Runner(calls[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return


def test_configurations_are_those_of_the_production_kernels() -> None:
    problem = SMALL.problem("sm_90a")
    found = configurations(problem)
    assert select(problem).spec in found.values()
    assert len(set(found.values())) == len(found)
    assert {spec.name for spec in found.values()} == {
        *("hopper/latency", "hopper/split", "hopper/throughput", "ampere/mma")
    }
    assert {spec.name for spec in configurations(SMALL.problem("sm_89")).values()} == {"ampere/mma"}


def test_the_choice_is_measured_even_when_its_kernel_is_not_asked_for() -> None:
    problem = SMALL.problem("sm_90a")
    found = tune.of_problem(problem, ["ampere/mma"])
    assert select(problem).spec in found.values()
    assert sum(spec.name != "ampere/mma" for spec in found.values()) == 1


@pytest.mark.usefixtures("on_a_pretended_h200")
def test_regret_is_how_much_longer_the_choice_takes(tmp_path: Path) -> None:
    step = tune.step("small", ["hopper/latency"], output=tmp_path)
    assert step.status == "failed"
    assert "2 choices with a regret above 5%, 25.0% in the mean" in step.summary
    assert step.table[1] == [
        *("(1, 2, 64, 64, 64), float16", "hopper/latency, one CTA a tile", "10.00"),
        *(FASTEST, "8.00", "25.0%", "2"),
    ]
    written = results.read(next(tmp_path.rglob("tune_small.json")))
    assert [row["chosen"] for row in written["rows"]] == [True, False] * 2
    marker = "<!-- microsdpa:table gpu=h200 suite=tune_small -->\n<!-- microsdpa:end -->\n"
    text = render.rendered(marker, tmp_path, "page")
    assert "| 25.0% | 2 |" in text
    assert "Geometric mean of the regrets: 25.0%." in text
    assert "(stale)" not in text


@pytest.mark.usefixtures("on_a_pretended_h200")
def test_a_wrong_configuration_is_not_timed_and_fails_the_step() -> None:
    step = tune.step("small", ["ampere/mma", "hopper/latency"])
    assert step.status == "failed"
    assert "1 wrong" in step.summary
    wrong = [row for row in step.data["rows"] if row["status"] == "wrong"]
    assert ["streaming" in row["variant"] for row in wrong] == [True]


def test_rows_of_other_code_are_marked() -> None:
    problem = SMALL.problem("sm_90a")
    chosen = select(problem).spec
    label = next(label for label, spec in configurations(problem).items() if spec == chosen)
    timed = {"median_us": 2.0, "min_us": 2.0, "samples_us": [2.0], "code_signature": "of another day"}
    made = results.make("tune_small", "microsdpa tune", [results.row(SMALL, variant=label, chosen=True, **timed)])
    assert tune.table(made)[1][1] == f"{label} (stale)"


def test_without_a_gpu_nothing_is_measured() -> None:
    if launcher.device_error() is None:
        pytest.skip("there is a GPU")
    assert tune.step("small").status == "not run"
