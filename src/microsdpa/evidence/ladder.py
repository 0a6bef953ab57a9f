"""`microsdpa ladder`: every rung at one shape: what it takes, what it was compiled to, and how wrong it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from microsdpa import reference
from microsdpa.emulate import build
from microsdpa.emulate import run as emulator
from microsdpa.evidence import ada, compare, ladder_table, results, worker
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.peers.ours import QuantizedTensors
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.evidence.suites import Suite, load
from microsdpa.execution import quantized
from microsdpa.jit import compile_kernel
from microsdpa.jit.occupancy import occupancy
from microsdpa.kernels import EIGHT_BIT_FAMILIES, FAMILIES, KernelSpec, family_named
from microsdpa.kernels.eight_bit import MIN_CAPABILITY
from microsdpa.kernels.problem import Problem, capability_of, target_of
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

SUITE = "ladder"
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
        emulated_error: largest absolute error of the emulated run; with 8 bits, of the dequantized values.
        ada_tensor_instructions: of the same rung for sm_89.
        ada_least_us: what an L4 would take at least, by the roofline; not measured.
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
    ada_tensor_instructions: str = ""
    ada_least_us: float | None = None


def rungs(target: str = ada.TARGET) -> list[str]:
    """Names of the rungs that a target can run, in their order."""
    names = [family.name for family in FAMILIES]
    if capability_of(target) >= MIN_CAPABILITY:
        names += [family.name for family in EIGHT_BIT_FAMILIES]
    return sorted(name for name in names if name.startswith("ladder/"))


def specification(rung: str, case: Case, target: str) -> tuple[KernelSpec, Problem]:
    """The kernel of a rung for a case, and its problem; with 8 bits that of E4M3 values with a scale a head."""
    problem = case.problem(target)
    if _takes_eight_bits(rung):
        problem = replace(problem, operands="fp8", key_block=0)
    return select(problem, rung).spec, problem


def _takes_eight_bits(rung: str) -> bool:
    family = family_named(rung)
    return family is not None and family.eight_bit


def figures(rung: str, case: Case, target: str) -> Figures:
    """Compile a rung for a case and a target, and run it in the emulator on EMULATED."""
    spec, _ = specification(rung, case, target)
    kernel = compile_kernel(spec, target)
    shared = kernel.resources.shared_bytes + spec.shared_bytes
    held = occupancy(target, spec.threads, kernel.resources.registers, shared)
    expected = ada.expectation(rung, *specification(rung, case, ada.TARGET), case)
    report, error = emulated(rung, target)
    opaque = any("mma.h" in site.place for site in report.bank_sites)
    return Figures(
        registers=kernel.resources.registers,
        shared_bytes=shared,
        spill_bytes=kernel.resources.spill_store_bytes + kernel.resources.spill_load_bytes,
        ctas=held.ctas,
        occupancy=held.fraction,
        limit=held.limit,
        tensor_instructions=ada.tensor_words(kernel.cubin),
        bank_conflicts=None if opaque else report.bank_conflicts,
        bank_wavefronts=report.counters["bank_wavefronts"],
        emulated_error=error,
        ada_tensor_instructions=expected.tensor_instructions,
        ada_least_us=expected.least_us,
    )


def emulated(rung: str, target: str) -> tuple[emulator.Report, float]:
    """Counters, bank conflicts and largest error of a rung on EMULATED."""
    tensors = make(EMULATED)
    spec, problem = specification(rung, EMULATED, target)
    out = torch.full_like(tensors[0], torch.nan)
    if problem.operands is None:
        report = emulator.attention(spec, problem, (*tensors, out, None), count_banks=True)
        return report, compare.measure(out, reference.oracle(*tensors)[0]).max_abs
    made = QuantizedTensors.of(tensors)
    inputs = dict(zip(("query", "key", "value"), made.values, strict=True))
    inputs |= {f"{name}_scale": x.scale for name, x in zip(("query", "key", "value"), made.quantized, strict=True)}
    places = {name: quantized.Place.of(name, x) for name, x in {**inputs, "out": out}.items()}
    launch = quantized.attending(spec, problem, places, EMULATED.head_dim**-0.5)
    report = emulator.one_kernel(launch.spec, launch.grid, launch.filled, inputs, {"out": out}, count_banks=True)
    return report, compare.measure(out, reference.oracle(*made.dequantized())[0]).max_abs


def step(progress: Progress = no_progress, output: Path | None = None, command: str = "microsdpa ladder") -> Step:
    """The table of all rungs; on a GPU with times, each rung in a process of its own, beside torch's backends."""
    suite = load(SUITE)
    reason = launcher.device_error()
    target = ada.TARGET if reason else target_of(torch.cuda.get_device_capability())
    names = rungs(target)
    advance = progress("ladder", 2 * len(names) + 1)
    if reason:
        found = _all_figures(suite, names, target, advance)
        table = ladder_table.columns([{"kernel": name, "figures": asdict(found[name])} for name in names], None)
        summary = f"{len(names)} rungs compiled for {target} and emulated; times need a GPU: {reason}"
        return Step("ladder", "passed", summary, table, data={name: asdict(f) for name, f in found.items()})

    rows: list[results.Row] = []
    with _processes(suite, [*names, ""]) as waiting:  # which rehearse while the rungs are compiled and emulated
        found = _all_figures(suite, names, target, advance)
        for process in waiting.values():
            process.wait_until_ready()
        for name in names:
            rows += _timed(suite, name, waiting[name])
            advance(name)
        rows += _timed(suite, "", waiting[""])
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


