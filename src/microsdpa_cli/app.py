"""Exit codes: 0 every gate that ran passed; 1 a gate failed; 2 wrong usage; 3 it cannot run here."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from microsdpa_cli import names
from microsdpa_cli.console import print_error, print_json, print_status, print_table, progress

if TYPE_CHECKING:
    from microsdpa.evidence.inputs import Case
    from microsdpa.evidence.step import Step

EXIT_FAILED, EXIT_USAGE, EXIT_CANNOT_RUN, EXIT_INTERRUPTED = 1, 2, 3, 130
MAX_THREADS = 8

app = typer.Typer(
    help=f"Exact fused attention: check it, time it, look inside. {__doc__}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
evidence = typer.Typer(no_args_is_help=True)
cache = typer.Typer(no_args_is_help=True)
app.add_typer(
    evidence,
    name="evidence",
    help="Tables in README and docs, from result files.",
    short_help="Render, check and resign the tables of README and docs.",
    epilog="Example: microsdpa evidence check",
)
app.add_typer(
    cache,
    name="cache",
    help="The cache of compiled kernels.",
    short_help="Show or prune the cache of compiled kernels.",
    epilog="Example: microsdpa cache show",
)


def _command(group: typer.Typer, name: str, summary: str, example: str) -> Callable[[Callable[..., None]], Any]:
    """A command with a summary that fits a line, and an example below its help. Torch is loaded when it runs."""
    register = group.command(name, short_help=summary, epilog=f"Example: {example}")

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> None:
            import torch

            # The references are many small operations: they wait longer for a large machine's threads than they run.
            torch.set_num_threads(min(torch.get_num_threads(), MAX_THREADS))
            function(*arguments, **options)

        return register(run)

    return decorate


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
Suite = Annotated[str, typer.Option(help=f"Suite of cases: {', '.join(names.SUITES)}.")]


def command_line() -> str:
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
        from importlib.metadata import version

        print(version("microsdpa"))
        raise typer.Exit


@contextmanager
def _writable(option: str, directory: Path) -> Iterator[None]:
    """What is done with a directory that must be written to; an error of the file system names the option."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(13, "Permission denied", str(directory))
        yield
    except OSError as error:
        raise typer.BadParameter(
            f"{option}: expected a directory that can be written, got {str(directory)!r} ({error.strerror}); "
            f"name another with --{option}"
        ) from None


def _existing(option: str, directory: Path) -> Path:
    if not directory.is_dir():
        raise typer.BadParameter(
            f"{option}: expected a directory of result files, got {str(directory)!r}, which is none; "
            "run it in a checkout of the project, or name one"
        )
    return directory


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@_command(app, "doctor", "What works here, and what to do about the rest.", "microsdpa doctor")
def doctor(as_json: Json = False) -> None:
    """Check the installation: packages, driver, GPU, compiler, cache; and say what to do where something is missing.

    It names the kernels that the GPU here gets, and fails when a call of sdpa would fail.
    """
    from microsdpa.evidence import doctor as checks

    _finish([checks.step()], as_json)


@_command(app, "info", "GPU, driver, torch, NVRTC, cache and kernels here.", "microsdpa info --json")
def info(as_json: Json = False) -> None:
    """GPU, driver, torch, NVRTC, cache, and which kernels are supported here."""
    from microsdpa.evidence import repro

    _finish([repro.info_step()], as_json)


@_command(app, "compile", "Compile the kernels: registers, spills, instructions.", "microsdpa compile sm_89 sm_90a")
def compile_(
    arch: Annotated[list[str] | None, typer.Option(help="Targets, such as sm_89; may be repeated.")] = None,
    extra: Annotated[list[str] | None, typer.Argument(help="Further targets.", metavar="[TARGET]...")] = None,
    every: Annotated[bool, typer.Option("--every", help="Every configuration, not a few of each kernel.")] = False,
    as_json: Json = False,
) -> None:
    """Compile the kernels, with or without a GPU: registers, shared memory, spills, tensor instructions."""
    from microsdpa.evidence import repro
    from microsdpa.kernels.problem import capability_of

    targets = [*(arch or []), *(extra or [])] or list(names.TARGETS)
    for target in targets:
        try:
            capability_of(target)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    with progress() as bars:
        step = repro.compile_step(bars, targets, every=every)
    _finish([step], as_json)


