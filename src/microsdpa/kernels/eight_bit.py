"""What the specifications of the kernels on mma.sync with 8-bit operands have in common."""

from __future__ import annotations

from microsdpa.kernels.problem import Problem, capability_of
from microsdpa.kernels.spec import CPP_TYPE, Rejection, refused_head_dim

HEAD_DIMS = (32, 64, 128)
ALL_HEAD_DIMS = (*HEAD_DIMS, 256)
"""The last one where V is E4M3 and the GPU has wgmma."""
MIN_CAPABILITY = (8, 9)
"""E4M3 products need Ada; INT8 alone would not, but V and P of int8_fp8 do, and the modes share their kernels."""


def operand_types(problem: Problem) -> tuple[tuple[str, str], ...]:
    """FORMAT, of Q and K, and VALUE, of V and P, as templates take them."""
    value = CPP_TYPE[problem.dtype] if problem.operands == "int8_fp16" else "microsdpa::E4m3"
    return ("FORMAT", "microsdpa::E4m3" if problem.operands == "fp8" else "microsdpa::Int8"), ("VALUE", value)


def refused(problem: Problem) -> Rejection | None:
    """Why no kernel on 8-bit mma.sync computes a problem, whatever its tiles."""
    if capability_of(problem.target) < MIN_CAPABILITY:
        return Rejection(
            f"{problem.target} has no 8-bit floating-point products (sm_89 and newer have)",
            "float16 or bfloat16 tensors without precision=",
        )
    if problem.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        return refused_head_dim(problem.head_dim, HEAD_DIMS, f"one of {known} with 8-bit operands")
    return None
