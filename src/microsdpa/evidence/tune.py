"""`microsdpa tune`: every legal configuration of the kernels on a suite, and what the choice among them costs.

The regret of a choice is how much longer it takes than the fastest configuration measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import torch

from microsdpa.call.options import OPTIONS
from microsdpa.evidence import results, survey
from microsdpa.evidence.bench import CaseBench
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers import Call, Implementation, Tensors
from microsdpa.evidence.results import Result, Row
from microsdpa.evidence.signatures import problem_of
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.evidence.suites import load
from microsdpa.evidence.wording import case_name, provenance
from microsdpa.jit.signature import code_signature, signature
from microsdpa.kernels import KernelSpec, configurations
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

COMMAND = "microsdpa tune"
PREFIX = "tune_"
"""Of a result file's suite, before the name of the suite of cases."""
MOST_REGRET = 0.05
HEAD = ["(B, H, S_q, S_k, D), dtype, mask", "chosen", "us", "fastest", "us", "regret", "measured"]


class Configuration(Implementation):
    """One configuration of a kernel, launched in spite of what impl="auto" would choose."""

    name = "microsdpa"
    where = "device"

    def __init__(self, label: str, spec: KernelSpec, target: str, chosen: bool) -> None:
        self.variant = label
        self.spec = spec
        self.target = target
        self.chosen = chosen

    def identity(self, case: Case, tensors: Tensors) -> dict[str, object]:
        """The kernel, and whether the library would have run it."""
        return {
            "kernel": self.spec.name,
            "signature": signature(self.spec, self.target),
            "code_signature": code_signature(self.spec, self.target),
            "chosen": self.chosen,
        }

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """A plan of its own, which later calls of sdpa do not find."""
        options = OPTIONS[False, case.causal, case.kv_heads != case.heads, "auto", None]
        query, key, value = tensors
        foreign = query, key, value, out, None, options, case.scale
        launcher.prepare(case.problem(self.target), self.spec, foreign)
        launch = launcher.prepared_call(foreign)
        launcher.forget_plans()

        def call() -> torch.Tensor:
            launch(query, key, value, out, None)
            return out

        return call


def of_problem(problem: Problem, kernels: Iterable[str] = ()) -> dict[str, KernelSpec]:
    """Configurations by their labels, of some kernels or of all; the one that impl="auto" takes is always there."""
    wanted = tuple(kernels)
    chosen = select(problem).spec
    found = {label: spec for label, spec in configurations(problem).items() if not wanted or spec.name in wanted}
    return found if chosen in found.values() else found | {chosen.name: chosen}


def step(
    suite: str,
    kernels: Iterable[str] = (),
    progress: Progress = no_progress,
    output: Path | None = None,
    command: str = COMMAND,
    most_regret: float = MOST_REGRET,
) -> Step:
    """Measure a suite; the gate is that every configuration is right, and that no choice is worse than it may be."""
    cases = load(suite).cases
    if reason := launcher.device_error():
        return Step("tune", "not run", f"timings need a GPU: {reason}")
    target = launcher.target_of_device()
    by_case = {case: of_problem(case.problem(target), kernels) for case in cases}
    stages = {stage for found in by_case.values() for spec in found.values() for stage in spec.stages}
    survey.compile_together((stage, target) for stage in stages)
    advance = progress("tune", len(cases))
    rows: list[Row] = []
    for case, found in by_case.items():
        chosen = select(case.problem(target)).spec
        candidates = [Configuration(label, spec, target, spec == chosen) for label, spec in found.items()]
        rows += [row for row in CaseBench(case).run(candidates, ["graph"]) if row["op"] != "empty"]
        advance(str(case))
    result = results.make(PREFIX + suite, command, rows)
    found_regrets = regrets(rows)
    wrong = [row for row in rows if row["status"] == "wrong"]
    above = [regret for regret in found_regrets if regret.value is None or regret.value > most_regret]
    summary = (
        f"{len(cases)} cases of suite {suite}, {len(rows)} configurations, {len(wrong)} wrong; "
        f"{len(above)} choices with a regret above {most_regret:.0%}, {geometric_mean(found_regrets):.1%} in the mean"
    )
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    sections = [("All configurations, us", _every(rows))]
    return Step("tune", "failed" if wrong or above else "passed", summary, table(result), sections, result)


@dataclass(frozen=True)
class Regret:
    """What the choice for one case costs.

    Attributes:
        case: its name.
        chosen: row of the configuration that the library took.
        best: row of the fastest one.
        measured: configurations that were timed.
    """

    case: str
    chosen: Row
    best: Row | None
    measured: int

    @property
    def value(self) -> float | None:
        """A fraction; None where the chosen configuration was not timed."""
        if self.best is None or self.chosen["median_us"] is None:
            return None
        return float(self.chosen["median_us"] / self.best["median_us"] - 1)


def regrets(rows: list[Row]) -> list[Regret]:
    """One for every case, in the rows' order."""
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(case_name(row), []).append(row)
    found = []
    for name, members in by_case.items():
        timed = [row for row in members if row["status"] == "ok"]
        chosen = next(row for row in members if row["chosen"])
        best = min(timed, key=lambda row: float(row["median_us"]), default=None)
        found.append(Regret(name, chosen, best, len(timed)))
    return found


def geometric_mean(found: list[Regret]) -> float:
    """Of the ratios, less one; of no regrets, nothing."""
    values = [regret.value for regret in found if regret.value is not None]
    return exp(sum(log(1 + value) for value in values) / len(values)) - 1 if values else 0.0


def table(result: Result) -> list[list[str]]:
    """A header and a line a case. Configurations whose code, or whose choice, is another now are marked."""
    target = result["environment"].get("target") or ""
    lines = [HEAD]
    for regret in regrets(result["rows"]):
        cells = [regret.case]
        for row in (regret.chosen, regret.best):
            cells += ["", ""] if row is None else [row["variant"] + _mark(row, target), _us(row)]
        value = "" if regret.value is None else f"{regret.value:.1%}"
        lines.append([*cells, value, str(regret.measured)])
    return lines


def markdown(result: Result) -> str:
    """The table of `table`, and where it is from."""
    lines = table(result)
    lines.insert(1, ["---", "---", "---:", "---", "---:", "---:", "---:"])
    mean = f"Geometric mean of the regrets: {geometric_mean(regrets(result['rows'])):.1%}."
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{mean}\n\n{provenance(result)}"


def _every(rows: list[Row]) -> list[list[str]]:
    lines = [["case", "configuration", "us", "status"]]
    return lines + [[case_name(row), row["variant"], _us(row), row["reason"] or row["status"]] for row in rows]


def _us(row: Row) -> str:
    return f"{row['median_us']:.2f}" if row["median_us"] is not None else str(row["status"])


def _mark(row: Row, target: str) -> str:
    problem = problem_of(row, target or "sm_90a")
    spec = of_problem(problem).get(row["variant"])
    same = spec is not None and code_signature(spec, problem.target) == row["code_signature"]
    same_choice = spec is not None and (select(problem).spec == spec) == row["chosen"]
    return "" if same and same_choice else " (stale)"
