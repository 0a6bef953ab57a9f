"""Specifications of hopper/varlen: its tiles, and which are chosen for a problem."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from microsdpa.kernels.ampere.varlen import spec as ampere_varlen
from microsdpa.kernels.chip import RESERVED_SHARED, chip_of
from microsdpa.kernels.hopper.common import ROWS, panel, stored_columns, tail
from microsdpa.kernels.problem import (
    ELEMENT,
    VECTOR_BYTES,
    MaskKind,
    Problem,
    capability_of,
)
from microsdpa.kernels.spec import (
    BOOLEAN,
    CPP_TYPE,
    ONE_LENGTH_PARAMS,
    VARLEN_PARAMS,
    Grid,
    KernelSpec,
    MappedTensor,
    Rejection,
    TensorMap,
    refused_head_dim,
)

MOST_TAKEN = 3
"""Parts of the keys of tiles of rows that a CTA takes at most, as in scheduler.cuh."""
SHARING_COSTS, LEAST_SHARE, WORTH, APART, MOST_AT_ONCE, L2_BYTES = 3, 4, 8, 4, 16, 32 << 20
"""What sharing keys costs, and where it is worth it, as in scheduler.cuh."""
SEGMENTS, SEGMENT_BYTES = 4, 64
"""Descriptions of segments in shared memory."""
DEEPEST = 5
"""Tiles of K, and of V, at most."""
FEWEST_BOX_ROWS = 8
"""Keys of a bulk copy at least: a repetition of the swizzle pattern."""
ROWS_OF_WORK = 16
"""Of a piece of work, as the limits of sdpa_varlen count them."""
WAVES = 4
"""Tiles of rows, for each CTA, up to which CTAs may share the keys of one: of more, whole ones are as even."""


@dataclass(frozen=True)
class Tiles:
    """A configuration of hopper/varlen.

    Attributes:
        consumers: warpgroups that compute, of 64 rows each.
        block_n: keys of a tile; CTAs of one consumer and tiles of 64 are two an SM.
        overlap: whether a warpgroup's exponentials run beside its own P V.
        cluster: CTAs of a cluster that share the keys of a tile of rows; 1 for none.
    """

    consumers: int
    block_n: int
    overlap: bool
    cluster: int = 1

    @property
    def block_m(self) -> int:
        """Rows of a CTA."""
        return ROWS * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers, and a warpgroup that copies."""
        return 128 * (self.consumers + 1)

    @property
    def resident(self) -> int:
        """CTAs of an SM."""
        return 2 if self.consumers == 1 and self.block_n == 64 else 1

    def shared_bytes(self, head_dim: int, stages: int, query_stages: int) -> int:
        """SharedStorage's size (shared.cuh)."""
        tiles = (query_stages * self.block_m + 2 * stages * self.block_n) * stored_columns(head_dim) * ELEMENT
        words = SEGMENTS + self.consumers
        barriers = (3 * query_stages + 5 * stages) * 8
        return ceil((tiles + SEGMENTS * SEGMENT_BYTES + ceil(words / 2) * 8 + barriers) / 1024) * 1024

    def rings(self, head_dim: int, target: str) -> tuple[int, int] | None:
        """(tiles of K and of V, tiles of Q) that fit: two query tiles unless a CTA of two an SM lacks others then."""
        chip = chip_of(target)
        most = min(chip.shared_per_cta, chip.shared_per_sm // self.resident - RESERVED_SHARED)
        fitting = [
            (stages, query_stages)
            for query_stages in (2, 1)
            for stages in range(DEEPEST, 1, -1)
            if self.shared_bytes(head_dim, stages, query_stages) <= most
        ]
        if self.resident == 1:
            return next(iter(fitting), None)
        return max(fitting, default=None)


FEW = Tiles(1, 64, True)
"""For up to 64 rows of a sequence and key head."""
FEW_WIDE = Tiles(1, 128, True)
"""The same where clusters have fewer CTAs than there are SMs: their time is that of a CTA, not that of memory."""
SOME = Tiles(2, 128, True)
"""For up to 128 rows, where there are larger tiles too."""
LARGE = Tiles(4, 64, False)
"""Where TILES has three consumers: for 193 to 256 rows, and 385 to 512. Tiles of 192 rows would be one more."""
FEWEST_LARGE, LONG_KEYS = 64, 4096
"""Products of sequences and key heads, or keys of a sequence, from which on LARGE is taken: its CTAs are fewer."""
TILES = {
    32: Tiles(3, 128, False),
    48: Tiles(3, 128, False),
    64: Tiles(3, 128, False),
    80: Tiles(2, 128, True),
    96: Tiles(2, 128, True),
    112: Tiles(2, 128, True),
    128: Tiles(2, 128, True),
    160: Tiles(2, 64, True),
    192: Tiles(2, 64, True),
    256: Tiles(2, 64, True),
}
"""For more rows, by the columns that are multiplied."""
HEAD_DIMS = range(8, max(TILES) + 1, 8)
"""Head dimensions whose rows a bulk copy can read."""
LARGEST_OF_FEW = 128
"""Head dimension up to which two CTAs share an SM."""


@dataclass(frozen=True)
class Sharing:
    """How clusters share the keys of sequences that have one tile of up to 64 rows.

    Attributes:
        units: sequences times key heads, up to which all clusters run at a time.
        cluster: CTAs of a cluster.
        keys: of a sequence at most: of longer ones, the longest alone would take longer than all CTAs take together.
        wide: whether their tiles are FEW_WIDE.
    """

    units: int
    cluster: int
    keys: int
    wide: bool = False


SHARING = (
    Sharing(4, 16, 16384),  # wide ones would need 16 SMs of one GPC, which not every chip has
    Sharing(12, 8, 16384, True),
    Sharing(28, 4, 8192, True),
    Sharing(56, 4, 8192),
    Sharing(128, 2, 4096),
)
"""The first of them that has room for a call is the one, as measured on an H100; the log has the figures."""
START_OF_CLUSTERS, CLUSTERS_READ = 10_900, 1.07
"""Clocks of a launch of clusters, and their time to read K and V, in times that memory would take."""
START_CLOCKS, SHARED_CLOCKS = 4_400, 57
"""Clocks of another launch, and, for each column, those of CTAs that share the keys of a tile of rows."""
FEWEST_SHARED = 512
"""Keys over which CTAs share those of few tiles."""
LEAST_CLOCKS, LEAST_OF_COLUMN = 8_600, 42
"""What each of a CTA's tiles takes at least, and the same for each column above 128."""
FLOPS_OF_CLOCK = {
    32: 1250,
    48: 1700,
    64: 2000,
    80: 1900,
    96: 2100,
    112: 2300,
    128: 2600,
    160: 2400,
    192: 2800,
    256: 2500,
}
"""Floating-point operations of an SM in a clock, by the columns that are multiplied. A soft cap halves them."""
BYTES_OF_CLOCK = 2380
"""Bytes that all SMs read from memory in a clock."""
MOSTLY_FULL = 7 / 8
"""Of the rows of a tile: what whole queries take at least, where bulk copies bring them."""
SPILLS = "the warp that finds the work has few registers, and keeps some of the schedule there, once per segment"


def padded(head_dim: int) -> int:
    """Columns that are multiplied: bulk copies fill those that a tensor lacks with zeros."""
    return min(columns for columns in TILES if columns >= head_dim)


def _few(problem: Problem) -> Tiles:
    """The tiles for up to 64 rows; clusters where they are better than CTAs that share what lengths say."""
    units = problem.batch * problem.heads_kv
    for each in SHARING:
        if units <= each.units:
            fits = problem.seqlen_k <= each.keys
            return replace(FEW_WIDE if each.wide else FEW, cluster=each.cluster) if fits else FEW
    return FEW


def tiles_of(problem: Problem) -> Tiles:
    """The tiles for a problem, by the rows that a sequence has of a key head."""
    rows = problem.seqlen_q * problem.heads // problem.heads_kv
    if rows <= FEW.block_m and problem.head_dim <= LARGEST_OF_FEW:
        return _few(problem)
    large = TILES[padded(problem.head_dim)]
    if large.consumers != 3:
        return large
    if rows <= SOME.block_m:
        return SOME
    fills = ceil(rows / LARGE.block_m) < ceil(rows / large.block_m) and rows <= 2 * LARGE.block_m
    modified = problem.mask is not None and (problem.mask.softcap or problem.mask.alibi)
    much = problem.batch * problem.heads_kv >= FEWEST_LARGE or problem.seqlen_k >= LONG_KEYS
    return LARGE if fills and much and not modified else large


def queries_of_box(problem: Problem, tiles: Tiles) -> int:
    """Queries of a bulk copy, with all heads of a key head; 0 where these leave an eighth of a tile empty, or more.

    A sequence that one copy is enough for has one tile of rows either way.
    """
    pack = problem.heads // problem.heads_kv
    queries = tiles.block_m // pack
    if problem.seqlen_q <= queries:
        return queries
    return queries if MOSTLY_FULL * tiles.block_m < queries * pack else 0


def forward(problem: Problem) -> KernelSpec | Rejection:
    """The kernel for packed tensors and paged caches whose rows fill tiles of wgmma."""
    if capability_of(problem.target) != (9, 0):
        return Rejection(f"{problem.target} has no wgmma, which is sm_90a's", "a GPU of compute capability 9.0")
    if problem.cache is not None:
        return Rejection(f"it does not widen {problem.cache}", f"keys and values of {problem.dtype}")
    if problem.head_dim not in HEAD_DIMS:
        return refused_head_dim(problem.head_dim, HEAD_DIMS, f"a multiple of 8 up to {max(TILES)}")
    if problem.alignment < VECTOR_BYTES:
        return Rejection(
            f"rows that are not aligned to {VECTOR_BYTES} bytes", f"tensors whose rows start on {VECTOR_BYTES} bytes"
        )
    if 0 < (problem.varlen or 0) < FEWEST_BOX_ROWS:
        return Rejection(
            f"pages of a number of keys that {FEWEST_BOX_ROWS} does not divide",
            f"pages whose keys are a multiple of {FEWEST_BOX_ROWS}",
        )
    if problem.value_dim and (refusal := ampere_varlen.refused_value_dim(problem)):
        return refusal
    return specification(problem, tiles_of(problem))


def specification(problem: Problem, tiles: Tiles) -> KernelSpec:
    """The kernel of one configuration for a problem."""
    box_rows = min(problem.varlen, tiles.block_n) if problem.varlen else tiles.block_n
    packed = tiles.cluster > 1 and problem.packed_queries and problem.batch > 1
    copies = Copies(box_rows, queries_of_box(problem, tiles), bool(problem.varlen))
    return _specification(problem.any_size, tiles, copies, problem.value_dim, packed)


class Copies(NamedTuple):
    """How keys and queries come to shared memory.

    Attributes:
        box_rows: keys of a bulk copy.
        queries: of a bulk copy; 0 where there is none of queries.
        paged: whether keys are in pages.
    """

    box_rows: int
    queries: int
    paged: bool


@functools.lru_cache(maxsize=1024)
def _specification(problem: Problem, tiles: Tiles, copies: Copies, value_dim: int, packed: bool) -> KernelSpec:
    """specification() for any problem of that kind, whatever its size."""
    chip, mask, head_dim = chip_of(problem.target), problem.mask or MaskKind(), padded(problem.head_dim)
    rings = tiles.rings(head_dim, problem.target)
    if rings is None:
        raise ValueError(f"tiles: expected some that fit shared memory with head_dim {head_dim}, got {tiles}")
    stages, query_stages = rings
    pack = problem.heads // problem.heads_kv
    right = mask.right or problem.causal is not None
    flags = ", ".join(BOOLEAN[flag] for flag in (mask.left, right, mask.softcap, mask.alibi))
    arguments = {
        "T": CPP_TYPE[problem.dtype],
        "HEAD_DIM": head_dim,
        "BLOCK_N": tiles.block_n,
        "CONSUMERS": tiles.consumers,
        "STAGES": stages,
        "QUERY_STAGES": query_stages,
        "OVERLAP": BOOLEAN[tiles.overlap],
        "PACK": pack,
        "BOX_ROWS": copies.box_rows,
        "PAGED": BOOLEAN[copies.paged],
        "CLUSTER": tiles.cluster,
        "PACKED": BOOLEAN[packed],
        "MASKS": f"microsdpa::hopper::varlen::Masks<{flags}, {CPP_TYPE[mask.sinks]}>",
        "QUERIES": copies.queries,
        "PARAMS": VARLEN_PARAMS,
    }
    columns, narrow = panel(head_dim), tail(head_dim)
    keys = _maps(("key", "value"), copies.box_rows, columns, narrow)
    queries = _maps(("query",), copies.queries, columns, narrow, pack) if copies.queries else []
    further = len(keys) - 2 + len(queries)
    if value_dim or problem.head_dim != head_dim or further:  # MAPS come behind all other arguments
        arguments |= {"VALUE_DIM": value_dim or problem.head_dim, "QUERY_DIM": problem.head_dim}
    if further:
        arguments["MAPS"] = ", ".join(["microsdpa::TensorMap"] * further)
    return KernelSpec(
        name="hopper/varlen",
        source="hopper/varlen/kernel.cu",
        template="microsdpa::hopper::varlen::attention",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=tiles.threads,
        block_m=copies.queries * pack or tiles.block_m,
        shared_bytes=tiles.shared_bytes(head_dim, stages, query_stages),
        low_occupancy=f"{tiles.threads // 32} warps share the registers of a CTA: wgmma wants few that hold much",
        local_memory=SPILLS,
        pack=pack,
        cluster=tiles.cluster,
        max_ctas=tiles.resident * chip.sms,
        tensor_maps=(*keys, *queries),
        programmatic=True,
        params=VARLEN_PARAMS,
    )


def _maps(names: tuple[MappedTensor, ...], rows: int, columns: int, narrow: int, heads: int = 0) -> list[TensorMap]:
    """The tensor maps of the panels of some tensors, and of their tails of `narrow` columns if there are any."""
    return [
        TensorMap(name, rows, width, width * ELEMENT, heads) for width in (columns, narrow) if width for name in names
    ]


def for_one_length(problem: Problem) -> KernelSpec | Rejection:
    """The kernel for a call whose sequences have one length: the query heads of a key head share tiles there, too."""
    if problem.mask is not None and problem.mask.tensor is not None:
        return Rejection(f"it reads no mask tensor, as {problem.mask} has", "a call without attn_mask")
    if not knows_positions(problem):
        return Rejection("its queries are the last ones of their keys", 'causal="lower_right"')
    queries = problem.batch * problem.seqlen_q
    if problem.seqlen_k > ampere_varlen.MOST_KEYS or queries > ampere_varlen.MOST_KEYS:
        return Rejection(f"keys or queries exceed the {ampere_varlen.MOST_KEYS} that it counts", "shorter sequences")
    if queries * problem.heads // ROWS_OF_WORK + problem.batch * problem.heads_kv >= ampere_varlen.MOST_WORK:
        return Rejection("its tiles of rows exceed what it counts", "a smaller batch")
    found = forward(problem.as_sequences)
    return found if isinstance(found, Rejection) else _for_one_length(found)


def knows_positions(problem: Problem) -> bool:
    """Whether what the problem's masks hide is told from positions that end with the last key, if from any."""
    mask = problem.mask or MaskKind()
    if problem.causal is None:
        return not (mask.left or mask.right or mask.alibi)
    return problem.causal == "lower_right"


@functools.lru_cache(maxsize=1024)
def _for_one_length(spec: KernelSpec) -> KernelSpec:
    """The same object for the same specification."""
    if spec.cluster > 1:
        return replace(spec, grid_order="clusters", split=spec.cluster)
    arguments = dict(spec.template_args) | {"PARAMS": ONE_LENGTH_PARAMS}
    return replace(
        spec,
        grid_order="resident",
        workspace_fixed_bytes=workspace_bytes(spec),
        template_args=tuple(arguments.items()),
        params=ONE_LENGTH_PARAMS,
    )


def clocks(problem: Problem, spec: KernelSpec) -> float:
    """Clocks of a call whose sequences have one length, as measured on an H200 (docs/log/hopper-varlen.md)."""
    chip, dim = chip_of(problem.target), padded(problem.head_dim)
    tiles = problem.batch * problem.heads_kv * -(-problem.seqlen_q * spec.pack // spec.block_m)
    read = problem.batch * problem.heads_kv * problem.seqlen_k * problem.head_dim * 2 * ELEMENT / BYTES_OF_CLOCK
    if spec.cluster > 1:
        return START_OF_CLUSTERS + CLUSTERS_READ * read
    flops = FLOPS_OF_CLOCK[dim] / (2 if problem.mask is not None and problem.mask.softcap else 1)
    products = tiles * (4 * dim * spec.block_m / flops / chip.sms) * problem.seqlen_k
    rounds, least = -(-tiles // spec.max_ctas), LEAST_CLOCKS if dim <= 128 else LEAST_OF_COLUMN * dim
    longest = products + least if products > read else read + least
    several = least * rounds
    clocks = START_CLOCKS + (longest if longest > several else several)
    shared = tiles < spec.max_ctas if dim <= 128 else rounds <= WAVES
    return clocks + SHARED_CLOCKS * dim if shared and problem.seqlen_k > FEWEST_SHARED else clocks


def workspace_bytes(spec: KernelSpec) -> int:
    """Scratch memory of a call whose keys may be divided: MOST_TAKEN partial outputs a CTA (Partials of shared.cuh)."""
    arguments = dict(spec.template_args)
    rows = ROWS * int(arguments["CONSUMERS"])
    return MOST_TAKEN * spec.max_ctas * rows * (int(arguments["HEAD_DIM"]) + 8) * 4


class Shares(NamedTuple):
    """Which part of a call of one length a CTA computes, as OneLengthParams has it; runtime/sequences.h says the same.

    Attributes:
        units: tiles of rows, of all key heads and sequences.
        row_tiles: of a key head.
        key_tiles: tiles of keys that a tile of rows sees at most.
        parts: into which the keys of each tile of rows are divided.
        each: tiles of keys of a CTA, where all of them are numbered; else 0.
    """

    units: int
    row_tiles: int
    key_tiles: int
    parts: int = 1
    each: int = 0


def shares_of(spec: KernelSpec, problem: Problem) -> Shares:
    """How CTAs share the keys of tiles of rows where that saves an eighth; else each has those of whole tiles."""
    block_n = int(dict(spec.template_args)["BLOCK_N"])
    row_tiles, tiles = ceil(problem.seqlen_q * spec.pack / spec.block_m), ceil(problem.seqlen_k / block_n)
    units, ctas = problem.batch * problem.heads_kv * row_tiles, spec.max_ctas
    whole = Shares(units, row_tiles, tiles)
    if not divides_keys(spec, problem, problem.batch * problem.seqlen_q):
        return whole
    numbered = max(ceil(units * tiles / ctas), LEAST_SHARE)
    found = whole._replace(each=numbered)
    read = 2 * ELEMENT * problem.head_dim * tiles * block_n * problem.batch * problem.heads_kv
    apart = 0 if read <= L2_BYTES else numbered // APART
    least = numbered + apart + 2 * SHARING_COSTS
    for taken in range(1, MOST_TAKEN + 1):
        parts = min(ctas * taken // units, tiles // LEAST_SHARE)
        if parts <= 1 or (taken > 1 and parts > MOST_AT_ONCE):
            continue
        cost = taken * (ceil(tiles / parts) + SHARING_COSTS)
        if cost < least:
            least, found = cost, whole._replace(parts=parts)
    return found if ceil(units / ctas) * tiles > least + least // WORTH else whole


def divides_keys(spec: KernelSpec, problem: Problem, queries: int) -> bool:
    """Whether CTAs may share the keys of a tile of rows, for `queries` of all sequences together.

    Where they may, the kernel decides, which alone knows the lengths.
    """
    rows = -(-queries * problem.heads // ROWS_OF_WORK) + problem.batch * problem.heads_kv
    if spec.cluster > 1:
        return False
    if rows * -(-problem.seqlen_k // 16) > ampere_varlen.MOST_WORK:
        return False
    one = problem.seqlen_q * spec.pack <= spec.block_m
    return one or ceil(queries * spec.pack / spec.block_m) * problem.heads_kv <= WAVES * spec.max_ctas


def grid_of(spec: KernelSpec, problem: Problem, queries: int) -> Grid:
    """CTAs of a launch: clusters, or as many CTAs as run at a time."""
    if spec.cluster > 1:
        return spec.cluster, problem.heads_kv, problem.batch + ampere_varlen.further_tiles(spec, queries)
    return spec.max_ctas, 1, 1
