"""The report: one page that needs nothing but itself, with plots, tables and what every step said; and its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import jinja2

from microsdpa.evidence.plots import Plot, all_plots
from microsdpa.evidence.plots.charts import Results
from microsdpa.evidence.render import timing_lines
from microsdpa.evidence.step import Step
from microsdpa.evidence.timing import MODES, START
from microsdpa.evidence.wording import provenance

SUITES_FIRST = ("mission", "small", "prefill", "ampere", "decode", "masked", "fp8", "prefill_fp8", "real", "ladder")


@dataclass(frozen=True)
class Table:
    """A table of timings of one suite and mode."""

    suite: str
    mode: str
    source: str
    lines: list[list[str]]


def tables(results: Results) -> list[Table]:
    """A table for every suite and mode that was timed."""
    found = []
    for suite in sorted(results, key=lambda s: (SUITES_FIRST.index(s) if s in SUITES_FIRST else len(SUITES_FIRST), s)):
        result = results[suite]
        modes = {row["mode"] for row in result["rows"] if row["op"] != "empty"}
        source = provenance(result).strip("*\n")
        found += [
            Table(suite, mode, source, dense_first(timing_lines(result, mode)))
            for mode in (*MODES, START)
            if mode in modes
        ]
    return found


def dense_first(lines: list[list[str]]) -> list[list[str]]:
    """A table whose columns that are mostly empty come last, behind the comparison with the best peer."""
    head, *rows = lines
    filled = [sum(row[i] not in ("", "-") for row in rows) for i in range(len(head))]
    sparse = [i > 0 and 2 * count < len(rows) and "best peer" not in head[i] for i, count in enumerate(filled)]
    order = sorted(range(len(head)), key=lambda i: sparse[i])
    return [[line[i] for i in order] for line in lines]


def write(directory: Path, steps: Sequence[Step], results: Results, origin: str) -> Path:
    """Write index.html, report.json and plots/*.svg; gives the path of the page. `origin` says what `results` are."""
    directory.mkdir(parents=True, exist_ok=True)
    plots = all_plots(results)
    _write_plots(directory / "plots", plots)
    everything = {"steps": [asdict(step) for step in steps], "origin": origin, "results": results}
    (directory / "report.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    source = resources.files("microsdpa.evidence").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(source).render(steps=steps, plots=plots, tables=tables(results), origin=origin)
    path = directory / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _write_plots(directory: Path, plots: list[Plot]) -> None:
    directory.mkdir(exist_ok=True)
    for plot in plots:
        path = directory / f"{plot.name}.svg"
        if plot.missing:
            path.unlink(missing_ok=True)
        else:
            path.write_text(plot.file, encoding="utf-8")
