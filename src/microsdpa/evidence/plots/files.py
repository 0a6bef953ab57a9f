"""Plots as files of the checkout, docs/plots/<gpu>_<name>.svg, and how pages refer to them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from microsdpa.evidence import results
from microsdpa.evidence.plots.charts import Results
from microsdpa.evidence.plots.figure import Plot

FOLDER = Path("docs/plots")


class State(NamedTuple):
    """Which result files a directory has: their names, sizes in bytes, and times of the last change in nanoseconds."""

    directory: Path
    files: tuple[tuple[str, int, int], ...]


def state(directory: Path) -> State:
    """What lies in the directory of one GPU now."""
    found = [(path.name, path.stat()) for path in sorted(directory.glob("*.json"))]
    return State(directory, tuple((name, of.st_size, of.st_mtime_ns) for name, of in found))


def load(directory: Path) -> Results:
    """The result files of one GPU by suite; those that record no suite of timings come along unused."""
    return {path.stem: results.read(path) for path in sorted(directory.glob("*.json"))}


def path_of(gpu: str, plot: Plot) -> Path:
    """Where a plot lies below the root of a checkout."""
    return FOLDER / f"{gpu}_{plot.name}.svg"


def reference(page: str, gpu: str, plot: Plot) -> str:
    """What a page, named from the root, shows of a plot: the image and its caption, or why there is none."""
    if plot.missing:
        return f"*{plot.title}: {plot.missing}.*\n"
    target = os.path.relpath(path_of(gpu, plot), Path(page).parent)
    return f"![{plot.title}]({target})\n\n*{plot.caption}*\n"


def is_current(root: Path, gpu: str, plot: Plot) -> bool:
    """Whether the file of a plot exists and was drawn from the same data."""
    path = root / path_of(gpu, plot)
    return bool(plot.missing) or (path.is_file() and f"<!-- data {plot.digest} -->" in path.read_text(encoding="utf-8"))


def write(root: Path, gpu: str, plot: Plot) -> None:
    """Write the file of a plot."""
    path = root / path_of(gpu, plot)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plot.file, encoding="utf-8")
