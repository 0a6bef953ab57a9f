"""`microsdpa evidence mutate`: every mutation of a kernel that is generated, and whether the emulator's cases catch it.

Each call of a fence, wait, arrive, sync or commit is left out in turn, and each comparison with a length moved by one.
What survives is either proved to change nothing, in a comment beside it, or is a case that the tests lack.

A log has a line of JSON for every mutation that was tried. A run with the same log goes on where the last one ended:
a line holds as long as the kernel's code, the cases and the emulator are what they were. Comments may change.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from microsdpa import reference
from microsdpa.emulate import build, run
from microsdpa.emulate.run import EmulationError, Schedule
from microsdpa.errors import CompileError, InvalidArgument
from microsdpa.evidence import compare, mutate_varlen, results
from microsdpa.evidence.fuzz_check import merged
from microsdpa.evidence.inputs import Case, make, make_masks, masks_of
from microsdpa.evidence.mutate_sites import EXPLAINED, Site, sites
from microsdpa.evidence.mutate_varlen import PackedCase
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.evidence.verify import problem_of
from microsdpa.jit.signature import code_signature
from microsdpa.jit.source import KERNELS_DIR
from microsdpa.kernels import FAMILIES, ONE_LENGTH, VARLEN_FAMILIES, KernelSpec, family_named
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

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
    Case(1, 3, 64, 130, 64, scale=-0.3),  # consumers without a row, and a round without a query tile for the last CTA
    Case(1, 3, 192, 256, 64, causal="lower_right"),  # tiles that some consumers skip, ahead of another query tile
    Case(1, 2, 160, 64, 64, causal="lower_right", scale=-0.3),  # query tiles without a key
    Case(1, 2, 3, 2, 64, masks=("window", "alibi")),  # rows that see one key
    Case(1, 2, 70, 260, 64, masks=("float32",)),  # a mask of numbers in a ring of its own
    Case(1, 2, 70, 300, 64, masks=("documents",)),  # ranges of keys, whose query tiles are dealt out
)
"""Those that a kernel computes are what it is tried on, LSE included, in two orders of threads."""
OWN_CASES: dict[str, tuple[tuple[Case, str], ...]] = {
    "hopper/split": ((Case(1, 1, 1600, 1600, 64, causal="upper_left"), ""),),  # stages of a ring pass by twice
    "hopper/throughput": (
        # A consumer without rows, and one that sees fewer tiles than the other, beside a mask of numbers.
        (Case(1, 3, 192, 224, 64, causal="lower_right", masks=("additive",)), ""),
        (Case(1, 3, 192, 224, 64, causal="lower_right", masks=("additive", "alibi")), ""),  # the last keys first
        # Numbers whose rows do not start on 16 bytes, which lanes copy: two bytes each, and four.
        (Case(1, 3, 192, 227, 64, causal="lower_right", masks=("additive",)), ""),
        (Case(1, 2, 70, 301, 64, masks=("float32",)), ""),
        (Case(1, 2, 70, 301, 64, masks=("slice",)), ""),  # the mask itself does not start on 16 bytes
        (Case(1, 2, 70, 300, 64, causal="lower_right", masks=("documents",)), ""),
        (Case(1, 3, 200, 450, 64), "192 x 128"),  # S and P V in turn
        (Case(1, 2, 70, 300, 64, masks=("bool",)), ""),  # a list of three tiles, each of which several warps read
        (Case(1, 1, 150, 2200, 64, masks=("padding",)), ""),  # more tiles than warps, in words that all queries share
        (Case(1, 2, 200, 450, 64, masks=("blocks 50%",)), ""),  # lists of a table
        (Case(1, 2, 200, 450, 160, causal="lower_right", masks=("blocks 50%", "window")), ""),  # of which parts are cut
        # Keys that CTAs share, of rows that some of them see no key of; and columns that change CTAs in several goes.
        (Case(1, 2, 200, 260, 64, causal="lower_right"), "128 x 128 overlapped, 2 CTAs"),
        (Case(1, 2, 130, 200, 192, scale=30.0), "128 x 64 overlapped, 4 CTAs"),
        (Case(1, 3, 70, 600, 64), "128 x 128 overlapped, 2 CTAs"),  # a cluster without a last tile of queries
    ),
    "ampere/mma": ((Case(1, 2, 5, 700, 64, masks=("bool",)), ""),),  # more tiles of keys than a ring has
}
"""Further cases of one kernel, each with the name of a configuration, or empty for the chosen one."""
CONTINUED = (
    Case(1, 3, 192, 130, 64, causal="lower_right"),
    Case(1, 2, 70, 127, 64, masks=("bool", "sinks")),
)
"""Cases that go on from an output and an LSE of other keys, for the kernels that do."""
ONE_LENGTH_CASES = (
    Case(1, 8, 40, 2000, 64, heads_kv=4, causal="lower_right"),  # numbered tiles of keys
    Case(1, 5, 30, 1600, 64, heads_kv=1, scale=-0.3),  # parts, and rows that no copy of queries writes
    Case(2, 6, 33, 200, 80, heads_kv=2, layout="bshd", causal="lower_right"),  # whole tiles of rows
    Case(1, 14, 9, 150, 64, heads_kv=2, scale=-0.2),  # clusters, whose CTAs have one consumer
)
"""Calls of one length by a kernel for sequences of many, of CTAS_OF_ONE_LENGTH."""
CTAS_OF_ONE_LENGTH = 3
GUARD = 1 << 16
"""Elements behind the output and the LSE that no kernel may write to."""
FURTHER = {"hopper/split": "128 queries, 2 parts of the keys"}
"""Configurations, by kernel and name, that only larger problems choose: they are tried on the same cases."""
CTAS = 2
"""Of a persistent kernel, so that each takes several query tiles."""
SCHEDULES = (Schedule(0, late=True), Schedule(1, late=False))
TARGET = "sm_90a"
"""Launches are programmatic there, and all production kernels run."""
SECONDS = 600
SOURCES = (".cc", ".h", ".cuh")
"""Suffixes of the emulator's files."""
CAUGHT, SURVIVED, NO_PROGRAM, SAME, REDUNDANT = (
    "caught",
    "survived",
    "does not compile",
    "same program",
    "proved redundant",
)
VERDICTS = (CAUGHT, NO_PROGRAM, SAME, REDUNDANT, SURVIVED)
COMMAND = "microsdpa evidence mutate"
SUITE = "mutations"
NOT_RECORDED = f"*Not recorded yet: `{COMMAND} --log LOG --output benchmarks/results` writes the result file.*\n"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one mutation: `said` is the emulator's error, or what is wrong."""

    site: Site
    verdict: str
    said: str = ""


