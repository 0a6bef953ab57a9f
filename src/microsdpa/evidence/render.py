"""Tables of README and docs, rendered from result files between markers, and the check that they still match.

A marker pair looks like this, and what stands between the two is replaced:

    <!-- microsdpa:table gpu=h200 suite=mission mode=graph -->
    <!-- microsdpa:end -->

`peers=torch-flash,...` shows the columns of these peers only, `eight_bit=no` no 8-bit modes, `unit=tflops` TFLOP/s,
`unit=ms` milliseconds, `notes=no` no reasons of failures, `by=modes` what each precision gains and loses.
`microsdpa:plot gpu=h200 name=latency` shows a plot,
`microsdpa:peers` the table of peers, `microsdpa:support` what the specifications support, and
`microsdpa:summary gpu=h200` a line a suite: how much faster than the best peer.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from microsdpa.errors import MicrosdpaError
from microsdpa.evidence import (
    accuracy,
    context_parallel,
    fuzz,
    ladder_table,
    model_results,
    modes_table,
    mutate,
    probes,
    ratios,
    results,
    schedule,
    suites,
    support,
    tune,
    verify_torch,
)
from microsdpa.evidence.peers import PEERS, slug
from microsdpa.evidence.plots import Plot
from microsdpa.evidence.plots import files as plot_files
from microsdpa.evidence.plots.charts import DRAWINGS, Results
from microsdpa.evidence.signatures import is_stale
from microsdpa.evidence.timing import ON_DEVICE
from microsdpa.evidence.wording import case_name, provenance, quoted_us

MARKER = re.compile(
    r"(?P<head><!-- microsdpa:(?P<what>table|peers|plot|summary|support) ?(?P<options>[^>]*?) ?-->\n)"
    r"(?P<body>.*?)(?P<tail><!-- microsdpa:end -->)",
    re.DOTALL,
)
STALE = "stale"
NOT_RECORDED = "*Not recorded yet: `microsdpa {} --output benchmarks/results`, on a GPU, writes the result file.*\n"
UNITS = ("us", "ms", "tflops")
OVER_PLAIN = "over the plain call"
"""Head of a column: host time that an option of sdpa adds, from calls that were timed in turn."""
ENERGY = "mJ per call: microsdpa / best peer"
NOTE_LENGTH = 85


class RenderError(MicrosdpaError, ValueError):
    """A marker that names no known table, or a result file that is missing."""


def pages(root: Path) -> list[Path]:
    """README and every page of docs below `root`."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def rendered(text: str, results_directory: Path, name: str) -> str:
    """`text` with the body of every marker pair made anew.

    Raises:
        RenderError: a marker is wrong, or its result file does not exist; `name` tells of which page.
    """

    def replace(match: re.Match[str]) -> str:
        if match["what"] == "peers":
            return match["head"] + peers_table() + match["tail"]
        if match["what"] == "support":
            return match["head"] + support.markdown() + match["tail"]
        if match["what"] == "summary":
            return match["head"] + ratios.summary(results_directory / _options(match)["gpu"]) + match["tail"]
        if match["what"] == "plot":
            gpu, plot = _plot(_options(match), results_directory, name)
            return match["head"] + plot_files.reference(name, gpu, plot) + match["tail"]
        options = _options(match)
        return match["head"] + _table(options, results_directory, name) + match["tail"]

    opened, matched = len(re.findall("<!-- microsdpa:(?!end)", text)), len(MARKER.findall(text))
    if opened != matched:
        raise RenderError(f"{name}: {opened} table markers, but {matched} of them are closed by microsdpa:end")
    return MARKER.sub(replace, text)


def _options(match: re.Match[str]) -> dict[str, str]:
    return dict(option.split("=", 1) for option in match["options"].split() if "=" in option)


def _plot(options: dict[str, str], directory: Path, name: str) -> tuple[str, Plot]:
    """The GPU and the plot that a marker names."""
    if not {"gpu", "name"} <= set(options):
        raise RenderError(f"{name}: a plot marker needs gpu= and name=, got {options}")
    if options["name"] not in DRAWINGS:
        raise RenderError(f"{name}: expected a plot called {', '.join(DRAWINGS)}, got {options['name']!r}")
    return options["gpu"], _drawn(options["name"], plot_files.state(directory / options["gpu"]))


