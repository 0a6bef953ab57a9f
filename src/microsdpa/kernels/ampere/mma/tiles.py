"""Tilings of ampere/mma: which there are, which are legal for a problem, and which is chosen.

On the H200 the choice is measured (`measured`, docs/log/ampere.md). For every other chip it is derived: the cheapest
legal candidate by `cost`, a model in clocks of an SM that was not fitted to any measurement of those chips.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import ceil

from microsdpa.kernels.chip import CLUSTERS, Chip, chip_of
from microsdpa.kernels.problem import ELEMENT, Problem, capability_of


def columns_of(head_dim: int) -> int:
    """Columns of tiles: those of a head, and zeros up to a multiple of 16."""
    return ceil(head_dim / 16) * 16


@dataclass(frozen=True)
class Tiling:
    """A configuration of ampere/mma or ampere/stream, apart from what the problem itself decides.

    Attributes:
        block_n: keys of a tile.
        row_tiles: 16-row tiles of queries that a warp owns.
        warps_m: warps that share keys, each with its own rows.
        warps_n: groups of such warps, each with its own keys.
        streaming: ampere/stream, for problems that fill the chip, with one group and two or four stages.
        stages: tiles of K and V in shared memory, of each group.
        resident: all of a group's keys are loaded at once; they must fit its `stages` tiles.
        kept: blocks of 16 columns of Q that stay in registers; at most all.
        step: keys whose scores are in registers at a time; of a streaming tiling.
        ctas: CTAs that an SM shall hold at once, which bounds the registers; of a streaming tiling.
        split: CTAs among which the keys are divided.
        clustered: these CTAs are a cluster and merge their parts themselves; else a second kernel does.
    """

    block_n: int
    row_tiles: int
    warps_m: int
    warps_n: int = 1
    stages: int = 2
    resident: bool = False
    kept: int = 16
    step: int = 0
    ctas: int = 1
    split: int = 1
    clustered: bool = False
    streaming: bool = False

    def __str__(self) -> str:
        """For a table."""
        words = [f"{self.block_m} x {self.block_n}", f"{self.warps_m} x {self.warps_n} warps"]
        words += ["streaming"] if self.streaming else []
        words += ["resident"] if self.resident else []
        words += [f"keys in {self.split}{' of a cluster' if self.clustered else ''}"] if self.split > 1 else []
        return ", ".join(words)

    @property
    def block_m(self) -> int:
        """Rows of a CTA."""
        return 16 * self.row_tiles * self.warps_m

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_m * self.warps_n

    def shared_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory: the query tile and the rings, or the groups' results that replace them."""
        columns = columns_of(head_dim)
        ring = 2 * self.stages * self.block_n * columns * ELEMENT
        tiles = self.block_m * columns * ELEMENT + self.warps_n * ring
        if self.streaming:  # and seven addresses and strides, two barriers, two numbers, flags, sums of a thread's rows
            sums = 8 * self.row_tiles * self.threads if head_dim > 64 else 4
            return tiles + ceil((80 + 4 * self.warps_m + sums) / 128) * 128
        if self.warps_n == self.split == 1:
            return tiles
        merging = self.warps_n * self.block_m * (4 * (columns + 8) + 8)
        exchange = self.block_m * head_dim // 4 * (16 + 8) + 8 if self.clustered else 0
        return ceil((ceil(max(tiles, merging) / 128) * 128 + exchange) / 128) * 128