def kernels() -> list[str]:
    """Names of the production kernels."""
    return [family.name for family in (*FAMILIES, *VARLEN_FAMILIES) if not family.name.startswith("ladder/")]


class Trial(NamedTuple):
    """A case that a kernel computes, and how; `problem` says whether it goes on from an output of other keys."""

    case: Case | PackedCase
    spec: KernelSpec
    problem: Problem

    @property
    def stages(self) -> tuple[KernelSpec, ...]:
        """All kernels that it runs."""
        if isinstance(self.case, PackedCase):
            return mutate_varlen.stages(self.case, self.spec, self.problem)
        return tuple(self.spec.stages)


def specifications(kernel: str) -> list[Trial]:
    """The cases that a kernel computes, and how."""
    family = family_named(kernel)
    if family is None or kernel not in kernels():
        known = ", ".join(kernels())
        raise InvalidArgument("kernel", expected=f"one of {known}", got=repr(kernel), hint="name a production kernel")
    if family in VARLEN_FAMILIES:
        one_length = _of_one_length() if kernel == ONE_LENGTH.name else []
        packed = [Trial(case, *how) for case in mutate_varlen.cases() for how in mutate_varlen.of(case, kernel)]
        return packed + one_length
    found = []
    plain = (*((case, "") for case in CASES), *OWN_CASES.get(kernel, ()))
    continued = CONTINUED if family.continues else ()
    for case, configuration, goes_on in (*((*one, False) for one in plain), *((case, "", True) for case in continued)):
        if case.masks and not family.masks:
            continue
        problem = dataclasses.replace(problem_of(case, TARGET), continued=goes_on)
        spec = family.configurations(problem)[configuration] if configuration else family.specify(problem)
        if not isinstance(spec, KernelSpec):
            continue
        few = dataclasses.replace(spec, max_ctas=CTAS * spec.cluster) if spec.max_ctas else spec
        found.append(Trial(case, few, problem))
        if kernel in FURTHER:
            found.append(Trial(case, family.configurations(problem)[FURTHER[kernel]], problem))
    return found


def _of_one_length() -> list[Trial]:
    """Calls of one length by a kernel for sequences of many."""
    found = []
    for case in ONE_LENGTH_CASES:
        problem = problem_of(case, TARGET)
        spec = ONE_LENGTH.specify(problem)
        assert isinstance(spec, KernelSpec)
        few = dataclasses.replace(spec, max_ctas=CTAS_OF_ONE_LENGTH) if spec.cluster == 1 else spec
        found.append(Trial(case, few, problem))
    return found


