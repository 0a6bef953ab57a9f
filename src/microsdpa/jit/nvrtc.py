"""NVRTC through cuda-bindings: from CUDA C++ to a cubin, with the compiler and headers of the PyPI wheels."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microsdpa.errors import CompileError
from microsdpa.kernels.problem import VIRTUAL, capability_of

INSTALL = "install it with pip install 'microsdpa[compiler]'; builds of torch for CUDA 13 have it already"


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel, or its PTX: bytes, the kernel's symbol, the compiler's log, the seconds it took."""

    code: bytes
    symbol: str
    log: str
    seconds: float


@functools.cache
def include_directories() -> tuple[str, ...]:
    """Directories of the CUDA headers: those of the wheels, which need not lie in one place, then a toolkit's.

    Raises:
        CompileError: there is none.
    """
    from cuda.pathfinder import find_nvidia_header_directory

    found = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    places = [Path(place) / "include" for place in (found.submodule_search_locations or [])] if found else []
    if toolkit := find_nvidia_header_directory("cudart"):
        places.append(Path(toolkit))
    existing = dict.fromkeys(str(place) for place in places if place.is_dir())
    if not any((Path(place) / "cuda_fp16.h").is_file() for place in existing):
        raise CompileError(
            "no CUDA headers found: install them with pip install 'microsdpa[compiler]'", log="", source=None
        )
    return tuple(existing)


@functools.cache
def version() -> str:
    """Version of NVRTC, such as "13.0 (nvidia-cuda-nvrtc 13.0.88)".

    Raises:
        CompileError: NVRTC cannot be loaded.
    """
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise CompileError(f"NVRTC 13 cannot be loaded: {INSTALL}", log=str(error), source=None) from error
    if major != 13:
        raise CompileError(f"expected NVRTC 13, got {major}.{minor}: {INSTALL}", log="", source=None)
    try:
        return f"{major}.{minor} (nvidia-cuda-nvrtc {importlib.metadata.version('nvidia-cuda-nvrtc')})"
    except importlib.metadata.PackageNotFoundError:
        return f"{major}.{minor}"


@functools.cache
def supported_capabilities() -> tuple[tuple[int, int], ...]:
    """Compute capabilities that this NVRTC generates code for."""
    version()
    from cuda.bindings import nvrtc

    _, numbers = nvrtc.nvrtcGetSupportedArchs()
    return tuple((number // 10, number % 10) for number in numbers)


def check_target(name: str, target: str) -> None:
    """Refuse a target that this NVRTC does not know; `name` is that of the source.

    Raises:
        CompileError: it does not.
    """
    if capability_of(target) not in supported_capabilities():
        known = ", ".join(f"sm_{major}{minor}" for major, minor in supported_capabilities())
        raise CompileError(
            f"{name}: NVRTC {version()} generates no code for {target} (it does for {known}); "
            "install a newer nvidia-cuda-nvrtc",
            log="",
            source=None,
        )


def compile_cubin(text: str, name: str, expression: str, target: str, flags: tuple[str, ...]) -> Cubin:
    """Compile the kernel that `expression` instantiates in the expanded source `text`; to PTX for a virtual target.

    PTX ends with the zero that drivers want.

    Raises:
        CompileError: NVRTC does not know the target, or refuses the source; its log is in the error.
    """
    version()  # which says what to install where there is none
    check_target(name, target)
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> tuple[Any, ...]:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name}: NVRTC failed for {target}: {result[0].name}", log="", source=None)
        return result[1:]

    virtual = target.startswith(VIRTUAL)
    options = [f"--gpu-architecture={target}", *flags, *(f"--include-path={d}" for d in include_directories())]
    if not virtual:
        options.append("--ptxas-options=-v")
    size_of, copy = (
        (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) if virtual else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    )
    start = time.perf_counter()
    (program,) = check(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    try:
        check(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        buffer = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))[0]
        check(nvrtc.nvrtcGetProgramLog(program, buffer))
        log = buffer.rstrip(b"\0").decode()
        if failed != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name}: NVRTC refused {expression} for {target}", log=log, source=None)
        code = b" " * check(size_of(program))[0]
        check(copy(program, code))
        (symbol,) = check(nvrtc.nvrtcGetLoweredName(program, expression.encode()))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(code, symbol.decode(), log, time.perf_counter() - start)
