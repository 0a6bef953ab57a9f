"""Processes that check models for the models sweep: several side by side on a GPU, started anew where one ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from microsdpa.evidence.results import Row
from microsdpa.evidence.tiny import Candidate

BATCH_OF_MODELS = 60
"""So many models are checked by one process: what torch.compile keeps of each is never freed."""
CORES_PER_PROCESS = 4
MOST_PROCESSES = 4
WORKER = ["-m", "microsdpa.evidence.models"]
"""What Python runs to check models in a process of its own."""


class EagerLost(Exception):
    """A model's eager attention ended the use of the device in a scenario: it can be run on, without that one."""

    def __init__(self, scenario: str, line: str) -> None:
        super().__init__(scenario, line)
        self.scenario, self.line = scenario, line


@dataclass
class Job:
    """A model to check.

    Attributes:
        place: its number among all.
        lost: scenarios that are not run again, and why: eager attention loses the device there.
    """

    place: int
    candidate: Candidate
    lost: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> list[Any]:
        """For a process: the family and kind, and the lost scenarios."""
        return [self.candidate.family, self.candidate.kind, self.lost]


def number_of_processes(device: str) -> int:
    """Side by side: some on a GPU, whose kernels are short beside the host's work; one on a CPU."""
    return 1 if device == "cpu" else max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // CORES_PER_PROCESS))


def rows(
    todo: list[Candidate],
    device: str,
    dtype: torch.dtype,
    until: float,
    advance: Callable[[str], None],
    row_without: Callable[[Candidate, str, str], Row],
) -> list[Row]:
    """A row of each candidate, in their order.

    Args:
        todo: models to check.
        device: "cpu" or "cuda".
        dtype: type of the models.
        until: time.monotonic() after which no further model is begun.
        advance: told of each model that is done.
        row_without: the row of a model that was not checked to its end, of its outcome and reason.
    """
    found: dict[int, Row] = {}
    lock = threading.Lock()

    def note(job: Job, row: Row) -> None:
        with lock:
            found[job.place] = row
            advance(str(job.candidate))

    jobs = [Job(place, candidate) for place, candidate in enumerate(todo)]
    lanes = number_of_processes(device)
    threads = [
        threading.Thread(target=_run, args=(jobs[lane::lanes], device, dtype, until, note, row_without))
        for lane in range(lanes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = {job.place: row_without(job.candidate, "not made", "not run: the time was up") for job in jobs}
    return [row for _, row in sorted((late | found).items())]


def _run(
    jobs: list[Job],
    device: str,
    dtype: torch.dtype,
    until: float,
    note: Callable[[Job, Row], None],
    row_without: Callable[[Candidate, str, str], Row],
) -> None:
    """Check the jobs in one process after the other."""
    while jobs and time.monotonic() < until:
        batch = json.dumps([job.as_json() for job in jobs[:BATCH_OF_MODELS]])
        command = [sys.executable, *WORKER, device, str(dtype).removeprefix("torch."), batch]
        done, again = 0, False
        with (
            tempfile.TemporaryFile("w+") as said,  # a pipe that nobody reads would stop the process when it is full
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                answer = json.loads(line)
                again = "eager_lost" in answer
                if again:
                    jobs[0].lost[answer["eager_lost"]] = answer["line"]
                    continue
                note(jobs.pop(0), answer)
                done += 1
                if time.monotonic() >= until:
                    process.kill()
                    break
            code = process.wait()
            said.seek(0)
            last = (said.read().strip().splitlines() or ["nothing"])[-1][:200]
        if (code or not done) and not again and jobs and time.monotonic() < until:
            job = jobs.pop(0)
            note(job, row_without(job.candidate, "differs", f"its process ended with {code}: {last}"))
