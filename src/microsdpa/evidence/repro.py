"""`microsdpa repro`: info, compile, verify, probe, bench, and a report of all that ran and of what could not."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from microsdpa import reference
from microsdpa.emulate.run import Schedule
from microsdpa.emulate.run import attention as run_kernel
from microsdpa.errors import InvalidArgument, MicrosdpaError, UnsupportedProblem
from microsdpa.evidence import (
    accuracy,
    block,
    compare,
    context_parallel,
    door_eight_bit,
    door_models,
    door_pages,
    doors,
    environment,
    probes,
    report,
    results,
    resume,
    roofline_page,
    serving,
    start,
    steps,
    survey,
    training,
    verify_eight_bit,
    worker,
)
from microsdpa.evidence.cases import emulated_cases, needs_gpu, verify_cases
from microsdpa.evidence.devices import named
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.peers import choose
from microsdpa.evidence.plots import files as plot_files
from microsdpa.evidence.plots.charts import Results
from microsdpa.evidence.probe_list import PROBES
from microsdpa.evidence.step import Progress, Step, Together, no_progress
from microsdpa.evidence.suites import ALL, Some, chosen, load, some_of
from microsdpa.evidence.verify import as_row, check, problem_of
from microsdpa.evidence.wording import case_name, us_with_interval
from microsdpa.kernels import catalogue, emulated_target
from microsdpa.kernels.problem import Precision, target_of
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

COMMAND = "microsdpa repro"
SUITES = ("mission", "small", "decode", "fp8", "real", "prefill")
MEMORY_OF_A_PROCESS = 2 * 2**30
"""GPU memory for each process that waits for its turn: what CUDA and its libraries take, and some to spare."""
REPORT = "report"
SECONDS_OF_FEW = {"compile": 30, "verify": 40, "roofline": 4, REPORT: 10}
SECONDS_OF_ALL = {"compile": 300, "verify": 400, "roofline": 4, REPORT: 10}
"""Of the long steps without a GPU, on two cores; what counts is their ratio. With a GPU each step has its own bar."""
COMMITTED, COMMITTED_GPU = Path("benchmarks/results"), "h200"


def info_step(progress: Progress = no_progress) -> Step:
    """What is here."""
    facts = survey.info()
    rows = [["fact", "value"]]
    for name, value in facts.items():
        if isinstance(value, dict) and len(set(value.values())) == 1:  # one reason for all of them
            rows.append([name, f"{next(iter(value.values()))} ({', '.join(value)})"])
        elif isinstance(value, dict):
            rows += [[f"{name}: {key}", str(entry)] for key, entry in value.items()]
        else:
            rows.append([name, "none" if value is None else str(value)])
    return Step("info", "passed", f"{facts['gpu'] or 'no GPU'}, NVRTC {facts['nvrtc']}", rows, data=facts)


def compile_step(
    progress: Progress = no_progress, targets: list[str] | None = None, *, every: bool = False, few: bool = False
) -> Step:
    """Every kernel, in some or in every configuration, for every target; each must compile, none use local memory.

    With `few` each kernel is compiled once, for the first target that has it, and one kernel for every target.
    """
    targets = targets or list(survey.TARGETS)
    jobs = [(spec, target) for target in targets for spec in catalogue(target, every=every)]
    bare = [target for target in targets if target not in {target for _, target in jobs}]
    if few:
        jobs = survey.once_each(jobs)
    rows = survey.compile_all(jobs, progress("compile", len(jobs)))
    failed = [row for row in rows if row.failure]
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
    if few:
        summary += "; --full compiles every kernel for every target"
    return Step("compile", "failed" if failed or bare else "passed", summary, table, data=[asdict(row) for row in rows])


def verify_step(
    progress: Progress = no_progress,
    impl: str = "auto",
    output: Path | None = None,
    command: str = COMMAND,
    *,
    ptx: str | None = None,
    few: bool = False,
) -> Step:
    """Every verify case, on the GPU when there is one, else by the same kernels in the emulator.

    With `ptx`, a target such as "sm_89", the GPU runs what its driver makes of that target's PTX. With `few`, where
    there is no GPU, kernels of several architectures run a few cases each.
    """
    reason = launcher.device_error()
    if ptx and reason:
        return Step("verify", "not run", f"PTX is compiled by the driver of a GPU: {reason}")
    launcher.use_ptx_of(ptx)
    device = "cpu" if reason or impl.startswith("emulate") else "cuda"
    if device == "cpu" and not impl.startswith("emulate"):
        impl = "emulate" if impl == "auto" else f"emulate:{impl}"
    cases = [(case, impl) for case in verify_cases()]
    if few and device == "cpu":
        cases = [(case, f"emulate:{kernel}") for kernel, case in emulated_cases()]
    left_out = {case: why for case, _ in cases if device == "cpu" and (why := needs_gpu(case))}
    cases = [(case, by) for case, by in cases if case not in left_out]
    advance = progress("verify", len(cases))
    if device == "cuda" and not ptx:
        target = launcher.target_of_device()
        survey.compile_ahead((problem_of(case, target) for case, _ in cases), impl)
    outcomes, rows = [], []
    for case, by in cases:
        try:
            outcomes.append(check(case, device, by))
            rows.append(as_row(outcomes[-1], by, device))
        except UnsupportedProblem as refusal:
            if by in ("auto", "emulate"):
                raise
            left_out[case] = str(refusal)  # a kernel that was named need not compute every problem
        advance(str(case))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    table = [["case", "max abs error", "tolerance", "outcome"]]
    table += [
        [str(o.case), f"{o.errors.max_abs:.2e}", f"{o.tolerance.max_abs:.2e}", o.failure or "passed"] for o in outcomes
    ]
    table += [[str(case), "", "", f"not run: {why}"] for case, why in left_out.items()]
    where = (
        f"from the PTX of {ptx} on the GPU"
        if ptx
        else "on the GPU"
        if device == "cuda"
        else "in the emulator, on the CPU"
    )
    kernels = ", ".join(sorted({str(row["kernel"]) for row in rows}))
    summary = f"{len(outcomes) - len(failed)} of {len(outcomes)} cases passed by {kernels} {where}"
    if reason and device == "cpu":
        summary += f" (not on a GPU: {reason})"
    if left_out:
        summary += f"; {len(left_out)} not run: {'; '.join(sorted(set(left_out.values())))}"
    if few:
        summary += "; --full runs every case"
    result = results.make(f"verify_ptx_{ptx}" if ptx else "verify", command, rows)
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    return Step("verify", "failed" if failed else "passed", summary, table, data=result)


def emulate_step(case: Case, impl: str, schedule: Schedule, precision: Precision | None = None) -> Step:
    """One case in the emulator: its counters, bank conflicts by source line, and the error against the oracle.

    With `precision` the attention kernel runs on quantized operands, and the oracle on what these are dequantized to.
    """
    query, key, value = make(case)
    out = torch.full_like(query, torch.nan)
    if precision is None:
        problem = case.problem(emulated_target(impl))
        spec = select(problem, impl).spec
        start = time.perf_counter()
        operands = query, key, value, out, None
        report = run_kernel(spec, problem, operands, case.scale, schedule=schedule, count_banks=True)
        seconds = time.perf_counter() - start
        expected, _ = reference.oracle(query, key, value, causal=case.causal, scale=case.scale)
        eager, _ = reference.eager(query, key, value, causal=case.causal, scale=case.scale)
        allowed = compare.tolerance(eager, expected, query.dtype)
    else:
        problem = verify_eight_bit.problem_of(case, precision, emulated_target(impl))
        spec = select(problem, impl).spec
        start = time.perf_counter()
        report = verify_eight_bit.emulated(spec, problem, case, precision, out, schedule)
        seconds = time.perf_counter() - start
        expected, allowed = verify_eight_bit.expected(spec, case, precision)
    errors = compare.measure(out, expected)
    table = [["counter", "value"]]
    table += [[name.replace("_", " "), f"{value:,}"] for name, value in report.counters.items()]
    table += [
        [f"bank conflicts at {site.place}", f"{site.conflicts:,} of {site.wavefronts:,} wavefronts"]
        for site in report.bank_sites
    ]
    passed = allowed.admits(errors)
    data = {
        "kernel": spec.name,
        "case": str(case),
        "counters": report.counters,
        "bank_sites": [asdict(site) | {"conflicts": site.conflicts} for site in report.bank_sites],
        "error": compare.as_record(errors, allowed),
    }
    summary = (
        f"{spec.name} on {case}: max abs error {errors.max_abs:.2e} (tolerance {allowed.max_abs:.2e}), "
        f"{report.bank_conflicts} bank conflicts, {seconds:.2f} s"
    )
    return Step("emulate", "passed" if passed else "failed", summary, table, data=data)


def probe_step(progress: Progress = no_progress, output: Path | None = None, command: str = COMMAND) -> Step:
    """Every instruction that the emulator models, against this machine's GPU."""
    if reason := launcher.device_error():
        return Step("probe", "not run", f"the emulator is compared with a GPU: {reason}")
    target = target_of(torch.cuda.get_device_capability())
    rows = probes.compare_all(target, progress("probe", len(PROBES)))
    failed = [row for row in rows if row["status"] != "ok"]
    table = [["instruction", "words", "distance", "allowed", "outcome"]]
    table += [
        [
            row["kernel"],
            str(row["compared_words"]),
            f"{row['distance']} {row['unit']}",
            str(row["allowed"]),
            row["reason"] or "passed",
        ]
        for row in rows
    ]
    summary = f"{len(rows) - len(failed)} of {len(rows)} instructions agree with the emulator on {target}"
    result = results.make("instructions", command, rows)
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    return Step("probe", "failed" if failed else "passed", summary, table, data=result)