@_command(app, "pack", "Make the wheel of compiled kernels.", "microsdpa pack sm_90a --output dist")
def pack_(
    targets: Annotated[list[str] | None, typer.Argument(help="Targets; else sm_80, sm_89 and sm_90a.")] = None,
    output: Annotated[Path, typer.Option(help="Directory to write the wheel to.")] = Path("dist"),
    as_json: Json = False,
) -> None:
    """Compile common configurations and write the wheel microsdpa-kernels: with it, first calls compile nothing.

    No GPU is needed. It takes minutes on two cores.
    """
    from microsdpa.evidence import pack
    from microsdpa.kernels.problem import capability_of

    wanted = targets or list(pack.TARGETS)
    for target in wanted:
        try:
            capability_of(target)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    with _writable("output", output), progress() as bars:
        step = pack.step(wanted, output, bars)
    _finish([step], as_json)


@_command(app, "verify", "Check every case against the FP64 oracle.", "microsdpa verify --impl hopper/latency")
def verify(
    impl: Impl = "auto",
    output: Output = None,
    ptx: Annotated[str | None, typer.Option(help="Run the PTX of another target's kernels, such as sm_89.")] = None,
    precision: Annotated[
        str | None, typer.Option(help=f"Check 8-bit operands instead: all, or one of {', '.join(names.PRECISIONS)}.")
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
    log: Annotated[
        Path | None, typer.Option(help="With --fuzz: keep what calls come to, a line each; go on where it ends.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every case against the FP64 oracle: on a GPU within a minute, on a CPU in the emulator in five or more."""
    if backward and random_calls is None:
        raise typer.BadParameter("backward: expected --fuzz N beside it, got none")
    if log is not None and random_calls is None:
        raise typer.BadParameter("log: expected --fuzz N beside it, got none")
    if random_calls is not None:
        from microsdpa.evidence import fuzz
        from microsdpa.evidence.fuzz_calls import DOORS, Door

        doors: tuple[Door, ...] = ("backward",) if backward else DOORS
        with progress() as bars:
            step = fuzz.step(random_calls, seed, bars, output, command_line(), doors, log)
        _finish([step], as_json)
    if training:
        from microsdpa.evidence import learning

        with progress() as bars:
            step = learning.step(bars, output, command_line())
        _finish([step], as_json)
    if torch_cases:
        from microsdpa.evidence import verify_torch

        with progress() as bars:
            step = verify_torch.step(bars, sample, seed, output, command_line())
        _finish([step], as_json)
    from microsdpa.evidence import repro
    from microsdpa.kernels.problem import virtual

    if ptx is not None:
        try:
            virtual(ptx)
        except ValueError as error:
            raise typer.BadParameter(f"ptx: {error}") from None
    if precision is not None:
        from microsdpa.evidence import verify_eight_bit, verify_quantizers
        from microsdpa.runtime import launcher

        known = names.PRECISIONS
        if precision not in ("all", *known):
            raise typer.BadParameter(f"precision: expected all or one of {', '.join(known)}, got {precision!r}")
        with progress() as bars:
            whole = precision == "all" and impl == "auto"
            if whole and ptx is None and launcher.device_error() is None:
                verify_quantizers.compile_ahead(launcher.target_of_device())
            parts = verify_quantizers.parts if whole else lambda _: []
            step = verify_eight_bit.step(precision, bars, impl, ptx, parts)
        _finish([step], as_json)
    with progress() as bars:
        step = repro.verify_step(bars, impl, output, command_line(), ptx=ptx)
    _finish([step], as_json)


@_command(app, "models", "Compare tiny models with their eager attention.", "microsdpa models llama --device cpu")
def models_(
    model_types: Annotated[list[str] | None, typer.Argument(help="Model types, such as llama; else all.")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="So many models, at random; else all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of --sample.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; else cuda where there is a GPU.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of the models on a GPU; else float16.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Start no model after so long.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Hold tiny models of transformers and diffusers against their eager attention: padding, caches, generation."""
    from microsdpa.evidence import models
    from microsdpa.runtime import launcher

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
            tuple(model_types or ()),
            output,
            command_line(),
        )
    _finish([step], as_json)


@_command(app, "accuracy", "Errors of 8-bit attention, against their gates.", "microsdpa accuracy --seeds 1")
def accuracy_(
    seeds: Annotated[int, typer.Option(min=1, help="Sets of inputs of every kind.")] = 5,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Errors of 8-bit attention against the FP64 oracle, and their gates.

    On a GPU it takes a minute. On a CPU it runs in the emulator, for five minutes or more.
    """
    from microsdpa.evidence import accuracy

    with progress() as bars:
        step = accuracy.step(bars, seeds, output, command_line())
    _finish([step], as_json)


@_command(app, "probe", "Compare the emulator with the GPU here.", "microsdpa probe")
def probe(output: Output = None, as_json: Json = False) -> None:
    """Compare the emulator with this machine's GPU, instruction by instruction."""
    from microsdpa.evidence import repro

    with progress() as bars:
        step = repro.probe_step(bars, output, command_line())
    _finish([step], as_json)


@_command(app, "bench", "Time a suite against its peers.", "microsdpa bench --suite small --peers torch-cudnn")
def bench(
    suite: Suite = "mission",
    modes: Annotated[
        str | None, typer.Option(help=f"Some of {', '.join(names.MODES)}; else what the suite says.")
    ] = None,
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
    from microsdpa.call.tensors import check_impl
    from microsdpa.evidence import repro, suites

    chosen = modes.split(",") if modes else None
    if unknown := [mode for mode in chosen or [] if mode not in names.MODES]:
        raise typer.BadParameter(f"modes: expected some of {', '.join(names.MODES)}, got {', '.join(unknown)}")
    with progress() as bars:
        some = suites.Some(peers, cells, part, seconds)
        step = repro.bench_step(bars, suite, chosen, check_impl(impl), some, output, command_line())
    _finish([step], as_json)


@_command(app, "tune", "Time every configuration of every kernel.", "microsdpa tune --kernels hopper/latency")
def tune_(
    suite: Suite = "small",
    kernels: Annotated[str | None, typer.Option(help="Some kernels, such as hopper/latency; else all.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time every configuration of every kernel on a suite: how far the library's choice is from the fastest."""
    from microsdpa.call.tensors import check_impl
    from microsdpa.evidence import tune

    chosen = [check_impl(name) for name in kernels.split(",")] if kernels else []
    with progress() as bars:
        step = tune.step(suite, chosen, bars, output, command_line())
    _finish([step], as_json)


@_command(app, "regress", "Fail when a suite has become slower.", "microsdpa regress old/mission.json new/mission.json")
def regress(
    baseline: Annotated[Path, typer.Argument(help="Result file to compare with.", dir_okay=False)],
    candidate: Annotated[Path | None, typer.Argument(help="Result file; else the baseline's suite is run now.")] = None,
    threshold: Annotated[float, typer.Option(help="Slowdown that is tolerated, as a fraction.")] = 0.05,
    as_json: Json = False,
) -> None:
    """Compare two result files of a suite, and fail on a slowdown that is confirmed and above the threshold."""
    from microsdpa.evidence import regress as regression
    from microsdpa.evidence import repro
    from microsdpa.evidence.results import read

    old = read(baseline)
    if candidate is not None:
        _finish([regression.step(old, read(candidate), threshold)], as_json)
    with progress() as bars:
        run = repro.bench_step(bars, old["suite"], sorted({row["mode"] for row in old["rows"]}))
    if run.status == "not run":
        _finish([run], as_json)
    _finish([run, regression.step(old, run.data, threshold)], as_json)


@_command(app, "profile", "Run a call under Nsight Compute.", "microsdpa profile hopper/latency --shape 1,8,512,512,64")
def profile_(
    kernel: Annotated[str, typer.Argument(help="Kernel, such as ladder/01_scalar, or auto.")],
    shape: Shape = "1,8,512,512,64",
    dtype: TensorDtype = Dtype.float16,
    causal: Causal = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Run one call under Nsight Compute; print its metrics against the gates, and store them with the signature."""
    from microsdpa.call.tensors import check_impl
    from microsdpa.evidence import profile

    case = _case(shape, dtype, causal)
    _finish([profile.step(case, check_impl(kernel), output, command_line())], as_json)


@_command(app, "ladder", "Time every rung of the ladder beside torch.", "microsdpa ladder")
def ladder(output: Output = None, as_json: Json = False) -> None:
    """Every rung of the ladder: times beside torch's, and registers, shared memory, occupancy, conflicts, error."""
    from microsdpa.evidence.ladder import step as ladder_step

    with progress() as bars:
        step = ladder_step(bars, output, command_line())
    _finish([step], as_json)


@_command(app, "roofline", "Floors of a shape on a device.", "microsdpa roofline --device l4 --shape 1,8,512,512,64")
def roofline(
    device: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(names.DEVICES)}; else the GPU here, or l4.")
    ] = None,
    measured: Annotated[bool, typer.Option("--measured", help="Measure the ceilings of the GPU here.")] = False,
    shape: Shape = "1,8,512,512,64",
    dtype: TensorDtype = Dtype.float16,
    causal: Causal = None,
    results: ResultsBelow = names.RESULTS,
    as_json: Json = False,
) -> None:
    """Floors of a shape on a device, what they are bound by, and where measured kernels stand."""
    from microsdpa.evidence import ceilings, roofline_page
    from microsdpa.evidence.devices import named
    from microsdpa.evidence.step import Step
    from microsdpa.runtime import launcher

    if measured and (reason := launcher.device_error()):
        _finish([Step("roofline", "not run", f"ceilings are measured on a GPU: {reason}")], as_json)
    chosen = ceilings.measure() if measured else named(device or roofline_page.default_device())
    _finish([roofline_page.step(_case(shape, dtype, causal), chosen, results)], as_json)


@_command(app, "report", "Draw the report from result files.", "microsdpa report --gpu h200 --report report")
def report_(
    results: ResultsBelow = names.RESULTS,
    gpu: Annotated[str, typer.Option(help="Folder of --results.")] = names.GPU,
    report: ReportDirectory = Path("report"),
) -> None:
    """Draw the report from result files."""
    from microsdpa.evidence import report as report_page
    from microsdpa.evidence.plots import files as plot_files

    found = plot_files.load(results / gpu)
    if not found:
        there = ", ".join(sorted(path.name for path in results.glob("*") if path.is_dir())) or "none"
        raise typer.BadParameter(f"gpu: expected a folder of {results} with result files ({there}), got {gpu!r}")
    with _writable("report", report):
        page = report_page.write(report, [], found, f"From the result files of {results / gpu}.")
    print(f"report: {page}")


@_command(app, "repro", "Everything in order, ending in a report.", "microsdpa repro --report report")
def repro_(
    report: ReportDirectory = Path("report"),
    full: Annotated[
        bool, typer.Option("--full", help="Without a GPU: every kernel and every case, not some of each.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Take steps again that passed before.")] = False,
    as_json: Json = False,
) -> None:
    """Compile, check against FP64, time against every peer here, and draw the report.

    Without a GPU some kernels of each architecture are compiled, and run in the emulator: under three minutes on two
    cores. With --full all of them are, which takes about ten. An interrupted run goes on where it stopped.
    """
    from microsdpa.evidence import repro

    with _writable("report", report):
        try:
            with progress() as bars:
                steps = repro.run(report, bars, fresh, full)
        except KeyboardInterrupt:
            print_error(f"interrupted; the same command goes on after the last finished step (kept in {report}/steps)")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if not as_json:
        print(f"report: {report / 'index.html'}")
    _finish(steps, as_json, tables=False)


def _case(shape: str, dtype: Dtype, causal: Alignment | None, seed: int = 0) -> Case:
    """The case of the options --shape, --dtype and --causal."""
    from microsdpa.evidence.inputs import Case

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


@_command(app, "emulate", "Run a kernel on the CPU, every access checked.", "microsdpa emulate hopper/latency")
def emulate(
    kernel: Annotated[str, typer.Argument(help="Kernel, such as ladder/01_scalar, or auto.")],
    shape: Shape = "1,8,512,512,64",
    dtype: TensorDtype = Dtype.float16,
    causal: Causal = None,
    precision: Annotated[
        str | None, typer.Option(help=f"8-bit operands, quantized from tensors: {', '.join(names.PRECISIONS)}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs and of the order of threads.")] = 0,
    early: Annotated[bool, typer.Option(help="Asynchronous copies arrive early, not late.")] = False,
    as_json: Json = False,
) -> None:
    """Run a kernel on the CPU with every access checked: counters, bank conflicts, error."""
    from microsdpa.call.tensors import check_impl
    from microsdpa.emulate.run import Schedule
    from microsdpa.evidence import repro

    if precision not in (None, *names.PRECISIONS):
        raise typer.BadParameter(f"precision: expected one of {', '.join(names.PRECISIONS)}, got {precision!r}")
    case, schedule = _case(shape, dtype, causal, seed), Schedule(seed, late=not early)
    name = check_impl(kernel, eight_bit=precision is not None)
    _finish([repro.emulate_step(case, name, schedule, precision)], as_json)  # type: ignore[arg-type]


Root = Annotated[Path, typer.Option(help="Checkout of the project.", exists=True, file_okay=False)]
Results = Annotated[Path | None, typer.Option(help="Result files; by default benchmarks/results of the checkout.")]


@_command(evidence, "render", "Write the tables of README and docs.", "microsdpa evidence render")
def render(root: Root = Path(), results: Results = None) -> None:
    """Write the tables between the markers of README and docs from the result files."""
    from microsdpa.evidence import render as rendering

    for page in rendering.render(root, _existing("results", results or root / names.RESULTS)):
        print(f"rendered {page}")


@_command(evidence, "check", "Fail when a table and its results differ.", "microsdpa evidence check")
def check(root: Root = Path(), results: Results = None) -> None:
    """Fail when a rendered table and its result file differ."""
    from microsdpa.evidence import render as rendering

    differing = rendering.differing(root, _existing("results", results or root / names.RESULTS))
    for page in differing:
        print_error(f"{page}: its tables are not what the result files say; run 'microsdpa evidence render'")
    if differing:
        raise typer.Exit(EXIT_FAILED)
    print("every table matches its result file")


@_command(
    evidence, "resign", "Keep rows of identical machine code fresh.", "microsdpa evidence resign HEAD~1 --dry-run"
)
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
    from microsdpa.evidence import resign as resigning

    below = _existing("results", results or root / names.RESULTS)
    with progress() as bars:
        step = resigning.step(old_ref, root, below, gpu, dry_run, resigning.names_of(renamed or []), bars)
    _finish([step], as_json)


@_command(
    evidence, "mutate", "Does the emulator see a missing fence or wait?", "microsdpa evidence mutate hopper/latency"
)
def mutate_(
    kernel: Annotated[str, typer.Argument(help="A production kernel, such as ampere/mma; else all of them.")] = "",
    jobs: Annotated[int, typer.Option(min=0, help="Processes at a time; 0 for one on each core.")] = 0,
    sample: Annotated[int | None, typer.Option(min=1, help="So many of each kernel, evenly chosen; else all.")] = None,
    only: Annotated[str, typer.Option(help="Mutations of one place: hopper/split/consumer.cuh:121, or a file.")] = "",
    log: Annotated[Path | None, typer.Option(help="Keep what is found, a line each; go on where it ends.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Leave out each fence and wait of a kernel, and move each comparison with a length: does the emulator see it?"""
    from microsdpa.evidence import mutate

    with progress() as bars:
        step = mutate.step(kernel, jobs, sample, bars, output, command_line(), only, log)
    _finish([step], as_json)


@_command(cache, "show", "Its place, entries and size.", "microsdpa cache show")
def show(as_json: Json = False) -> None:
    """Where the cache is, and the number, size and last use of its entries by kind."""
    from microsdpa.evidence import cache_steps

    _finish([cache_steps.show()], as_json)


@_command(cache, "prune", "Remove entries that were not used lately.", "microsdpa cache prune --days 7")
def prune(
    days: Annotated[float, typer.Option(min=0, help="Keep what was used within so many days; 0 removes all.")] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count only; remove nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Remove compiled kernels that were not used lately. Kernels are compiled again when they are called."""
    from microsdpa.evidence import cache_steps

    _finish([cache_steps.prune(days, dry_run)], as_json)


def main() -> None:
    """Entry point: an error of the library becomes its message and exit code 2."""
    try:
        app()
    except Exception as error:
        errors = sys.modules.get("microsdpa.errors")
        if errors is None or not isinstance(error, errors.MicrosdpaError):
            raise
        print_error(f"{type(error).__name__}: {error}")
        raise SystemExit(EXIT_USAGE) from None
