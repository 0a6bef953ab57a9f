"""Energy of a call: watts while its graph is replayed, by the driver's counter of millijoules, times its duration.

The counter moves some ten times per second, so watts are those between two of its steps, of which each is seen within
a millisecond. Where a GPU is at its power limit, fewer joules per call are what allows a higher clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from microsdpa.evidence import environment, nvml

SECONDS = 0.6
"""That work is repeated for."""
SETTLING_SECONDS = 0.1
"""Of these at the beginning, which do not count: power rises."""
POLL_SECONDS = 0.001
LEAST_US = 100.0
"""Calls that take less are not measured: their energy is that of an idle GPU first of all."""
MOST_TIMES_THE_FASTEST = 1.5
"""Implementations that take longer are no rivals, and are not measured."""
Steps = list[tuple[float, float]]
"""Steps of the counter: when each was seen, in seconds, and joules."""


def watts(repeat: Callable[[], object]) -> float | None:
    """Mean power of the current GPU while `repeat`, a few milliseconds of work, runs; None where no counter tells.

    Args:
        repeat: work that returns when the GPU has done it.
    """
    uuid = environment.gpu_uuid()
    if nvml.energy(uuid) is None:
        return None
    steps: Steps = []
    done = threading.Event()
    poller = threading.Thread(target=_poll, args=(uuid, steps, done))
    poller.start()
    try:
        deadline = time.perf_counter() + SECONDS
        while time.perf_counter() < deadline:
            repeat()
    finally:
        done.set()
        poller.join()
    return mean_power(steps)


def mean_power(steps: Steps) -> float | None:
    """Watts between the first step after the GPU has settled and the last one; None with fewer than two."""
    if not steps:
        return None
    settled = [step for step in steps if step[0] >= steps[0][0] + SETTLING_SECONDS]
    if len(settled) < 2:
        return None
    (start, first), (end, last) = settled[0], settled[-1]
    return (last - first) / (end - start)


def of_call(power: float, microseconds: float) -> float:
    """Millijoules of a call that takes so long at so many watts."""
    return power * microseconds * 1e-3


def _poll(uuid: str, steps: Steps, done: threading.Event) -> None:
    previous = nvml.energy(uuid)
    while not done.wait(POLL_SECONDS):
        found = nvml.energy(uuid)
        if found is not None and found != previous:
            steps.append((time.perf_counter(), found))
            previous = found


def replays(replay: Callable[[], object]) -> Callable[[], None]:
    """Two replays of a graph at a time, so that the GPU has the next one when the first is done."""

    def both() -> None:
        replay()
        replay()
        torch.cuda.synchronize()

    return both