def bench_step(
    progress: Progress = no_progress,
    suite: str = "mission",
    modes: list[str] | None = None,
    impl: str = "auto",
    some: Some = ALL,
    output: Path | None = None,
    command: str = COMMAND,
    ahead: worker.Rehearsals | None = None,
) -> Step:
    """A suite, microsdpa against its peers; the gate is that microsdpa is right and fails at nothing it accepts.

    `ahead` may have processes that have rehearsed the suite as it is. Where `some` of the cells are measured, rows of
    the others that lie below `output` stay, as completed() of results has it.
    """
    until = None if some.seconds is None else time.time() + some.seconds
    of_doors = suite == doors.SUITE  # its cells are doors, and not the cases
    has_cells = of_doors or suite in (block.SUITE, steps.SUITE, serving.SUITE)
    loaded = load(suite) if some.is_all or has_cells else chosen(load(suite), some)
    peers = some.peers or loaded.peers
    choose(peers, bool(loaded.eight_bit))
    if suite == training.SUITE and modes not in (None, ["graph"]):
        hint = "leave --modes out: both passes are timed in CUDA graphs"
        raise InvalidArgument("modes", expected="graph for suite backward", got=",".join(modes or []), hint=hint)
    if suite == start.SUITE and modes:
        hint = "leave --modes out, or name another suite"
        raise InvalidArgument(
            "modes", expected="none for suite start, which times first calls", got=",".join(modes), hint=hint
        )
    if (has_cells or suite == context_parallel.SUITE) and some.seconds is not None:
        hint = "--part 1/2 and --part 2/2 take half of the time each"
        raise InvalidArgument("seconds", expected=f"none for suite {suite}", got=f"{some.seconds:g}", hint=hint)
    if reason := launcher.device_error():
        return Step("bench", "not run", f"timings need a GPU: {reason}")

    if suite == context_parallel.SUITE:
        if reason := context_parallel.absence():
            return Step("bench", "not run", f"suite {suite} needs several processes: {reason}")
        output = output if context_parallel.is_first() else None

    def keep(found: list[results.Row]) -> None:
        if output is not None:
            made = results.make(loaded.name, command, found)
            whole = made if some.is_all else results.completed(made, output, case_name, not loaded.drawn)
            results.write(whole, output)

    if suite == start.SUITE and not some.is_all:
        hint = "leave --cells, --part and --seconds out, or name another suite"
        raise InvalidArgument("cells", expected=f"all of suite {suite}", got="some of them", hint=hint)
    if suite == start.SUITE:
        rows = start.run(loaded.cases[0], progress(suite, len(start.STARTS)), keep)
    elif of_doors:
        ways = some_of(
            [*doors.doors(), *door_eight_bit.doors(), *door_pages.doors(), *door_models.doors()],
            some,
            lambda door: f"{door.name} {door.text} {','.join(door.case.masks)}",
        )
        rows = doors.run(ways, modes or list(loaded.modes), progress(suite, len(ways)), keep)
    elif suite == training.SUITE:
        rows = training.run(loaded.cases, peers, progress(suite, len(loaded.cases)), keep, until)
    elif suite == serving.SUITE:
        cells = some_of(serving.cells(), some, str)
        rows = serving.run(cells, modes or list(loaded.modes), progress(suite, len(cells)), keep)
    elif suite == block.SUITE:
        calls, target = some_of(block.cells(), some, lambda cell: f"{cell} {cell.case}"), launcher.target_of_device()
        survey.compile_ahead((block.problem_of(cell, target) for cell in calls), "auto")
        rows = block.run(calls, modes or list(loaded.modes), progress(suite, len(calls)), keep)
    elif suite == steps.SUITE:
        models = some_of(steps.MODELS, some, lambda model: f"{model.cell} {model.cell.case}")
        survey.compile_ahead((block.problem_of(model.cell, launcher.target_of_device()) for model in models), "auto")
        rows = steps.run(models, modes or list(loaded.modes), progress(suite, len(models)), keep)
    elif suite == context_parallel.SUITE:
        rows = context_parallel.run(loaded.cases, progress(suite, len(loaded.cases)), keep)
    else:
        advance = progress(suite, len(loaded.cases))
        target = launcher.target_of_device()
        survey.compile_ahead((case.problem(target) for case in loaded.cases), impl)
        waiting = ahead.take(loaded.name) if ahead else None
        rows = worker.run(loaded, modes or list(loaded.modes), impl, peers, advance, waiting, until)
    result = results.make(loaded.name, command, rows)
    ours = [row for row in rows if row["impl"] == "microsdpa"]
    wrong = [row for row in ours if row["status"] == "wrong"]
    refused = {str(row["shape"]) + row["mask"] for row in ours if row["status"] == "unavailable"}
    table = [["case", "mode", "implementation", "us [95% interval of a median]", "TFLOP/s", "status"]]
    table += [
        [
            case_name(row),
            row["mode"],
            " ".join(filter(None, (row["impl"], row["variant"]))) if row["op"] != "empty" else row["impl"],
            us_with_interval(row),
            "" if row["tflops"] is None else f"{row['tflops']:.1f}",
            row["reason"] or row["status"],
        ]
        for row in rows
    ]
    summary = f"{len(loaded.cases)} cases of suite {loaded.name}, {len(wrong)} rows of microsdpa's wrong"
    if refused:
        summary += f", {len(refused)} cases refused by microsdpa"
    begun = {case_name(row) for row in rows if suite != training.SUITE or row["direction"] == "both"}
    if missing := len(loaded.cases) - len(begun) if some.seconds is not None else 0:
        summary += f", {missing} cases not begun within {some.seconds:g} seconds"
    if output is not None:
        keep(rows)
        summary += f"; wrote {results.path_below(output, result)}"
    return Step("bench", "failed" if wrong else "passed", summary, table, data=result)


