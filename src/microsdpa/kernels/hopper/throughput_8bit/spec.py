"""Specification of hopper/throughput_8bit: Q K^T in E4M3 or INT8, and P V in E4M3."""

from __future__ import annotations

from dataclasses import dataclass, replace

from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.common import ROWS
from microsdpa.kernels.hopper.common.eight_bit import WORKS, kernel, refused, too_many, unread
from microsdpa.kernels.problem import ELEMENT_BYTES, Problem
from microsdpa.kernels.spec import CPP_TYPE, KernelSpec, Rejection, TensorMap

HEAD_DIMS = (64, 128, 256)
PANEL = 128
"""Channels of a tile that are copied together, at most."""
WIDE_SPILLS = "at D = 256 O takes 128 registers, beside which a few numbers of the loop find no place"
MOST_SHARED = 227 << 10
"""Bytes that a CTA can have."""
SMALL_TILES = 1.1
"""Time of a key in tiles of 64 over that in tiles of 96, at D = 256."""
SHORT_KEYS = 8192
"""At D = 256, up to so many, two tiles of K and V^T and room for O are taken beside scales of keys, and masks."""
MOST_STAGES = 4
"""More than four tiles of K and V^T are no faster; two hold the consumers together."""
OUT_PANEL = 64
"""Channels of a panel of O on its way through shared memory (wide_promoting.cuh)."""
LARGEST_VALUE = 16
"""Of a probability in the first tile of a row, where the tensor cores add to O (promoting.cuh)."""
CPP_FORMAT: dict[str | None, str] = {"fp8": "__nv_fp8_e4m3", "int8_fp8": "signed char"}
"""Of Q and K."""