def wrong(trial: Trial, root: Path, schedule: Schedule) -> str:
    """What is wrong with one case of a tree of sources; empty if nothing is."""
    case, spec, problem = trial
    if isinstance(case, PackedCase):
        return mutate_varlen.wrong(case, spec, problem, root, schedule)
    (query, key, value), masks = make(case), make_masks(case)
    whole = [torch.full((query.numel() + GUARD,), torch.nan, dtype=t) for t in (query.dtype, torch.float32)]
    out, lse = (t[: math.prod(s)].view(s) for t, s in zip(whole, (query.shape, query.shape[:3]), strict=True))
    if problem.continued:
        out.copy_(query.roll(1, 2))
        lse.copy_(3.0 + query[..., 0].float())
    previous = (out.clone(), lse.clone()) if problem.continued else None
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
    if previous is not None:
        expected, plain = merged(previous, *expected), merged(previous, *plain)
    for name, got, exact, rough in zip(("output", "LSE"), (out, lse), expected, plain, strict=True):
        if not compare.tolerance(rough, exact, got.dtype).admits(compare.measure(got, exact)):
            return f"the {name} is wrong"
    for name, memory, part in zip(("output", "LSE"), whole, (out, lse), strict=True):
        if not memory[part.numel() :].isnan().all():
            return f"memory behind the {name} is written to"
    return ""


def tried(kernel: str, root: Path) -> tuple[str, str]:
    """The verdict on a tree of sources and what was said: by the first case that shows anything."""
    same = True
    for trial in specifications(kernel):
        try:
            if root != KERNELS_DIR and all(_code(stage, root) == _code(stage, KERNELS_DIR) for stage in trial.stages):
                continue
            same = False
            for schedule in SCHEDULES:
                if said := wrong(trial, root, schedule):
                    return CAUGHT, f"{trial.case}: {said}"
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


class Log:
    """The mutations of a kernel that were tried, a line of JSON each, in a file that later runs add to.

    Args:
        path: the file, which need not exist; None keeps nothing.
        kernel: a production kernel's name.
    """

    def __init__(self, path: Path | None, kernel: str) -> None:
        self._path, self._kernel, self._tested = path, kernel, tested(kernel)
        self._lock = threading.Lock()
        self._found: dict[str, tuple[str, str]] = {}
        text = path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
        if path is not None and text and not text.endswith("\n"):  # a run was ended while it wrote
            path.write_text(text := text[: text.rfind("\n") + 1], encoding="utf-8")
        for line in text.splitlines():
            one = json.loads(line)
            if one["tested"] == self._tested:
                self._found[one["name"]] = one["verdict"], one["said"]

    def find(self, name: str) -> tuple[str, str] | None:
        """What became of a mutation, by its name()."""
        return self._found.get(name)

    def keep(self, name: str, site: Site, verdict: str, said: str) -> None:
        """Add what became of a mutation."""
        if self._path is None:
            return
        line = {"tested": self._tested, "kernel": self._kernel, "name": name, "line": site.line}
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"verdict": verdict, "said": said}) + "\n")


def tested(kernel: str) -> str:
    """Digest of all that a kernel's verdicts depend on: its code, its cases and the emulator."""
    parts = [
        f"{trial.case} {code_signature(stage, TARGET)}" for trial in specifications(kernel) for stage in trial.stages
    ]
    parts += [str(SCHEDULES), *(path.read_text() for path in sorted(build.HERE.rglob("*")) if path.suffix in SOURCES)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def names(chosen: Iterable[Site]) -> dict[Site, str]:
    """A name of each of a kernel's mutations that holds when comments change: "file: kind of code", and a number."""
    seen: Counter[str] = Counter()
    found = {}
    for site in chosen:
        name = f"{site.file}: {site.kind} in {site.text.partition('//')[0].strip()}"
        seen[name] += 1
        found[site] = f"{name} #{seen[name]}"
    return found


def outcomes(
    kernel: str,
    chosen: dict[Site, str],
    jobs: int,
    advance: Callable[[str], None] = lambda message: None,
    path: Path | None = None,
) -> list[Outcome]:
    """What becomes of each mutation, `jobs` at a time.

    Args:
        kernel: a production kernel's name.
        chosen: the mutations with their names().
        jobs: processes at a time.
        advance: is told of each that is done.
        path: of the log.

    Raises:
        InvalidArgument: the kernel fails its cases as it is.
    """
    log = Log(path, kernel)
    with tempfile.TemporaryDirectory() as cache:
        if any(log.find(name) is None for name in chosen.values()):
            build.lend(Path(cache))
            verdict, said = _outcome(kernel, None, cache)
            if verdict != SURVIVED:  # every case was run, and nothing said
                raise InvalidArgument(
                    "kernel", expected="one that is right", got=f"{kernel}: {said}", hint="mend it first"
                )

        def one(site: Site) -> Outcome:
            known = log.find(chosen[site])
            verdict, said = known or _outcome(kernel, site, cache)
            if known is None:
                log.keep(chosen[site], site, verdict, said)
            if verdict == SURVIVED and site.explained:
                verdict, said = REDUNDANT, site.explained
            advance(f"{site.file}:{site.line} {verdict}")
            return Outcome(site, verdict, said)

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, chosen))


