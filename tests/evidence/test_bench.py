from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from microsdpa import reference
from microsdpa.evidence import (
    bench,
    environment,
    graphs,
    measuring,
    results,
    signatures,
    timing,
    wording,
    worker,
)
from microsdpa.evidence.bench import CaseBench
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.measuring import to_rehearse
from microsdpa.evidence.peers import Call, Implementation, Tensors, ours
from microsdpa.evidence.suites import Suite
from microsdpa.kernels.problem import PRECISIONS, Precision
from microsdpa.runtime import launcher

CASE = Case(1, 8, 512, 512, 64)  # its floor on an H200 is 0.54 us


class Fake(Implementation):
    """Right by default; `times` are what it is said to take, `nodes` what its graph caught."""

    def __init__(self, name: str, times: Sequence[float] = (9.0,), nodes: int = 20, scale: float | None = None) -> None:
        self.name = name  # type: ignore[misc]
        self.times, self.nodes, self.scale = times, nodes, scale

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        class Bound:
            times, nodes = self.times, self.nodes

            def __call__(inner) -> torch.Tensor:
                return reference.oracle(*tensors, scale=self.scale)[0].half()

        return Bound()


class Failing(Fake):
    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        raise ValueError("no kernel\nfor this")


class Absent(Fake):
    def unavailable(self) -> str:
        return "not installed: pip install absent"


class FakeGraphRunner(timing.GraphRunner):
    def __init__(self, call: Any) -> None:
        self.calls, self.turns, self.times, self.replay_us = 20, 3, call.times, 20 * call.times[0]
        self.graph = type("Graph", (), {"nodes": call.nodes})()

    def turn(self) -> list[float]:
        return list(self.times)


class FakeRunner(timing.Runner):
    turns = 2

    def turn(self) -> list[float]:
        return [5.0, 6.0]


