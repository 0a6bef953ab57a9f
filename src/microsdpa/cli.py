"""The command line. Exit codes: 0 every gate that ran passed; 1 a gate failed; 2 wrong usage; 3 it cannot run here."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer

from microsdpa import __version__
from microsdpa.call.tensors import check_impl as check_kernel
from microsdpa.console import print_error, print_json, print_status, print_table, progress
from microsdpa.emulate.run import Schedule
from microsdpa.errors import MicrosdpaError
from microsdpa.evidence import (
    accuracy,
    ceilings,
    fuzz,
    learning,
    models,
    mutate,
    profile,
    suites,
    tune,
    verify_eight_bit,
    verify_quantizers,
    verify_torch,
)
from microsdpa.evidence import regress as regression
from microsdpa.evidence import render as rendering
from microsdpa.evidence import report as report_page
from microsdpa.evidence import repro as reproduction
from microsdpa.evidence import resign as resigning
from microsdpa.evidence.devices import DEVICES, named
from microsdpa.evidence.fuzz_calls import DOORS, Door
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.ladder import step as ladder_step
from microsdpa.evidence.plots import files as plot_files
from microsdpa.evidence.results import read
from microsdpa.evidence.roofline_page import default_device
from microsdpa.evidence.roofline_page import step as roofline_step
from microsdpa.evidence.step import Step
from microsdpa.evidence.survey import TARGETS
from microsdpa.evidence.timing import MODES
from microsdpa.kernels.problem import OPERANDS, capability_of, virtual
from microsdpa.runtime import launcher

EXIT_FAILED, EXIT_USAGE, EXIT_CANNOT_RUN = 1, 2, 3

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
evidence = typer.Typer(help="Tables in README and docs, from result files.", no_args_is_help=True)
app.add_typer(evidence, name="evidence")


class Dtype(str, Enum):
    """Types of the tensors."""

    float16 = "float16"
    bfloat16 = "bfloat16"


class Alignment(str, Enum):
    """Causal alignments."""

    upper_left = "upper_left"
    lower_right = "lower_right"


Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Impl = Annotated[str, typer.Option(help="'auto' or the name of a kernel, such as ladder/01_scalar.")]
Output = Annotated[Path | None, typer.Option(help="Directory of result files to write <gpu>/<suite>.json to.")]
Shape = Annotated[str, typer.Option(help="B,H,S_q,S_k,D or B,H,H_kv,S_q,S_k,D.")]
TensorDtype = Annotated[Dtype, typer.Option("--dtype", help="Type of the tensors.")]
Causal = Annotated[Alignment | None, typer.Option(help="Causal alignment.")]
ResultsBelow = Annotated[Path, typer.Option("--results", help="Directory of result files.")]
ReportDirectory = Annotated[Path, typer.Option("--report", help="Directory to write the report to.")]
COMMITTED = reproduction.COMMITTED
MAX_THREADS = 8


def _command() -> str:
    """The command line for a result file, without the directory that it writes to: that is a machine's own."""
    kept: list[str] = []
    for argument in sys.argv[1:]:
        if kept and kept[-1] == "--output":
            kept.pop()
        elif not argument.startswith("--output="):
            kept.append(argument)
    return shlex.join(["microsdpa", *kept])


def _finish(steps: list[Step], as_json: bool, tables: bool = True) -> NoReturn:
    if as_json:
        print_json([asdict(step) for step in steps] if len(steps) > 1 else asdict(steps[0]))
    for step in [] if as_json else steps:
        if tables and step.table:
            print_table(step.table)
        for title, table in step.sections if tables else []:
            print(f"\n{title}")
            print_table(table)
        print_status(step.name, step.status, step.summary)
    if any(step.status == "failed" for step in steps):
        raise typer.Exit(EXIT_FAILED)
    raise typer.Exit(EXIT_CANNOT_RUN if all(step.status == "not run" for step in steps) else 0)


def _version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command()
def info(as_json: Json = False) -> None:
    """GPU, driver, torch, NVRTC, cache, and what is supported here or why not."""
    _finish([reproduction.info_step()], as_json)


@app.command("compile")
def compile_(
    arch: Annotated[list[str] | None, typer.Option(help="Targets, such as sm_89; may be repeated.")] = None,
    extra: Annotated[list[str] | None, typer.Argument(help="Further targets.", metavar="[TARGET]...")] = None,
    every: Annotated[bool, typer.Option("--every", help="Every configuration, not a few of each kernel.")] = False,
    as_json: Json = False,
) -> None:
    """Compile the kernels, with or without a GPU: registers, shared memory, spills, tensor instructions."""
    targets = [*(arch or []), *(extra or [])] or list(TARGETS)
    for target in targets:
        try:
            capability_of(target)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    with progress() as bars:
        step = reproduction.compile_step(bars, targets, every=every)
    _finish([step], as_json)


