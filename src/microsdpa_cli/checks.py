"""Commands that say whether everything here works and is right: installation, compilation, accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from microsdpa_cli import names
from microsdpa_cli.console import progress
from microsdpa_cli.options import Dtype, Impl, Json, Output, writable
from microsdpa_cli.running import command, command_line, finish

commands = typer.Typer()


@command(commands, "doctor", "What works here, and what to do about the rest.", "microsdpa doctor")
def doctor(as_json: Json = False) -> None:
    """Check the installation: packages, driver, GPU, compiler, cache; and say what to do where something is missing.

    It names the kernels that the GPU here gets, and fails when a call of sdpa would fail.
    """
    from microsdpa.evidence import doctor as checks

    finish([checks.step()], as_json)


@command(commands, "info", "GPU, driver, torch, NVRTC, cache and kernels here.", "microsdpa info --json")
def info(as_json: Json = False) -> None:
    """GPU, driver, torch, NVRTC, cache, and which kernels are supported here."""
    from microsdpa.evidence import repro

    finish([repro.info_step()], as_json)


@command(commands, "compile", "Compile the kernels: registers, spills, instructions.", "microsdpa compile sm_89 sm_90a")
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
    finish([step], as_json)


@command(commands, "pack", "Make the wheel of compiled kernels.", "microsdpa pack sm_90a --output dist")
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
    with writable("output", output), progress() as bars:
        step = pack.step(wanted, output, bars)
    finish([step], as_json)


@command(commands, "verify", "Check every case against the FP64 oracle.", "microsdpa verify --impl hopper/latency")
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
        finish([step], as_json)
    if training:
        from microsdpa.evidence import learning

        with progress() as bars:
            step = learning.step(bars, output, command_line())
        finish([step], as_json)
    if torch_cases:
        from microsdpa.evidence import verify_torch

        with progress() as bars:
            step = verify_torch.step(bars, sample, seed, output, command_line())
        finish([step], as_json)
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
        finish([step], as_json)
    with progress() as bars:
        step = repro.verify_step(bars, impl, output, command_line(), ptx=ptx)
    finish([step], as_json)


@command(commands, "models", "Compare tiny models with their eager attention.", "microsdpa models llama --device cpu")
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
    finish([step], as_json)


@command(commands, "accuracy", "Errors of 8-bit attention, against their gates.", "microsdpa accuracy --seeds 1")
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
    finish([step], as_json)


@command(commands, "probe", "Compare the emulator with the GPU here.", "microsdpa probe")
def probe(output: Output = None, as_json: Json = False) -> None:
    """Compare the emulator with this machine's GPU, instruction by instruction."""
    from microsdpa.evidence import repro

    with progress() as bars:
        step = repro.probe_step(bars, output, command_line())
    finish([step], as_json)