@functools.lru_cache(maxsize=64)
def _drawn(plot: str, state: plot_files.State) -> Plot:
    """The plot of these result files. Pages ask for it twice: for its caption, and to compare its data."""
    return DRAWINGS[plot](_loaded(state))


@functools.lru_cache(maxsize=2)
def _loaded(state: plot_files.State) -> Results:
    return plot_files.load(state.directory)


def _plots_shown(text: str, directory: Path, name: str) -> list[tuple[str, Plot]]:
    return [_plot(_options(m), directory, name) for m in MARKER.finditer(text) if m["what"] == "plot"]


def _table(options: dict[str, str], directory: Path, name: str) -> str:
    if not {"gpu", "suite"} <= set(options):
        raise RenderError(f"{name}: a table marker needs gpu= and suite=, got {options}")
    path = directory / options["gpu"] / f"{options['suite']}.json"
    if options["suite"] == "ladder" and not path.is_file():
        return ladder_table.NOT_RECORDED
    if options["suite"] == "verify_torch" and not path.is_file():
        return verify_torch.NOT_RECORDED
    if options["suite"] == fuzz.SUITE and not path.is_file():
        return fuzz.NOT_RECORDED
    if options["suite"].startswith(mutate.SUITE) and not path.is_file():
        return mutate.NOT_RECORDED
    if options["suite"] == schedule.SUITE and not path.is_file():
        return schedule.NOT_RECORDED
    if options["suite"] == model_results.SUITE and not path.is_file():
        return model_results.NOT_RECORDED
    if not path.is_file() and options["suite"] == "accuracy":
        return NOT_RECORDED.format("accuracy")
    if not path.is_file() and options["suite"].startswith(tune.PREFIX):
        return NOT_RECORDED.format(f"tune --suite {options['suite'].removeprefix(tune.PREFIX)}")
    if not path.is_file() and options["suite"] in suites.names():
        return NOT_RECORDED.format(f"bench --suite {options['suite']}")
    if not path.is_file():
        raise RenderError(f"{name}: no result file {path}; record it with 'microsdpa bench' or 'microsdpa verify'")
    result = results.read(path)
    if options["suite"] == "verify_torch":
        return verify_torch.markdown(result, is_stale) + f"\n{provenance(result)}"
    if options["suite"].startswith(mutate.SUITE):
        return mutate.markdown(result, is_stale) + f"\n{provenance(result)}"
    if options["suite"] == fuzz.SUITE:
        return fuzz.markdown(result, is_stale) + f"\n{provenance(result)}"
    if options["suite"] == schedule.SUITE:
        return schedule.markdown(result)
    if options["suite"] == model_results.SUITE:
        return model_results.markdown(result) + f"\n{provenance(result)}"
    if options["suite"].startswith("verify"):
        return verify_table(result)
    if options["suite"].startswith(tune.PREFIX):
        return tune.markdown(result)
    if options["suite"] == context_parallel.SUITE:
        return context_parallel.markdown(result)
    if options["suite"] == "accuracy":
        return accuracy.markdown(result, options)
    if options["suite"] == "instructions":
        return instructions_table(result)
    if options["suite"] == "ladder" and "mode" not in options:
        return ladder_table.markdown(result, options, _stale_kernels(result))
    if "mode" not in options:
        raise RenderError(f"{name}: a table of timings needs mode=, got {options}")
    if options.get("by") == "modes":
        return modes_table.markdown(result, options["mode"], is_stale)
    unit = options.get("unit", "us")
    if unit not in UNITS:
        raise RenderError(f"{name}: unit: expected one of {', '.join(UNITS)}, got {unit!r}")
    peers = options["peers"].split(",") if "peers" in options else None
    if options.get("eight_bit") == "no":
        result = result | {"rows": [row for row in result["rows"] if row["dtype"] in ratios.SIXTEEN_BIT]}
    return timing_table(result, options["mode"], unit, notes=options.get("notes") != "no", peers=peers)


