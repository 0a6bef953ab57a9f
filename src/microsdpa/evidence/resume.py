"""Finished steps of a reproduction, kept so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch

import microsdpa
from microsdpa.evidence import environment
from microsdpa.evidence.step import Step


class Finished:
    """Steps that passed, below `directory`, each with the code and the machine that it passed on.

    `extent` says how much of each step is taken, if not all.
    """

    def __init__(self, directory: Path, fresh: bool = False, extent: str = "") -> None:
        self._directory = directory
        self._key = _key() + extent
        self._fresh = fresh

    def find(self, name: str) -> Step | None:
        """The step called `name`, when it passed with this code on this machine; its summary says so."""
        if self._fresh:
            return None
        try:
            kept = json.loads(self._path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if kept.get("key") != self._key:
            return None
        sections = [(title, table) for title, table in kept["step"].pop("sections")]
        return Step(**kept["step"], sections=sections)

    def keep(self, step: Step) -> None:
        """Remember a step, if it passed."""
        path = self._path(step.name)
        if step.status != "passed":
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_suffix(".partial")
        staged.write_text(json.dumps({"key": self._key, "step": asdict(step)}) + "\n", encoding="utf-8")
        staged.replace(path)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name.replace(' ', '_')}.json"


def _key() -> str:
    """Digest of this package's files, and what it runs on."""
    package = Path(microsdpa.__file__).parent
    digest = hashlib.sha256(f"{torch.__version__} {environment.gpu_name()}".encode())
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(package)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
