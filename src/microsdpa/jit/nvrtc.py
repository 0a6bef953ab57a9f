"""NVRTC through cuda-core: from CUDA C++ to a cubin, with the compiler and headers of the PyPI wheels."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import io
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microsdpa.errors import CompileError
from microsdpa.kernels.problem import VIRTUAL, capability_of

INSTALL = "install it with pip install 'microsdpa[compiler]'; builds of torch for CUDA 13 have it already"
_import_lock = threading.Lock()


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

    Raises:
        CompileError: NVRTC does not know the target, or refuses the source; its log is in the error.
    """
    version()  # which says what to install where there is none
    with _import_lock:  # cuda.core cannot be imported by two threads at once
        from cuda.core import Program, ProgramOptions

    check_target(name, target)
    if target.startswith(VIRTUAL):
        return _compile_ptx(text, name, expression, target, flags)
    log = io.StringIO()
    start = time.perf_counter()
    try:
        options = ProgramOptions(
            name=name,
            arch=target,
            std=next((f.removeprefix("-std=") for f in flags if f.startswith("-std=")), None),
            lineinfo="-lineinfo" in flags,
            include_path=list(include_directories()),
            ptxas_options=["-v"],
        )
        code = Program(text, "c++", options).compile("cubin", name_expressions=(expression,), logs=log)
    except RuntimeError as error:
        raise CompileError(f"{name}: NVRTC failed for {target}", log=str(error), source=None) from error
    except Exception as error:
        if type(error).__name__ != "NVRTCError":
            raise
        raise CompileError(f"{name}: NVRTC refused {expression} for {target}", log=str(error), source=None) from None
    symbol = code.symbol_mapping[expression]
    return Cubin(
        code=bytes(code.code),
        symbol=symbol.decode() if isinstance(symbol, bytes) else symbol,
        log=log.getvalue(),
        seconds=time.perf_counter() - start,
    )


def _compile_ptx(text: str, name: str, expression: str, target: str, flags: tuple[str, ...]) -> Cubin:
    """The same to PTX, which cuda-core makes on machines with a driver only. Ends with the zero that drivers want."""
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> tuple[Any, ...]:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name}: NVRTC failed for {target}: {result[0].name}", log="", source=None)
        return result[1:]

    start = time.perf_counter()
    (program,) = check(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    try:
        check(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        options = [f"--gpu-architecture={target}", *flags, *(f"--include-path={d}" for d in include_directories())]
        (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))[0]
        check(nvrtc.nvrtcGetProgramLog(program, log))
        if failed != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name}: NVRTC refused {expression} for {target}", log=log.decode(), source=None)
        code = b" " * check(nvrtc.nvrtcGetPTXSize(program))[0]
        check(nvrtc.nvrtcGetPTX(program, code))
        (symbol,) = check(nvrtc.nvrtcGetLoweredName(program, expression.encode()))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(code, symbol.decode(), log.rstrip(b"\0").decode(), time.perf_counter() - start)