def run(directory: Path, progress: Progress = no_progress, fresh: bool = False, full: bool = True) -> list[Step]:
    """All steps in order; writes the report, result files and the finished steps below `directory`.

    A step that passed before, with the same code on the same machine, is not taken again unless `fresh`. Without a GPU
    and without `full`, few kernels are compiled, and few cases are run.
    """
    output = directory / "results"
    on_gpu = launcher.device_error() is None
    few = not full and not on_gpu
    plan: dict[str, Callable[[Progress], Step]] = {
        "info": info_step,
        "compile": functools.partial(compile_step, few=few),
        "verify": functools.partial(verify_step, output=output, few=few),
        "probe": functools.partial(probe_step, output=output),
        "roofline": lambda _: roofline_page.step(roofline_page.MISSION, named("l4"), output),
    }
    finished = resume.Finished(directory / "steps", fresh, "few" if few else "")
    suites = {"bench": "mission"}
    if on_gpu:
        suites |= {f"bench {suite}": suite for suite in SUITES[1:]}
    ahead = _rehearse([suite for name, suite in suites.items() if finished.find(name) is None])
    for name, suite in suites.items():
        plan[name] = functools.partial(bench_step, suite=suite, output=output, ahead=ahead)
    if on_gpu:
        plan["accuracy"] = functools.partial(accuracy.step, output=output, command=COMMAND)
    found = {name: finished.find(name) for name in plan}
    shares = SECONDS_OF_FEW if few else SECONDS_OF_ALL
    together = Together(
        progress, "repro", {name: shares.get(name, 1) for name in (*plan, REPORT) if found.get(name) is None}
    )
    steps = []
    try:
        for name, take in plan.items():
            step = found[name]
            if step is None:
                start = time.perf_counter()
                try:
                    step = take(progress if on_gpu else together.of(name))
                except (MicrosdpaError, RuntimeError) as error:
                    step = Step(name, "failed", f"{type(error).__name__}: {error}")
                step.name, step.seconds = name, time.perf_counter() - start
                finished.keep(step)
                together.end(name, step.status)
            steps.append(step)
    finally:
        ahead.abandon()
    report.write(directory, steps, *_results_to_show(output))
    together.end(REPORT, "written")
    return steps


def _rehearse(suites: list[str]) -> worker.Rehearsals:
    """Processes that compile what these suites' peers need, while the steps before are taken; none without a GPU."""
    if launcher.device_error():
        return worker.Rehearsals([], 0)
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return worker.Rehearsals([load(suite) for suite in suites], memory // MEMORY_OF_A_PROCESS)


def _results_to_show(output: Path) -> tuple[Results, str]:
    """What this run measured; else what the checkout has, for want of a GPU; and a line that says which."""
    own = environment.gpu_name()
    if own:
        return plot_files.load(output / environment.gpu_slug(own)), f"Measured in this run, on {own}."
    committed = plot_files.load(COMMITTED / COMMITTED_GPU)
    if committed:
        return committed, f"No GPU here: these are the committed results of {COMMITTED / COMMITTED_GPU}."
    return {}, "No GPU here, and no committed results where this was run."