def _all_figures(suite: Suite, names: list[str], target: str, advance: Callable[[str], None]) -> dict[str, Figures]:
    """Figures of every rung, and every kernel of the suite compiled; the compilers run beside the emulator."""
    mission, found = suite.cases[0], {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # neither compiler holds the GIL
        pending: list[Future[Any]] = []
        for name in names:
            emulated_spec = specification(name, EMULATED, target)[0]
            pending.append(pool.submit(build.load, emulated_spec, params=emulated_spec.params))
            for case, chip in ((mission, target), (mission, ada.TARGET)):
                pending.append(pool.submit(compile_kernel, specification(name, case, chip)[0], chip))
        if target != ada.TARGET:  # to be timed
            rest = {specification(name, case, target)[0]: None for name in names for case in suite.cases[1:]}
            pending += [pool.submit(compile_kernel, spec, target) for spec in rest]
        for name in names:
            found[name] = figures(name, mission, target)
            advance(name)
        for job in pending:
            job.result()
    return found


def _what(suite: Suite, rung: str) -> tuple[Suite, list[str], str, str]:
    """What worker.run takes for a rung, or for torch under the empty name."""
    if _takes_eight_bits(rung):
        suite = replace(suite, eight_bit=frozenset(suite.cases))
    return suite, ["graph"], rung or "auto", "none" if rung else TORCH_PEERS


@contextmanager
def _processes(suite: Suite, names: list[str]) -> Iterator[dict[str, worker.Worker]]:
    """A process for every rung, and for torch under the empty name; those whose turn did not come are ended."""
    waiting = {name: worker.Worker(worker.jobs(*_what(suite, name))[0][1]) for name in names}
    try:
        yield waiting
    finally:
        for process in waiting.values():
            process.abandon()


def _timed(suite: Suite, rung: str, process: worker.Worker) -> list[dict[str, Any]]:
    """Rows of a suite in a graph, measured in one process: those of the rung, or without one those of torch."""
    found = worker.run(*_what(suite, rung), waiting=[process])
    wanted = [row for row in found if row["op"] != "empty" and (row["impl"] == "microsdpa") == bool(rung)]
    return [row | {"kernel": row["kernel"] or rung or None} for row in wanted]  # one that died has no kernel
