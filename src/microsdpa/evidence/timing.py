"""The timing protocol: the only one whose numbers are quoted. docs/measuring.md says why each mode is as it is."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from microsdpa.evidence.graphs import CapturedGraph
from microsdpa.evidence.peers import Call

MODES = ("graph", "graph_nopdl", "cold", "eager", "host")
START = "start"
"""First calls of fresh processes: the mode of suite start, which has runners of its own."""
DEFAULT_MODES = ("graph", "cold", "eager", "host")
ON_DEVICE = ("graph", "graph_nopdl", "cold")
"""Modes that time the device alone."""

GRAPH_CALLS, GRAPH_LEAST_US, GRAPH_LONG_US, GRAPH_SAMPLES_PER_TURN = 20, 1000.0, 5000.0, 5
LONG_CALL_US, GRAPH_LONG_CALLS = 1000.0, 4
GRAPH_TURNS, GRAPH_MIN_TURNS, GRAPH_BUDGET_US = 6, 3, 1.0e6
BUSY_SECONDS, BUSY_SETTLING_SECONDS = 0.1, 0.03
SUSTAINED_BUSY_SECONDS, SUSTAINED_SETTLING_SECONDS = 0.4, 0.2
EAGER_CALLS, EAGER_TURNS = 200, 7
HOST_CALLS, HOST_TURNS, HOST_CALLS_IN_FLIGHT, HOST_BUDGET_US = 2000, 7, 200, 1.0e5
SETTLING_US, SUSTAINED_SAMPLE_US, SUSTAINED_TURNS = 120_000, 8_000, 5
STEADY_BLOCK_US, STEADY_TOLERANCE, STEADY_BLOCKS, MAX_WARM_UP_SECONDS = 10_000, 0.01, 3, 0.4


class Runner:
    """Something that gives samples, in microseconds a call, a few at a time so that several can take turns."""

    turns: int

    def turn(self) -> list[float]:
        """The samples of one turn."""
        raise NotImplementedError


class GraphRunner(Runner):
    """Back-to-back calls in one CUDA graph; a sample is a replay, which starts while the device is still busy.

    Attributes:
        busy_seconds: what keep_busy() takes; of these the GPU settles in `settling_seconds`.
    """

    busy_seconds, settling_seconds = BUSY_SECONDS, BUSY_SETTLING_SECONDS

    def __init__(self, calls: Sequence[Call]) -> None:
        calls[0]()  # what a first call does besides is not to be seen in the next one
        # What a replay costs beside a call is a few microseconds: nothing, where a call takes a millisecond.
        is_long = _elapsed_us(calls[0]) > LONG_CALL_US
        self.calls = max(GRAPH_LONG_CALLS if is_long else GRAPH_CALLS, len(calls))
        self.graph = self._captured(calls)
        self._replay(1)
        each = _elapsed_us(functools.partial(self._replay, 1))
        if each < GRAPH_LEAST_US:
            # Between two replays pass 2 to 4 us that are no call's; a short one takes longer to submit than to run.
            rounds = math.ceil(self.calls / len(calls) * GRAPH_LEAST_US / each)
            self.calls = rounds * len(calls)
            self.graph = self._captured(calls)
        self.replay_us = self._warm_up()
        self.leads, self.replays = int(self.replay_us < GRAPH_LONG_US), 1
        # Long replays take fewer turns, but never fewer than 15 samples.
        turns = int(GRAPH_BUDGET_US / (self.replay_us * GRAPH_SAMPLES_PER_TURN))
        self.turns = min(GRAPH_TURNS, max(GRAPH_MIN_TURNS, turns))

    def _captured(self, calls: Sequence[Call]) -> CapturedGraph:
        return CapturedGraph([calls[i % len(calls)] for i in range(self.calls)])

    def _warm_up(self) -> float:
        """Replay until successive blocks of time agree, so that the clock is steady; gives microseconds a replay."""
        replays, previous, agreeing = 1, 0.0, 0
        deadline = time.perf_counter() + MAX_WARM_UP_SECONDS
        while True:
            each = _elapsed_us(functools.partial(self._replay, replays)) / replays
            if replays * each < STEADY_BLOCK_US:
                replays = min(10_000, max(replays + 1, round(STEADY_BLOCK_US / each)))
            else:
                agreeing = agreeing + 1 if abs(each - previous) <= STEADY_TOLERANCE * each else 1
                previous = each
            if agreeing >= STEADY_BLOCKS or time.perf_counter() > deadline:
                return each

    def _replay(self, times: int) -> None:
        for _ in range(times):
            self.graph.replay()

    def keep_busy(self) -> None:
        """Replay for `busy_seconds`."""
        deadline = time.perf_counter() + self.busy_seconds
        while time.perf_counter() < deadline:
            self.graph.replay()
            torch.cuda.synchronize()

    def turn(self) -> list[float]:
        """One replay that is not timed, unless replays are long, then some that are, with no gap between them."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(GRAPH_SAMPLES_PER_TURN + 1)]  # type: ignore[no-untyped-call]
        self._replay(self.leads)
        marks[0].record()
        for mark in marks[1:]:
            self._replay(self.replays)
            mark.record()
        torch.cuda.synchronize()
        calls = self.calls * self.replays
        return [float(start.elapsed_time(end)) * 1e3 / calls for start, end in itertools.pairwise(marks)]

    def sustain(self) -> None:
        """Have turns begin with replays for SETTLING_US, in which power and clock become those of this work alone.

        A GPU at its power limit goes by the power of the last tenth of a second: behind less work its clock is higher.
        """
        self.leads = math.ceil(SETTLING_US / self.replay_us)
        self.replays = math.ceil(SUSTAINED_SAMPLE_US / self.replay_us)
        self.turns = SUSTAINED_TURNS
        self.busy_seconds, self.settling_seconds = SUSTAINED_BUSY_SECONDS, SUSTAINED_SETTLING_SECONDS


