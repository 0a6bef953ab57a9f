"""`microsdpa evidence mutate`: every mutation of a kernel that is generated, and whether the emulator's cases catch it.

Each call of a fence, wait, arrive, sync or commit is left out in turn, and each comparison with a length moved by one.
What survives is either proved to change nothing, in a comment beside it, or is a case that the tests lack.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from microsdpa import reference
from microsdpa.emulate import build, run
from microsdpa.emulate.run import EmulationError, Schedule
from microsdpa.errors import CompileError, InvalidArgument
from microsdpa.evidence import compare, results
from microsdpa.evidence.inputs import Case, make, make_masks, masks_of
from microsdpa.evidence.mutate_sites import EXPLAINED, Site, sites
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.evidence.verify import problem_of
from microsdpa.jit.signature import code_signature
from microsdpa.jit.source import KERNELS_DIR
from microsdpa.kernels import FAMILIES, KernelSpec, family_named
from microsdpa.kernels.problem import Problem

CASES = (
    Case(1, 2, 65, 130, 64),
    Case(1, 1, 140, 319, 64, causal="lower_right"),
    Case(1, 2, 3, 700, 64),
    Case(2, 2, 70, 127, 64, heads_kv=1, causal="upper_left"),
    Case(1, 1, 66, 129, 128),
    Case(1, 2, 40, 191, 64, causal="lower_right", masks=("window", "bool")),
    Case(1, 1, 20, 70, 40),
    Case(1, 6, 130, 200, 64, causal="lower_right", scale=-0.3),
    Case(1, 2, 65, 130, 64, scale=30.0),
    Case(1, 2, 70, 127, 64, scale=30.0, masks=("bool",)),
)
"""Those that a kernel computes are what it is tried on, LSE included, in two orders of threads."""
CTAS = 2
"""Of a persistent kernel, so that each takes several query tiles."""
SCHEDULES = (Schedule(0, late=True), Schedule(1, late=False))
TARGET = "sm_90a"
"""Launches are programmatic there, and all production kernels run."""
SECONDS = 600
CAUGHT, SURVIVED, NO_PROGRAM, SAME, REDUNDANT = (
    "caught",
    "survived",
    "does not compile",
    "same program",
    "proved redundant",
)
VERDICTS = (CAUGHT, NO_PROGRAM, SAME, REDUNDANT, SURVIVED)
COMMAND = "microsdpa evidence mutate"
PREFIX = "mutations_"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one mutation: `said` is the emulator's error, or what is wrong."""

    site: Site
    verdict: str
    said: str = ""


def kernels() -> list[str]:
    """Names of the production kernels."""
    return [family.name for family in FAMILIES if not family.name.startswith("ladder/")]


def specifications(kernel: str) -> list[tuple[Case, KernelSpec]]:
    """The cases that a kernel computes, and how."""
    family = family_named(kernel)
    if family is None or kernel not in kernels():
        known = ", ".join(kernels())
        raise InvalidArgument("kernel", expected=f"one of {known}", got=repr(kernel), hint="name a production kernel")
    found = []
    for case in CASES:
        if case.masks and not family.masks:
            continue
        spec = family.specify(problem_of(case, TARGET))
        if isinstance(spec, KernelSpec):
            found.append((case, dataclasses.replace(spec, max_ctas=CTAS) if spec.max_ctas else spec))
    return found


def wrong(case: Case, spec: KernelSpec, problem: Problem, root: Path, schedule: Schedule) -> str:
    """What is wrong with one case of a tree of sources; empty if nothing is."""
    (query, key, value), masks = make(case), make_masks(case)
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:3], torch.nan)
    try:
        run.attention(
            *(spec, problem, (query, key, value, out, lse), case.scale),
            schedule=schedule,
            masks=masks_of(case),
            root=root,
        )
    except EmulationError as error:
        return error.problem
    options: dict[str, Any] = {"causal": case.causal, "scale": case.scale, **masks}
    expected, plain = (f(query, key, value, **options) for f in (reference.oracle, reference.eager))
    for name, got, exact, rough in zip(("output", "LSE"), (out, lse), expected, plain, strict=True):
        if not compare.tolerance(rough, exact, got.dtype).admits(compare.measure(got, exact)):
            return f"the {name} is wrong"
    return ""


def tried(kernel: str, root: Path) -> tuple[str, str]:
    """The verdict on a tree of sources and what was said: by the first case that shows anything."""
    same = True
    for case, spec in specifications(kernel):
        try:
            if root != KERNELS_DIR and all(_code(stage, root) == _code(stage, KERNELS_DIR) for stage in spec.stages):
                continue
            same = False
            for schedule in SCHEDULES:
                if said := wrong(case, spec, problem_of(case, TARGET), root, schedule):
                    return CAUGHT, f"{case}: {said}"
        except CompileError as error:
            return NO_PROGRAM, error.summary
    return (SAME if same else SURVIVED), ""