STREAM = Tiling(64, 2, 4, step=32, ctas=2, streaming=True)
STREAM_DEEP = replace(STREAM, stages=4)
STREAM_LARGE_STEP = replace(STREAM, kept=0, step=64)
STREAM_WIDE = Tiling(64, 2, 8, stages=4, kept=0, step=64, streaming=True)
STREAM_SMALL_STEP = replace(STREAM, kept=0, step=16)
STREAM_LEAN = replace(STREAM, block_n=32)
STREAM_LEAN_128 = replace(STREAM_LEAN, kept=0)
PAIRED = Tiling(64, 2, 2, 2)
SMALL = Tiling(64, 1, 4)
LARGE_HEADS = Tiling(32, 1, 4, kept=0)
TINY_64, TINY_128, TINY_512 = (
    Tiling(16, 1, 1, 4, 1, resident=True),
    Tiling(32, 1, 1, 4, 1, resident=True),
    Tiling(64, 1, 2, 4, 2, resident=True),
)
DECODE, DECODE_LEAN = Tiling(32, 1, 1, 4), Tiling(16, 1, 1, 4)
DECODE_LEAN_DEEP = replace(DECODE_LEAN, stages=3)
DECODE_DEEP, DECODE_WIDE = Tiling(32, 1, 1, 4, 3), Tiling(16, 1, 1, 8, 3)
DECODE_LARGE_HEADS = Tiling(16, 1, 1, 4, 3, kept=0)
DECODE_LARGE_HEADS_LEAN = Tiling(16, 1, 1, 2, kept=0)
SPLITS = (1, 2, 4, 8, 16, 32)
KEYS_OF_A_LAUNCH, KEYS_FOR_EIGHT_WARPS = 400, 512
"""Keys of a CTA, by measurements on an H200: those that take as long as a second kernel, and from which on eight warps
are faster than four."""
MOST_FEW_KEYS, MOST_FEW_NARROW_KEYS = 700, 1000
"""Keys up to which several small CTAs an SM decode faster than one large one, as measured on an H100; and the same at D
= 72 and 80 for up to three CTAs an SM. On an H200 these were measured up to 1,000 keys, with three CTAs up to 729."""
LONG_KEYS = 2048
FEWEST_TURNS, MOST_LATE_KEYS = 6, 1024
"""Where the second CTA of an SM begins late, as measured on an H200: CTAs that a place on an SM computes, keys."""
MASKED_QUERIES = 16
"""Queries of a head that have masks at most; more of them are ampere/general's."""


def candidates(problem: Problem) -> list[Tiling]:
    """Tilings that compile without spills for the head dimension."""
    hopper = capability_of(problem.target) == (9, 0)
    if problem.mask is not None:
        return [tiling for tiling in candidates(replace(problem, mask=None)) if takes_masks(tiling)]
    if problem.head_dim > 128:
        few = [*_splits(DECODE_LARGE_HEADS), *_clusters(DECODE_LARGE_HEADS)] if hopper else []
        return [*_splits(LARGE_HEADS), *few, *([] if hopper else _splits(DECODE_LARGE_HEADS_LEAN))]
    few_rows = (DECODE_DEEP, DECODE_WIDE) if hopper else (DECODE, DECODE_LEAN)
    decode = [one for tiling in few_rows for one in _splits(tiling)]
    if hopper:
        decode += [DECODE_LEAN, DECODE_LEAN_DEEP, *_clusters(DECODE_DEEP), *_clusters(DECODE_WIDE)]
    if problem.head_dim > 64:
        return [_streaming(problem), SMALL, TINY_64, TINY_128, *decode]
    return [_streaming(problem), *_splits(PAIRED), SMALL, TINY_64, TINY_128, TINY_512, *decode]


def _splits(tiling: Tiling) -> list[Tiling]:
    return [replace(tiling, split=split) for split in SPLITS]


def _clusters(tiling: Tiling) -> list[Tiling]:
    return [replace(tiling, split=split, clustered=True) for split in CLUSTERS]


def _streaming(problem: Problem) -> Tiling:
    """The tiling of ampere/stream: as many scores at once as the registers hold.

    Tiles of 32 keys, which are copied in rows of a multiple of 32, let two CTAs share 100 KB at D = 64. Four stages are
    for sm_90, where they were measured.
    """
    hopper = capability_of(problem.target) == (9, 0)
    if problem.head_dim <= 64:
        return STREAM_DEEP if hopper else STREAM if columns_of(problem.head_dim) % 32 else STREAM_LEAN
    if columns_of(problem.head_dim) == 128 and hopper:
        # One CTA of twice the rows reads K and V half as often; where few keys follow, what it begins and ends with,
        # beside no other CTA, costs more.
        waves = ctas_of(problem, STREAM_WIDE) / chip_of(problem.target).sms
        return STREAM_WIDE if problem.seqlen_k >= 4096 and waves >= 4 else STREAM_LARGE_STEP
    return STREAM_LEAN_128 if columns_of(problem.head_dim) % 32 == 0 and not hopper else STREAM_SMALL_STEP


def late_ctas(problem: Problem, tiling: Tiling) -> int:
    """CTAs of the first turn that begin late, one an SM: where many CTAs of few keys each are of equal length."""
    sms = chip_of(problem.target).sms
    turns = ctas_of(problem, tiling) / (2 * sms)
    equal = problem.causal is None and problem.seqlen_k <= MOST_LATE_KEYS
    hopper = capability_of(problem.target) == (9, 0)
    return sms if hopper and equal and tiling.ctas == 2 and turns >= FEWEST_TURNS else 0


