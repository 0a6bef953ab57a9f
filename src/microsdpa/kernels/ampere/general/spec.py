"""Specification of the kernel that computes every call (kernels/ampere/general/kernel.cu)."""

from __future__ import annotations

import functools
from math import ceil

from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.problem import VECTOR_BYTES, MaskKind, Problem, capability_of
from microsdpa.kernels.spec import (
    BOOLEAN,
    CPP_TYPE,
    DROPOUT_TYPE,
    SUMMED_BOOL,
    KernelSpec,
    Rejection,
    dropped_params,
    prologue_type,
    prologued_params,
)

MAX_HEAD_DIM = 256
WARPS = 4
MANY_CTAS = 6
"""CTAs of 128 queries an SM, from which on warps with two tiles of queries serve up to 128 queries faster."""


def forward(problem: Problem) -> KernelSpec | Rejection:
    """The general kernel: any mask, any head dimension up to 256, any alignment."""
    if capability_of(problem.target) < (8, 0):
        return Rejection(f"{problem.target} is older than sm_80", "a GPU of compute capability 8.0 or newer")
    if problem.head_dim > MAX_HEAD_DIM:
        return Rejection(
            f"head_dim {problem.head_dim} is over {MAX_HEAD_DIM}", f"head_dim {MAX_HEAD_DIM}", MAX_HEAD_DIM
        )
    if problem.prologue and problem.head_dim % 8:
        return Rejection(
            f"norms and rotary embedding work on chunks of 8 columns, and head_dim is {problem.head_dim}",
            "a head_dim that is a multiple of 8",
        )
    return _specification(problem.any_size, *_tile(problem))


@functools.lru_cache(maxsize=1024)
def _specification(problem: Problem, row_tiles: int, block_n: int) -> KernelSpec:
    """The kernel with tiles of one kind for any problem of a kind, whatever its size."""
    columns = -(-problem.head_dim // 16) * 16
    vectors = problem.alignment >= VECTOR_BYTES and problem.head_dim % 8 == 0
    mask = problem.mask or MaskKind()
    programmatic = capability_of(problem.target) >= (9, 0)
    arguments = {
        "T": CPP_TYPE[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "BLOCK_N": block_n,
        "ROW_TILES": row_tiles,
        "WARPS": WARPS,
        "LOAD_BYTES": VECTOR_BYTES if vectors else 2,
        "MASK": SUMMED_BOOL if mask.tensor == "uint8" else CPP_TYPE[mask.tensor],
        "LEFT": BOOLEAN[mask.left],
        "RIGHT": BOOLEAN[mask.right or problem.causal is not None],
        "SOFTCAP": BOOLEAN[mask.softcap],
        "ALIBI": BOOLEAN[mask.alibi],
        "SINK": CPP_TYPE[mask.sinks],
        "PROGRAMMATIC": BOOLEAN[programmatic],
        "DROPOUT": DROPOUT_TYPE[problem.dropout],
    }
    if problem.prologue or problem.continued:
        arguments["PROLOGUE"] = prologue_type(problem.prologue)
    if problem.continued:
        arguments["CONTINUES"] = BOOLEAN[True]
    return KernelSpec(
        name="ampere/general",
        source="ampere/general/kernel.cu",
        template="microsdpa::ampere::general::attention",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=32 * WARPS,
        block_m=16 * row_tiles * WARPS,
        shared_bytes=2 * columns * (16 * row_tiles * WARPS + 4 * block_n),
        programmatic=programmatic,
        params=prologued_params(dropped_params("microsdpa::MaskedParams", problem.dropout), problem.prologue),
        local_memory="it computes what no other kernel does: refused, the call would have none",
    )


def _tile(problem: Problem) -> tuple[int, int]:
    """(tiles of 16 queries that a warp owns, keys of a tile), as measured on an H200.

    With two tiles of queries a warp reads shared memory half as often; they are for long rows of queries that fill the
    chip, and take the keys that leave its registers room for the mask. What a tile has beyond the last key is computed
    for nothing: few keys take tiles of 32 (docs/log/hopper-throughput.md).
    """
    head_dim, queries, sms = problem.head_dim, problem.seqlen_q, chip_of(problem.target).sms
    tensor = problem.mask.tensor if problem.mask else None
    few = problem.seqlen_k <= 32 or 64 < problem.seqlen_k <= 96
    block_n = 32 if head_dim > 128 or few else 64
    if problem.dropout or problem.prologue:
        return 1, 64 if head_dim <= 128 else 32  # random numbers take the registers of a second tile
    ctas = problem.batch * problem.heads * ceil(queries / (32 * WARPS))
    if queries <= 64 or ctas < sms or head_dim > 128 or (head_dim > 64 and tensor == "float32"):
        return 1, block_n
    wide = head_dim > 64 or tensor not in (None, "bool", "int32", "uint8")
    if queries > 128:
        return 2, 32 if wide else 64
    if head_dim <= 32:
        return 2, 32
    return (2, 32 if wide else block_n) if ctas >= MANY_CTAS * sms else (1, block_n)