@pytest.fixture
def on_a_pretended_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    empty = type("Empty", (), {"times": (0.6,), "nodes": 20})()
    monkeypatch.setattr(graphs, "empty_kernel", lambda: empty)
    monkeypatch.setattr(graphs, "programmatic_launches", lambda enabled: torch.no_grad())
    monkeypatch.setattr(environment, "gpu_state", lambda work, settling: {"sm_clock_mhz": 1980.0})
    monkeypatch.setattr(environment, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(
        timing, "prepare", lambda mode, calls: FakeGraphRunner(calls[0]) if mode == "graph" else FakeRunner()
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return


def rows_of(*implementations: Implementation, modes: Sequence[str] = ("graph",)) -> dict[str, results.Row]:
    rows = CaseBench(CASE, device="cpu").run(implementations, modes)
    result = results.make("mission", "microsdpa bench", rows)
    results.validate(json.loads(json.dumps(result)), "test")
    return {row["impl"]: row for row in rows}


@pytest.mark.usefixtures("on_a_pretended_h200")
def test_a_right_peer_is_timed_with_its_interval_and_the_state_of_the_gpu() -> None:
    rows = rows_of(Fake("right", times=(9.0, 9.1, 9.2)))
    row = rows["right"]
    assert row["status"] == "ok"
    assert row["median_us"] == 9.1
    assert row["interval_us"][0] <= 9.1 <= row["interval_us"][1]
    assert len(row["samples_us"]) == 9
    assert row["sm_clock_mhz"] == 1980.0
    assert row["nodes"] == 1.0
    assert row["tflops"] == pytest.approx(536.870912 / 9.1, rel=1e-3)
    assert rows[bench.EMPTY_KERNEL]["median_us"] == 0.6
    assert rows[bench.EMPTY_KERNEL]["op"] == "empty"


@pytest.mark.usefixtures("on_a_pretended_h200")
def test_long_calls_are_timed_once_the_gpu_draws_their_power(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: dict[float, FakeGraphRunner] = {}

    def prepare(mode: str, calls: Any) -> timing.Runner:
        runner = FakeGraphRunner(calls[0])
        return prepared.setdefault(runner.times[0], runner)

    monkeypatch.setattr(timing, "prepare", prepare)
    monkeypatch.setattr(CaseBench, "_energies", lambda self, mode, runners, *rest: {name: {} for name in runners})
    rows = CaseBench(CASE, device="cpu", energy=True).run([Fake("long", times=(900.0,))], ["graph"])
    results.validate(json.loads(json.dumps(results.make("prefill", "microsdpa bench", rows))), "test")
    settled = {row["impl"]: row.get("settled_ms") for row in rows}
    assert settled == {"long": 120.0, bench.EMPTY_KERNEL: None}
    long, empty = prepared[900.0], prepared[0.6]
    assert long.leads * long.replay_us >= 120_000 > (long.leads - 1) * long.replay_us
    assert long.replays * long.replay_us >= timing.SUSTAINED_SAMPLE_US
    assert (long.turns, empty.turns) == (timing.SUSTAINED_TURNS, 3)


@pytest.mark.usefixtures("on_a_pretended_h200")
@pytest.mark.parametrize(
    ("peer", "status", "reason"),
    [
        (Fake("wrong", scale=0.2), "wrong", "differs from the oracle by"),
        (Fake("other stream", nodes=0), "wrong", "the graph captured nothing"),
        (Fake("too fast", times=(0.4,)), "wrong", "below the roofline floor of 0.543 us"),
        (Fake("nothing", times=(0.1,)), "wrong", "below half of an empty kernel"),
        (Failing("failing"), "unavailable", "ValueError: no kernel ... for this"),
        (Absent("absent"), "unavailable", "pip install absent"),
    ],
)
def test_a_peer_that_cannot_be_believed_is_never_timed(peer: Implementation, status: str, reason: str) -> None:
    row = rows_of(peer)[peer.name]
    assert row["status"] == status
    assert reason in row["reason"]
    assert row["median_us"] is None
    assert row["samples_us"] == []


@pytest.mark.usefixtures("on_a_pretended_h200")
def test_a_failure_of_ours_is_a_defect_and_not_an_absence() -> None:
    assert rows_of(Failing("microsdpa"))["microsdpa"]["status"] == "wrong"


@pytest.mark.usefixtures("on_a_pretended_h200")
def test_an_excluded_peer_keeps_its_reason() -> None:
    excluded = {"right": "the process died of signal 11 while it ran"}
    rows = CaseBench(CASE, device="cpu", excluded=excluded).run([Fake("right")], ["graph"])
    assert rows[0]["reason"] == excluded["right"]


@pytest.mark.usefixtures("on_a_pretended_h200")
def test_a_variant_is_timed_on_the_host_only() -> None:
    variant = Fake("right")
    variant.variant, variant.where = "out=", "host"
    rows = CaseBench(CASE, device="cpu").run([Fake("right"), variant], ["graph", "host"])
    assert sorted((row["mode"], row.get("variant", "")) for row in rows if row["impl"] == "right") == [
        ("graph", ""),
        ("host", ""),
        ("host", "out="),
    ]


@pytest.mark.usefixtures("on_a_pretended_h200")
def test_a_broken_context_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(SystemExit, match="failing: ValueError: no kernel"):
        CaseBench(CASE, device="cpu").run([Failing("failing")], ["graph"])


def test_turns_are_interleaved_in_an_order_that_the_seed_decides() -> None:
    class Counting(timing.Runner):
        def __init__(self, turns: int) -> None:
            self.turns = turns

        def turn(self) -> list[float]:
            return [1.0]

    def order(seed: int) -> list[str]:
        seen: list[str] = []

        def around(name: str, turn: Any) -> list[float]:
            seen.append(name)
            return list(turn())

        samples = timing.interleave({name: Counting(3) for name in "abcd"} | {"e": Counting(1)}, seed, around)
        assert [len(s) for s in samples.values()] == [3, 3, 3, 3, 1]
        return seen

    first = order(0)
    assert first == order(0)
    assert first != order(1)
    assert [sorted(first[5:9]), sorted(first[9:])] == [list("abcd")] * 2  # a round holds each once
    assert first[5:9] != first[9:]


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of graph, graph_nopdl, cold, eager, host, got 'warm'"):
        timing.prepare("warm", [])
    assert timing.cold_sets(2 * 2**20, 50 * 2**20) * 2 > 100


SUITE = Suite("mission", "two", (CASE, Case(1, 2, 64, 64, 64)), labels={CASE: "the mission"})


@pytest.mark.parametrize(
    ("processes", "jobs"),
    [("case", [["0"], ["1"]]), ("head_dim", [["0", "1"]]), ("suite", [["0", "1"]])],
)
def test_a_suite_says_how_many_processes_measure_it(
    monkeypatch: pytest.MonkeyPatch, processes: str, jobs: list[list[str]]
) -> None:
    seen: list[list[str]] = []

    def measure(job: dict[str, Any], finished: Any, worker: Any) -> Any:
        seen.append(list(job["cases"]))
        return {int(i): [{"impl": "microsdpa"}] for i in job["cases"]}, "", "ended with 0"

    monkeypatch.setattr(worker, "_measure", measure)
    monkeypatch.setattr(worker, "start_together", lambda jobs: [])
    rows = worker.run(Suite(**(vars(SUITE) | {"processes": processes})), ["graph"], "auto", "none")
    assert seen == jobs
    assert [row["process"] for row in rows] == ([0, 1] if processes == "case" else [0, 0])
    assert [row["label"] for row in rows] == ["the mission", ""]


def test_a_head_dimension_can_have_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def measure(job: dict[str, Any], finished: Any, worker: Any) -> Any:
        seen.append(list(job["cases"]))
        return {int(i): [{"impl": "microsdpa"}] for i in job["cases"]}, "", "ended with 0"

    monkeypatch.setattr(worker, "_measure", measure)
    monkeypatch.setattr(worker, "start_together", lambda jobs: [])
    cases = (Case(1, 1, 8, 8, 64), Case(1, 1, 8, 8, 128), Case(1, 1, 16, 16, 64))
    worker.run(Suite("three", "three", cases, processes="head_dim"), ["graph"], "auto", "none")
    assert seen == [["0", "2"], ["1"]]


@pytest.mark.usefixtures("on_a_pretended_h200")
def test_a_rehearsal_calls_everything_once_and_reports_nothing() -> None:
    calls: list[str] = []

    class Counting(Failing):
        def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
            calls.append(self.name)
            return super().bind(case, tensors, out)

    announced: list[str] = []
    rehearsed = CaseBench(CASE, device="cpu", excluded={"left out": "it died"}, announce=announced.append)
    rehearsed.rehearse([Counting("failing"), Counting("left out"), Fake("right")])
    assert (calls, announced) == (["failing"], ["failing", "right"])
    assert rehearsed.rows == []


def test_what_compilers_tell_apart_is_rehearsed_in_its_cheapest_case() -> None:
    cases = {0: Case(1, 1, 512, 512, 64), 3: Case(1, 1, 64, 64, 64), 4: Case(1, 1, 512, 512, 64, causal="upper_left")}
    assert to_rehearse(cases) == [3, 4]


def test_a_death_is_laid_at_the_door_of_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, Any]] = []

    def measure(job: dict[str, Any], finished: Any, worker: Any) -> Any:
        jobs.append(json.loads(json.dumps(job)))
        if "1" in job["cases"] and not job["excluded"]:
            return {0: [{"impl": "a"}]}, "peer", "died of signal 11"
        return {int(i): [{"impl": "b"}] for i in job["cases"]}, "", "ended with 0"

    monkeypatch.setattr(worker, "_measure", measure)
    monkeypatch.setattr(worker, "start_together", lambda jobs: [])
    rows = worker.run(SUITE, ["graph"], "auto", "all")
    assert [row["impl"] for row in rows] == ["a", "b"]
    assert jobs[1]["excluded"] == {"peer": f"the process died of signal 11 while it ran {SUITE.cases[1]}"}
    assert list(jobs[1]["cases"]) == ["1"]


def test_eight_bits_take_part_in_the_cases_that_a_suite_names(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, Any]] = []

    def measure(job: dict[str, Any], finished: Any, worker: Any) -> Any:
        jobs.append(job)
        return {int(i): [{"impl": "microsdpa"}] for i in job["cases"]}, "", "ended with 0"

    monkeypatch.setattr(worker, "_measure", measure)
    monkeypatch.setattr(worker, "start_together", lambda jobs: [])
    suite = Suite(**(vars(SUITE) | {"alone": True, "processes": "case", "eight_bit": frozenset([SUITE.cases[1]])}))
    worker.run(suite, ["graph"], "auto", "all")
    assert [job["eight_bit"] for job in jobs] == [[], [1], [], []]