def peers_table() -> str:
    """One line a peer: how it is called and where it comes from."""
    lines = [["peer", "on the command line", "called as", "install"], ["---"] * 4]
    lines += [[p.name, f"`{slug(p.name)}`", p.configuration, f"`{p.package}`" if p.package else "torch"] for p in PEERS]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _stale_kernels(result: results.Result) -> set[str]:
    target = result["environment"].get("target") or ""
    return {row["kernel"] for row in result["rows"] if row.get("code_signature") and is_stale(row, target)}


def timing_table(
    result: results.Result, mode: str, unit: str = "us", notes: bool = True, peers: list[str] | None = None
) -> str:
    """The lines of `timing_lines` in Markdown, with where they are from and why cells are missing."""
    lines = timing_lines(result, mode, unit, peers)
    lines.insert(1, ["---"] + ["---:"] * (len(lines[0]) - 1))
    rows = [row for row in result["rows"] if row["mode"] == mode and row["op"] != "empty"]
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines)
        + f"\n{provenance(result)}{_notes(rows) if notes else ''}"
    )


def timing_lines(
    result: results.Result, mode: str, unit: str = "us", peers: list[str] | None = None
) -> list[list[str]]:
    """Times or TFLOP/s: a header, then a line a case, a column an implementation, the ratio to the best peer.

    `peers` are the slugs of those that get a column; the best peer is that of all of them.

    Raises:
        RenderError: the result has no rows of the mode.
    """
    rows = [row for row in result["rows"] if row["mode"] == mode and row["op"] != "empty"]
    if not rows:
        raise RenderError(f"suite {result['suite']} has no rows of mode {mode!r}")
    columns = list(dict.fromkeys(_column(row) for row in rows))
    columns = [c for c in columns if any(row["status"] != "unavailable" for row in rows if _column(row) == c)]
    if mode in ON_DEVICE:
        # On the device all ways to call it do the same; only the host can tell them apart.
        columns = [c for c in columns if c[1] not in ("out=", "plan", "plan out=")]
    if peers is not None:
        columns = [c for c in columns if c[0] == "microsdpa" or slug(c[0]) in peers]
    cases: dict[str, list[results.Row]] = {}
    for row in rows:
        cases.setdefault(case_name(row), []).append(row)
    with_energy, with_plain = (any(field in row for row in rows) for field in ("energy_mj", "plain_us"))
    head = [
        "(B, H, S_q, S_k, D), dtype, mask",
        *(" ".join(filter(None, c)) for c in columns),
        *([OVER_PLAIN] if with_plain else []),
        "best peer / microsdpa",
        *(["8-bit: best peer / microsdpa"] if any(row.get("precision") for row in rows) else []),
        *([ENERGY] if with_energy else []),
    ]
    lines = [head]
    for name, members in cases.items():
        by_column = {_column(row): row for row in members}
        target = result["environment"].get("target") or ""
        ratio = ratios.sixteen_bits(members)
        of_eight = "; ".join(
            f"{one.text} ({one.peer['impl']} / {one.ours['variant']})" for one in ratios.eight_bits(members)
        )
        shown = [ratio.text if ratio else "", of_eight][: len(head) - 1 - len(columns) - with_plain - with_energy]
        price = [_over_plain(members)] if with_plain else []
        last = [_energies(ratio)] if with_energy else []
        lines.append([name, *(_cell(by_column.get(c), target, unit) for c in columns), *price, *shown, *last])
    return lines


def _over_plain(rows: list[results.Row]) -> str:
    """Microseconds that an option adds to the best plain call that was timed in turn with it; empty where none was."""
    return next((f"{row['min_us'] - row['plain_us']:+.2f}" for row in rows if "plain_us" in row), "")


def _energies(ratio: ratios.Ratio | None) -> str:
    """Millijoules of a call by us and by the best peer; empty where either is unknown."""
    both = [row["energy_mj"] for row in (ratio.ours, ratio.peer) if "energy_mj" in row] if ratio else []
    return f"{both[0]:.3g} / {both[1]:.3g}" if len(both) == 2 else ""


