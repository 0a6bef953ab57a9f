"""Specifications of the mma.sync production kernel (kernels/ampere/)."""

from __future__ import annotations

import functools

from microsdpa.kernels.ampere.mma.tiles import (
    MASKED_QUERIES,
    Tiling,
    candidates,
    choose,
    columns_of,
    illegal,
    late_ctas,
    packed_heads,
)
from microsdpa.kernels.problem import VECTOR_BYTES, MaskKind, Problem, capability_of
from microsdpa.kernels.spec import BOOLEAN, CPP_TYPE, KernelSpec, Rejection, masks_type, refused_head_dim

HEAD_DIMS = range(8, 257, 8)
STREAM_SPILLS = (
    "all 255 registers are used: another compiler than the tested one may keep a value of the outer loop there"
)
MASK_SPILLS = "a mask of numbers takes the registers that are left: some bytes of addresses, once a tile"


def specification(problem: Problem, tiling: Tiling, pack: int = 1) -> KernelSpec:
    """The kernel of one tiling for a problem."""
    late = late_ctas(problem, tiling) if tiling.streaming else 0
    return _specification(problem.any_size, tiling, pack, late)


@functools.lru_cache(maxsize=1024)
def _specification(problem: Problem, tiling: Tiling, pack: int, late: int) -> KernelSpec:
    """specification() for any problem of that kind, whatever its size."""
    mask = problem.mask or MaskKind()
    programmatic = capability_of(problem.target) >= (9, 0)
    arguments: dict[str, str | int] = {
        "T": CPP_TYPE[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "BLOCK_N": tiling.block_n,
        "ROW_TILES": tiling.row_tiles,
    }
    causal = BOOLEAN[mask.right or problem.causal is not None]
    kept = min(tiling.kept, columns_of(problem.head_dim) // 16)
    if tiling.streaming:
        arguments |= {"WARPS": tiling.warps_m, "STAGES": tiling.stages, "KEPT": kept, "STEP": tiling.step}
        arguments |= {"CTAS": tiling.ctas, "LATE": late, "CAUSAL": causal}
    else:
        arguments |= {"WARPS_M": tiling.warps_m, "WARPS_N": tiling.warps_n, "STAGES": tiling.stages}
        arguments |= {"RESIDENT": BOOLEAN[tiling.resident], "KEPT": kept, "CAUSAL": causal}
        arguments |= {"PACK": pack, "SPLIT": tiling.split, "CLUSTERED": BOOLEAN[tiling.clustered]}
    arguments["PROGRAMMATIC"] = BOOLEAN[programmatic]
    if not tiling.streaming:
        arguments["MASKS"] = masks_type(problem.mask)
    in_two_kernels = tiling.split > 1 and not tiling.clustered
    folder = "stream" if tiling.streaming else "mma"
    return KernelSpec(
        name="ampere/mma",
        source=f"ampere/{folder}/kernel.cu",
        template=f"microsdpa::ampere::{folder}::attention",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=tiling.threads,
        block_m=tiling.block_m,
        shared_bytes=tiling.shared_bytes(problem.head_dim),
        local_memory=_local_memory(problem, tiling),
        cluster=tiling.split if tiling.clustered else 1,
        split=tiling.split,
        pack=pack,
        programmatic=programmatic,
        workspace_row_bytes=tiling.split * (4 * problem.head_dim + 8) if in_two_kernels else 0,
        next_kernel=_combine(problem, tiling.split, programmatic) if in_two_kernels else None,
        params="microsdpa::MaskedParams" if problem.mask else "microsdpa::AttentionParams",
    )


def _local_memory(problem: Problem, tiling: Tiling) -> str:
    """Why a kernel may spill; empty when it may not."""
    if problem.mask is not None:
        return MASK_SPILLS if problem.head_dim > 64 else ""
    return STREAM_SPILLS if tiling.streaming and problem.head_dim > 64 else ""


def _combine(problem: Problem, split: int, programmatic: bool) -> KernelSpec:
    """The kernel that adds up the parts of a split problem."""
    block_m = max(1, 512 // problem.head_dim)  # 128 threads with four columns each
    arguments = (CPP_TYPE[problem.dtype], problem.head_dim, block_m, split, BOOLEAN[programmatic])
    return KernelSpec(
        name="ampere/mma",
        source="ampere/combine/kernel.cu",
        template="microsdpa::ampere::combine::combine",
        template_args=tuple(
            zip(("T", "HEAD_DIM", "BLOCK_M", "SPLIT", "PROGRAMMATIC"), map(str, arguments), strict=True)
        ),
        threads=block_m * problem.head_dim // 4,
        block_m=block_m,
        programmatic=programmatic,
        workspace_row_bytes=split * (4 * problem.head_dim + 8),
    )


def forward(problem: Problem) -> KernelSpec | Rejection:
    """The production kernel."""
    if capability_of(problem.target) < (8, 0):
        return Rejection(f"{problem.target} is older than sm_80", "a GPU of compute capability 8.0 or newer")
    if problem.head_dim not in HEAD_DIMS:
        return refused_head_dim(problem.head_dim, HEAD_DIMS, "a multiple of 8 up to 256")
    if problem.alignment < VECTOR_BYTES:
        return Rejection(
            f"rows that are not aligned to {VECTOR_BYTES} bytes", f"tensors whose rows start on {VECTOR_BYTES} bytes"
        )
    if problem.mask is not None and problem.seqlen_q > MASKED_QUERIES:
        return Rejection(
            f"it knows the causal mask only, not {problem.mask}, but for up to {MASKED_QUERIES} queries of a head",
            f"a call without {problem.mask}",
        )
    return specification(problem, choose(problem), packed_heads(problem))


def configurations(problem: Problem) -> dict[str, KernelSpec]:
    """Those of ampere/mma and ampere/stream, by their tiles."""
    legal = [tiling for tiling in candidates(problem) if not illegal(problem, tiling)]
    return {str(tiling): specification(problem, tiling, packed_heads(problem)) for tiling in legal}
