"""Commands for what is kept: the tables of README and docs, and the cache of compiled kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from microsdpa_cli import names
from microsdpa_cli.console import print_error, progress
from microsdpa_cli.options import Json, Output, existing
from microsdpa_cli.running import EXIT_FAILED, command, command_line, finish

evidence = typer.Typer(no_args_is_help=True)
cache = typer.Typer(no_args_is_help=True)

Root = Annotated[Path, typer.Option(help="Checkout of the project.", exists=True, file_okay=False)]
Results = Annotated[Path | None, typer.Option(help="Result files; by default benchmarks/results of the checkout.")]


@command(evidence, "render", "Write the tables of README and docs.", "microsdpa evidence render")
def render(root: Root = Path(), results: Results = None) -> None:
    """Write the tables between the markers of README and docs from the result files."""
    from microsdpa.evidence import render as rendering

    for page in rendering.render(root, existing("results", results or root / names.RESULTS)):
        print(f"rendered {page}")


@command(evidence, "check", "Fail when a table and its results differ.", "microsdpa evidence check")
def check(root: Root = Path(), results: Results = None) -> None:
    """Fail when a rendered table and its result file differ."""
    from microsdpa.evidence import render as rendering

    differing = rendering.differing(root, existing("results", results or root / names.RESULTS))
    for page in differing:
        print_error(f"{page}: its tables are not what the result files say; run 'microsdpa evidence render'")
    if differing:
        raise typer.Exit(EXIT_FAILED)
    print("every table matches its result file")


@command(evidence, "resign", "Keep rows of identical machine code fresh.", "microsdpa evidence resign HEAD~1 --dry-run")
def resign_(
    old_ref: Annotated[str, typer.Argument(help="Commit that the rows were recorded with, or a path of a checkout.")],
    root: Root = Path(),
    results: Results = None,
    gpu: Annotated[str | None, typer.Option(help="One folder of the result files, such as h200; else all.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compare only; write nothing.")] = False,
    renamed: Annotated[
        list[str] | None,
        typer.Option(help="OLD=NEW: the old and the new name of a kernel; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Keep rows fresh whose kernels are the same machine code and launch as those of an old commit."""
    from microsdpa.evidence import resign as resigning

    below = existing("results", results or root / names.RESULTS)
    with progress() as bars:
        step = resigning.step(old_ref, root, below, gpu, dry_run, resigning.names_of(renamed or []), bars)
    finish([step], as_json)


@command(evidence, "stale", "Cells that want to be measured again.", "microsdpa evidence stale --gpu h200")
def stale(
    root: Root = Path(),
    results: Results = None,
    gpu: Annotated[str | None, typer.Option(help="One folder of the result files, such as h200; else all.")] = None,
    as_json: Json = False,
) -> None:
    """List the cells whose rows were measured with code that has changed since."""
    from microsdpa.evidence import upkeep

    with progress() as bars:
        step = upkeep.stale(existing("results", results or root / names.RESULTS), gpu, bars)
    finish([step], as_json)


@command(evidence, "add", "Add cells that were measured elsewhere.", "microsdpa evidence add report/h200/decode.json")
def add(
    files: Annotated[list[Path], typer.Argument(help="Result files of some cells.")],
    root: Root = Path(),
    results: Results = None,
    as_json: Json = False,
) -> None:
    """Add the cells of result files to those of their suites; rows of the other cells stay, each with its commit."""
    from microsdpa.evidence import upkeep

    finish([upkeep.add(files, existing("results", results or root / names.RESULTS))], as_json)


@command(
    evidence, "mutate", "Does the emulator see a missing fence or wait?", "microsdpa evidence mutate hopper/latency"
)
def mutate_(
    kernel: Annotated[str, typer.Argument(help="A production kernel, such as ampere/mma; else all of them.")] = "",
    jobs: Annotated[int, typer.Option(min=0, help="Processes at a time; 0 for one on each core.")] = 0,
    sample: Annotated[int | None, typer.Option(min=1, help="So many of each kernel, evenly chosen; else all.")] = None,
    only: Annotated[str, typer.Option(help="Mutations of one place: hopper/split/consumer.cuh:121, or a file.")] = "",
    log: Annotated[Path | None, typer.Option(help="Keep what is found, a line each; go on where it ends.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Leave out each fence and wait of a kernel, and move each comparison with a length: does the emulator see it?"""
    from microsdpa.evidence import mutate

    with progress() as bars:
        step = mutate.step(kernel, jobs, sample, bars, output, command_line(), only, log)
    finish([step], as_json)


@command(cache, "show", "Its place, entries and size.", "microsdpa cache show")
def show(as_json: Json = False) -> None:
    """Where the cache is, and the number, size and last use of its entries by kind."""
    from microsdpa.evidence import cache_steps

    finish([cache_steps.show()], as_json)


@command(cache, "prune", "Remove entries that were not used lately.", "microsdpa cache prune --days 7")
def prune(
    days: Annotated[float, typer.Option(min=0, help="Keep what was used within so many days; 0 removes all.")] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count only; remove nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Remove compiled kernels that were not used lately. Kernels are compiled again when they are called."""
    from microsdpa.evidence import cache_steps

    finish([cache_steps.prune(days, dry_run)], as_json)