def _notes(rows: list[results.Row]) -> str:
    """One line for every reason why a cell has no number, with the number of cases that it holds for."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["status"] != "ok":
            reason = row["reason"]
            key = row["impl"], reason if len(reason) <= NOTE_LENGTH else f"{reason[:NOTE_LENGTH]}..."
            counts[key] = counts.get(key, 0) + 1
    lines = [
        f"- {impl}: {reason}{f' ({count} cases)' if count > 1 else ''}\n" for (impl, reason), count in counts.items()
    ]
    return "".join(["\n", *sorted(lines)]) if lines else ""


def _column(row: results.Row) -> tuple[str, str]:
    return row["impl"], row.get("variant", "")


def verify_table(result: results.Result) -> str:
    """One line per implementation: cases passed, and the worst error against its tolerance."""
    lines = [
        ["kernel", "dtype", "cases passed", "max abs error", "largest error / tolerance"],
        ["---"] * 2 + ["---:"] * 3,
    ]
    groups: dict[tuple[str, str], list[results.Row]] = {}
    for row in result["rows"]:
        groups.setdefault((row["kernel"] or row["impl"], row["dtype"]), []).append(row)
    target = result["environment"].get("target") or ""
    for (kernel, dtype), members in groups.items():
        passed = [row for row in members if row["status"] == "ok"]
        stale = any(row["code_signature"] and is_stale(row, row.get("target") or target) for row in members)
        worst = max((row["error"]["max_abs"] for row in passed), default=float("nan"))
        use = max(
            (
                row["error"]["max_abs"] / row["error"]["tolerance"]["max_abs"]
                for row in passed
                if row["error"]["max_abs"]
            ),
            default=0.0,
        )
        name = f"{kernel} ({STALE})" if stale else kernel
        lines.append([name, dtype, f"{len(passed)} of {len(members)}", f"{worst:.2e}", f"{use:.2f}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{provenance(result)}"


def instructions_table(result: results.Result) -> str:
    """One line per instruction: how far the emulator is from the GPU."""
    lines = [["instruction", "words compared", "largest distance", "allowed"], ["---"] + ["---:"] * 3]
    target = result["environment"].get("target") or ""
    for row in result["rows"]:
        distance = f"{row['distance']:.3g} {row['unit']}" if row["status"] == "ok" else "wrong"
        if probes.is_stale(row, target):
            distance += f" ({STALE})"
        lines.append([row["kernel"], f"{row['compared_words']:,}", distance, f"{row['allowed']:g}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{provenance(result)}"


def _cell(row: results.Row | None, target: str, unit: str) -> str:
    if row is None:
        return ""
    if row["status"] != "ok":
        return str(row["status"])
    stale = f" ({STALE})" if row.get("code_signature") and is_stale(row, target) else ""
    if unit == "tflops" and row["tflops"]:
        return f"{row['tflops']:.0f}{stale}"
    number = f"{quoted_us(row) / 1000:.1f}" if unit == "ms" else f"{quoted_us(row):.2f}"
    return f"{number}{stale}"


def render(root: Path, results_directory: Path) -> list[Path]:
    """Write every page of `root` whose tables change, and every plot whose data did; gives their paths."""
    changed = []
    for page in pages(root):
        name = str(page.relative_to(root))
        text = page.read_text(encoding="utf-8")
        new = rendered(text, results_directory, name)
        if new != text:
            page.write_text(new, encoding="utf-8")
            changed.append(page)
        for gpu, plot in _plots_shown(new, results_directory, name):
            if not plot_files.is_current(root, gpu, plot):
                plot_files.write(root, gpu, plot)
                changed.append(root / plot_files.path_of(gpu, plot))
    return changed


def differing(root: Path, results_directory: Path) -> list[Path]:
    """Pages of `root` whose tables are not what their result files say, and plots that were drawn from other data."""
    found = []
    for page in pages(root):
        name = str(page.relative_to(root))
        text = page.read_text(encoding="utf-8")
        if rendered(text, results_directory, name) != text:
            found.append(page)
        for gpu, plot in _plots_shown(text, results_directory, name):
            if not plot_files.is_current(root, gpu, plot):
                found.append(root / plot_files.path_of(gpu, plot))
    return found
