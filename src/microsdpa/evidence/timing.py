"""The timing protocol: the only one whose numbers are quoted. docs/measuring.md says why each mode is as it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

GRAPH_CALLS, GRAPH_REPLAYS = 20, 30
EAGER_CALLS, EAGER_REPEATS = 200, 7
HOST_CALLS, HOST_REPEATS, HOST_CALLS_IN_FLIGHT = 5000, 5, 200
WARM_UP_SECONDS = 0.05

MODES = ("graph", "cold", "eager", "host")

Call = Callable[[int], object]
"""A timed call; the argument selects one of the input sets."""


@dataclass(frozen=True)
class Timing:
    """Latency of one call in one mode, in microseconds."""

    mode: str
    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples_us)

    @property
    def min_us(self) -> float:
        """The fastest sample."""
        return min(self.samples_us)


def cold_sets(tensor_bytes: int, device: torch.device) -> int:
    """Input sets whose total exceeds twice the L2 cache."""
    return 2 * torch.cuda.get_device_properties(device).L2_cache_size // tensor_bytes + 1


def measure(mode: str, call: Call, sets: int = 1) -> Timing:
    """Time `call` in one of MODES; "cold" rotates through `sets` input sets.

    Raises:
        ValueError: the mode is unknown.
    """
    if mode == "graph":
        return Timing(mode, _graph(call, GRAPH_CALLS, 1))
    if mode == "cold":
        return Timing(mode, _graph(call, max(GRAPH_CALLS, sets), sets))
    if mode == "eager":
        return Timing(mode, _eager(call))
    if mode == "host":
        return Timing(mode, _host(call))
    raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")


def _graph(call: Call, calls: int, sets: int) -> tuple[float, ...]:
    """`calls` back-to-back calls in one CUDA graph; one sample per replay."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for i in range(max(3, sets)):
            call(i % sets)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % sets)
    deadline = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < deadline:
        graph.replay()
        torch.cuda.synchronize()
    return tuple(_elapsed_us(graph.replay) / calls for _ in range(GRAPH_REPLAYS))


def _eager(call: Call) -> tuple[float, ...]:
    def burst() -> None:
        for _ in range(EAGER_CALLS):
            call(0)

    burst()
    return tuple(_elapsed_us(burst) / EAGER_CALLS for _ in range(EAGER_REPEATS))


def _host(call: Call) -> tuple[float, ...]:
    """CPU time to issue a call. The device drains, unmeasured, between short runs: a full launch queue would block."""
    for _ in range(HOST_CALLS_IN_FLIGHT):
        call(0)
    samples = []
    for _ in range(HOST_REPEATS):
        total = 0.0
        for _ in range(HOST_CALLS // HOST_CALLS_IN_FLIGHT):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS_IN_FLIGHT):
                call(0)
            total += time.perf_counter() - start
        samples.append(total / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return tuple(samples)


def _elapsed_us(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3
