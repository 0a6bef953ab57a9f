"""The plots of the report, each from the result files that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from microsdpa.evidence import roofline
from microsdpa.evidence.devices import DEVICES, Device
from microsdpa.evidence.environment import gpu_slug
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.ladder_table import rung_before
from microsdpa.evidence.plots.figure import INK, OURS, Plot, colour_of, finish, new_figure
from microsdpa.evidence.results import Result, Row
from microsdpa.evidence.wording import provenance, quoted_us
from microsdpa.kernels.problem import DType

Results = dict[str, Result]
"""Result files of one GPU by suite."""

MISSION = {"b": 1, "h": 8, "h_kv": 8, "s_q": 512, "s_k": 512, "d": 64}
SIXTEEN_BIT = ("float16", "bfloat16")
MARKERS = {"normal": "o", "mean": "s", "outliers": "D"}
"""Of the kinds of inputs."""
BAR = 0.3
"""Inches of a bar with its place."""
NOT_DRAWN = ("out=", "plan", "plan out=", "alone")
"""Variants that differ on the host only, or that were measured without the peers."""


Bar = tuple[str, float, tuple[float, float] | None, str]
"""(name, value, interval, note behind the value)"""


def _rows(result: Result | None, mode: str = "graph", **wanted: Any) -> list[Row]:
    """Rows that were timed, of one mode, whose fields are as wanted."""
    if result is None:
        return []
    return [
        row
        for row in result["rows"]
        if row["status"] == "ok"
        and row["mode"] == mode
        and row["op"] != "empty"
        and row.get("variant", "") not in (() if mode == "host" else NOT_DRAWN)
        and all(row.get(name) == value for name, value in wanted.items())
    ]


def _name(row: Row) -> str:
    return " ".join(filter(None, (row["impl"], row.get("variant", ""))))


def _source(result: Result) -> str:
    return provenance(result).strip("*\n")


def _missing(name: str, title: str, suite: str, command: str = "") -> Plot:
    command = command or f"microsdpa bench --suite {suite}"
    absent = f"no data: there is no result file of the suite {suite} with timed rows"
    return Plot(name, title, "", missing=f"{absent}; {command} takes them")


def _case(row: Row) -> Case:
    s = row["shape"]
    causal = None if row["mask"] == "none" else row["mask"]
    dtype: DType = "bfloat16" if "bfloat16" in (row.get("inputs"), row["dtype"]) else "float16"
    return Case(s["b"], s["h"], s["s_q"], s["s_k"], s["d"], heads_kv=s["h_kv"], dtype=dtype, causal=causal)


def _device(result: Result) -> Device | None:
    return DEVICES.get(gpu_slug(result["environment"]["gpu"]))


def _bars(axis: Any, entries: Sequence[Bar], unit: str) -> None:
    """Horizontal bars, the first on top, each with its number and, when given, its interval."""
    longest = max(value for _, value, _, _ in entries)
    for position, (name, value, interval, note) in enumerate(entries):
        ours = name.startswith("microsdpa") or name.startswith("ladder/") or "/" in name
        axis.barh(position, value, color=OURS if ours else colour_of(name), height=0.7)
        if interval:
            low, high = interval
            axis.errorbar(
                value,
                position,
                xerr=[[max(0.0, value - low)], [max(0.0, high - value)]],
                color="#808080",
                capsize=2,
                lw=1,
            )
        axis.annotate(f"{value:.2f}{note}", (value, position), xytext=(6, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(entries)), [name for name, *_ in entries])
    axis.invert_yaxis()
    axis.set_xlim(0, longest * (1.5 if any(note for *_, note in entries) else 1.25))
    axis.set_xlabel(unit)
    axis.grid(axis="x")
    axis.set_axisbelow(True)
    axis.tick_params(length=0)


def latency(results: Results) -> Plot:
    """Microseconds a call at the headline shape, in a graph."""
    name, title = "latency", "Latency at the headline shape: B=1, H=8, S=512, D=64, FP16"
    result = results.get("mission")
    rows = sorted(_rows(result, shape=MISSION, mask="none", dtype="float16"), key=quoted_us)
    if not rows or result is None:
        return _missing(name, title, "mission")
    entries = [(_name(r), quoted_us(r), tuple(r["interval_us"]) if r.get("interval_us") else None, "") for r in rows]
    figure, axes = new_figure(BAR * len(entries) + 0.7)
    _bars(axes[0], entries, "microseconds a call in a CUDA graph, 95% intervals")
    return finish(figure, name, title, f"Lower is better. {_source(result)}", entries)


def ladder(results: Results) -> Plot:
    """Every rung of the ladder at the headline shape."""
    name, title = "ladder", "The ladder at the headline shape: each rung adds one idea"
    result = results.get("ladder")
    rows = _rows(result, shape=MISSION, mask="none", inputs="float16") or _rows(result, shape=MISSION, mask="none")
    ours = [row for row in rows if row["kernel"]]
    best = {row["kernel"]: quoted_us(row) for row in sorted(ours, key=quoted_us, reverse=True)}
    rungs = sorted(kernel for kernel in best if kernel.startswith("ladder/"))
    others = sorted((kernel for kernel in best if not kernel.startswith("ladder/")), key=lambda k: -best[k])
    if not rungs or result is None:
        return _missing(name, title, "ladder", "microsdpa ladder")
    entries: list[Bar] = []
    names = [*rungs, *others]
    for kernel in names:
        before = best.get(rung_before(kernel, names))
        entries.append((kernel, best[kernel], None, f"  ({before / best[kernel]:.2f}x)" if before else ""))
    figure, axes = new_figure(BAR * len(entries) + 0.7)
    _bars(axes[0], entries, "microseconds a call (gain over the rung before)")
    return finish(figure, name, title, f"Lower is better. {_source(result)}", entries)


def throughput(results: Results) -> Plot:
    """TFLOP/s against S, for every D and mask."""
    return _throughput(results, "prefill", "throughput", "Throughput at 16k tokens, hidden size 2048, FP16")


def ampere(results: Results) -> Plot:
    """The same of the mma.sync kernels, which are those of sm_80, sm_86, sm_89 and sm_120."""
    title = "mma.sync kernels: 16k tokens, hidden size 2048, FP16"
    return _throughput(results, "ampere", "ampere", title, "microsdpa bench --suite ampere --impl ampere/mma")


def _throughput(results: Results, suite: str, name: str, title: str, command: str = "") -> Plot:
    result = results.get(suite)
    rows = [r for r in _rows(result, dtype="float16") if r["shape"]["b"] * r["shape"]["s_q"] == 16384]
    if not rows or result is None:
        return _missing(name, title, suite, command)
    dims = sorted({row["shape"]["d"] for row in rows})
    masks = sorted({row["mask"] for row in rows}, key=lambda mask: mask != "none")
    names = sorted({_name(row) for row in rows}, key=lambda n: (not n.startswith("microsdpa"), n))
    device = _device(result)
    peak = device.peak("float16") if device else None
    panels = [(dim, mask) for dim in dims for mask in masks]
    figure, axes = new_figure(2.1 * len(panels), len(panels))
    highest = max(row["tflops"] for row in rows)
    for axis, (dim, mask) in zip(axes, panels, strict=True):
        some = [r for r in rows if (r["mask"], r["shape"]["d"]) == (mask, dim)]
        _throughput_panel(axis, some, names)
        axis.set_title(f"D = {dim}, {'causal' if mask != 'none' else 'no mask'}")
        axis.set_ylim(0, max(highest, peak or 0) * 1.06)
        if peak:
            axis.axhline(peak, ls="--", lw=1, color="#808080")
        _label_ends(axis, some, names)
        axis.set_ylabel("TFLOP/s")
    ceiling = f" Dashed: {device.name.upper()}'s published dense peak, {peak:g} TFLOP/s." if device and peak else ""
    data = [[_name(r), r["shape"], r["mask"], r["tflops"]] for r in rows]
    return finish(figure, name, title, f"Higher is better.{ceiling} {_source(result)}", data)


def _throughput_panel(axis: Any, rows: list[Row], names: list[str]) -> None:
    for name in reversed(names):
        points = sorted((row["shape"]["s_q"], row["tflops"]) for row in rows if _name(row) == name)
        width = 2.4 if name.startswith("microsdpa") else 1.2
        if points:
            axis.plot(*zip(*points, strict=True), "o-", ms=3.5, lw=width, color=colour_of(name))
    lengths = sorted({row["shape"]["s_q"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{s // 1024}k" if s >= 1024 else str(s) for s in lengths])
    axis.set_xlabel("S")
    axis.grid()


def _label_ends(axis: Any, rows: list[Row], names: list[str]) -> None:
    """Every line's name behind its last point, moved up or down where two would lie on one another."""
    ends = []
    for name in names:
        points = sorted((row["shape"]["s_q"], row["tflops"]) for row in rows if _name(row) == name)
        if points:
            ends.append((points[-1][1], name))
    lowest, highest = axis.get_ylim()
    places = spread([value for value, _ in sorted(ends)], (highest - lowest) * 0.12, lowest, highest)
    for (_, name), place in zip(sorted(ends), places, strict=True):
        axis.annotate(
            name, (1.02, place), xycoords=("axes fraction", "data"), color=colour_of(name), va="center", fontsize=9
        )


