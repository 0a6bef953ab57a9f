"""What the compiler makes of kernels, recorded by what decides it: tests compile only what the record does not have.

A key is that of the source, the template arguments, the flags, the target, the compiler's version and the toolkit's
headers. An edit that changes any of these gives a key that is not in the record, and the kernel is compiled. One of 40
that are in the record is compiled all the same, others at every commit, and must give what the record says.

    MICROSDPA_TESTS_RECORD=1 .venv/bin/python -m pytest -n 2 tests/jit

compiles what is missing, and leaves in the record what these tests ask for and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from microsdpa.jit import nvrtc
from microsdpa.jit.signature import code_signature
from microsdpa.jit.source import expand, toolkit_headers
from microsdpa.kernels import KernelSpec

RECORD = Path(__file__).parent / "jit/compiled.jsonl"
RECORDING = os.environ.get("MICROSDPA_TESTS_RECORD") == "1"
ONE_OF = 40
"""Entries of which one is compiled again."""

_lock = threading.Lock()


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


@functools.cache
def _commit() -> str:
    command = ["git", "-C", str(RECORD.parent), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@functools.cache
def entries() -> dict[str, Any]:
    """The record: what was found, by its key."""
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.is_file() else []
    return dict(map(json.loads, lines))


def is_sampled(key: str, commit: str) -> bool:
    """Whether this commit compiles a kernel again that the record has."""
    return int(_digest(key, commit), 16) % ONE_OF == 0


def key_of(kind: str, spec: KernelSpec, target: str) -> str:
    """Key of what is found of a kernel; `kind` names what that is."""
    headers = toolkit_headers(expand(spec.source), nvrtc.include_directories())
    return f"{kind} {_digest(code_signature(spec, target), nvrtc.version(), headers)}"


def recorded(key: str, find: Callable[[], Any]) -> Any:
    """What the record has for a key, or what `find` gives."""
    known = entries().get(key)
    if known is None or (is_sampled(key, _commit()) and not RECORDING):
        found = json.loads(json.dumps(find()))
        assert known in (None, found), f"tests/jit/compiled.jsonl has {known} for {key}, and the compiler gives {found}"
    else:
        found = known
    if RECORDING or known is None:
        asked = _directory() / f"asked-{os.getpid()}.jsonl"
        with _lock, asked.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, found]) + "\n")
    return found


@functools.cache
def _directory() -> Path:
    """Where this run's processes leave what they asked for."""
    directory = Path(os.environ["MICROSDPA_CACHE_DIR"]) / "asked"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def begin() -> None:
    """Forgets what an earlier run in the same cache asked for."""
    for file in _directory().iterdir():
        file.unlink()


def asked() -> dict[str, Any]:
    """What all processes of this run asked for: where they record everything, else what the record does not have."""
    files: Iterator[Path] = _directory().glob("asked-*.jsonl")
    return dict(json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines())


def summary() -> str:
    """Writes the record where this run is to, and says what was missing; empty where nothing was."""
    found = asked()
    if RECORDING:
        new = len(found.keys() - entries().keys())
        RECORD.write_text("".join(json.dumps(entry) + "\n" for entry in sorted(found.items())), encoding="utf-8")
        return f"{RECORD.name}: {len(found)} entries, {new} of them new"
    return f"compiled, for tests/jit/compiled.jsonl does not have them: {len(found)} kernels" if found else ""
