"""The process in which cases are measured: `python -m microsdpa.evidence.worker FD`, its job as JSON on standard input.

What it finds goes to the file descriptor FD, one JSON object a line: {"running": implementation}, {"case": index,
"rows": [...]}. Standard output belongs to the peers, some of which write to it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from microsdpa.evidence import results
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.suites import Suite
from microsdpa.evidence.timing import ON_DEVICE

Advance = Callable[[str], None]

OWN_PROCESS = "case"
ALONE = "alone"
"""Variant of the rows that were measured in a process without peers."""


def run(
    suite: Suite, modes: Sequence[str], impl: str, peers: str, advance: Advance = lambda message: None
) -> list[results.Row]:
    """Measure a suite, in one process or in one a case, as the suite says; `advance` is told of every finished case."""
    indices = list(range(len(suite.cases)))
    groups = [[index] for index in indices] if suite.processes == OWN_PROCESS else [indices]
    passes = [(peers, list(modes), "")]
    if suite.alone and peers != "none":
        passes.append(("none", [mode for mode in modes if mode in ON_DEVICE], ALONE))
    rows: list[results.Row] = []
    for names, chosen, variant in passes:
        for group in groups if chosen else []:
            job = {"modes": chosen, "impl": impl, "peers": names, "eight_bit": suite.eight_bit}
            found = _measure_group(suite, group, job, (lambda message: None) if variant else advance)
            process = len({row["process"] for row in rows})
            rows += [row | {"process": process} | ({"variant": variant} if variant else {}) for row in found]
    return rows


def _measure_group(suite: Suite, group: list[int], job: dict[str, Any], advance: Advance) -> list[results.Row]:
    """The cases of one process. When it dies it is started again, without the implementation that was running."""
    rows: list[results.Row] = []
    excluded: dict[str, str] = {}
    pending = list(group)
    while pending:
        cases = {str(index): asdict(suite.cases[index]) for index in pending}
        done, running, ending = _measure(
            job | {"cases": cases, "excluded": excluded}, lambda index: advance(str(suite.cases[index]))
        )
        for index, found in done.items():
            rows += [row | {"label": suite.labels.get(suite.cases[index], "")} for row in found]
        pending = [index for index in pending if index not in done]
        if pending:
            if not running or running in excluded:
                raise RuntimeError(f"the measuring process {ending}")
            excluded[running] = f"the process {ending} while it ran {suite.cases[pending[0]]}"
    return rows


def _measure(job: dict[str, Any], finished: Callable[[int], None]) -> tuple[dict[int, list[results.Row]], str, str]:
    """(rows by case, the implementation that ran last, how the process ended) of one process."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", __name__, str(writer)]
    done: dict[int, list[results.Row]] = {}
    running = ""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=[writer], text=True
    ) as process:
        os.close(writer)
        assert process.stdin is not None
        assert process.stderr is not None
        log = _Tail(process.stderr)
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        with os.fdopen(reader, encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                running = message.get("running", running)
                if "case" in message:
                    done[message["case"]] = message["rows"]
                    finished(message["case"])
        process.wait()
        last = log.last_line()
    ending = f"died of signal {-process.returncode}" if process.returncode < 0 else f"ended with {process.returncode}"
    return done, running, f"{ending} ({last})" if last else ending


class _Tail:
    """Reads a stream to its end beside the main thread, and keeps the last line."""

    def __init__(self, stream: Any) -> None:
        import threading

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


def main() -> None:
    """Measure the job's cases, one after another."""
    import torch

    from microsdpa.evidence.bench import CaseBench
    from microsdpa.evidence.peers import Microsdpa, choose

    job = json.load(sys.stdin)
    report = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")

    def tell(message: dict[str, object]) -> None:
        report.write(json.dumps(message) + "\n")
        report.flush()

    implementations = [
        *(Microsdpa(job["impl"], write_out, prepared) for prepared in (False, True) for write_out in (False, True)),
        *choose(job["peers"], job["eight_bit"]),
    ]
    for index, fields in job["cases"].items():
        bench = CaseBench(
            Case(**fields), seed=int(index), excluded=job["excluded"], announce=lambda name: tell({"running": name})
        )
        tell({"case": int(index), "rows": bench.run(implementations, job["modes"])})
        del bench
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
