"""Specifications of the ladder: teaching kernels, one idea a rung (cuda/ladder/)."""

from __future__ import annotations

from microsdpa.problem import ELEMENT_BYTES, VECTOR_BYTES, Problem, capability_of
from microsdpa.specs.spec import MAX_GRID_X, KernelSpec, Rejection

CPP_TYPE = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
HEAD_DIMS = (32, 64, 128)


def scalar(problem: Problem) -> KernelSpec | Rejection:
    """Rung 01: FP32 arithmetic on the CUDA cores, 16 queries a CTA, one key a lane."""
    block_m, warps = 16, 4
    spec = KernelSpec(
        name="ladder/01_scalar",
        source="ladder/01_scalar.cu",
        template="microsdpa::scalar_attention",
        template_args=_template_args(problem, BLOCK_M=block_m, WARPS=warps),
        threads=32 * warps,
        block_m=block_m,
    )
    return _rejection(problem, spec) or spec


def wmma(problem: Problem) -> KernelSpec | Rejection:
    """Rung 02: tensor cores through C++ wmma, 16 queries a warp."""
    return _through_wmma(problem, "02_wmma", stages=1)


def cp_async(problem: Problem) -> KernelSpec | Rejection:
    """Rung 03: rung 02 with two places for K and V, one of which is being filled while the other is used."""
    return _through_wmma(problem, "03_cp_async", stages=2)


def _through_wmma(problem: Problem, rung: str, stages: int) -> KernelSpec | Rejection:
    block_m, block_n = 64, 32 if problem.head_dim > 64 else 64
    warps = block_m // 16
    pitch = _row_bytes(problem) + 16
    scratch = 16 * 4 * (max(problem.head_dim, block_n) + 4) + 16 * 2 * (block_n + 8)
    spec = KernelSpec(
        name=f"ladder/{rung}",
        source=f"ladder/{rung}.cu",
        template=f"microsdpa::{rung[3:]}_attention",
        template_args=_template_args(problem, BLOCK_M=block_m, BLOCK_N=block_n),
        threads=32 * warps,
        block_m=block_m,
        shared_bytes=(block_m + 2 * stages * block_n) * pitch + warps * scratch,
    )
    return _rejection(problem, spec) or spec


def _row_bytes(problem: Problem) -> int:
    return problem.head_dim * ELEMENT_BYTES[problem.dtype]


def _template_args(problem: Problem, **tiles: int) -> tuple[tuple[str, str], ...]:
    """What every rung's template has first and last, with the rung's own tiles between."""
    return (
        ("T", CPP_TYPE[problem.dtype]),
        ("HEAD_DIM", str(problem.head_dim)),
        *((name, str(value)) for name, value in tiles.items()),
        ("CAUSAL", "true" if problem.causal else "false"),
        ("LOAD_BYTES", str(16 if problem.alignment >= VECTOR_BYTES else ELEMENT_BYTES[problem.dtype])),
    )


def _rejection(problem: Problem, spec: KernelSpec) -> Rejection | None:
    """Why the ladder does not compute a problem, for which `spec` would be the kernel."""
    if problem.head_dim not in HEAD_DIMS:
        nearest = min(HEAD_DIMS, key=lambda d: (abs(d - problem.head_dim), -d))
        return Rejection(
            f"head_dim {problem.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}",
            f"head_dim {nearest}",
        )
    if capability_of(problem.target) < (8, 0):
        return Rejection(f"{problem.target} is older than sm_80", "a GPU of compute capability 8.0 or newer")
    if spec.grid(problem)[0] > MAX_GRID_X:
        return Rejection(
            f"{spec.grid(problem)[0]} query tiles exceed the {MAX_GRID_X} CTAs of one launch",
            "a smaller batch",
        )
    return None