def takes_masks(tiling: Tiling) -> bool:
    """Whether a warp of the tiling decides alone which keys it loads, as it does under masks."""
    return tiling.row_tiles == tiling.warps_m == 1 and not (tiling.streaming or tiling.resident)


def wide_mask(problem: Problem) -> bool:
    """Whether there is a mask of float32 numbers beside a large head dimension."""
    return problem.mask is not None and problem.mask.tensor == "float32" and problem.head_dim > 64


def illegal(problem: Problem, tiling: Tiling) -> str:
    """Why a tiling cannot compute a problem on its chip; empty when it can."""
    chip = chip_of(problem.target)
    if problem.mask is not None and not takes_masks(tiling):
        return "its warps share the keys, which masks decide about"
    if tiling.block_n > 16 and wide_mask(problem):
        return "a mask of float32 numbers for so many keys does not fit the registers"
    if (needed := tiling.shared_bytes(problem.head_dim)) > chip.shared_per_cta:
        return f"{needed} bytes of shared memory exceed the {chip.shared_per_cta} of a CTA"
    if tiling.resident and problem.seqlen_k > tiling.block_n * tiling.stages * tiling.warps_n:
        return f"{problem.seqlen_k} keys do not fit at once"
    if tiling.clustered and capability_of(problem.target) != (9, 0):
        return "clusters of CTAs are for sm_90"
    if tiling.streaming and packed_heads(problem) > 1:
        return "heads are packed, which ampere/stream does not do"
    return ""


def packed_heads(problem: Problem) -> int:
    """Query heads of one key head whose rows share tiles: all, where one head's rows would not fill a tile of 16."""
    return problem.heads // problem.heads_kv if problem.seqlen_q < 16 else 1


def ctas_of(problem: Problem, tiling: Tiling) -> int:
    """CTAs of the launch."""
    pack = packed_heads(problem)
    tiles = ceil(problem.seqlen_q * pack / tiling.block_m)
    return tiling.split * tiles * problem.batch * problem.heads // pack


def cost(problem: Problem, tiling: Tiling) -> float:
    """Clocks that the launch is expected to take.

    An SM works at half of the peak rate of mma.sync in ampere/stream and at a third in ampere/mma, as on the H200. A
    warp's tile takes at least its instructions. A CTA has a fixed latency (launch, Q and the first K from L2, the
    store), and merging parts another.
    """
    chip = chip_of(problem.target)
    at_once = _resident_ctas(problem, tiling, chip)
    keys = problem.seqlen_k / tiling.split
    if problem.causal is not None:
        keys = keys * 5 / 8  # the average, and the tiles on the diagonal
    tiles = ceil(keys / (tiling.block_n * tiling.warps_n))
    products = 4 * 16 * tiling.row_tiles * tiling.block_n * columns_of(problem.head_dim) * tiles  # of one warp
    warps = tiling.warps_m * tiling.warps_n
    throughput = (2 if tiling.streaming else 3) * at_once * warps * products / chip.mma_flops
    latency = 4 * products / chip.mma_flops + 300 * tiles
    fixed = 2000 + (600 if tiling.warps_n > 1 else 0)
    waves = ceil(ctas_of(problem, tiling) / (chip.sms * at_once))
    return waves * (max(throughput, latency) + fixed) + (4000 if tiling.split > 1 else 0)


