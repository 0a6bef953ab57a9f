"""A step: what one command of the evidence found, for a terminal, for JSON and for the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "not run"]
Progress = Callable[[str, int], Callable[[str], None]]
"""progress(title, total) gives a function that is told of each finished item."""


@dataclass
class Step:
    """One step.

    Attributes:
        summary: one line for a person: the outcome, or the reason why it did not run.
        table: a header line and rows, as text.
        sections: further tables, each with a title.
        data: everything, for report.json.
    """

    name: str
    status: Status
    summary: str
    table: list[list[str]] = field(default_factory=list)
    sections: list[tuple[str, list[list[str]]]] = field(default_factory=list)
    data: Any = None
    seconds: float = 0.0


def no_progress(title: str, total: int) -> Callable[[str], None]:
    """For callers without progress bars."""
    return lambda message: None


PARTS = 100
"""That the progress of several steps is counted in."""


class Together:
    """One progress for several steps, so that its estimate is of the time that all of them take.

    `seconds` says how long each takes on some machine: the shares that they have of the whole.
    """

    def __init__(self, progress: Progress, title: str, seconds: dict[str, float]) -> None:
        self._advance = progress(title, PARTS)
        self._seconds = seconds
        self._behind = 0.0
        self._told = 0

    def of(self, name: str) -> Progress:
        """The progress of one step, which moves the whole through the step's share."""

        def start(_: str, total: int) -> Callable[[str], None]:
            done = 0

            def advance(message: str) -> None:
                nonlocal done
                done += 1
                self._move(self._behind + self._seconds[name] * done / total, f"{name}: {message}")

            return advance

        return start

    def end(self, name: str, status: str) -> None:
        """A step has ended, whatever it has told of its items."""
        self._behind += self._seconds[name]
        self._move(self._behind, f"{name}: {status}")

    def _move(self, seconds: float, message: str) -> None:
        share = seconds / max(sum(self._seconds.values()), 1e-9)
        for _ in range(self._told, min(round(share * PARTS), PARTS)):
            self._told += 1
            self._advance(message)
