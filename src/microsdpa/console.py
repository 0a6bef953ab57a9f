"""Output of the command line: tables and progress bars for a person, plain text and JSON for a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

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


@contextmanager
def progress() -> Iterator[Callable[[str, int], Callable[[str], None]]]:
    """Progress bars on standard error, none when it is no terminal."""
    columns = (
        TextColumn("{task.fields[title]:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=_err, disable=not _err.is_terminal) as bars:

        def start(title: str, total: int) -> Callable[[str], None]:
            task = bars.add_task("", total=total, title=title)

            def advance(message: str) -> None:
                bars.update(task, advance=1, description=message)

            return advance

        yield start