@app.command()
def verify(
    impl: Impl = "auto",
    output: Output = None,
    ptx: Annotated[str | None, typer.Option(help="Run the PTX of another target's kernels, such as sm_89.")] = None,
    precision: Annotated[
        str | None, typer.Option(help=f"Check 8-bit operands instead: all, or one of {', '.join(OPERANDS)}.")
    ] = None,
    torch_cases: Annotated[
        bool, typer.Option("--torch-cases", help="Run the calls of torch's own tests through F.sdpa instead.")
    ] = False,
    sample: Annotated[int | None, typer.Option(min=1, help="So many of torch's cases, at random; else all.")] = None,
    random_calls: Annotated[
        int | None, typer.Option("--fuzz", min=1, help="Make so many random calls through every door instead.")
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="With --fuzz: calls with gradients alone.")] = False,
    training: Annotated[bool, typer.Option("--training", help="Train small transformers instead.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --sample or --fuzz.")] = 0,
    as_json: Json = False,
) -> None:
    """Check every case against the FP64 oracle."""
    if backward and random_calls is None:
        raise typer.BadParameter("backward: expected --fuzz N beside it, got none")
    if random_calls is not None:
        doors: tuple[Door, ...] = ("backward",) if backward else DOORS
        with progress() as bars:
            step = fuzz.step(random_calls, seed, bars, output, _command(), doors)
        _finish([step], as_json)
    if training:
        with progress() as bars:
            step = learning.step(bars, output, _command())
        _finish([step], as_json)
    if torch_cases:
        with progress() as bars:
            step = verify_torch.step(bars, sample, seed, output, _command())
        _finish([step], as_json)
    if ptx is not None:
        try:
            virtual(ptx)
        except ValueError as error:
            raise typer.BadParameter(f"ptx: {error}") from None
    if precision is not None:
        if precision not in ("all", *OPERANDS):
            raise typer.BadParameter(f"precision: expected all or one of {', '.join(OPERANDS)}, got {precision!r}")
        with progress() as bars:
            whole = precision == "all" and impl == "auto"
            if whole and ptx is None and launcher.device_error() is None:
                verify_quantizers.compile_ahead(launcher.target_of_device())
            step = verify_eight_bit.step(precision, bars, impl, ptx, verify_quantizers.parts if whole else lambda _: [])
        _finish([step], as_json)
    with progress() as bars:
        step = reproduction.verify_step(bars, impl, output, _command(), ptx=ptx)
    _finish([step], as_json)


