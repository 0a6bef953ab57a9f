"""Compile a KernelSpec, or find it: memory first, then the cache, then NVRTC."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from microsdpa.errors import CompileError
from microsdpa.jit import cache, nvrtc
from microsdpa.jit.inspect import Resources, resources_from_cubin, resources_from_log
from microsdpa.jit.signature import code_signature, signature
from microsdpa.jit.source import expand
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import VIRTUAL


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin and what is known of it.

    Attributes:
        symbol: the kernel's mangled name.
        compile_seconds: what NVRTC took when the cubin was made, now or long ago.
        cached: whether the cubin was found rather than made by this call.
    """

    spec: KernelSpec
    target: str
    signature: str
    code_signature: str
    cubin: bytes
    symbol: str
    resources: Resources
    log: str
    compile_seconds: float
    cached: bool


_memory: dict[str, CompiledKernel] = {}
_building: dict[str, threading.Lock] = {}


def compile_kernel(spec: KernelSpec, target: str, directory: Path | None = None) -> CompiledKernel:
    """The compiled kernel of `spec` for `target`: machine code for "sm_89", PTX for "compute_89".

    `directory` overrides the cache's place, and then the kernels held in memory are not consulted. Needs no GPU.

    Raises:
        CompileError: NVRTC refused the kernel, or it uses local memory and its spec does not say why it may.
    """
    key = signature(spec, target)
    with _building.setdefault(key, threading.Lock()):  # threads that miss build it once, others go on
        if directory is None and key in _memory:
            return _memory[key]
        store = cache.KernelCache(directory or cache.default_directory())
        entry, found = store.get_or_build(key, lambda: _build(spec, target))
        meta = entry.metadata
        kernel = CompiledKernel(
            spec=spec,
            target=target,
            signature=key,
            code_signature=code_signature(spec, target),
            cubin=entry.cubin,
            symbol=meta["symbol"],
            resources=Resources(**meta["resources"]),
            log=meta["log"],
            compile_seconds=meta["compile_seconds"],
            cached=found,
        )
        if directory is None:
            _memory[key] = kernel
        return kernel


def is_compiled(spec: KernelSpec, target: str) -> bool:
    """Whether the kernel is in memory or has an entry in the cache."""
    key = signature(spec, target)
    return key in _memory or cache.KernelCache(cache.default_directory()).has(key)


def _build(spec: KernelSpec, target: str) -> cache.Entry:
    nvrtc.check_target(spec.source, target)  # here nothing is wrong with the source, which is not kept
    text = expand(spec.source)
    try:
        cubin = nvrtc.compile_cubin(text, spec.source, spec.expression, target, spec.flags)
        try:
            if target.startswith(VIRTUAL):  # what ptxas makes of it here; the driver's compiler is another
                resources = compile_kernel(spec, target.replace(VIRTUAL, "sm_")).resources
            else:
                resources = resources_from_log(cubin.log)
        except ValueError:  # some versions of cuda-core hand over the warnings only, when there are warnings
            resources = resources_from_cubin(cubin.code, target)
        if resources.uses_local_memory and not spec.local_memory:
            raise CompileError(
                f"{spec.name} for {target} uses local memory ({resources.stack_bytes} bytes of stack, "
                f"{resources.spill_store_bytes} of spill stores, {resources.spill_load_bytes} of spill loads), "
                "and its spec does not say why it may",
                log=cubin.log,
                source=None,
            )
    except CompileError as error:
        raise CompileError(error.summary, log=error.log, source=cache.keep_failed_source(text)) from None
    return cache.Entry(
        cubin=cubin.code,
        source=text,
        metadata={
            "kernel": spec.name,
            "expression": spec.expression,
            "target": target,
            "nvrtc": nvrtc.version(),
            "symbol": cubin.symbol,
            "resources": resources.as_dict(),
            "log": cubin.log,
            "compile_seconds": cubin.seconds,
        },
    )
