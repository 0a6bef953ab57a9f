"""`microsdpa repro`: info, compile, verify and bench in order, and a report of all that ran and of what could not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jinja2

from microsdpa.errors import MicrosdpaError
from microsdpa.evidence import bench, results, survey
from microsdpa.evidence.cases import verify_cases
from microsdpa.evidence.implementations import microsdpa_implementations, torch_peers
from microsdpa.evidence.render import quoted_us
from microsdpa.evidence.suites import load
from microsdpa.evidence.timing import MODES
from microsdpa.evidence.verify import as_row, verify
from microsdpa.runtime import launcher
from microsdpa.specs import FAMILIES, catalogue

Status = Literal["passed", "failed", "not run"]
Progress = Callable[[str, int], Callable[[str], None]]
"""progress(title, total) gives a function that is told of each finished item."""

COMMAND = "microsdpa repro"


@dataclass
class Step:
    """One step of the reproduction.

    Attributes:
        summary: one line for a person: the outcome, or the reason why it did not run.
        table: a header line and rows, as text.
        data: everything, for report.json.
    """

    name: str
    status: Status
    summary: str
    table: list[list[str]] = field(default_factory=list)
    data: Any = None
    seconds: float = 0.0


def _no_progress(title: str, total: int) -> Callable[[str], None]:
    return lambda message: None


def info_step(progress: Progress = _no_progress) -> Step:
    """What is here."""
    facts = survey.info()
    rows = [["fact", "value"]]
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += [[f"{name}: {key}", str(entry)] for key, entry in value.items()]
        else:
            rows.append([name, "none" if value is None else str(value)])
    return Step("info", "passed", f"{facts['gpu'] or 'no GPU'}, NVRTC {facts['nvrtc']}", rows, facts)


def compile_step(progress: Progress = _no_progress, targets: list[str] | None = None) -> Step:
    """Every kernel for every target; the gate is that each compiles and none uses local memory."""
    targets = targets or list(survey.TARGETS)
    total = sum(len(catalogue(target)) for target in targets)
    rows = survey.compile_all(targets, progress("compile", total))
    failed = [row for row in rows if row.failure]
    bare = [target for target in targets if not catalogue(target)]
    table = [["kernel", "configuration", "target", "registers", "shared B", "spill B", "tensor instr.", "seconds"]]
    table += [
        [
            r.kernel,
            r.configuration,
            r.target,
            *("" if value is None else str(value) for value in (r.registers, r.shared_bytes, r.spill_bytes)),
            r.failure or r.tensor_instructions,
            f"{r.seconds:.2f}{' (cached)' if r.cached else ''}",
        ]
        for r in rows
    ]
    summary = f"{len(rows) - len(failed)} of {len(rows)} kernels compiled for {', '.join(targets)} without spills"
    if bare:
        summary += f"; no kernel supports {', '.join(bare)}"
    return Step("compile", "failed" if failed or bare else "passed", summary, table, [asdict(row) for row in rows])


def verify_step(
    progress: Progress = _no_progress, impl: str = "auto", output: Path | None = None, command: str = COMMAND
) -> Step:
    """Every verify case, on the GPU when there is one, else by torch's attention on the CPU."""
    reason = launcher.device_error()
    device = "cpu" if reason else "cuda"
    if reason and impl != "auto":
        return Step("verify", "not run", f"{impl} was not run: {reason}")
    cases = verify_cases()
    advance = progress("verify", len(cases))
    outcomes = []
    for outcome in verify(cases, device, impl):
        outcomes.append(outcome)
        advance(str(outcome.case))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    rows = [as_row(outcome, impl, device) for outcome in outcomes]
    table = [["case", "max abs error", "tolerance", "outcome"]]
    table += [
        [str(o.case), f"{o.errors.max_abs:.2e}", f"{o.tolerance.max_abs:.2e}", o.failure or "passed"] for o in outcomes
    ]
    what = "torch's attention on the CPU" if reason else ", ".join(sorted({str(row["kernel"]) for row in rows}))
    summary = f"{len(outcomes) - len(failed)} of {len(outcomes)} cases passed by {what}"
    if reason:
        summary += f"; {', '.join(family.name for family in FAMILIES)} not run: {reason}"
    result = results.make("verify", command, rows)
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    return Step("verify", "failed" if failed else "passed", summary, table, result)


def bench_step(
    progress: Progress = _no_progress,
    suite: str = "mission",
    modes: list[str] | None = None,
    impl: str = "auto",
    output: Path | None = None,
    command: str = COMMAND,
) -> Step:
    """A suite, microsdpa against torch's backends; the gate is that microsdpa is never wrong and always there."""
    if reason := launcher.device_error():
        return Step("bench", "not run", f"timings need a GPU: {reason}")
    loaded = load(suite)
    modes = modes or list(MODES)
    implementations = microsdpa_implementations(impl) + torch_peers()
    advance = progress("bench", len(loaded.cases) * len(implementations))
    rows = bench.run(loaded, implementations, modes, impl, advance)
    result = results.make(loaded.name, command, rows)
    bad = [row for row in rows if row["impl"] == "microsdpa" and row["status"] != "ok"]
    table = [["case", "mode", "implementation", "us", "TFLOP/s", "status"]]
    table += [
        [
            str(case),
            row["mode"],
            " ".join(filter(None, (row["impl"], row["variant"]))),
            "" if row["median_us"] is None else f"{quoted_us(row):.2f}",
            "" if row["tflops"] is None else f"{row['tflops']:.1f}",
            row["reason"] or row["status"],
        ]
        for case in loaded.cases
        for row in rows
        if results.row(case)["shape"] == row["shape"]
        and (case.dtype, case.causal or "none") == (row["dtype"], row["mask"])
    ]
    summary = f"{len(rows)} rows of suite {loaded.name}, {len(bad)} of microsdpa's wrong or missing"
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    return Step("bench", "failed" if bad else "passed", summary, table, result)


def run(directory: Path, progress: Progress = _no_progress) -> list[Step]:
    """All steps in order; writes index.html, report.json and the result files below `directory`."""
    output = directory / "results"
    plan: list[tuple[str, Callable[[], Step]]] = [
        ("info", lambda: info_step(progress)),
        ("compile", lambda: compile_step(progress)),
        ("verify", lambda: verify_step(progress, output=output)),
        ("bench", lambda: bench_step(progress, output=output)),
    ]
    steps = []
    for name, make in plan:
        start = time.perf_counter()
        try:
            step = make()
        except (MicrosdpaError, RuntimeError) as error:
            step = Step(name, "failed", f"{type(error).__name__}: {error}")
        step.seconds = time.perf_counter() - start
        steps.append(step)
    write_report(steps, directory)
    return steps


def write_report(steps: list[Step], directory: Path) -> None:
    """index.html, one self-contained page, and report.json, everything."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "report.json").write_text(json.dumps([asdict(step) for step in steps], indent=1) + "\n")
    source = resources.files("microsdpa.evidence").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    (directory / "index.html").write_text(environment.from_string(source).render(steps=steps), encoding="utf-8")
