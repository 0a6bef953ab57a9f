"""Specifications of the ladder: teaching kernels, one idea a rung (cuda/ladder/)."""

from __future__ import annotations

from microsdpa.problem import ELEMENT_BYTES, Problem, capability_of
from microsdpa.specs.spec import MAX_GRID_X, KernelSpec, Rejection

CPP_TYPE = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
HEAD_DIMS = (32, 64, 128)


def scalar(problem: Problem) -> KernelSpec | Rejection:
    """Rung 01: FP32 arithmetic on the CUDA cores, 16 queries a CTA, one key a lane."""
    if problem.head_dim not in HEAD_DIMS:
        nearest = min(HEAD_DIMS, key=lambda d: (abs(d - problem.head_dim), -d))
        return Rejection(
            f"head_dim {problem.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}",
            f"head_dim {nearest}",
        )
    if capability_of(problem.target) < (8, 0):
        return Rejection(f"{problem.target} is older than sm_80", "a GPU of compute capability 8.0 or newer")
    block_m, warps = 16, 4
    spec = KernelSpec(
        name="ladder/01_scalar",
        source="ladder/01_scalar.cu",
        template="microsdpa::scalar_attention",
        template_args=(
            ("T", CPP_TYPE[problem.dtype]),
            ("HEAD_DIM", str(problem.head_dim)),
            ("BLOCK_M", str(block_m)),
            ("WARPS", str(warps)),
            ("CAUSAL", "true" if problem.causal else "false"),
            ("LOAD_BYTES", str(16 if problem.alignment >= 16 else ELEMENT_BYTES[problem.dtype])),
        ),
        threads=32 * warps,
        block_m=block_m,
    )
    if spec.grid(problem)[0] > MAX_GRID_X:
        return Rejection(
            f"{spec.grid(problem)[0]} query tiles exceed the {MAX_GRID_X} CTAs of one launch",
            "a smaller batch",
        )
    return spec
