#!/usr/bin/env python3
"""Builds FlashAttention-3's forward as a library of one C function, a peer of the benchmarks.

    git clone --recurse-submodules=csrc/cutlass https://github.com/Dao-AILab/flash-attention
    python benchmarks/peers/fa3/build.py flash-attention --output libfa3.so
    MICROSDPA_FA3_LIBRARY=$PWD/libfa3.so microsdpa bench --suite prefill --peers flash-attn-3,torch-cudnn

It needs nvcc 12.4 or newer (tried with 13.0), no GPU, and some 3 GB of memory per job. FP16, BF16 and E4M3 of head
dimensions 64, 128 and 256 are nine files: about two minutes on 16 cores. What else the library could do is left out.
Object files stay beside the library, and are not compiled again: remove them after a change of the checkout.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TYPES = ("fp16", "bf16", "e4m3")
HEAD_DIMS = (64, 128, 256)
LEFT_OUT = (
    *("BACKWARD", "SPLIT", "PAGEDKV", "APPENDKV", "LOCAL", "SOFTCAP", "PACKGQA", "VARLEN", "SM8x"),
    *("HDIM96", "HDIM192", "HDIMDIFF64", "HDIMDIFF192"),
)
FLAGS = (
    *("-O3", "-std=c++17", "-Xcompiler=-fPIC", "--use_fast_math", "--expt-relaxed-constexpr", "--expt-extended-lambda"),
    *("-gencode=arch=compute_90a,code=sm_90a", "-DNDEBUG", "-DCUTLASS_ENABLE_GDC_FOR_SM90"),
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",  # else tiles of 80, 160, 176 or 224 keys take narrow instructions
    *(f"-DFLASHATTENTION_DISABLE_{name}" for name in LEFT_OUT),
)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Builds FlashAttention-3's forward as a peer of the benchmarks.")
    parser.add_argument("checkout", type=Path, help="a checkout of flash-attention")
    parser.add_argument("--cutlass", type=Path, help="a checkout of CUTLASS; else the checkout's csrc/cutlass")
    parser.add_argument("--output", type=Path, default=Path("libfa3.so"), help="the library to write")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    return parser.parse_args()


def nvcc() -> str:
    """CUDA's compiler: of CUDA_HOME, else of PATH, else where CUDA is installed by default."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc", path=str(Path(home, "bin"))) or shutil.which("nvcc")
    if found is None:
        sys.exit("nvcc is not here: install the CUDA toolkit and set CUDA_HOME")
    return found


def commit(checkout: Path) -> str:
    """The checkout's commit, or "unknown" for one without history."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else "unknown"


def main() -> None:
    """Compiles each file in a process of its own, then links them."""
    options = arguments()
    hopper, cutlass = options.checkout / "hopper", options.cutlass or options.checkout / "csrc" / "cutlass"
    for needed in (hopper / "flash.h", cutlass / "include" / "cutlass" / "cutlass.h"):
        if not needed.exists():
            sys.exit(f"{needed} is not there: pass a checkout of flash-attention with its submodule csrc/cutlass")
    compiler = nvcc()
    headers = [f"-I{path}" for path in (hopper, cutlass / "include", Path(compiler).parents[1] / "include" / "cccl")]
    built = [
        hopper / "instantiations" / f"flash_fwd_hdim{head_dim}_{name}_sm90.cu"
        for head_dim, name in itertools.product(options.head_dims, options.types)
    ]
    wrapper = Path(__file__).with_name("wrapper.cu")
    chosen = [f"-DFA3_{name.upper()}" for name in options.types] + [f"-DFA3_D{d}" for d in options.head_dims]
    chosen.append(f'-DFA3_COMMIT="{commit(options.checkout)}"')

    objects = options.output.with_suffix(".objects")
    objects.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> str:
        target, more = objects / f"{source.stem}.o", chosen if source == wrapper else []
        if source == wrapper or not target.exists():
            partial = target.with_suffix(".partial.o")
            subprocess.run([compiler, *FLAGS, *more, *headers, "-c", str(source), "-o", str(partial)], check=True)
            partial.rename(target)
            print(f"compiled {source.name}", flush=True)
        return str(target)

    with ThreadPoolExecutor(options.jobs) as pool:
        linked = list(pool.map(compiled, [*built, wrapper]))
    # The driver's functions are found when the library is loaded: a machine without a driver can build it.
    subprocess.run([compiler, "-shared", "-o", str(options.output), *linked], check=True)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