@app.command("models")
def models_(
    names: Annotated[list[str] | None, typer.Argument(help="Model types, such as llama; else all.")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="So many models, at random; else all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of --sample.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; else cuda where there is a GPU.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of the models on a GPU; else float16.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Start no model after so long.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Hold tiny models of transformers and diffusers against their eager attention: padding, caches, generation."""
    there = device or ("cpu" if launcher.device_error() else "cuda")
    if there not in ("cpu", "cuda"):
        raise typer.BadParameter(f"device: expected cpu or cuda, got {device!r}")
    if there == "cpu" and dtype is not None:
        raise typer.BadParameter("dtype: expected none on a CPU, where models are compared in float32")
    with progress() as bars:
        step = models.step(
            bars,
            None if sample is None else (sample, seed),
            there,
            dtype and dtype.value,
            seconds,
            tuple(names or ()),
            output,
            _command(),
        )
    _finish([step], as_json)


@app.command("accuracy")
def accuracy_(
    seeds: Annotated[int, typer.Option(min=1, help="Sets of inputs of every kind.")] = accuracy.SEEDS,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Errors of 8-bit attention against the FP64 oracle, on the GPU or in the emulator, against their gates."""
    with progress() as bars:
        step = accuracy.step(bars, seeds, output, _command())
    _finish([step], as_json)


@app.command()
def probe(output: Output = None, as_json: Json = False) -> None:
    """Compare the emulator with this machine's GPU, instruction by instruction."""
    with progress() as bars:
        step = reproduction.probe_step(bars, output, _command())
    _finish([step], as_json)


@app.command()
def bench(
    suite: Annotated[str, typer.Option(help=f"Suite of cases: {', '.join(suites.names())}.")] = "mission",
    modes: Annotated[str | None, typer.Option(help=f"Some of {', '.join(MODES)}; else what the suite says.")] = None,
    peers: Annotated[
        str | None, typer.Option(help="all, none, or a list, such as torch-flash,torch-cudnn; else the suite's own.")
    ] = None,
    impl: Impl = "auto",
    cells: Annotated[str, typer.Option(help="Texts: cases whose name or label has one, such as documents,d72.")] = "",
    part: Annotated[str, typer.Option(help="1/3: every third case; results of the other parts are kept.")] = "",
    seconds: Annotated[float | None, typer.Option(help="Begin no case after so many seconds.", min=1)] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time a suite against its peers; every output is compared with the oracle first."""
    chosen = modes.split(",") if modes else None
    if unknown := [mode for mode in chosen or [] if mode not in MODES]:
        raise typer.BadParameter(f"modes: expected some of {', '.join(MODES)}, got {', '.join(unknown)}")
    with progress() as bars:
        some = suites.Some(peers, cells, part, seconds)
        step = reproduction.bench_step(bars, suite, chosen, check_kernel(impl), some, output, _command())
    _finish([step], as_json)


@app.command("tune")
def tune_(
    suite: Annotated[str, typer.Option(help=f"Suite of cases: {', '.join(suites.names())}.")] = "small",
    kernels: Annotated[str | None, typer.Option(help="Some kernels, such as hopper/latency; else all.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time every configuration of every kernel on a suite: how far the library's choice is from the fastest."""
    chosen = [check_kernel(name) for name in kernels.split(",")] if kernels else []
    with progress() as bars:
        step = tune.step(suite, chosen, bars, output, _command())
    _finish([step], as_json)


@app.command()
def regress(
    baseline: Annotated[Path, typer.Argument(help="Result file to compare with.", dir_okay=False)],
    candidate: Annotated[Path | None, typer.Argument(help="Result file; else the baseline's suite is run now.")] = None,
    threshold: Annotated[float, typer.Option(help="Slowdown that is tolerated, as a fraction.")] = 0.05,
    as_json: Json = False,
) -> None:
    """Compare two result files of a suite, and fail on a slowdown that is confirmed and above the threshold."""
    old = read(baseline)
    if candidate is not None:
        _finish([regression.step(old, read(candidate), threshold)], as_json)
    with progress() as bars:
        run = reproduction.bench_step(bars, old["suite"], sorted({row["mode"] for row in old["rows"]}))
    if run.status == "not run":
        _finish([run], as_json)
    _finish([run, regression.step(old, run.data, threshold)], as_json)


@app.command("profile")
def profile_(
    kernel: Annotated[str, typer.Argument(help="Kernel, such as ladder/01_scalar, or auto.")],
    shape: Shape = "1,8,512,512,64",
    dtype: TensorDtype = Dtype.float16,
    causal: Causal = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Run one call under Nsight Compute; print its metrics against the gates, and store them with the signature."""
    case = _case(shape, dtype, causal)
    _finish([profile.step(case, check_kernel(kernel), output, _command())], as_json)


@app.command()
def ladder(output: Output = None, as_json: Json = False) -> None:
    """Every rung of the ladder: times beside torch's, and registers, shared memory, occupancy, conflicts, error."""
    with progress() as bars:
        step = ladder_step(bars, output, _command())
    _finish([step], as_json)


@app.command()
def roofline(
    device: Annotated[str | None, typer.Option(help=f"One of {', '.join(DEVICES)}; else the GPU here, or l4.")] = None,
    measured: Annotated[bool, typer.Option("--measured", help="Measure the ceilings of the GPU here.")] = False,
    shape: Shape = "1,8,512,512,64",
    dtype: TensorDtype = Dtype.float16,
    causal: Causal = None,
    results: ResultsBelow = COMMITTED,
    as_json: Json = False,
) -> None:
    """Floors of a shape on a device, what they are bound by, and where measured kernels stand."""
    if measured and (reason := launcher.device_error()):
        _finish([Step("roofline", "not run", f"ceilings are measured on a GPU: {reason}")], as_json)
    chosen = ceilings.measure() if measured else named(device or default_device())
    _finish([roofline_step(_case(shape, dtype, causal), chosen, results)], as_json)


@app.command("report")
def report_(
    results: ResultsBelow = COMMITTED,
    gpu: Annotated[str, typer.Option(help="Folder of --results.")] = reproduction.COMMITTED_GPU,
    report: ReportDirectory = Path("report"),
) -> None:
    """Draw the report from result files."""
    found = plot_files.load(results / gpu)
    if not found:
        there = ", ".join(sorted(path.name for path in results.glob("*") if path.is_dir())) or "none"
        raise typer.BadParameter(f"gpu: expected a folder of {results} with result files ({there}), got {gpu!r}")
    page = report_page.write(report, [], found, f"From the result files of {results / gpu}.")
    print(f"report: {page}")


@app.command()
def repro(
    report: ReportDirectory = Path("report"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Take steps again that passed before.")] = False,
    as_json: Json = False,
) -> None:
    """All of it in order, ending in the report; goes on where an interrupted run stopped."""
    with progress() as bars:
        steps = reproduction.run(report, bars, fresh)
    if not as_json:
        print(f"report: {report / 'index.html'}")
    _finish(steps, as_json, tables=False)


def _case(shape: str, dtype: Dtype, causal: Alignment | None, seed: int = 0) -> Case:
    """The case of the options --shape, --dtype and --causal."""
    numbers = shape.split(",")
    if len(numbers) not in (5, 6) or not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise typer.BadParameter(f"shape: expected B,H,S_q,S_k,D or B,H,H_kv,S_q,S_k,D, got {shape!r}")
    batch, heads, *heads_kv, seqlen_q, seqlen_k, head_dim = map(int, numbers)
    case = Case(
        batch,
        heads,
        seqlen_q,
        seqlen_k,
        head_dim,
        heads_kv=heads_kv[0] if heads_kv else 0,
        dtype=dtype.value,
        causal=causal.value if causal else None,
        seed=seed,
    )
    if heads % case.kv_heads:
        raise typer.BadParameter(f"shape: H_kv must divide H, got {shape!r}")
    return case


@app.command()
def emulate(
    kernel: Annotated[str, typer.Argument(help="Kernel, such as ladder/01_scalar, or auto.")],
    shape: Shape = "1,8,512,512,64",
    dtype: TensorDtype = Dtype.float16,
    causal: Causal = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs and of the order of threads.")] = 0,
    early: Annotated[bool, typer.Option(help="Asynchronous copies arrive early, not late.")] = False,
    as_json: Json = False,
) -> None:
    """Run a kernel on the CPU with every access checked: counters, bank conflicts, error."""
    case = _case(shape, dtype, causal, seed)
    _finish([reproduction.emulate_step(case, check_kernel(kernel), Schedule(seed, late=not early))], as_json)


Root = Annotated[Path, typer.Option(help="Checkout of the project.", exists=True, file_okay=False)]
Results = Annotated[Path | None, typer.Option(help="Result files; by default benchmarks/results of the checkout.")]


@evidence.command()
def render(root: Root = Path(), results: Results = None) -> None:
    """Write the tables between the markers of README and docs from the result files."""
    for page in rendering.render(root, results or root / "benchmarks/results"):
        print(f"rendered {page}")


@evidence.command()
def check(root: Root = Path(), results: Results = None) -> None:
    """Fail when a rendered table and its result file differ."""
    differing = rendering.differing(root, results or root / "benchmarks/results")
    for page in differing:
        print_error(f"{page}: its tables are not what the result files say; run 'microsdpa evidence render'")
    if differing:
        raise typer.Exit(EXIT_FAILED)
    print("every table matches its result file")


@evidence.command("resign")
def resign_(
    old_ref: Annotated[str, typer.Argument(help="Commit that the rows were recorded with, or a path of a checkout.")],
    root: Root = Path(),
    results: Results = None,
    gpu: Annotated[str | None, typer.Option(help="One folder of the result files, such as h200; else all.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compare only; write nothing.")] = False,
    renamed: Annotated[
        list[str] | None,
        typer.Option(help="OLD=NEW: the old and the new name of a kernel; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Keep rows fresh whose kernels are the same machine code and launch as those of an old commit."""
    with progress() as bars:
        names = resigning.names_of(renamed or [])
        step = resigning.step(old_ref, root, results or root / "benchmarks/results", gpu, dry_run, names, bars)
    _finish([step], as_json)


@evidence.command("mutate")
def mutate_(
    kernel: Annotated[str, typer.Argument(help=f"One of {', '.join(mutate.kernels())}.")],
    jobs: Annotated[int, typer.Option(min=0, help="Processes at a time; 0 for one on each core.")] = 0,
    sample: Annotated[int | None, typer.Option(min=1, help="So many mutations, evenly chosen; else all.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Leave out each fence and wait of a kernel, and move each comparison with a length: does the emulator see it?"""
    with progress() as bars:
        step = mutate.step(kernel, jobs, sample, bars, output, _command())
    _finish([step], as_json)


def main() -> None:
    """Entry point: an error of the library becomes its message and exit code 2."""
    # The references are many small operations, for which the threads of a large machine wait longer than they compute.
    torch.set_num_threads(min(torch.get_num_threads(), MAX_THREADS))
    try:
        app()
    except MicrosdpaError as error:
        print_error(f"{type(error).__name__}: {error}")
        raise SystemExit(EXIT_USAGE) from None