def _resident_ctas(problem: Problem, tiling: Tiling, chip: Chip) -> int:
    """CTAs that an SM holds at once."""
    by_shared = chip.shared_per_sm // (tiling.shared_bytes(problem.head_dim) + 1024)
    return max(1, min(by_shared, tiling.ctas if tiling.ctas > 1 else 1, chip.threads_per_sm // tiling.threads))


def measured(problem: Problem) -> Tiling | None:
    """The choice that was measured on the H200; None for another chip, and for launches that were not measured."""
    if capability_of(problem.target) != (9, 0):
        return None
    sms = chip_of(problem.target).sms
    if problem.mask is not None:
        return _decoding(problem)
    if problem.seqlen_q <= 16 and (problem.seqlen_k > 128 or ctas_of(problem, DECODE_DEEP) > sms):
        return _decoding_in_small_ctas(problem) or _decoding(problem)
    if problem.head_dim > 128:
        return None
    if problem.head_dim <= 64 and splits_long_keys(problem):
        return replace(PAIRED, split=max(s for s in SPLITS if s * ctas_of(problem, PAIRED) <= sms))
    for tiling in (TINY_64, TINY_128, TINY_512, PAIRED):
        one_wave = ctas_of(problem, tiling) <= sms * (2 if tiling is PAIRED else 1)
        if one_wave and tiling in candidates(problem) and not illegal(problem, tiling):
            return tiling if tiling is not PAIRED or problem.seqlen_k <= 2048 else None
    streaming = _streaming(problem)
    return streaming if problem.seqlen_q >= 128 and ctas_of(problem, streaming) >= sms else None


def splits_long_keys(problem: Problem) -> bool:
    """Whether so few tiles of queries meet so many keys that these are divided among eight CTAs or more."""
    if problem.seqlen_k < LONG_KEYS:
        return False
    tiles = problem.batch * problem.heads * ceil(problem.seqlen_q / PAIRED.block_m)
    return 8 * tiles <= chip_of(problem.target).sms


def _decoding_in_small_ctas(problem: Problem) -> Tiling | None:
    """For up to 16 queries in more CTAs than SMs: small CTAs, of which an SM has several.

    They are for few keys, and for a second CTA of few SMs: large ones would leave most SMs idle behind the first.
    """
    ctas, sms, head_dim = ctas_of(problem, DECODE_LEAN), chip_of(problem.target).sms, problem.head_dim
    if head_dim > 128 or ctas <= sms:
        return None
    for keys, tiling in ((64, TINY_64), (128, TINY_128)):
        if problem.seqlen_k <= keys:
            return tiling
    if problem.mask is None and 2 * ctas <= 3 * sms:
        return DECODE_LEAN_DEEP if head_dim <= 64 else DECODE_LEAN
    narrow = problem.mask is None and 64 < head_dim <= 80
    if narrow and problem.seqlen_k <= MOST_FEW_NARROW_KEYS:
        if ctas <= 2 * sms:
            return DECODE_LEAN
        if 4 * ctas <= 13 * sms:  # an SM holds three of those with three stages
            return DECODE_LEAN_DEEP
    if problem.seqlen_k > MOST_FEW_KEYS:
        return None
    # Two CTAs an SM at most are spread evenly; where three fit, some SMs had three and others one.
    spread = problem.mask is None and ctas <= 2 * sms
    return DECODE_LEAN_DEEP if spread else DECODE_LEAN


def _decoding(problem: Problem) -> Tiling | None:
    """For up to 16 queries: as many parts of the keys as give the SMs one CTA each, with a turn of its warps each.

    Parts that a cluster merges spare a launch; but fewer of them run at a time.
    """
    tiling = DECODE_LARGE_HEADS if problem.head_dim > 128 else DECODE_WIDE if wide_mask(problem) else DECODE_DEEP
    if illegal(problem, tiling):
        return None
    tiles, sms, keys = ctas_of(problem, tiling), chip_of(problem.target).sms, problem.seqlen_k
    useful = [split for split in SPLITS if split == 1 or split * tiling.block_n * tiling.warps_n <= keys]
    merged = max(split for split in useful if split == 1 or tiles <= CLUSTERS.get(split, 0))
    apart = max(split for split in useful if split == 1 or split * tiles <= sms)
    # keys / merged - keys / apart, compared in integers.
    clustered = merged > 1 and keys * (apart - merged) <= KEYS_OF_A_LAUNCH * merged * apart
    split = merged if clustered else apart
    if problem.head_dim <= 128 and keys >= KEYS_FOR_EIGHT_WARPS * split:
        tiling = DECODE_WIDE
    return _divided(tiling, split, clustered)


@functools.lru_cache
def _divided(tiling: Tiling, split: int, clustered: bool) -> Tiling:
    return replace(tiling, split=split, clustered=clustered)


def choose(problem: Problem) -> Tiling:
    """The tiling for a problem: the measured one, or the legal candidate of the lowest cost."""
    if tiling := measured(problem):
        return tiling
    legal = [tiling for tiling in candidates(problem) if not (tiling.clustered or illegal(problem, tiling))]
    return min(legal, key=lambda tiling: cost(problem, tiling))
