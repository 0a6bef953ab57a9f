"""Exit codes: 0 every gate that ran passed; 1 a gate failed; 2 wrong usage; 3 it cannot run here."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from microsdpa_cli import checks, measures, upkeep
from microsdpa_cli.console import print_error
from microsdpa_cli.running import EXIT_USAGE

app = typer.Typer(
    help=f"Exact fused attention: check it, time it, look inside. {__doc__}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for group in (checks.commands, measures.commands):
    app.registered_commands.extend(group.registered_commands)
app.add_typer(
    upkeep.evidence,
    name="evidence",
    help="Tables in README and docs, from result files.",
    short_help="Render, check and resign the tables of README and docs.",
    epilog="Example: microsdpa evidence check",
)
app.add_typer(
    upkeep.cache,
    name="cache",
    help="The cache of compiled kernels.",
    short_help="Show or prune the cache of compiled kernels.",
    epilog="Example: microsdpa cache show",
)


def _version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(version("microsdpa"))
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: an error of the library becomes its message and exit code 2."""
    try:
        app()
    except Exception as error:
        errors = sys.modules.get("microsdpa.errors")
        if errors is None or not isinstance(error, errors.MicrosdpaError):
            raise
        print_error(f"{type(error).__name__}: {error}")
        raise SystemExit(EXIT_USAGE) from None
