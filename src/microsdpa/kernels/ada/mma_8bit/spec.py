"""Specification of ada/mma_8bit."""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.kernels.ampere.mma.tiles import packed_heads
from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.eight_bit import operand_types, refused
from microsdpa.kernels.problem import Problem, capability_of
from microsdpa.kernels.spec import BOOLEAN, CPP_TYPE, EIGHT_BIT_PARAMS, KernelSpec, Rejection


@dataclass(frozen=True)
class Tiles:
    """Tiles: keys of a tile, warps of 16 rows, groups that divide the keys, CTAs per SM."""

    block_n: int
    row_warps: int
    key_groups: int
    ctas: int

    @property
    def block_m(self) -> int:
        """Rows of a CTA."""
        return 16 * self.row_warps


FEW_ROWS = 16
"""Rows of a key head's packed query heads, or of a head, that one warp has: more warps share out the keys instead."""
STAGES = 2


def tiles_of(problem: Problem) -> Tiles:
    """Few queries a CTA and the keys divided where the chip would be left empty."""
    chip, pack = chip_of(problem.target), packed_heads(problem)
    rows, columns = problem.seqlen_q * pack, problem.batch * problem.heads // pack
    # A large chip that one CTA an SM leaves room on: more warps at it.
    large = problem.head_dim <= 64 and capability_of(problem.target) in ((9, 0), (10, 0))
    if rows <= FEW_ROWS:
        choices = (Tiles(32, 1, 8, 1),) if large and columns <= chip.sms else (Tiles(32, 1, 4, 2), Tiles(32, 1, 2, 2))
        return next(tiles for tiles in choices if shared_bytes(problem, tiles) <= chip.shared_per_cta)
    if columns * -(-rows // 64) >= 2 * chip.sms:
        return Tiles(64 if problem.head_dim <= 64 else 32, row_warps=4, key_groups=1, ctas=2)
    return Tiles(32, row_warps=2, key_groups=4, ctas=1) if large else Tiles(32, row_warps=2, key_groups=2, ctas=2)


def shared_bytes(problem: Problem, tiles: Tiles) -> int:
    """SharedStorage's size (kernel.cu)."""
    quantized = problem.operands != "int8_fp16"
    per_key = (2 if quantized else 3) * problem.head_dim + 4
    query = tiles.block_m * problem.query_terms * problem.head_dim
    streaming = query + tiles.key_groups * STAGES * tiles.block_n * per_key
    return max(streaming, tiles.key_groups * tiles.block_m * (4 * (problem.head_dim + (16 if quantized else 8)) + 8))


def mma_8bit(problem: Problem) -> KernelSpec | Rejection:
    """The kernel for a problem: its tiles, and the keys divided among warps."""
    if rejection := refused(problem):
        return rejection
    tiles, pack = tiles_of(problem), packed_heads(problem)
    return KernelSpec(
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
            ("STAGES", str(STAGES)),
            ("CTAS", str(tiles.ctas)),
            ("CAUSAL", BOOLEAN[problem.causal is not None]),
            *([("PACK", str(pack))] if pack > 1 else []),
        ),
        threads=32 * tiles.row_warps * tiles.key_groups,
        block_m=tiles.block_m,
        shared_bytes=shared_bytes(problem, tiles),
        pack=pack,
        params=EIGHT_BIT_PARAMS,
    )