def test_no_case_is_begun_after_the_time_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(1, 1, 8, 8, 32)
    for until, measured in ((None, True), (time.time() + 600, True), (time.time() - 1, False)):
        (_, job, _), *_ = worker.jobs(Suite("one", "one", (case,)), ["graph"], "auto", "torch", until)
        reader, writer = os.pipe()
        monkeypatch.setattr(sys, "argv", ["measuring", str(writer)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(job) + "\n\n"))
        monkeypatch.setattr(measuring, "to_rehearse", lambda cases: [])
        monkeypatch.setattr(CaseBench, "run", lambda bench, implementations, modes: [{"impl": "microsdpa"}])
        measuring.main()  # which closes what it writes to
        with os.fdopen(reader) as lines:
            told = [json.loads(line) for line in lines]
        assert told[-1] == {"case": 0, "rows": [{"impl": "microsdpa"}] if measured else []}


@pytest.mark.usefixtures("on_a_pretended_h200")
def test_a_row_says_when_memory_has_another_order() -> None:
    case = Case(1, 2, 8, 8, 32, layout="bshd")
    (row,) = [row for row in CaseBench(case, device="cpu").run([Fake("right")], ["graph"]) if row["op"] != "empty"]
    assert wording.case_name(row) == "[B, S, H, D] memory: (1, 2, 8, 8, 32), float16"