def _code(spec: KernelSpec, root: Path) -> bytes:
    """The instructions of a kernel that is built for the emulator: those of what it does not use are not there."""
    library = build.load(spec, root)
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory, "text")
        command = ["objcopy", "-O", "binary", "--only-section=.text", str(library.path), str(text)]
        subprocess.run(command, check=True, capture_output=True)
        return text.read_bytes()


def _outcome(kernel: str, site: Site | None, cache: str) -> tuple[str, str]:
    """tried() in a process of its own: a mutation may hang or crash. Without a site, the kernel is as it is."""
    with tempfile.TemporaryDirectory() as directory:
        root = KERNELS_DIR
        if site is not None:
            root = Path(directory, "kernels")
            shutil.copytree(KERNELS_DIR, root)
            site.apply(root)
        command = [sys.executable, "-m", "microsdpa.evidence.mutate", kernel, str(root)]
        environment = os.environ | {"MICROSDPA_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        try:
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return CAUGHT, f"it does not end within {SECONDS} s"
    if ended.returncode:
        return CAUGHT, f"the process ended with {ended.returncode}"
    verdict, said = json.loads(ended.stdout.splitlines()[-1])
    return str(verdict), str(said)


def outcomes(
    kernel: str, chosen: list[Site], jobs: int, advance: Callable[[str], None] = lambda message: None
) -> list[Outcome]:
    """What becomes of each mutation, `jobs` at a time.

    Raises:
        InvalidArgument: the kernel fails its cases as it is.
    """
    with tempfile.TemporaryDirectory() as cache:
        verdict, said = _outcome(kernel, None, cache)
        if verdict != SURVIVED:  # every case was run, and nothing said
            raise InvalidArgument("kernel", expected="one that is right", got=f"{kernel}: {said}", hint="mend it first")

        def one(site: Site) -> Outcome:
            verdict, said = _outcome(kernel, site, cache)
            if verdict == SURVIVED and site.explained:
                verdict, said = REDUNDANT, site.explained
            advance(f"{site.file}:{site.line} {verdict}")
            return Outcome(site, verdict, said)

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, chosen))


def step(
    kernel: str,
    jobs: int = 0,
    sample: int | None = None,
    progress: Progress = no_progress,
    output: Path | None = None,
    command: str = COMMAND,
) -> Step:
    """All mutations of one kernel, or `sample` of them at even distances; it fails when one survives unexplained."""
    computed = specifications(kernel)
    chosen = list(
        dict.fromkeys(
            site for _, spec in computed for stage in spec.stages for site in sites(stage.source, KERNELS_DIR)
        )
    )
    everything = len(chosen)
    if sample is not None and sample < everything:
        chosen = [chosen[i * everything // sample] for i in range(sample)]
    found = outcomes(kernel, chosen, jobs or os.cpu_count() or 1, progress("mutate", len(chosen)))
    case, spec = computed[0]
    rows = [
        results.row(
            case,
            kernel=kernel,
            code_signature=code_signature(spec, TARGET),
            target=TARGET,
            requested=kernel,
            op="mutation",
            mode="verify",
            label=outcome.verdict,
            case=f"{outcome.site.file}:{outcome.site.line}, {outcome.site.kind}: {outcome.site.text}",
            status="wrong" if outcome.verdict == SURVIVED else "ok",
            reason=outcome.said or ("no case shows it" if outcome.verdict == SURVIVED else ""),
        )
        for outcome in found
    ]
    counts = Counter(outcome.verdict for outcome in found)
    survivors = [outcome for outcome in found if outcome.verdict == SURVIVED]
    table = [["place", "mutation", "line", "verdict"]]
    table += [[f"{o.site.file}:{o.site.line}", o.site.kind, o.site.text, o.verdict] for o in survivors]
    summary = f"{len(found)} of {everything} mutations of {kernel} on {len(computed)} cases: "
    summary += ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    if survivors:
        summary += f"; give a survivor a test, or a comment '// {EXPLAINED} why it changes nothing' beside it"
    result = results.make(f"{PREFIX}{kernel.replace('/', '_')}", command, rows)
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    return Step("mutate", "failed" if survivors else "passed", summary, table if survivors else [], data=result)


def markdown(result: results.Result, is_stale: Callable[[results.Row, str], bool]) -> str:
    """How many mutations of a kernel came to what, and a line for each that survived."""
    rows = result["rows"]
    stale = " (stale)" if any(is_stale(row, row["target"]) for row in rows[:1]) else ""
    lines = [["kernel", "mutations", *VERDICTS], ["---"] + ["---:"] * 6]
    counts = Counter(row["label"] for row in rows)
    numbers = [str(counts[verdict]) for verdict in VERDICTS]
    lines.append([f"{rows[0]['kernel']}{stale}", str(len(rows)), *numbers])
    survivors = "".join(f"- survived: `{row['case']}`\n" for row in rows if row["label"] == SURVIVED)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + (f"\n{survivors}" if survivors else "")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(tried(sys.argv[1], Path(sys.argv[2]))))
