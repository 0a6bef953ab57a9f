"""Suite start: what the first calls of a fresh process cost, with torch imported and its tensors on the device.

Every sample is a process of its own, forked from one that has imported torch. This library and torch take turns.
Results of the last process of a door are compared with the oracle. docs/measuring.md has the protocol.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from microsdpa.errors import MicrosdpaError
from microsdpa.evidence import doors, results, statistics
from microsdpa.evidence.doors import OURS, TORCHS, Door, Side
from microsdpa.evidence.inputs import BLOCK, BLOCK_SHARES, Case, Masking, block_table, documents, make, make_masks
from microsdpa.evidence.timing import START

SUITE = "start"
ROUNDS = 5
EMPTY, FILLED = "empty cache", "filled cache"
BLOCKS: Masking = "blocks 50%"
SECONDS = 240
"""A process that takes longer is ended, and its row says so."""


@dataclass(frozen=True)
class Start:
    """A way to make the first call of a process.

    Attributes:
        door: what start_program.py calls it.
        text: state of the kernel cache.
        torchs: whether torch has a way of this kind.
        eager: whether the call may not import what torch.compile needs.
        masks: of the case; what they are, the process is given.
    """

    door: str
    text: str = FILLED
    torchs: bool = True
    eager: bool = True
    masks: tuple[Masking, ...] = ()

    def option(self, case: Case) -> object:
        """What the process makes its further argument of."""
        if self.masks == ("documents",):
            return documents(case)[0]
        if self.masks == (BLOCKS,):
            return block_table(case, BLOCK_SHARES[BLOCKS]), BLOCK, case.seqlen_q, case.seqlen_k
        return make_masks(case)["window"] if self.masks else None

    @property
    def impls(self) -> tuple[str, ...]:
        """Those that take part."""
        return (OURS, TORCHS) if self.torchs else (OURS,)


STARTS = (
    Start("import microsdpa", "", torchs=False),
    Start("sdpa", EMPTY, torchs=False),
    Start("sdpa"),
    Start("sdpa(document_ids)", torchs=False, masks=("documents",)),
    Start("sdpa(block_mask)", torchs=False, masks=(BLOCKS,)),
    Start("sdpa_varlen", torchs=False),
    Start("requires grad"),
    Start("sdpa(window), requires grad", torchs=False, masks=("window",)),
    Start("enable()"),
    Start("sdpa(precision=int8_fp8)", torchs=False),
    Start("torch.compile", eager=False),
)
MEASURED = {"first_us": ("", "forward"), "backward_us": ("the backward pass after it", "backward")}
"""What a process times: what its row's case says beside the cache, and its direction."""

Failure = str


class ProcessFailed(MicrosdpaError, RuntimeError):
    """A process of the suite that ended without a result."""


def run(
    case: Case,
    advance: Callable[[str], None] = lambda message: None,
    keep: Callable[[list[results.Row]], None] = lambda rows: None,
    device: str = "cuda",
    starts: tuple[Start, ...] = STARTS,
    rounds: int = ROUNDS,
) -> list[results.Row]:
    """Rows of all starts; `keep` is given the rows so far after every one."""
    rows: list[results.Row] = []
    with tempfile.TemporaryDirectory() as directory, Server() as server:
        place = Path(directory)
        tensors = make(case)
        torch.save([*tensors, doors.weight(tensors[0])], place / "inputs.pt")
        for start in starts:
            rows += _measure(server, start, case, device, place, rounds)
            keep(rows)
            advance(f"{start.door}, {start.text}")
    return rows


