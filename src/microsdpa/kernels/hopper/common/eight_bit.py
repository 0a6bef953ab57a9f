"""What the specifications of the kernels on Hopper's wgmma with 8-bit values of Q and K have in common."""

from __future__ import annotations

from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.common import ROWS
from microsdpa.kernels.problem import Problem, capability_of
from microsdpa.kernels.spec import (
    BOOLEAN,
    EIGHT_BIT_MASKED,
    EIGHT_BIT_PARAMS,
    KernelSpec,
    Rejection,
    TensorMap,
    masks_type,
    refused_head_dim,
)

WORKS = 4
"""Descriptions of query tiles in shared memory, 20 bytes each."""
MAX_TILES = 2**29
"""Query tiles that the kernels count."""


def refused(problem: Problem, head_dims: tuple[int, ...]) -> Rejection | None:
    """Why no kernel on wgmma with these head dimensions computes a problem, whatever its tiles."""
    if capability_of(problem.target) != (9, 0):
        return Rejection(f"{problem.target} has no wgmma, which is sm_90a's", "a GPU of compute capability 9.0")
    if problem.head_dim not in head_dims:
        return refused_head_dim(problem.head_dim, head_dims)
    return None


def unread(problem: Problem) -> Rejection | None:
    """Why these kernels do not know a problem's masks; None where they do."""
    mask = problem.mask
    if mask is None or mask.tensor in (None, "int32"):
        return None
    return Rejection(f"it reads no masks but ranges of keys, not {mask}", "a window, ranges of keys or shorter keys")


def too_many(problem: Problem, block_m: int) -> Rejection | None:
    """Why a kernel with query tiles of that size cannot count them."""
    if problem.batch * problem.heads * -(-problem.seqlen_q // block_m) > MAX_TILES:
        return Rejection(f"more than {MAX_TILES} query tiles", "a smaller batch")
    return None


def kernel(
    problem: Problem,
    folder: str,
    arguments: dict[str, object],
    consumers: int,
    shared_bytes: int,
    tensor_maps: tuple[TensorMap, ...],
    local_memory: str = "",
) -> KernelSpec:
    """kernels/hopper/<folder>/kernel.cu with these template arguments, behind which are CAUSAL, and MASKS if any."""
    mask = problem.mask
    arguments = arguments | {"CAUSAL": problem.causal is not None or (mask is not None and mask.right)}
    if mask is not None:
        arguments |= {"MASKS": masks_type(mask)}
    return KernelSpec(
        name=f"hopper/{folder}",
        source=f"hopper/{folder}/kernel.cu",
        template=f"microsdpa::hopper::{folder}::attention",
        template_args=tuple((name, _spelled(value)) for name, value in arguments.items()),
        threads=2 * ROWS * (1 + consumers),
        block_m=ROWS * consumers,
        local_memory=local_memory,
        shared_bytes=shared_bytes,
        max_ctas=chip_of(problem.target).sms,
        tensor_maps=tensor_maps,
        programmatic=True,
        params=EIGHT_BIT_PARAMS if mask is None else EIGHT_BIT_MASKED,
    )


def _spelled(value: object) -> str:
    """As C++ spells it."""
    return BOOLEAN[value] if isinstance(value, bool) else str(value)
