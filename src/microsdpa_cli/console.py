"""Output of the command line: tables and progress for a person, plain text and JSON for a program."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

SECONDS_PER_LINE = 10.0
"""Between two lines of progress where nobody watches a terminal."""

_out = Console()
_err = Console(stderr=True)


def print_json(data: object) -> None:
    """JSON on standard output."""
    print(json.dumps(data, indent=1))


def print_table(table: list[list[str]]) -> None:
    """A header line and rows: drawn on a terminal, tab-separated when piped."""
    if not _out.is_terminal:
        print("\n".join("\t".join(row) for row in table))
        return
    drawn = Table(*table[0], header_style="bold")
    for row in table[1:]:
        drawn.add_row(*row)
    _out.print(drawn)


def print_status(name: str, status: str, summary: str) -> None:
    """One line that says how a step ended."""
    if not _out.is_terminal:
        print(f"{name}: {status}: {summary}")
        return
    colour = {"passed": "green", "failed": "red"}.get(status, "yellow")
    _out.print(f"[bold]{name}[/bold] [{colour}]{status}[/{colour}]", summary, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    """A message on standard error."""
    print(message, file=sys.stderr)


class Lines:
    """Progress without a terminal: a line on standard error every ten seconds, with an estimate of the time left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._printed = clock()

    def start(self, title: str, total: int) -> Callable[[str], None]:
        """What is told of each of `total` items."""
        began, done = self._clock(), 0

        def advance(message: str) -> None:
            nonlocal done
            done += 1
            now = self._clock()
            if now - self._printed < SECONDS_PER_LINE:
                return
            self._printed = now
            left = (now - began) / done * (total - done)
            print_error(f"{title}: {done} of {total}, about {left:.0f} s left ({message})")

        return advance


@contextmanager
def progress() -> Iterator[Callable[[str, int], Callable[[str], None]]]:
    """Progress on standard error: bars on a terminal, and lines elsewhere."""
    if not _err.is_terminal:
        yield Lines().start
        return
    whole = Column(no_wrap=True)
    columns = (
        TextColumn("{task.fields[title]:>8}", table_column=whole),
        BarColumn(bar_width=16),
        MofNCompleteColumn(table_column=whole),
        TimeElapsedColumn(table_column=whole),
        TimeRemainingColumn(table_column=whole),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    with Progress(*columns, console=_err, expand=True) as bars:

        def start(title: str, total: int) -> Callable[[str], None]:
            task = bars.add_task("", total=total, title=title)

            def advance(message: str) -> None:
                bars.update(task, advance=1, description=message)

            return advance

        yield start
