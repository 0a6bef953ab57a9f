"""`microsdpa pack`: the wheel microsdpa-kernels, machine code of common configurations, so that first calls compile
nothing. The wheel is the same for every Python and every machine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import microsdpa
from microsdpa.errors import InvalidArgument
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.jit import CompiledKernel, compile_kernel, nvrtc, prebuilt
from microsdpa.jit.cache import default_directory
from microsdpa.kernels import KernelSpec, Rejection
from microsdpa.kernels.ampere.varlen import spec as ampere_varlen
from microsdpa.kernels.hopper.backward import spec as hopper_backward
from microsdpa.kernels.problem import Causal, DType, Problem
from microsdpa.kernels.select import chosen

TARGETS = ("sm_80", "sm_89", "sm_90a")
"""A100; L4, L40 and RTX 40; H100 and H200."""
DTYPES: tuple[DType, ...] = ("float16", "bfloat16")
HEAD_DIMS = (64, 128)
MASKS: tuple[Causal | None, ...] = (None, "upper_left", "lower_right")
SIZES = (
    *((1, heads, heads, length, length) for heads in (1, 8) for length in (64, 128, 256, 512)),
    *((1, 12, 12, 197, 197), (1, 16, 16, 1024, 1024), (2, 16, 16, 2048, 2048), (8, 12, 12, 512, 512)),
    *((1, 32, heads_kv, length, length) for heads_kv in (8, 32) for length in (512, 2048, 4096)),
    (1, 16, 16, 16384, 16384),
    *((batch, 32, heads_kv, 1, keys) for batch in (1, 8, 64) for heads_kv in (8, 32) for keys in (512, 4096)),
)
"""B, H, H_kv, S_q and S_k: short and long self-attention, and decoding, with and without groups of heads."""
PAGES = (0, 16)
"""Packed sequences, and a cache of pages of 16."""
SEQUENCES = ((1, 1, 4096), (8, 1, 4096), (64, 1, 4096), (64, 1, 128), (8, 512, 4096))
"""Batch, queries and keys of sequences of many lengths: decoding and prompts."""
DATE = (1980, 1, 1, 0, 0, 0)
MODULE = '"""Machine code for microsdpa, by target; microsdpa.jit.prebuilt reads it."""\n'


def common(target: str) -> list[KernelSpec]:
    """The configurations of the wheel for `target`: what impl="auto" chooses for FP16 and BF16 with D of 64 and 128.

    They are without a mask and causal, of SIZES, with their gradients on Hopper; and for packed sequences and caches of
    pages of 16, of which new keys are written by the same kernel or by one ahead.
    """
    specs: dict[KernelSpec, None] = {}
    for dtype, head_dim, causal, sizes in product(DTYPES, HEAD_DIMS, MASKS, SIZES):
        problem = Problem(*sizes, head_dim, dtype, causal=causal, target=target)
        if (spec := chosen(problem)) is not None:
            specs |= dict.fromkeys(spec.stages)
        tiling = hopper_backward.choose(problem)
        if not isinstance(tiling, Rejection):
            gradients = hopper_backward.prepare, hopper_backward.gradients, hopper_backward.finish
            specs |= dict.fromkeys(make(problem, tiling) for make in gradients)
    for dtype, head_dim, page, (batch, queries, keys) in product(DTYPES, HEAD_DIMS, PAGES, SEQUENCES):
        sizes = batch, 32, 8, queries, keys
        problem = Problem(*sizes, head_dim, dtype, causal="lower_right", varlen=page, target=target)
        spec = chosen(problem)
        if spec is not None:
            appends = ampere_varlen.appends_itself(spec, problem)
            plain = ampere_varlen.RowChange()
            makes = ampere_varlen.appending(spec, problem, plain) if appends else ampere_varlen.append(problem, plain)
            specs |= dict.fromkeys((*spec.stages, makes))
    return list(specs)


def step(targets: Iterable[str] = TARGETS, output: Path = Path("dist"), progress: Progress = no_progress) -> Step:
    """Compile the common configurations and write the wheel below `output`.

    Raises:
        InvalidArgument: no kernel supports a target.
    """
    jobs = []
    for target in targets:
        specs = common(target)
        if not specs:
            hint = "name a target from sm_80 on"
            raise InvalidArgument("target", expected="one that kernels support", got=target, hint=hint)
        jobs += [(spec, target) for spec in specs]
    kernels, advance = [], progress("pack", len(jobs))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles without holding the GIL
        # A cache that is named is all that is looked into: not what an installed wheel has.
        for kernel in pool.map(lambda job: compile_kernel(job[0], job[1], default_directory()), jobs):
            kernels.append(kernel)
            advance(f"{kernel.spec.name} {kernel.target}")
    path = write(kernels, output)
    table = [["target", "kernels", "MB of machine code"]]
    for target in targets:
        sizes = [len(kernel.cubin) for kernel in kernels if kernel.target == target]
        table.append([target, str(len(sizes)), f"{sum(sizes) / 1e6:.1f}"])
    summary = f"{len(kernels)} kernels in {path.stat().st_size / 1e6:.1f} MB: {path}"
    return Step("pack", "passed", summary, table, data={"wheel": str(path), "kernels": len(kernels)})


def write(kernels: list[CompiledKernel], output: Path) -> Path:
    """Write the wheel of compiled kernels below `output`, and give its path."""
    counts: dict[str, int] = {}
    for kernel in kernels:
        counts[kernel.target] = counts.get(kernel.target, 0) + 1
    about: dict[str, Any] = {
        "format": prebuilt.FORMAT,
        "microsdpa": microsdpa.__version__,
        "nvrtc": nvrtc.version(),
        "kernels": counts,
    }
    files = {
        f"{prebuilt.FOLDER}/__init__.py": MODULE.encode(),
        f"{prebuilt.FOLDER}/{prebuilt.ABOUT}": _json(about),
    }
    for kernel in kernels:
        name = f"{prebuilt.FOLDER}/{kernel.target}/{kernel.code_signature}"
        described = {
            "kernel": kernel.spec.name,
            "expression": kernel.spec.expression,
            "target": kernel.target,
            "signature": kernel.signature,
            "symbol": kernel.symbol,
            "resources": kernel.resources.as_dict(),
            "log": "",
            "compile_seconds": 0.0,
            "cubin_sha256": hashlib.sha256(kernel.cubin).hexdigest(),
        }
        files |= {f"{name}{prebuilt.BINARY}": zlib.compress(kernel.cubin, 9), f"{name}.json": _json(described)}
    wheel = f"{prebuilt.FOLDER}-{microsdpa.__version__}"
    files |= {f"{wheel}.dist-info/METADATA": _metadata(about).encode(), f"{wheel}.dist-info/WHEEL": _WHEEL.encode()}
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in sorted(files.items())]
    files[f"{wheel}.dist-info/RECORD"] = "\n".join([*record, f"{wheel}.dist-info/RECORD,,", ""]).encode()
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{wheel}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, DATE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return path


_WHEEL = "Wheel-Version: 1.0\nGenerator: microsdpa pack\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def _metadata(about: dict[str, Any]) -> str:
    version = about["microsdpa"]
    targets = ", ".join(about["kernels"])
    return (
        f"Metadata-Version: 2.4\nName: {prebuilt.NAME}\nVersion: {version}\n"
        f"Summary: Compiled kernels of microsdpa for {targets}: the first call compiles nothing\n"
        f"License-Expression: Apache-2.0\nRequires-Python: >=3.10\nRequires-Dist: microsdpa=={version}\n"
        "Description-Content-Type: text/markdown\n\n"
        f"Machine code of common configurations of microsdpa {version} for {targets}, made by NVRTC {about['nvrtc']}.\n"
        "With this package beside microsdpa, the first call of such a configuration compiles nothing.\n"
    )


def _json(data: object) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
