"""What is here and what is supported: the facts behind `microsdpa info` and `microsdpa compile`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from microsdpa.emulate.build import compiler
from microsdpa.errors import CompileError, UnsupportedProblem
from microsdpa.evidence import environment
from microsdpa.jit import compile_kernel
from microsdpa.jit.cache import default_directory
from microsdpa.jit.inspect import count_instructions, find_nvdisasm, tensor_instructions
from microsdpa.kernels import ALL_FAMILIES, KernelSpec
from microsdpa.kernels.problem import Problem, capability_of
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_120")


def info() -> dict[str, object]:
    """The environment, the cache's place, and for every kernel whether it runs here and why not."""
    facts = environment.describe()
    reason = launcher.device_error()
    target = facts["target"]
    if reason is None and isinstance(target, str) and capability_of(target) < (8, 0):
        reason = f"{target} is older than sm_80"
    return facts | {
        "cache": str(default_directory()),
        "nvdisasm": find_nvdisasm() or "missing: pip install nvidia-cuda-nvdisasm",
        "kernels": {family.name: reason or f"supported on {target}" for family in ALL_FAMILIES},
        "cpu_tensors": "torch's own attention under impl='auto'; the kernels themselves under impl='emulate'",
        "emulator": _emulator(),
    }


def _emulator() -> str:
    try:
        return f"built with {compiler()}"
    except CompileError as error:
        return error.summary


@dataclass(frozen=True)
class CompileRow:
    """One compiled kernel; `failure` is empty when it compiled inside its resource promise."""

    kernel: str
    configuration: str
    target: str
    registers: int | None
    shared_bytes: int | None
    spill_bytes: int | None
    tensor_instructions: str
    seconds: float
    cached: bool
    signature: str
    failure: str


def compile_row(spec: KernelSpec, target: str) -> CompileRow:
    """Compile one kernel, or find it, and read what it uses."""
    configuration = ", ".join(f"{name}={value}" for name, value in spec.template_args)
    try:
        kernel = compile_kernel(spec, target)
    except CompileError as error:
        return CompileRow(
            spec.name,
            configuration,
            target,
            None,
            None,
            None,
            "",
            0.0,
            False,
            "",
            f"{error.summary} ({error.source})" if error.source else error.summary,
        )
    if find_nvdisasm() is None:
        tensor = "not counted: nvdisasm is missing"
    else:
        counts = tensor_instructions(count_instructions(kernel.cubin))
        tensor = " ".join(f"{opcode}:{count}" for opcode, count in counts.items()) or "none"
    resources = kernel.resources
    return CompileRow(
        kernel=spec.name,
        configuration=configuration,
        target=target,
        registers=resources.registers,
        shared_bytes=resources.shared_bytes + spec.shared_bytes,
        spill_bytes=resources.spill_store_bytes + resources.spill_load_bytes,
        tensor_instructions=tensor,
        seconds=kernel.compile_seconds,
        cached=kernel.cached,
        signature=kernel.signature,
        failure="",
    )


def once_each(jobs: list[tuple[KernelSpec, str]]) -> list[tuple[KernelSpec, str]]:
    """The first job of every kernel, and the first one of every target."""
    kernels: set[str] = set()
    targets: set[str] = set()
    kept = []
    for spec, target in jobs:
        if spec.name not in kernels or target not in targets:
            kept.append((spec, target))
        kernels.add(spec.name)
        targets.add(target)
    return kept


def compile_all(
    jobs: list[tuple[KernelSpec, str]], advance: Callable[[str], None] = lambda message: None
) -> list[CompileRow]:
    """Compile kernels for targets; `advance` is told of each."""
    rows = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # NVRTC compiles without holding the GIL
        for row in pool.map(lambda job: compile_row(*job), jobs):
            rows.append(row)
            advance(f"{row.kernel} {row.target}")
    return rows


def compile_ahead(problems: Iterable[Problem], impl: str = "auto") -> int:
    """Compile what `problems` will run, in parallel, and give the number of kernels: one after another takes minutes.

    Problems that `impl` does not compute are left to the caller, who reports them.
    """
    kernels: dict[tuple[KernelSpec, str], None] = {}
    for problem in problems:
        with contextlib.suppress(UnsupportedProblem):
            kernels |= {(stage, problem.target): None for stage in select(problem, impl).spec.stages}
    compile_together(kernels)
    return len(kernels)


def compile_together(kernels: Iterable[tuple[KernelSpec, str]]) -> None:
    """Compile kernels for targets in parallel; one that fails does so again, with its reason, where it is used."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for compiled in [pool.submit(compile_kernel, *kernel) for kernel in kernels]:
            compiled.exception()
