"""NVRTC: from CUDA C++ to a cubin, in a process of its own, with the compiler and headers of the PyPI wheels."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microsdpa.errors import CompileError
from microsdpa.jit import nvrtc_program
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


def _library() -> str:
    """Path of NVRTC's library, which version() has loaded into this process."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return load_nvidia_dynamic_lib("nvrtc").abs_path or "libnvrtc.so.13"


def _interpreter() -> str | None:
    """The Python that runs nvrtc_program.py; None in a program that has its interpreter built in."""
    found = sys.executable or ""
    frozen = getattr(sys, "frozen", False) or not Path(found).name.startswith(("python", "pypy"))
    return None if frozen else found


def _compiled(library: str, request: dict[str, Any]) -> nvrtc_program.Reply:
    """The reply to a request, from a process of its own where there is an interpreter for one.

    Raises:
        RuntimeError: the process cannot be started, or ended without a reply.
    """
    interpreter = _interpreter()
    if interpreter is None:
        return nvrtc_program.compile_kernel(library, **request)
    command = [interpreter, "-I", "-S", nvrtc_program.__file__, library]
    try:
        ended = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{interpreter} cannot be started: {error}") from error
    if ended.returncode:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"its process ended with status {ended.returncode}{': ' if last else ''}{''.join(last)}")
    header, _, code = ended.stdout.partition(b"\n")
    failed, refused, symbol, log = json.loads(header)
    return nvrtc_program.Reply(failed, refused, symbol, log, code)


def compile_cubin(text: str, name: str, expression: str, target: str, flags: tuple[str, ...]) -> Cubin:
    """Compile the kernel that `expression` instantiates in the expanded source `text`; to PTX for a virtual target.

    The code depends on nothing that this process compiled before: NVRTC runs in one of its own. PTX ends with the zero
    that drivers want.

    Raises:
        CompileError: NVRTC does not know the target, refuses the source, or ended without an answer; its log is in the
            error.
    """
    version()  # which says what to install where there is none
    check_target(name, target)
    virtual = target.startswith(VIRTUAL)
    options = [f"--gpu-architecture={target}", *flags, *(f"--include-path={d}" for d in include_directories())]
    if not virtual:
        options.append("--ptxas-options=-v")
    request = {"text": text, "name": name, "expression": expression, "options": options, "ptx": virtual}
    start = time.perf_counter()
    try:
        reply = _compiled(_library(), request)
    except RuntimeError as error:
        raise CompileError(f"{name}: NVRTC failed for {target}: {error}", log="", source=None) from error
    if reply.refused:
        raise CompileError(f"{name}: NVRTC refused {expression} for {target}", log=reply.log, source=None)
    if reply.error:
        raise CompileError(f"{name}: NVRTC failed for {target}: {reply.error}", log=reply.log, source=None)
    return Cubin(reply.code, reply.symbol, reply.log, time.perf_counter() - start)