def spread(values: Sequence[float], gap: float, lowest: float, highest: float) -> list[float]:
    """Ascending values, moved as little as a pass up and a pass down do, so that neighbours are `gap` apart."""
    placed: list[float] = []
    for value in values:
        placed.append(max(value, placed[-1] + gap) if placed else max(value, lowest))
    limit = highest
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - gap
    return placed


def accuracy(results: Results) -> Plot:
    """Error against time of every implementation of the 8-bit suite, at the headline shape, for each kind of input."""
    name, title = "accuracy", "Accuracy against speed: 8-bit and 16-bit at the headline shape"
    result = results.get("fp8")
    rows = [r for r in _rows(result, shape=MISSION, mask="none") if r["error"] and r["error"]["rel_l1"]]
    if not rows or result is None:
        return _missing(name, title, "fp8")
    found: dict[str, dict[str, Row]] = {}
    for row in sorted(rows, key=quoted_us):
        kind = row.get("kind", "normal")
        if kind in MARKERS:
            found.setdefault(_of_operands(row), {})[kind] = row
    figure, axes = new_figure(BAR * len(found) + 1.0)
    axis = axes[0]
    for place, by_kind in enumerate(found.values()):
        values = {kind: row["error"]["rel_l1"] for kind, row in by_kind.items()}
        colour = colour_of(_name(next(iter(by_kind.values()))))
        axis.plot([min(values.values()), max(values.values())], [place, place], color=colour, lw=1)
        for kind, value in values.items():
            axis.scatter(value, place, marker=MARKERS[kind], s=34, color=colour)
    _name_marks(axis, {name: {kind: row["error"]["rel_l1"] for kind, row in of.items()} for name, of in found.items()})
    axis.set_yticks(
        range(len(found)), [f"{name}, {quoted_us(next(iter(of.values()))):.1f} us" for name, of in found.items()]
    )
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="relative L1 error against FP64")
    axis.grid(axis="x")
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
    data = [[_name(r), r.get("kind"), r["dtype"], quoted_us(r), r["error"]["rel_l1"]] for r in rows]
    caption = (
        "The fastest is on top; further left is better. A line spans the kinds of inputs: normal, with a mean, with"
    )
    return finish(figure, name, title, f"{caption} outliers. {_source(result)}", data)


