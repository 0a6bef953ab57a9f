"""Specification of ada/mma_8bit."""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.eight_bit import operand_types, refused
from microsdpa.kernels.problem import Problem, capability_of
from microsdpa.kernels.spec import BOOLEAN, CPP_TYPE, EIGHT_BIT_PARAMS, KernelSpec, Rejection


@dataclass(frozen=True)
class Tiles:
    """Tiles: keys of a tile, warps of 16 queries, groups that divide the keys, CTAs per SM."""

    block_n: int
    row_warps: int
    key_groups: int
    ctas: int


def tiles_of(problem: Problem) -> Tiles:
    """Few queries a CTA and the keys divided where the chip would be left empty."""
    block_n = 64 if problem.head_dim <= 64 else 32
    tiles = problem.batch * problem.heads * -(-problem.seqlen_q // 64)
    if tiles >= 2 * chip_of(problem.target).sms:
        return Tiles(block_n, row_warps=4, key_groups=1, ctas=2)
    if problem.head_dim > 64 or capability_of(problem.target) not in ((9, 0), (10, 0)):
        return Tiles(32, row_warps=2, key_groups=2, ctas=2)
    return Tiles(32, row_warps=2, key_groups=4, ctas=1)  # one CTA an SM of a large chip: more warps at it


def mma_8bit(problem: Problem) -> KernelSpec | Rejection:
    """The kernel for a problem: its tiles, and the keys divided among warps."""
    tiles, stages = tiles_of(problem), 2
    quantized = problem.operands != "int8_fp16"
    block_m = 16 * tiles.row_warps
    per_key = (2 if quantized else 3) * problem.head_dim + 4
    streaming = block_m * problem.query_terms * problem.head_dim + tiles.key_groups * stages * tiles.block_n * per_key
    merging = tiles.key_groups * block_m * (4 * (problem.head_dim + (16 if quantized else 8)) + 8)
    spec = KernelSpec(
        name="ada/mma_8bit",
        source="ada/mma_8bit/kernel.cu",
        template="microsdpa::ada::mma_8bit::attention",
        template_args=(
            ("T", CPP_TYPE[problem.dtype]),
            *operand_types(problem),
            ("HEAD_DIM", str(problem.head_dim)),
            ("TERMS", str(problem.query_terms)),
            ("BLOCK_N", str(tiles.block_n)),
            ("ROW_WARPS", str(tiles.row_warps)),
            ("KEY_GROUPS", str(tiles.key_groups)),
            ("STAGES", str(stages)),
            ("CTAS", str(tiles.ctas)),
            ("CAUSAL", BOOLEAN[problem.causal is not None]),
        ),
        threads=32 * tiles.row_warps * tiles.key_groups,
        block_m=block_m,
        shared_bytes=max(streaming, merging),
        params=EIGHT_BIT_PARAMS,
    )
    return refused(problem) or spec