@dataclass(frozen=True)
class Tiles:
    """A configuration, apart from what the problem itself decides.

    Attributes:
        block_n: keys of a tile.
        consumers: warpgroups that compute, with 64 queries each.
        stages: tiles of K, and of V^T, that there is room for.
        value_stages: tiles of V that wait for their transposition.
        promoted_keys: over so many the tensor cores add P V to O, until the sum is moved; 0: P V of every tile is
            added to O in FP32.
    """

    block_n: int
    consumers: int
    stages: int
    value_stages: int = 2
    promoted_keys: int = 0

    @property
    def block_m(self) -> int:
        """Queries of a CTA."""
        return ROWS * self.consumers

    def promoted_tiles(self, seqlen_k: int) -> int:
        """The same in tiles; 0 where there are no more keys than that, so that nothing is moved."""
        tiles = -(-self.promoted_keys // self.block_n)
        return tiles if -(-seqlen_k // self.block_n) > tiles else 0

    def query_stages(self, head_dim: int, terms: int, key_scales: bool, promotes: bool) -> int:
        """Query tiles that there is room for: two at most."""
        return 2 if self.shared_bytes(head_dim, terms, key_scales, promotes, 2) <= MOST_SHARED else 1

    def shared_bytes(self, head_dim: int, terms: int, key_scales: bool, promotes: bool, query_stages: int) -> int:
        """SharedStorage's size (shared.cuh)."""
        tiles = query_stages * terms * self.block_m + (2 * self.stages + self.value_stages) * self.block_n
        scales = self.stages * 4 * (self.block_n if key_scales else 4)
        promoted = 4 * self.block_m * head_dim if promotes and head_dim <= 128 else 16
        barriers = WORKS * 20 + 4 * self.value_stages + (2 * query_stages + 4 * self.stages + 2 * self.value_stages) * 8
        return -(-(tiles * head_dim + scales + promoted + barriers) // 1024) * 1024


def tiles_for(problem: Problem) -> Tiles:
    """The configuration for a problem: as many consumers as registers hold, and as many keys a tile.

    Two terms at D = 256, and scales of keys where more than two consumers would leave SMs empty, have P V of every tile
    added to O in FP32 (docs/hopper-8bit.md). Under masks there is no such configuration.
    """
    several = _has_key_scales(problem)
    if problem.head_dim == 256:
        if problem.query_terms == 2:
            return Tiles(64, consumers=2, stages=3)
        promoted_keys = 1024 if several else 2048
        if SMALL_TILES * _padded(problem.seqlen_k, 64) < _padded(problem.seqlen_k, 96):
            return Tiles(64, consumers=2, stages=3, promoted_keys=promoted_keys)
        # Under a causal mask room for a second query tile, and for O, is worth more than a third tile of K and V^T.
        # Scales of keys, and masks, find no registers beside a third tile, but where few query tiles begin.
        is_plain = not several and problem.mask is None
        stages = 3 if not _is_causal(problem) and (is_plain or problem.seqlen_k > SHORT_KEYS) else 2
        return Tiles(96, consumers=2, stages=stages, promoted_keys=promoted_keys)
    if problem.head_dim == 64:
        tiles, few = Tiles(64, consumers=4, stages=3, promoted_keys=1024), Tiles(192, consumers=2, stages=3)
    else:
        promoted_keys = 1024 if several else 4096
        tiles, few = Tiles(96, consumers=3, stages=2, promoted_keys=promoted_keys), Tiles(128, consumers=2, stages=3)
    if not several:
        return _deepened(tiles, problem)
    ctas = problem.batch * problem.heads * -(-problem.seqlen_q // tiles.block_m)
    if problem.mask is not None:
        return tiles
    return few if ctas < chip_of(problem.target).sms else tiles


def _deepened(tiles: Tiles, problem: Problem) -> Tiles:
    """With as many stages as there is room for, up to MOST_STAGES."""
    promotes = tiles.promoted_tiles(problem.seqlen_k) > 0
    for stages in range(MOST_STAGES, tiles.stages, -1):
        deeper = replace(tiles, stages=stages)
        if deeper.shared_bytes(problem.head_dim, problem.query_terms, False, promotes, 1) <= MOST_SHARED:
            return deeper
    return tiles


def _has_key_scales(problem: Problem) -> bool:
    """Whether the keys of a head have different scales."""
    return problem.operands == "int8_fp8" or problem.key_block != 0


def _is_causal(problem: Problem) -> bool:
    """Whether what a row sees has a right end."""
    return problem.causal is not None or (problem.mask is not None and problem.mask.right)


def _padded(keys: int, block_n: int) -> int:
    """Keys of all tiles."""
    return -(-keys // block_n) * block_n


def specification(problem: Problem, tiles: Tiles) -> KernelSpec:
    """The kernel of one configuration for a problem."""
    if problem.head_dim == 256 and tiles.promoted_keys > 0:
        return _wide(problem, tiles)
    head_dim, terms = problem.head_dim, problem.query_terms
    columns = min(head_dim, PANEL)
    promoted_tiles = tiles.promoted_tiles(problem.seqlen_k)
    key_scales = _has_key_scales(problem)
    query_stages = tiles.query_stages(head_dim, terms, key_scales, promoted_tiles > 0)
    return kernel(
        problem,
        "throughput_8bit",
        {
            "T": CPP_TYPE[problem.dtype],
            "FORMAT": CPP_FORMAT[problem.operands],
            "HEAD_DIM": head_dim,
            "TERMS": terms,
            "BLOCK_N": tiles.block_n,
            "CONSUMERS": tiles.consumers,
            "STAGES": tiles.stages,
            "VALUE_STAGES": tiles.value_stages,
            "QUERY_STAGES": query_stages,
            "KEY_SCALES": key_scales,
            "IN_PLACE": tiles.promoted_keys > 0,
            "PROMOTED_TILES": promoted_tiles,
        },
        tiles.consumers,
        tiles.shared_bytes(head_dim, terms, key_scales, promoted_tiles > 0, query_stages),
        (
            TensorMap("query", ROWS, columns, columns),
            TensorMap("key", tiles.block_n, columns, columns),
            TensorMap("value", tiles.block_n, columns, columns),
        ),
        WIDE_SPILLS if head_dim == 256 else "",
    )


def _wide(problem: Problem, tiles: Tiles) -> KernelSpec:
    """The same where O has 256 channels and the tensor cores add to it (wide.cu)."""
    promoted_tiles = tiles.promoted_tiles(problem.seqlen_k)
    key_scales = _has_key_scales(problem)
    query_stages = tiles.query_stages(256, 1, key_scales, False)
    needed = tiles.shared_bytes(256, 1, key_scales, False, query_stages)
    panel_bytes = tiles.block_m * OUT_PANEL * ELEMENT_BYTES[problem.dtype]
    out_panels = min(2, (MOST_SHARED - needed) // panel_bytes) if query_stages == 2 else 0
    spec = kernel(
        problem,
        "throughput_8bit",
        {
            "T": CPP_TYPE[problem.dtype],
            "FORMAT": CPP_FORMAT[problem.operands],
            "BLOCK_N": tiles.block_n,
            "STAGES": tiles.stages,
            "VALUE_STAGES": tiles.value_stages,
            "QUERY_STAGES": query_stages,
            "KEY_SCALES": key_scales,
            "PROMOTED_TILES": promoted_tiles,
            "OUT_PANELS": out_panels,
        },
        tiles.consumers,
        needed + (out_panels * panel_bytes or 1024),
        (
            TensorMap("query", ROWS, PANEL, PANEL),
            TensorMap("key", tiles.block_n, PANEL, PANEL),
            TensorMap("value", tiles.block_n, PANEL, PANEL),
            TensorMap("out", 16, OUT_PANEL, OUT_PANEL * ELEMENT_BYTES[problem.dtype]),
        ),
        WIDE_SPILLS if key_scales or problem.mask is not None else "",
    )
    return replace(
        spec,
        source="hopper/throughput_8bit/wide.cu",
        template="microsdpa::hopper::throughput_8bit::wide_attention",
    )


def throughput(problem: Problem) -> KernelSpec | Rejection:
    """The kernel for P and V in E4M3."""
    if problem.operands not in CPP_FORMAT:
        return Rejection("V is not E4M3", "E4M3 tensors with scales, or precision='int8_fp8'")
    if problem.operands == "int8_fp8" and problem.query_terms != 1:
        return Rejection("a query has two INT8 terms an element", "one term an element")
    if (refusal := refused(problem, HEAD_DIMS)) is not None:
        return refusal
    if (refusal := unread(problem)) is not None:
        return refusal
    mask = problem.mask
    if mask is not None and problem.head_dim == 256 and problem.query_terms == 2:
        return Rejection(f"at head_dim 256 with two terms a query it does not know {mask}", "precision='int8_fp8'")
    tiles = tiles_for(problem)
    return too_many(problem, tiles.block_m) or specification(problem, tiles)