def _of_operands(row: Row) -> str:
    """The name of an implementation, with "8-bit" where its operands are and its name does not say so."""
    eight = row["dtype"] not in SIXTEEN_BIT and not row.get("precision")
    return _name(row) + (" (8-bit)" if eight else "")


def _name_marks(axis: Any, found: dict[str, dict[str, float]]) -> None:
    """The kinds of inputs, beside the marks of the implementation whose marks are furthest apart."""
    widest = max(found, key=lambda name: max(found[name].values()) / min(found[name].values()))
    place = list(found).index(widest)
    for turn, (kind, value) in enumerate(sorted(found[widest].items(), key=lambda one: one[1])):
        beside = (-6, 0, 6)[turn] if len(found[widest]) == 3 else 0
        alignment = ("right", "center", "left")[turn] if len(found[widest]) == 3 else "center"
        axis.annotate(
            kind,
            (value, place),
            xytext=(beside, 5 if turn == 1 else -3),
            textcoords="offset points",
            ha=alignment,
            fontsize=8,
        )


KIND_TITLES = {
    "normal": "N(0, 1)",
    "outliers": "with outliers",
    "key_bias": "K with a bias a channel",
    "model": "MiniLM's layers",
}


def errors(results: Results) -> Plot:
    """Relative L1 of each precision on each kind of input, the mean over the sets, with the best and the worst."""
    name, title = "errors", "Error of 8-bit attention by kind of input"
    result = results.get("accuracy")
    if result is None:
        return Plot(
            name,
            title,
            "",
            missing="no data: there is no result file of the suite accuracy; microsdpa accuracy takes it",
        )
    found: dict[tuple[str, str], list[float]] = {}
    for row in result["rows"]:
        if row.get("layer") == 0 or (not row.get("model") and row["shape"]["s_q"] != MISSION["s_q"]):
            continue
        kind = "model" if row.get("model") else row["kind"]
        found.setdefault((kind, row["dtype"]), []).append(row["error"]["rel_l1"])
    kinds = [kind for kind in KIND_TITLES if any(key[0] == kind for key in found)]
    precisions = list(dict.fromkeys(precision for _, precision in found))
    figure, axes = new_figure(0.24 * len(kinds) * (len(precisions) + 1) + 0.7)
    axis, ticks = axes[0], []
    longest = max(max(values) for values in found.values())
    for number, kind in enumerate(kinds):
        top = number * (len(precisions) + 1)
        axis.annotate(
            KIND_TITLES[kind], (0, top), xytext=(4, 0), textcoords="offset points", va="center", weight="bold"
        )
        for place, precision in enumerate(precisions, start=top + 1):
            value = found[kind, precision]
            mean = sum(value) / len(value)
            axis.barh(place, mean, 0.8, color=OURS)
            axis.hlines(place, min(value), max(value), color="#808080", lw=1)
            axis.annotate(
                f"{mean:.4f}", (max(value), place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
            )
            ticks.append((place, precision))
    axis.set_yticks(*zip(*ticks, strict=True))
    axis.set_xlim(0, 1.2 * longest)
    axis.set_ylim(len(kinds) * (len(precisions) + 1) - 0.4, -0.6)
    axis.set_xlabel("relative L1 error against FP64")
    axis.grid(axis="x")
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
    caption = f"Lower is better. Bars: mean; lines: best to worst set of inputs, or layer and text. {_source(result)}"
    return finish(figure, name, title, caption, [[*key, values] for key, values in found.items()])


def roofline_plot(results: Results) -> Plot:
    """TFLOP/s of this library and of the best peer against arithmetic intensity, below the device's roof."""
    name, title = "roofline", "Roofline: every measured case, this library and its best peer"
    used = [results[suite] for suite in ("mission", "small", "prefill", "decode", "real") if _rows(results.get(suite))]
    device = next((d for d in map(_device, used) if d), None)
    peak = device.peak("float16") if device else None
    if device is None or peak is None:
        suites = "mission, small, prefill, decode or real, on a GPU whose ceilings are known,"
        return _missing(name, title, suites, "microsdpa repro")
    ours, peers = _intensities(used)
    figure, axes = new_figure(3.4)
    axis = axes[0]
    knee = peak * 1e3 / device.dram_gb_s
    span = [x for x, _ in [*ours, *peers]] + [knee]
    left, right = min(span) / 2, max(span) * 2
    axis.plot([left, knee, right], [left * device.dram_gb_s / 1e3, peak, peak], color="#808080", lw=1.5)
    axis.annotate(f"{peak:g} TFLOP/s FP16", (right, peak), xytext=(-4, 4), textcoords="offset points", ha="right")
    axis.annotate(
        f"{device.dram_gb_s / 1e3:g} TB/s",
        (left, left * device.dram_gb_s / 1e3),
        xytext=(6, 10),
        textcoords="offset points",
    )
    for points, colour, label, above in ((peers, INK, "best peer", 0.03), (ours, OURS, "microsdpa", 0.11)):
        if points:
            axis.scatter(*zip(*points, strict=True), s=22, color=colour, alpha=0.7)
            axis.annotate(f"\u25cf {label}", (0.97, above), xycoords="axes fraction", ha="right", color=colour)
    axis.set(
        xscale="log", yscale="log", xlim=(left, right), xlabel="FLOP for each byte of Q, K, V and O", ylabel="TFLOP/s"
    )
    axis.grid()
    caption = f"Inputs warm in L2, so points may lie above the slope of the memory. {_source(used[0])}"
    return finish(figure, name, title, caption, [ours, peers, device.name])


def _intensities(used: list[Result]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    ours: list[tuple[float, float]] = []
    best: dict[Case, tuple[float, float]] = {}
    for result in used:
        for row in _rows(result):
            if row["dtype"] not in SIXTEEN_BIT:
                continue  # below another roof
            case = _case(row)
            point = roofline.flops(case) / roofline.tensor_bytes(case), row["tflops"]
            if row["impl"] == "microsdpa":
                ours.append(point)
            elif row["tflops"] > best.get(case, (0.0, 0.0))[1]:
                best[case] = point
    return sorted(ours), sorted(best.values())


def host_overhead(results: Results) -> Plot:
    """CPU time to issue a call."""
    name, title = "host", "Host overhead: CPU time to issue one call at the headline shape"
    result = results.get("mission")
    rows = sorted(_rows(result, "host", shape=MISSION, mask="none", dtype="float16"), key=quoted_us)
    if not rows or result is None:
        return _missing(name, title, "mission, in the mode host,", "microsdpa bench --suite mission --modes host")
    entries: list[Bar] = [(_name(row), quoted_us(row), None, "") for row in rows]
    figure, axes = new_figure(BAR * len(entries) + 0.7)
    _bars(axes[0], entries, "microseconds of CPU time a call")
    return finish(figure, name, title, f"Lower is better. {_source(result)}", entries)


DRAWINGS: dict[str, Callable[[Results], Plot]] = {
    "latency": latency,
    "ladder": ladder,
    "throughput": throughput,
    "ampere": ampere,
    "accuracy": accuracy,
    "errors": errors,
    "roofline": roofline_plot,
    "host": host_overhead,
}
"""Every plot by name, in the order of the report."""


def all_plots(results: Results) -> list[Plot]:
    """Every plot, in the order of the report."""
    return [draw(results) for draw in DRAWINGS.values()]
