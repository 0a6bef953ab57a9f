"""`microsdpa doctor`: what works here, and what to do about the rest."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import metadata

import torch

from microsdpa import __version__
from microsdpa.emulate.build import compiler
from microsdpa.errors import CompileError, UnsupportedProblem
from microsdpa.evidence.step import Step
from microsdpa.jit import nvrtc, prebuilt
from microsdpa.jit.cache import KernelCache, default_directory
from microsdpa.jit.inspect import find_nvdisasm
from microsdpa.kernels.problem import Problem, capability_of, target_of
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

EXAMPLES = {
    "one head of 64 queries, D = 64": (1, 1, 1, 64, 64, 64),
    "headline, 8 heads of 512, D = 64": (1, 8, 8, 512, 512, 64),
    "long, 16 heads of 16,384, D = 128": (1, 16, 16, 16384, 16384, 128),
    "decoding, 32 heads on 8, 4,096 keys": (8, 32, 8, 1, 4096, 128),
}
"""B, H, H_kv, S_q, S_k and D of calls that the kernels are shown for."""
EXTRAS = {
    "emulate": ("nvidia-cuda-cccl",),
    "cli": ("jinja2", "jsonschema", "matplotlib", "nvidia-cuda-nvdisasm", "rich", "typer"),
    "integrations": ("diffusers", "transformers"),
}
OK, MISSING, BROKEN = "ok", "missing", "broken"
Line = tuple[str, str, str, str]
"""What is looked at, OK, MISSING or BROKEN, what was found, and what to do."""


def step() -> Step:
    """Look at everything; the step fails where a call of sdpa on a GPU that is here would fail."""
    lines = [*_software(), *_gpu(), *_caches(), *_emulator()]
    table = [["what", "state", "found", "to do"], *(list(line) for line in lines)]
    broken = [name for name, state, _, _ in lines if state == BROKEN]
    missing = [name for name, state, _, _ in lines if state == MISSING]
    summary = f"broken: {', '.join(broken)}" if broken else "sdpa works here"
    if not broken and launcher.device_error():
        summary += ", by torch's own attention: there is no GPU that runs the kernels"
    if missing:
        summary += f"; missing: {', '.join(missing)}"
    data = [dict(zip(table[0], line, strict=True)) for line in lines]
    return Step("doctor", "failed" if broken else "passed", summary, table, data=data)


def _software() -> list[Line]:
    lines: list[Line] = [("microsdpa", OK, __version__, ""), ("torch", OK, torch.__version__, "")]
    try:
        lines.append(("NVRTC", OK, nvrtc.version(), ""))
    except (CompileError, ImportError, OSError, RuntimeError) as error:
        lines.append(("NVRTC", BROKEN, str(error).splitlines()[0], "pip install 'nvidia-cuda-nvrtc>=13.0,<14'"))
    for extra, packages in EXTRAS.items():
        absent = [name for name in packages if not _is_installed(name)]
        found = f"without {', '.join(absent)}" if absent else "installed"
        state = MISSING if absent else OK
        lines.append((f"extra [{extra}]", state, found, f"pip install 'microsdpa[{extra}]'" if absent else ""))
    tool = find_nvdisasm()
    lines.append(("nvdisasm", OK if tool else MISSING, tool or "none", "" if tool else "pip install 'microsdpa[cli]'"))
    return [*lines, _prebuilt()]


def _prebuilt() -> Line:
    """What the optional package of compiled kernels has."""
    there = prebuilt.package()
    if there is None:
        return prebuilt.NAME, OK, "not installed: a first call compiles its kernel, within seconds", ""
    if there.refusal:
        return prebuilt.NAME, MISSING, there.refusal, f"pip install {prebuilt.NAME}=={__version__}"
    numbers = ", ".join(f"{number} kernels for {target}" for target, number in there.kernels.items())
    return prebuilt.NAME, OK, numbers, ""


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _gpu() -> list[Line]:
    version = launcher.driver_version()
    driver = f"supports CUDA {version // 1000}.{version % 1000 // 10}" if version else "none"
    enough = version >= launcher.MIN_DRIVER
    todo = "" if enough else "install driver R580 or newer; without one, CPU tensors go to torch"
    lines: list[Line] = [("driver", OK if enough else MISSING, driver, todo)]
    if reason := launcher.device_error():
        todo = "install a CUDA build of torch" if enough and torch.version.cuda is None else "use a machine with a GPU"
        return [*lines, ("GPU", MISSING, reason, todo)]
    target = target_of(torch.cuda.get_device_capability())
    name = torch.cuda.get_device_name()
    if capability_of(target) < (8, 0):
        found = f"{name}, {target}: older than sm_80, calls go to torch or raise"
        return [*lines, ("GPU", MISSING, found, "use an Ampere, Ada, Hopper or Blackwell GPU")]
    lines.append(("GPU", OK, f"{name}, {target}", ""))
    for text, (batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim) in EXAMPLES.items():
        problem = Problem(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, "float16", target=target)
        try:
            lines.append((f"kernel: {text}", OK, select(problem).spec.name, ""))
        except UnsupportedProblem as error:
            lines.append((f"kernel: {text}", MISSING, str(error), f"nearest: {error.nearest}"))
    return lines


def _caches() -> list[Line]:
    directory = default_directory()
    if reason := KernelCache(directory).distrust("00"):
        return [("kernel cache", MISSING, reason, "set MICROSDPA_CACHE_DIR to a directory of your own")]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        found = f"{directory}: {error.strerror}; every process compiles its own kernels"
        return [("kernel cache", MISSING, found, "set MICROSDPA_CACHE_DIR to a directory that can be written")]
    free = shutil.disk_usage(directory).free // 2**20
    named = " (MICROSDPA_CACHE_DIR)" if "MICROSDPA_CACHE_DIR" in os.environ else ""
    return [("kernel cache", OK, f"{directory}{named}, {free:,} MiB free", "")]


def _emulator() -> list[Line]:
    try:
        return [("emulator", OK, f"built with {compiler()}", "")]
    except CompileError as error:
        return [("emulator", MISSING, error.summary, "install g++, to emulate a kernel that is not in the cache")]