class EagerRunner(Runner):
    """Plain calls between two events."""

    turns = EAGER_TURNS

    def __init__(self, call: Call) -> None:
        self.call = call
        self._burst()

    def _burst(self) -> None:
        for _ in range(EAGER_CALLS):
            self.call()

    def turn(self) -> list[float]:
        """One burst."""
        return [_elapsed_us(self._burst) / EAGER_CALLS]


class HostRunner(Runner):
    """CPU time to issue a call. The device drains, unmeasured, between short runs: a full launch queue would block.

    Where the device takes long for a call, a turn has fewer of these runs: their calls take the host as long as others.
    """

    turns = HOST_TURNS

    def __init__(self, call: Call) -> None:
        self.call = call
        self._run()
        run_us = _elapsed_us(self._run)
        self.runs = max(1, min(HOST_CALLS // HOST_CALLS_IN_FLIGHT, int(HOST_BUDGET_US / run_us)))

    def _run(self) -> None:
        for _ in range(HOST_CALLS_IN_FLIGHT):
            self.call()

    def turn(self) -> list[float]:
        """At most HOST_CALLS calls."""
        total = 0.0
        for _ in range(self.runs):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self._run()
            total += time.perf_counter() - start
        torch.cuda.synchronize()
        return [total / (self.runs * HOST_CALLS_IN_FLIGHT) * 1e6]


def prepare(mode: str, calls: Sequence[Call]) -> Runner:
    """A warm runner for a mode; "cold" rotates through `calls`, one for each input set, the others use the first.

    Raises:
        ValueError: the mode is unknown.
    """
    if mode in ("graph", "graph_nopdl"):
        return GraphRunner(calls[:1])
    if mode == "cold":
        return GraphRunner(calls)
    if mode == "eager":
        return EagerRunner(calls[0])
    if mode == "host":
        return HostRunner(calls[0])
    raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")


def interleave(
    runners: Mapping[str, Runner], seed: int, around: Callable[[str, Callable[[], list[float]]], list[float]]
) -> dict[str, list[float]]:
    """Samples of every runner: in each round those with turns left take one, in a random order.

    `around(name, turn)` runs a turn and gives its samples: the caller's chance to enter a context. A runner that fails
    raises through it.
    """
    order = random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for round_ in range(max((runner.turns for runner in runners.values()), default=0)):
        names = [name for name, runner in runners.items() if round_ < runner.turns]
        order.shuffle(names)
        for name in names:
            samples[name] += around(name, runners[name].turn)
    return samples


def cold_sets(tensor_bytes: int, cache_bytes: int) -> int:
    """Input sets whose total exceeds twice a cache."""
    return 2 * cache_bytes // tensor_bytes + 1


def _elapsed_us(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3
