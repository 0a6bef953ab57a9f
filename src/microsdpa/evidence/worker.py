"""Measuring a suite in processes of its own, so that a peer that crashes takes nothing else with it.

The processes of a suite start together, import what they need and call everything once, so that what is compiled at the
first call is there; then they measure one after another, while nothing else runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from microsdpa.evidence import results
from microsdpa.evidence.suites import Suite
from microsdpa.evidence.timing import ON_DEVICE

Advance = Callable[[str], None]
Outcome = tuple[dict[int, list[results.Row]], str, str]
"""Rows by case, the implementation that ran last, how the process ended."""

Job = tuple[list[int], dict[str, Any], str]
"""Cases of a suite by index, what a process is told of them, and the variant of its rows."""

OWN_PROCESS = "case"
OWN_HEAD_DIM = "head_dim"
ALONE = "alone"
"""Variant of the rows that were measured in a process without peers."""
MAX_WAITING = 16
"""Processes that wait for their turn at a time."""


def run(
    suite: Suite,
    modes: Sequence[str],
    impl: str,
    peers: str,
    advance: Advance = lambda message: None,
    waiting: list[Worker] | None = None,
    until: float | None = None,
) -> list[results.Row]:
    """Measure a suite, in as many processes as the suite says; `advance` is told of every finished case.

    `waiting` are processes that have the first of its jobs() already. After the time `until`, in seconds since the
    epoch, no further case is begun.
    """
    todo = jobs(suite, modes, impl, peers, until)
    rows: list[results.Row] = []
    if waiting is None:
        waiting = start_together([job for _, job, _ in todo[:MAX_WAITING]])
    try:
        for process, (group, job, variant) in enumerate(todo):
            found = _measure_group(suite, group, job, (lambda message: None) if variant else advance, waiting)
            rows += [row | {"process": process} | ({"variant": variant} if variant else {}) for row in found]
    finally:
        for worker in waiting:
            worker.abandon()
    return rows


def jobs(suite: Suite, modes: Sequence[str], impl: str, peers: str, until: float | None = None) -> list[Job]:
    """What each process of a suite has to do, and until when it begins with cases."""
    groups = _groups(suite)
    found: list[Job] = []
    for names, chosen, variant in (
        (peers, list(modes), ""),
        ("none", [mode for mode in modes if mode in ON_DEVICE], ALONE),
    ):
        if variant and (not suite.alone or peers == "none" or not chosen):
            continue
        for group in groups:
            # Alone, 16-bit calls are measured: that they are not slowed down by their company is what it is for.
            eight_bit = [] if variant else [index for index in group if suite.cases[index] in suite.eight_bit]
            cases = {str(index): asdict(suite.cases[index]) for index in group}
            # Alone, the oracle is computed on the CPU: cuBLAS has streams of its own, with which launches cost more.
            judge = "cpu" if variant else ""
            job: dict[str, Any] = {"modes": chosen, "impl": impl, "peers": names, "variants": suite.variants}
            job |= {"eight_bit": eight_bit, "energy": suite.energy and not variant}
            found.append((group, job | {"cases": cases, "excluded": {}, "judge": judge, "until": until}, variant))
    return found


def _groups(suite: Suite) -> list[list[int]]:
    """The cases of each process."""
    groups: dict[int, list[int]] = {}
    for index, case in enumerate(suite.cases):
        group = {OWN_PROCESS: index, OWN_HEAD_DIM: case.head_dim}.get(suite.processes, 0)
        groups.setdefault(group, []).append(index)
    return list(groups.values())


def _measure_group(
    suite: Suite, group: list[int], job: dict[str, Any], advance: Advance, waiting: list[Worker]
) -> list[results.Row]:
    """The cases of one process. When it dies it is started again, without the implementation that was running."""
    rows: list[results.Row] = []
    excluded: dict[str, str] = {}
    pending = list(group)
    worker = waiting.pop(0) if waiting else None
    while pending:
        cases = {str(index): asdict(suite.cases[index]) for index in pending}
        todo = job | {"cases": cases, "excluded": dict(excluded)}
        done, running, ending = _measure(todo, lambda index: advance(str(suite.cases[index])), worker)
        worker = None
        for index, found in done.items():
            rows += [row | {"label": suite.labels.get(suite.cases[index], "")} for row in found]
        pending = [index for index in pending if index not in done]
        if pending:
            if not running or running in excluded:
                raise RuntimeError(f"the measuring process {ending}")
            excluded[running] = f"the process {ending} while it ran {suite.cases[pending[0]]}"
    return rows


def _measure(job: dict[str, Any], finished: Callable[[int], None], worker: Worker | None) -> Outcome:
    """One process from its job to its end; `worker` is the one that has been given the job already."""
    return (worker or Worker(job)).measure(finished)


def start_together(jobs: Sequence[dict[str, Any]]) -> list[Worker]:
    """Processes for these jobs, all of them ready."""
    workers = [Worker(job) for job in jobs]
    for worker in workers:
        worker.wait_until_ready()
    return workers


class Rehearsals:
    """Processes of several suites that start together and rehearse while other work is done.

    Attributes:
        waiting: processes by suite, those of its first jobs.
    """

    def __init__(self, suites: Sequence[Suite], most: int) -> None:
        """Start at most so many processes, for the suites as they are, with all their modes and peers."""
        self.waiting: dict[str, list[Worker]] = {}
        self._ready = False
        for suite in suites:
            todo = jobs(suite, list(suite.modes), "auto", suite.peers)
            self.waiting[suite.name] = [Worker(job) for _, job, _ in todo[: max(0, most)]]
            most -= len(self.waiting[suite.name])

    def take(self, suite: str) -> list[Worker] | None:
        """A suite's processes, once those of every suite are ready; None if it has none."""
        if not self._ready:
            for worker in (worker for workers in self.waiting.values() for worker in workers):
                worker.wait_until_ready()
            self._ready = True
        return self.waiting.pop(suite, None) or None

    def abandon(self) -> None:
        """End the processes that nobody took."""
        for workers in self.waiting.values():
            for worker in workers:
                worker.abandon()