SMALL = Case(1, 1, 40, 64, 32)


@pytest.mark.usefixtures("on_a_pretended_h200")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_our_8_bit_calls_are_checked_timed_and_signed(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed(timing.Runner):
        turns = 2

        def __init__(self, call: Call) -> None:
            self.call = call

        def turn(self) -> list[float]:
            self.call()
            return [7.0]

    monkeypatch.setattr(timing, "prepare", lambda mode, calls: Timed(calls[0]) if callable(calls[0]) else FakeRunner())
    implementations = [one for one in ours("auto") if getattr(one, "precision", None) == precision]
    found = CaseBench(SMALL, device="cpu").run(implementations, ["graph", "host"])
    rows = [row for row in found if row["op"] != "empty"]
    named = [(row["mode"], row["variant"], row["op"]) for row in rows]
    assert named == [
        ("graph", precision, "quantize+sdpa"),
        ("graph", f"{precision} quantized", "sdpa"),
        ("host", precision, "quantize+sdpa"),
    ]
    for row in rows:
        assert (row["status"], row["reason"]) == ("ok", "")
        assert row["dtype"] == {"fp8": "e4m3", "fp8_fast": "e4m3"}.get(precision, precision)
        assert row["precision"] == precision
        assert row["kernel"].startswith("ada/mma_8bit")
        assert 0 < row["error"]["rel_l1"] < 0.06
        assert ("quantiser_signature" in row) == (row["op"] == "quantize+sdpa")
        assert not signatures.is_stale(row, "sm_89")
        assert signatures.is_stale(row | {"code_signature": "of other code"}, "sm_89")
    assert signatures.is_stale(rows[0] | {"quantiser_signature": "of other code"}, "sm_89")
    results.validate(json.loads(json.dumps(results.make("fp8", "microsdpa bench", found))), "test")


@pytest.mark.usefixtures("on_a_pretended_h200")
@pytest.mark.parametrize("rung", ["ladder/09_fp8_mma", "ladder/12_8bit_persistent"])
def test_a_rung_with_8_bits_is_timed_on_quantized_values(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "prepare", lambda mode, calls: FakeRunner())
    bench = CaseBench(SMALL, device="cpu")
    bench.rehearse(ours(rung))
    row, empty = bench.run(ours(rung), ["graph"])
    assert (row["status"], row["reason"], empty["op"]) == ("ok", "", "empty")
    assert (row["kernel"], row["requested"], row["dtype"], row["op"]) == (rung, rung, "e4m3", "sdpa")
    assert row["operands"] == "fp8"
    assert 0 < row["error"]["rel_l1"] < (0.03 if "persistent" in rung else 0.001)
    assert not signatures.is_stale(row, "sm_89")
    results.validate(json.loads(json.dumps(results.make("ladder", "microsdpa ladder", [row, empty]))), "test")


@pytest.mark.usefixtures("on_a_pretended_h200")
def test_one_term_a_query_is_timed_beside_peers_that_have_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "prepare", lambda mode, calls: FakeRunner())
    (one_term,) = (one for one in ours("auto") if one.variant == "e4m3, one term")
    assert one_term.where == "device"
    row, empty = CaseBench(SMALL, device="cpu").run([one_term], ["graph"])
    assert (row["status"], row["reason"], row["dtype"], row["op"]) == ("ok", "", "e4m3", "sdpa")
    assert row["kernel"] == "ada/mma_8bit"
    assert 0.02 < row["error"]["rel_l1"] < 0.09  # of the tensors, not of the dequantized values
    assert not signatures.is_stale(row, "sm_89")
    results.validate(json.loads(json.dumps(results.make("fp8", "microsdpa bench", [row, empty]))), "test")
    assert "32, 64, 128" in one_term.refuses(Case(1, 1, 8, 8, 48))


