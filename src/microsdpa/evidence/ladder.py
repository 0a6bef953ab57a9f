"""`microsdpa ladder`: every rung at one shape: what it takes, what it was compiled to, and how wrong it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from microsdpa import reference
from microsdpa.emulate import run as emulator
from microsdpa.evidence import compare, ladder_table, results, worker
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.evidence.suites import Suite, load
from microsdpa.jit import compile_kernel
from microsdpa.jit.inspect import count_instructions, find_nvdisasm, tensor_instructions
from microsdpa.jit.occupancy import occupancy
from microsdpa.problem import target_of
from microsdpa.runtime import launcher
from microsdpa.select import select
from microsdpa.specs import FAMILIES

SUITE = "ladder"
MISSION_TARGET = "sm_89"
TORCH_PEERS = "torch,torch-flash,torch-cudnn,torch-efficient,torch-math"
EMULATED = Case(1, 1, 64, 256, 64)
"""What bank conflicts are counted on: one tile of queries and several of keys."""


@dataclass(frozen=True)
class Figures:
    """What is known of a rung without running it on a GPU.

    Attributes:
        shared_bytes: static and dynamic.
        ctas: that an SM holds at a time.
        limit: what keeps the SM from holding more.
        bank_conflicts: passes lost of those made, counted in the emulator; None where fragments have a layout that is
            the emulator's own (wmma).
        emulated_error: largest absolute error of the emulated run.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    ctas: int
    occupancy: float
    limit: str
    tensor_instructions: str
    bank_conflicts: int | None
    bank_wavefronts: int
    emulated_error: float


def rungs() -> list[str]:
    """Names of the rungs, in their order."""
    return [family.name for family in FAMILIES if family.name.startswith("ladder/")]


def figures(rung: str, case: Case, target: str) -> Figures:
    """Compile a rung for a case and a target, and run it in the emulator on EMULATED."""
    spec = select(case.problem(target), rung).spec
    kernel = compile_kernel(spec, target)
    shared = kernel.resources.shared_bytes + spec.shared_bytes
    held = occupancy(target, spec.threads, kernel.resources.registers, shared)
    counts = tensor_instructions(count_instructions(kernel.cubin)) if find_nvdisasm() else None
    tensor = "not counted" if counts is None else " ".join(f"{n} {c}" for n, c in counts.items()) or "none"

    tensors = make(EMULATED)
    out = torch.full_like(tensors[0], torch.nan)
    problem = EMULATED.problem(target)
    emulated = select(problem, rung).spec
    report = emulator.attention(emulated, problem, *tensors, out, None, None, count_banks=True)
    opaque = any("mma.h" in site.place for site in report.bank_sites)
    return Figures(
        registers=kernel.resources.registers,
        shared_bytes=shared,
        spill_bytes=kernel.resources.spill_store_bytes + kernel.resources.spill_load_bytes,
        ctas=held.ctas,
        occupancy=held.fraction,
        limit=held.limit,
        tensor_instructions=tensor,
        bank_conflicts=None if opaque else report.bank_conflicts,
        bank_wavefronts=report.counters["bank_wavefronts"],
        emulated_error=compare.measure(out, reference.oracle(*tensors)[0]).max_abs,
    )


def step(progress: Progress = no_progress, output: Path | None = None, command: str = "microsdpa ladder") -> Step:
    """The table of all rungs; on a GPU with times, each rung in a process of its own, beside torch's backends."""
    suite = load(SUITE)
    reason = launcher.device_error()
    target = MISSION_TARGET if reason else target_of(torch.cuda.get_device_capability())
    names = rungs()
    advance = progress("ladder", len(names) + 1)
    found: dict[str, Figures] = {}
    rows: list[results.Row] = []
    for name in names:
        found[name] = figures(name, suite.cases[0], target)
        if not reason:
            rows += _timed(suite, name, "none", keep=lambda row: row["impl"] == "microsdpa")
        advance(name)
    if reason:
        table = ladder_table.columns([{"kernel": name, "figures": asdict(found[name])} for name in names], None)
        summary = f"{len(names)} rungs compiled for {target} and emulated; times need a GPU: {reason}"
        return Step("ladder", "passed", summary, table, data={name: asdict(f) for name, f in found.items()})

    rows += _timed(suite, names[-1], TORCH_PEERS, keep=lambda row: row["impl"] != "microsdpa")
    advance("torch")
    for row in rows:
        if (
            row["impl"] == "microsdpa"
            and row["kernel"] in found
            and results.row(suite.cases[0])["shape"] == row["shape"]
        ):
            row["figures"] = asdict(found[row["kernel"]])
    result = results.make(SUITE, command, rows)
    wrong = [row for row in rows if row["impl"] == "microsdpa" and row["status"] != "ok"]
    sections = [("At other shapes, us", ladder_table.shapes(result))]
    summary = f"{len(names)} rungs, {len(wrong)} rows wrong or missing"
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    table = ladder_table.mission(result)
    return Step("ladder", "failed" if wrong else "passed", summary, table, sections, result)


def _timed(suite: Suite, rung: str, peers: str, keep: Callable[[results.Row], bool]) -> list[dict[str, Any]]:
    """Rows of a suite in a graph, measured in one process, of the implementations that `keep` wants."""
    return [row for row in worker.run(suite, ["graph"], rung, peers) if keep(row) and row["op"] != "empty"]