class Worker:
    """A process of `microsdpa.evidence.measuring`, with its job."""

    def __init__(self, job: dict[str, Any]) -> None:
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "microsdpa.evidence.measuring", str(writer)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, pass_fds=[writer], text=True
        )
        os.close(writer)
        self._lines = os.fdopen(reader, encoding="utf-8")
        assert self._process.stderr is not None
        self._log = _Tail(self._process.stderr)
        self._running = ""
        self._give(json.dumps(job))

    def wait_until_ready(self) -> None:
        """Until everything has been called once, or the process has ended."""
        for line in self._lines:
            message = json.loads(line)
            self._running = message.get("running", self._running)
            if "ready" in message:
                return

    def measure(self, finished: Callable[[int], None]) -> Outcome:
        """Do the job; `finished` is told of every case."""
        done: dict[int, list[results.Row]] = {}
        self._give("")
        for line in self._lines:
            message = json.loads(line)
            self._running = message.get("running", self._running)
            if "case" in message:
                done[message["case"]] = message["rows"]
                finished(message["case"])
        code, last = self._end()
        ending = f"died of signal {-code}" if code < 0 else f"ended with {code}"
        return done, self._running, f"{ending} ({last})" if last else ending

    def abandon(self) -> None:
        """End a process that is not waited for; one that has done its job has ended."""
        if self._process.returncode is None:
            self._process.terminate()
            self._end()

    def _give(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # it has ended; how, is told below
            pass

    def _end(self) -> tuple[int, str]:
        code = self._process.wait()
        self._lines.close()
        return code, self._log.last_line()


class _Tail:
    """Reads a stream to its end beside the main thread, and keeps the last line."""

    def __init__(self, stream: Any) -> None:
        self._last = ""
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            self._last = line.strip() or self._last

    def last_line(self) -> str:
        """The last line that is not empty, once the stream has ended."""
        self._thread.join()
        return self._last
