"""Compile a KernelSpec, or find it: the package microsdpa-kernels first, then memory, the cache, NVRTC."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from pathlib import Path

from microsdpa.errors import CompileError
from microsdpa.jit import cache, nvrtc, prebuilt
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
    cubin: bytes
    symbol: str
    resources: Resources
    log: str
    compile_seconds: float
    cached: bool

    @functools.cached_property
    def code_signature(self) -> str:
        """That of jit/signature.py: it takes most of the time in which a cached kernel is found, and few ask for it."""
        return code_signature(self.spec, self.target)


_memory: dict[str, CompiledKernel] = {}
_building: dict[str, threading.Lock] = {}


def compile_kernel(
    spec: KernelSpec, target: str, directory: Path | None = None, *, strict: bool = True
) -> CompiledKernel:
    """The compiled kernel of `spec` for `target`: machine code for "sm_89", PTX for "compute_89".

    `directory` overrides the cache's place, and then neither the kernels held in memory nor those of the package
    microsdpa-kernels are consulted. Needs no GPU, and for a kernel that is found no compiler. `strict` refuses what
    `unexcused` says: those who build kernels ask for that, a caller of attention does not.

    Raises:
        CompileError: NVRTC refused the kernel, or `strict` did.
    """
    kernel = _found_or_built(spec, target, directory)
    if strict and (fault := unexcused(kernel)):
        source = cache.keep_failed_source(expand(spec.source))
        raise CompileError(fault, log=kernel.log, source=source)
    return kernel


def unexcused(kernel: CompiledKernel) -> str:
    """That a kernel uses local memory and its spec does not say why it may; empty for any other."""
    spec, used = kernel.spec, kernel.resources
    if not used.uses_local_memory or spec.local_memory:
        return ""
    return (
        f"{spec.name} for {kernel.target} uses local memory ({used.stack_bytes} bytes of stack, "
        f"{used.spill_store_bytes} of spill stores, {used.spill_load_bytes} of spill loads), "
        "and its spec does not say why it may"
    )


def _found_or_built(spec: KernelSpec, target: str, directory: Path | None) -> CompiledKernel:
    if directory is None and prebuilt.serves(target) and (ready := prebuilt.find(code_signature(spec, target), target)):
        return _kernel(spec, target, ready.metadata["signature"], ready, found=True)
    key = _signature(spec, target)
    with _building.setdefault(key, threading.Lock()):  # threads that miss build it once, others go on
        if directory is None and key in _memory:
            return _memory[key]
        store = cache.KernelCache(directory or cache.default_directory())
        entry, found = store.get_or_build(key, lambda: _build(spec, target))
        kernel = _kernel(spec, target, key, entry, found=found)
        if directory is None:
            _memory[key] = kernel
        return kernel


def _kernel(spec: KernelSpec, target: str, key: str, entry: cache.Entry, *, found: bool) -> CompiledKernel:
    meta = entry.metadata
    return CompiledKernel(
        spec=spec,
        target=target,
        signature=key,
        cubin=entry.cubin,
        symbol=meta["symbol"],
        resources=Resources(**meta["resources"]),
        log=meta["log"],
        compile_seconds=meta["compile_seconds"],
        cached=found,
    )


def _signature(spec: KernelSpec, target: str) -> str:
    """That of a kernel; where there is no compiler, the error also says why microsdpa-kernels does not have it."""
    try:
        return signature(spec, target)
    except CompileError as error:
        why = prebuilt.absence(target)
        summary = f"{error.summary}; {why}" if why else error.summary
        raise CompileError(summary, log=error.log, source=error.source) from error


def is_compiled(spec: KernelSpec, target: str) -> bool:
    """Whether the kernel is in the package microsdpa-kernels, in memory, or has an entry in the cache."""
    if prebuilt.serves(target) and prebuilt.has(code_signature(spec, target), target):
        return True
    key = _signature(spec, target)
    return key in _memory or cache.KernelCache(cache.default_directory()).has(key)


def _build(spec: KernelSpec, target: str) -> cache.Entry:
    nvrtc.check_target(spec.source, target)  # here nothing is wrong with the source, which is not kept
    text = expand(spec.source)
    try:
        cubin = nvrtc.compile_cubin(text, spec.source, spec.expression, target, spec.flags)
        try:
            if target.startswith(VIRTUAL):  # what ptxas makes of it here; the driver's compiler is another
                resources = compile_kernel(spec, target.replace(VIRTUAL, "sm_"), strict=False).resources
            else:
                resources = resources_from_log(cubin.log)
        except ValueError:  # NVRTC may leave ptxas' lines out where it has warnings of its own
            resources = resources_from_cubin(cubin.code, target)
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
