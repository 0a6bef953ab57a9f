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