def all_sites(kernel: str) -> dict[Site, str]:
    """The mutations of a kernel, with their names()."""
    stages = [stage for trial in specifications(kernel) for stage in trial.stages]
    return names(dict.fromkeys(site for stage in stages for site in sites(stage.source, KERNELS_DIR)))


def step(
    kernel: str = "",
    jobs: int = 0,
    sample: int | None = None,
    progress: Progress = no_progress,
    output: Path | None = None,
    command: str = COMMAND,
    only: str = "",
    log: Path | None = None,
) -> Step:
    """All mutations of a kernel, or of every production kernel; it fails when one survives unexplained.

    Args:
        kernel: a production kernel's name; empty for all of them.
        jobs: processes at a time; 0 for one on each core.
        sample: so many of a kernel's mutations, at even distances.
        progress: makes a bar for each kernel.
        output: the results directory, for a run of all mutations.
        command: for the result file.
        only: what the place of a mutation begins with, "hopper/split/consumer.cuh:121" or a part of it.
        log: file that keeps what was found, and from which a run goes on.

    Raises:
        InvalidArgument: the kernel has no such name, or fails its cases as it is; no mutation is at `only`; or a part
            of the mutations would be recorded.
    """
    if output is not None and (only or sample is not None):
        raise InvalidArgument(
            "output", expected="all mutations", got="a part", hint="leave out --only and --sample to record a table"
        )
    found: dict[str, list[Outcome]] = {}
    everything = 0
    for name in [kernel] if kernel else kernels():
        chosen = {site: key for site, key in all_sites(name).items() if f"{site.file}:{site.line}".startswith(only)}
        everything += (count := len(chosen))
        if sample is not None and sample < count:
            order = list(chosen)
            chosen = {site: chosen[site] for site in (order[i * count // sample] for i in range(sample))}
        if chosen:
            found[name] = outcomes(name, chosen, jobs or os.cpu_count() or 1, progress(name, len(chosen)), log)
    if not found:
        raise InvalidArgument("only", expected="the place of a mutation", got=repr(only), hint="name a file and a line")
    every = [outcome for one in found.values() for outcome in one]
    counts = Counter(outcome.verdict for outcome in every)
    survivors = [outcome for outcome in every if outcome.verdict == SURVIVED]
    table = [["place", "mutation", "line", "verdict"]]
    table += [[f"{o.site.file}:{o.site.line}", o.site.kind, o.site.text, o.verdict] for o in survivors]
    summary = f"{len(every)} of {everything} mutations of {', '.join(found)}: "
    summary += ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    if survivors:
        summary += f"; give a survivor a test, or a comment '// {EXPLAINED} why it changes nothing' beside it"
    rows = [row for name, outcomes_of in found.items() for row in _rows(name, outcomes_of)]
    result = results.make(f"{SUITE}_{kernel.replace('/', '_')}" if kernel else SUITE, command, rows)
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    return Step("mutate", "failed" if survivors else "passed", summary, table if survivors else [], data=result)


def _rows(kernel: str, found: list[Outcome]) -> list[results.Row]:
    case, _, problem = specifications(kernel)[0]
    spec = select(problem, kernel).spec  # as it is chosen, with all CTAs of a GPU
    packed: dict[str, Any] = {}
    if isinstance(case, PackedCase):
        packed = {"varlen": problem.varlen, "rounded_queries": problem.seqlen_q}
        packed |= {"packed_queries": True} if problem.packed_queries else {}
    return [
        results.row(
            case.call.case() if isinstance(case, PackedCase) else case,
            **packed,
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


def markdown(result: results.Result, is_stale: Callable[[results.Row, str], bool]) -> str:
    """How many mutations of each kernel came to what, and a line for each that survived."""
    lines = [["kernel", "mutations", *VERDICTS], ["---"] + ["---:"] * 6]
    kernels_of: dict[str, list[results.Row]] = {}
    for row in result["rows"]:
        kernels_of.setdefault(row["kernel"], []).append(row)
    for kernel, rows in kernels_of.items():
        stale = " (stale)" if is_stale(rows[0], rows[0]["target"]) else ""
        counts = Counter(row["label"] for row in rows)
        lines.append([f"{kernel}{stale}", str(len(rows)), *(str(counts[verdict]) for verdict in VERDICTS)])
    survivors = "".join(f"- survived: `{row['case']}`\n" for row in result["rows"] if row["label"] == SURVIVED)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + (f"\n{survivors}" if survivors else "")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(tried(sys.argv[1], Path(sys.argv[2]))))