@pytest.mark.usefixtures("on_a_pretended_h200")
def test_a_head_dimension_that_8_bits_lack_is_a_refusal() -> None:
    rows = CaseBench(Case(1, 1, 8, 8, 48), device="cpu").run(ours("auto")[-1:], ["graph"])
    assert rows[0]["status"] == "unavailable"
    assert "head_dim 48 is not one of 32, 64, 128" in rows[0]["reason"]


def test_ours_is_measured_alone_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, Any]] = []

    def measure(job: dict[str, Any], finished: Any, worker: Any) -> Any:
        jobs.append(job)
        return {int(i): [{"impl": "microsdpa", "variant": ""}] for i in job["cases"]}, "", "ended with 0"

    monkeypatch.setattr(worker, "_measure", measure)
    monkeypatch.setattr(worker, "start_together", lambda jobs: [])
    rows = worker.run(Suite(**(vars(SUITE) | {"alone": True})), ["graph", "host"], "auto", "all")
    assert [(job["peers"], job["modes"]) for job in jobs] == [("all", ["graph", "host"]), ("none", ["graph"])]
    assert [job["judge"] for job in jobs] == ["", "cpu"]
    assert [(row["variant"], row["process"]) for row in rows] == [("", 0), ("", 0), ("alone", 1), ("alone", 1)]


def test_suites_rehearse_together_and_none_is_measured_before_all_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Process:
        def __init__(self, job: dict[str, Any]) -> None:
            self.name = f"{job['peers']} {', '.join(job['cases'])}"
            told.append(f"start {self.name}")

        def wait_until_ready(self) -> None:
            told.append(f"ready {self.name}")

        def abandon(self) -> None:
            told.append(f"end {self.name}")

    monkeypatch.setattr(worker, "Worker", Process)
    fields = vars(SUITE) | {"peers": "all"}
    first, second, third = (
        Suite(**(fields | {"name": "first", "processes": "case"})),
        Suite(**(fields | {"name": "second", "alone": True})),
        Suite(**(fields | {"name": "third"})),
    )
    ahead = worker.Rehearsals([first, second, third], most=3)
    assert told == ["start all 0", "start all 1", "start all 0, 1"]
    assert len(ahead.take("first") or []) == 2
    assert told[3:] == ["ready all 0", "ready all 1", "ready all 0, 1"]
    assert ahead.take("third") is None  # nothing was left for it
    assert ahead.take("unknown") is None
    ahead.abandon()
    assert told[6:] == ["end all 0, 1"]


def test_a_process_that_keeps_dying_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "start_together", lambda jobs: [])
    monkeypatch.setattr(worker, "_measure", lambda job, finished, worker: ({}, "", "ended with 1 (no CUDA)"))
    with pytest.raises(RuntimeError, match=r"the measuring process ended with 1 \(no CUDA\)"):
        worker.run(SUITE, ["graph"], "auto", "all")


@pytest.mark.skipif(launcher.device_error() is None, reason="this machine has a GPU")
def test_the_process_reports_its_last_words() -> None:
    with pytest.raises(RuntimeError, match="the measuring process ended with 1"):
        worker.run(SUITE, ["graph"], "auto", "none")
