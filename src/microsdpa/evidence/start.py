"""Suite start: what the first calls of a fresh process cost, with torch imported and its tensors on the device.

Every sample is a process of its own. This library and torch take turns. Results of the last process of a door are
compared with the oracle. docs/measuring.md has the protocol.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from microsdpa.errors import MicrosdpaError
from microsdpa.evidence import doors, results, statistics
from microsdpa.evidence.doors import OURS, TORCHS, Door, Side
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.timing import START

SUITE = "start"
ROUNDS = 5
EMPTY, FILLED = "empty cache", "filled cache"
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
    """

    door: str
    text: str = FILLED
    torchs: bool = True
    eager: bool = True

    @property
    def impls(self) -> tuple[str, ...]:
        """Those that take part."""
        return (OURS, TORCHS) if self.torchs else (OURS,)


STARTS = (
    Start("import microsdpa", "", torchs=False),
    Start("sdpa", EMPTY, torchs=False),
    Start("sdpa"),
    Start("requires grad"),
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
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        tensors = make(case)
        torch.save([*tensors, doors.weight(tensors[0])], place / "inputs.pt")
        for start in starts:
            rows += _measure(start, case, device, place, rounds)
            keep(rows)
            advance(f"{start.door}, {start.text}")
    return rows


def _measure(start: Start, case: Case, device: str, place: Path, rounds: int) -> list[results.Row]:
    found: dict[str, list[dict[str, Any]]] = {impl: [] for impl in start.impls}
    failures: dict[str, Failure] = {}
    for turn in range(rounds + 1):
        for impl in start.impls:
            if impl in failures:
                continue
            try:
                timed = process(start, impl, device, place)
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


def process(start: Start, impl: str, device: str, place: Path) -> dict[str, Any]:
    """What one fresh process timed; its results are in `place`.

    Raises:
        ProcessFailed: it ended with an error, or took too long.
    """
    text = resources.files(__package__).joinpath("start_program.py").read_text(encoding="utf-8")
    job = {"impl": impl, "door": start.door, "device": device}
    job |= {"inputs": str(place / "inputs.pt"), "output": str(_output(place, impl))}
    with tempfile.TemporaryDirectory() as fresh:
        kernels = fresh if start.text == EMPTY else str(place / "kernels")
        # What torch.compile keeps is never there: a first call through it compiles.
        caches = {"MICROSDPA_CACHE_DIR": kernels, "TORCHINDUCTOR_CACHE_DIR": f"{fresh}/torch"}
        command = [sys.executable, "-c", text, json.dumps(job)]
        try:
            ended = subprocess.run(
                command, env=os.environ | caches, capture_output=True, text=True, check=False, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            raise ProcessFailed(f"the process was ended after {SECONDS} s") from None
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise ProcessFailed(f"the process ended with {ended.returncode}: {last}"[:240])
    timed: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return timed


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
