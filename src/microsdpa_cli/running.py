"""What every command does: it is registered, its steps are printed, and it ends with an exit code."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from microsdpa_cli.console import print_json, print_status, print_table

if TYPE_CHECKING:
    from microsdpa.evidence.step import Step

EXIT_FAILED, EXIT_USAGE, EXIT_CANNOT_RUN, EXIT_INTERRUPTED = 1, 2, 3, 130
MAX_THREADS = 8


def command(group: typer.Typer, name: str, summary: str, example: str) -> Callable[[Callable[..., None]], Any]:
    """A command with a summary that fits a line, and an example below its help. Torch is loaded when it runs."""
    register = group.command(name, short_help=summary, epilog=f"Example: {example}")

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> None:
            import torch

            # The references are many small operations: they wait longer for a large machine's threads than they run.
            torch.set_num_threads(min(torch.get_num_threads(), MAX_THREADS))
            function(*arguments, **options)

        return register(run)

    return decorate


PLACES = "--output", "--log"
"""Options that name a file or a directory of the machine."""


def command_line() -> str:
    """The command line for a result file, without the places that it writes to: those are a machine's own."""
    kept: list[str] = []
    for argument in sys.argv[1:]:
        if kept and kept[-1] in PLACES:
            kept.pop()
        elif not argument.startswith(tuple(f"{option}=" for option in PLACES)):
            kept.append(argument)
    return shlex.join(["microsdpa", *kept])


def finish(steps: list[Step], as_json: bool, tables: bool = True) -> NoReturn:
    """Print steps, as JSON or with their tables, and end with the exit code that they give."""
    if as_json:
        print_json([asdict(step) for step in steps] if len(steps) > 1 else asdict(steps[0]))
    for step in [] if as_json else steps:
        if tables and step.table:
            print_table(step.table)
        for title, table in step.sections if tables else []:
            print(f"\n{title}")
            print_table(table)
        print_status(step.name, step.status, step.summary)
    if any(step.status == "failed" for step in steps):
        raise typer.Exit(EXIT_FAILED)
    raise typer.Exit(EXIT_CANNOT_RUN if all(step.status == "not run" for step in steps) else 0)
