"""Commands that time kernels, look inside them and draw what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from microsdpa_cli import names
from microsdpa_cli.console import print_error, progress
from microsdpa_cli.options import (
    Causal,
    Dtype,
    Impl,
    Json,
    Output,
    ReportDirectory,
    ResultsBelow,
    Shape,
    Suite,
    TensorDtype,
    case_of,
    writable,
)
from microsdpa_cli.running import EXIT_INTERRUPTED, command, command_line, finish

commands = typer.Typer()


@command(commands, "bench", "Time a suite against its peers.", "microsdpa bench --suite small --peers torch-cudnn")
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
    finish([step], as_json)


@command(commands, "tune", "Time every configuration of every kernel.", "microsdpa tune --kernels hopper/latency")
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
    finish([step], as_json)


@command(
    commands, "regress", "Fail when a suite has become slower.", "microsdpa regress old/mission.json new/mission.json"
)
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
        finish([regression.step(old, read(candidate), threshold)], as_json)
    with progress() as bars:
        run = repro.bench_step(bars, old["suite"], sorted({row["mode"] for row in old["rows"]}))
    if run.status == "not run":
        finish([run], as_json)
    finish([run, regression.step(old, run.data, threshold)], as_json)


@command(
    commands, "profile", "Run a call under Nsight Compute.", "microsdpa profile hopper/latency --shape 1,8,512,512,64"
)
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

    case = case_of(shape, dtype, causal)
    finish([profile.step(case, check_impl(kernel), output, command_line())], as_json)


@command(commands, "ladder", "Time every rung of the ladder beside torch.", "microsdpa ladder")
def ladder(output: Output = None, as_json: Json = False) -> None:
    """Every rung of the ladder: times beside torch's, and registers, shared memory, occupancy, conflicts, error."""
    from microsdpa.evidence.ladder import step as ladder_step

    with progress() as bars:
        step = ladder_step(bars, output, command_line())
    finish([step], as_json)


@command(
    commands, "roofline", "Floors of a shape on a device.", "microsdpa roofline --device l4 --shape 1,8,512,512,64"
)
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
        finish([Step("roofline", "not run", f"ceilings are measured on a GPU: {reason}")], as_json)
    chosen = ceilings.measure() if measured else named(device or roofline_page.default_device())
    finish([roofline_page.step(case_of(shape, dtype, causal), chosen, results)], as_json)


@command(commands, "report", "Draw the report from result files.", "microsdpa report --gpu h200 --report report")
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
    with writable("report", report):
        page = report_page.write(report, [], found, f"From the result files of {results / gpu}.")
    print(f"report: {page}")


@command(commands, "repro", "Everything in order, ending in a report.", "microsdpa repro --report report")
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

    with writable("report", report):
        try:
            with progress() as bars:
                steps = repro.run(report, bars, fresh, full)
        except KeyboardInterrupt:
            print_error(f"interrupted; the same command goes on after the last finished step (kept in {report}/steps)")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if not as_json:
        print(f"report: {report / 'index.html'}")
    finish(steps, as_json, tables=False)


@command(commands, "emulate", "Run a kernel on the CPU, every access checked.", "microsdpa emulate hopper/latency")
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
    case, schedule = case_of(shape, dtype, causal, seed), Schedule(seed, late=not early)
    name = check_impl(kernel, eight_bit=precision is not None)
    finish([repro.emulate_step(case, name, schedule, precision)], as_json)  # type: ignore[arg-type]