def _measure(server: Server, start: Start, case: Case, device: str, place: Path, rounds: int) -> list[results.Row]:
    found: dict[str, list[dict[str, Any]]] = {impl: [] for impl in start.impls}
    failures: dict[str, Failure] = {}
    case = replace(case, masks=start.masks)
    torch.save(start.option(case), place / "option.pt")
    for turn in range(rounds + 1):
        for impl in start.impls:
            if impl in failures:
                continue
            try:
                timed = process(server, start, impl, device, place)
            except ProcessFailed as failure:
                failures[impl] = str(failure)
                continue
            if turn:  # the first fills the cache, and the disk's
                found[impl].append(timed)
    rows = []
    for impl in start.impls:
        fields = doors.fields_of(_door(start, case), impl, make(case, device)) | {
            "mode": START,
            "case": start.text,
            "direction": "forward",
        }
        wrong, status = failures.get(impl, ""), "wrong" if impl == OURS else "unavailable"
        if not wrong:
            fields["error"], wrong = _judge(start, impl, case, place, found[impl])
            status = "wrong"
        if wrong:
            rows.append(results.row(case, **fields, status=status, reason=wrong))
            continue
        for name, (further, direction) in MEASURED.items():
            if name not in found[impl][0]:
                continue
            named = {"case": ", ".join(filter(None, (start.text, further))), "direction": direction}
            samples = [one[name] for one in found[impl]]
            rows.append(results.row(case, **(fields | named), **statistics.summary(samples)))
    return rows


def _door(start: Start, case: Case) -> Door:
    """The door that a start goes through, for the fields of its rows."""
    nothing = Side(lambda _: lambda: None)
    quantizing = "int8_fp8" if "precision" in start.door else None
    return Door(start.door, nothing, nothing, case, start.text, precision=quantizing)  # type: ignore[arg-type]


class Server:
    """The process that all others are forked from. It has imported torch, and has not touched a GPU."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Server:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.end()

    def run(self, job: dict[str, Any]) -> int | None:
        """The exit status of a process for a job; None for one that was ended because it took too long."""
        if self._process is None:
            text = resources.files(__package__).joinpath("start_program.py").read_text(encoding="utf-8")
            self._process = subprocess.Popen(
                [sys.executable, "-c", text],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # its processes end with it
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], SECONDS)[0]:
            self.end()
            return None
        return int(self._process.stdout.readline())

    def end(self) -> None:
        """End it, and the process that it may wait for."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._process = None


def process(server: Server, start: Start, impl: str, device: str, place: Path) -> dict[str, Any]:
    """What one fresh process timed; its results are in `place`.

    Raises:
        ProcessFailed: it ended with an error, or took too long.
    """
    errors, timed = place / "errors", place / "timed"
    job: dict[str, Any] = {"impl": impl, "door": start.door, "device": device}
    job |= {"inputs": str(place / "inputs.pt"), "output": str(_output(place, impl))}
    job |= {"option": str(place / "option.pt"), "errors": str(errors), "timed": str(timed)}
    with tempfile.TemporaryDirectory() as fresh:
        kernels = fresh if start.text == EMPTY else str(place / "kernels")
        # What torch.compile keeps is never there: a first call through it compiles.
        job["environment"] = {"MICROSDPA_CACHE_DIR": kernels, "TORCHINDUCTOR_CACHE_DIR": f"{fresh}/torch"}
        status = server.run(job)
    if status is None:
        raise ProcessFailed(f"the process was ended after {SECONDS} s")
    if status != 0:
        last = (errors.read_text(encoding="utf-8").strip().splitlines() or ["no message"])[-1]
        raise ProcessFailed(f"the process ended with {status}: {last}"[:240])
    found: dict[str, Any] = json.loads(timed.read_text(encoding="utf-8"))
    return found


def _output(place: Path, impl: str) -> Path:
    return place / f"{impl}.pt"


def _judge(
    start: Start, impl: str, case: Case, place: Path, timed: list[dict[str, Any]]
) -> tuple[dict[str, object] | None, Failure]:
    """The error of the last process's results, and why they or its imports are wrong."""
    wrong, error = "", None
    found = torch.load(_output(place, impl))
    if found:
        error, wrong = doors.against_oracle(case, make(case), found[0], "int8_fp8" if "precision" in start.door else "")
    if not wrong and len(found) > 1:
        wrong = doors.gradients(case, make(case), tuple(found[1:]))[1]
    late = sorted({name for one in timed for name in one["imported"]})
    if not wrong and start.eager and impl == OURS and late:
        wrong = f"the call imported {', '.join(late)}"
    return error, wrong
