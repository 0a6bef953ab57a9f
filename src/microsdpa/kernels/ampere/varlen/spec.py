"""Specifications of the kernel for sequences of many lengths."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import ceil

from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.problem import (
    ELEMENT,
    VECTOR_BYTES,
    CacheKind,
    MaskKind,
    MaskType,
    Problem,
    capability_of,
)
from microsdpa.kernels.spec import BOOLEAN, CPP_TYPE, Grid, KernelSpec, Rejection, refused_head_dim

HEAD_DIMS = range(8, 257, 8)
MOST_KEYS = 2**29
"""Keys of a sequence, or of all packed ones: positions and ends of windows are sums of two such numbers."""
MOST_WORK = 2**31 - 2**20
"""Pieces of work, of 16 rows and 16 keys at least, that the scheduler counts in 32 bits."""
CACHE_DIMS = range(16, 257, 16)
"""Those of caches of 8-bit values, whose rows are multiples of 16 bytes."""
CACHE_FORMAT = {"e4m3": "E4m3Cache", "int8": "Int8Cache"}
SPILLS = "O and the tiles ahead take every register: some bytes of addresses and masks, once per tile"
MOST_RESIDENT = 2
"""CTAs of an SM, but where sequences are many: more of them would divide keys further than they share memory."""


APPEND_THREADS = 128


@dataclass(frozen=True)
class RowChange:
    """What is done to rows of queries and new keys: an RMS norm over D, and then rotary embedding (RoPE).

    Attributes:
        rotary: columns that are rotated, from the first on; 0 for none.
        interleaved: whether pairs are neighbours; else they are half of `rotary` apart.
        angles: type of cosines and sines.
        weights: type of the norms' weights; None without norms.
    """

    rotary: int = 0
    interleaved: bool = False
    angles: MaskType = "float32"
    weights: MaskType | None = None

    @property
    def changes_query(self) -> bool:
        """Whether queries come out other than they are."""
        return self.rotary > 0 or self.weights is not None


@dataclass(frozen=True)
class Tiling:
    """A configuration of ampere/varlen.

    Attributes:
        block_n: keys of a group's tile.
        row_tiles: 16-row tiles of queries that a warp owns.
        warps_m: warps of a group, which share keys.
        warps_n: groups, each with its own keys.
        stages: tiles of K and V in shared memory, of each group.
        cluster: CTAs of a cluster that share the keys of a tile of rows; 1 for none.
        kept: blocks of 16 columns of Q that stay in registers; at most all.
        resident: CTAs of an SM at most.
    """

    block_n: int
    row_tiles: int
    warps_m: int
    warps_n: int
    stages: int
    kept: int = 16
    cluster: int = 1
    resident: int = MOST_RESIDENT

    @property
    def block_m(self) -> int:
        """Rows of a CTA."""
        return 16 * self.row_tiles * self.warps_m

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_m * self.warps_n

    @property
    def tile(self) -> int:
        """Keys that the groups of a CTA take at a time."""
        return self.block_n * self.warps_n

    def shared_bytes(self, head_dim: int, cache: CacheKind | None = None) -> int:
        """Dynamic shared memory: the query tile and the rings, or the groups' results that replace them; and flags."""
        columns, flows = columns_of(head_dim, cache), self.block_n >= self.block_m
        stage = 2 * self.block_n * columns * (1 if cache else ELEMENT)
        stage += 8 * self.block_n if cache and cache.each_token else 0
        stage = ceil(max(stage, 4 * self.block_m * columns if flows else 4) / 128) * 128
        queries = 2 if flows and self.cluster == 1 else 1
        streaming = queries * self.block_m * columns * ELEMENT + self.warps_n * self.stages * stage
        combining = 0 if flows else self.warps_n * self.block_m * columns * 4
        stats = 8 * self.warps_n * self.block_m
        exchange = self.block_m * columns // 4 * (16 + 8) + 8 if self.cluster > 1 else 4
        flags = 4 * (self.warps_m * self.warps_n + 1) + (4 * queries * self.block_m + 128 if cache else 0)
        return ceil((ceil(max(streaming, combining) / 128) * 128 + stats + exchange + flags) / 128) * 128


def columns_of(head_dim: int, cache: CacheKind | None) -> int:
    """Columns of tiles: a multiple of 16, or of 32 where two values of 8 bits are a unit."""
    grain = 32 if cache else 16
    return ceil(head_dim / grain) * grain


FEW, FEW_LARGE = Tiling(16, 1, 1, 4, 3), Tiling(16, 1, 1, 4, 3, kept=0)
SOME, SOME_LARGE = Tiling(16, 2, 1, 8, 3, kept=0), Tiling(32, 1, 2, 2, 2, kept=0)
MANY, PROMPTS = Tiling(16, 2, 2, 4, 3, kept=0), Tiling(64, 1, 4, 1, 2, kept=0)
"""Tiles for up to 16 rows of a sequence, for up to 32, up to 64, and more; and for head dimensions over 128."""
WIDE_WARPS = 8
"""Groups for up to 16 rows where few CTAs have many keys each."""
SPLIT_KEYS = 512
"""Keys of a part where a sequence's bits may not depend on the others of its batch."""
MOST_PARTS = 4096
"""Such parts that the workspace has room for, and CTAs share."""
MOST_NEW_KEYS = 8
"""New keys of a sequence up to which every tile of rows rotates those that it sees; more are written ahead."""
MOST_ABREAST = 8
"""Key heads at most whose CTAs take the same keys side by side: more bring nothing, and leave more CTAs out."""
FEW_KEYS = 1536
"""Keys of one sequence in 8 bits up to which tiles of 16 are faster than those of as many bytes as 16 bits have."""
LARGE = 128
"""Head dimensions over it have tiles of their own."""


@dataclass(frozen=True)
class Sharing:
    """How CTAs share the keys of sequences that have one tile of rows.

    Attributes:
        units: sequences times key heads, up to which all clusters run at a time on an H200.
        resident: CTAs of an SM.
        cluster: CTAs of a cluster.
        keys: of a sequence at most: of longer ones, the longest alone would take longer than all CTAs take together.
        wide_from: keys of a sequence from which up to 16 rows have eight warps; 0 for never.
    """

    units: int
    resident: int
    cluster: int
    keys: int
    wide_from: int = 0


MANY_OF_FEW = replace(FEW, warps_n=2, stages=2, resident=4)
MANY_NARROW = replace(FEW, stages=2, resident=3)
"""Tiles for up to 16 rows of more sequences than clusters share the keys of: for few keys, and for few columns. As
measured on an H100."""
FREE_COLUMNS = 64
"""Columns up to which the latter take no more registers than three CTAs of an SM have, without a bound."""
NARROW, FEWEST_NARROW_KEYS, MOST_FEW_KEYS = 80, 128, 512
"""Columns of the latter at most, keys up to which these have the former, and keys up to which more columns have it."""
SHARING = (Sharing(15, 1, 8, 8192), Sharing(30, 1, 4, 2048), Sharing(66, 1, 2, 4096, 257), Sharing(132, 2, 2, 1024))
"""The first of them that has room for a call is the one; measurements are in the log."""


def tiling_of(problem: Problem) -> Tiling:
    """The tiles for a problem, by the rows that a sequence has of a key head; and clusters for few sequences."""
    tiling = _tiles_of(problem)
    rows, units = problem.seqlen_q * problem.heads // problem.heads_kv, problem.batch * problem.heads_kv
    if capability_of(problem.target) != (9, 0) or rows > tiling.block_m:
        return tiling
    if units > SHARING[-1].units:
        return _of_many_sequences(problem, tiling) if rows <= FEW.block_m and problem.cache is None else tiling
    sharing = next(each for each in SHARING if units <= each.units)
    if problem.seqlen_k > sharing.keys or tiling.block_m * problem.head_dim % (4 * sharing.cluster):
        return tiling
    clustered = replace(tiling, cluster=sharing.cluster)
    is_few = rows <= FEW.block_m and problem.head_dim <= LARGE
    if is_few and sharing.wide_from and problem.seqlen_k >= sharing.wide_from:
        clustered = replace(clustered, warps_n=WIDE_WARPS)
    elif problem.batch == 1 and rows <= FEW.block_m and (problem.seqlen_k <= FEW_KEYS or not is_few):
        clustered = replace(clustered, block_n=FEW.block_n)  # a tile for each warp as early as may be
    shared_bytes = clustered.shared_bytes(problem.head_dim, problem.cache)
    fits = shared_bytes <= chip_of(problem.target).shared_per_cta
    return clustered if fits and sharing.resident <= _resident(clustered, shared_bytes, problem.target) else tiling


def _of_many_sequences(problem: Problem, tiling: Tiling) -> Tiling:
    """The tiles for up to 16 rows of so many sequences that every SM has some."""
    columns, keys = columns_of(problem.head_dim, None), problem.seqlen_k
    if columns <= NARROW:
        return MANY_OF_FEW if keys <= FEWEST_NARROW_KEYS else MANY_NARROW
    most = MOST_FEW_KEYS if columns % 32 == 0 else FEWEST_NARROW_KEYS
    return MANY_OF_FEW if columns <= LARGE and keys <= most else tiling


def is_shared(problem: Problem) -> bool:
    """Whether the CTAs of clusters share the keys of sequences that have one tile of rows."""
    return tiling_of(problem).cluster > 1


def _resident(tiling: Tiling, shared_bytes: int, target: str) -> int:
    """CTAs of an SM."""
    return max(1, min(chip_of(target).shared_per_sm // (shared_bytes + 1024), tiling.resident))


def _is_odd(problem: Problem) -> bool:
    """Whether a group of two warps would copy 32 rows of 32 bytes at a time, which are more than its tiles have."""
    return columns_of(problem.head_dim, problem.cache) // (32 if problem.cache else 16) % 2 == 1


def _tiles_of(problem: Problem) -> Tiling:
    """The tiles for a problem, without clusters."""
    rows, large = problem.seqlen_q * problem.heads // problem.heads_kv, problem.head_dim > LARGE
    if rows <= FEW.block_m:
        tiling = FEW_LARGE if large else FEW
        if problem.cache:
            tiling = replace(tiling, block_n=2 * tiling.block_n)  # as many bytes
    elif large:
        tiling = SOME_LARGE
    else:
        tiling = SOME if rows <= 32 or _is_odd(problem) else MANY if rows <= 64 else PROMPTS
    shared = chip_of(problem.target).shared_per_cta
    while tiling.shared_bytes(problem.head_dim, problem.cache) > shared:  # where a chip has less of it
        if tiling.stages > 2:
            tiling = replace(tiling, stages=tiling.stages - 1)
        else:
            tiling = replace(tiling, warps_n=tiling.warps_n // 2)
    return tiling


def forward(problem: Problem) -> KernelSpec | Rejection:
    """The kernel for packed tensors and paged caches."""
    if capability_of(problem.target) < (8, 0):
        return Rejection(f"{problem.target} is older than sm_80", "a GPU of compute capability 8.0 or newer")
    if problem.head_dim not in HEAD_DIMS:
        return refused_head_dim(problem.head_dim, HEAD_DIMS, "a multiple of 8 up to 256")
    if problem.cache is not None:
        if problem.head_dim not in CACHE_DIMS:
            return refused_head_dim(problem.head_dim, CACHE_DIMS, "a multiple of 16 up to 256, as 8-bit caches need")
        if problem.cache.dtype == "e4m3" and capability_of(problem.target) < (8, 9):
            return Rejection(f"{problem.target} does not convert E4M3", "an int8 cache, or a GPU from sm_89 on")
    if problem.alignment < VECTOR_BYTES:
        return Rejection(
            f"rows that are not aligned to {VECTOR_BYTES} bytes", f"tensors whose rows start on {VECTOR_BYTES} bytes"
        )
    if problem.value_dim and (refusal := refused_value_dim(problem)):
        return refusal
    return specification(problem, tiling_of(problem))


def refused_value_dim(problem: Problem) -> Rejection | None:
    """Why a kernel for sequences of many lengths cannot have V of other columns than Q and K; None where it can."""
    if problem.cache is not None:
        return Rejection(
            f"8-bit keys and values have one head dimension, not {problem.head_dim} and {problem.value_dim}",
            f"a value padded to {problem.head_dim} columns",
        )
    if problem.value_dim % 8:
        wider = -(-problem.value_dim // 8) * 8
        return Rejection(f"{problem.value_dim} columns of V are no multiple of 8", f"a value padded to {wider} columns")
    if problem.value_dim > problem.head_dim:
        most = f"the {problem.head_dim} columns of Q and K"
        return Rejection(f"{problem.value_dim} columns of V are more than {most}", "fewer columns of V")
    return None


def batch_invariant(problem: Problem) -> KernelSpec:
    """The kernel whose bits of a sequence depend on nothing but the sequence: its parts of keys have a fixed size.

    Tiles differ in rows alone, so that a row's sums are the same in all of them.
    """
    small = FEW_LARGE if problem.head_dim > 128 else FEW
    odd = Tiling(16, 2, 1, 4, 3, kept=0)
    large = FEW_LARGE if problem.head_dim > 128 else odd if _is_odd(problem) else MANY
    shared, groups = chip_of(problem.target).shared_per_cta, 4
    while replace(large, warps_n=groups, stages=2).shared_bytes(problem.head_dim) > shared:
        groups //= 2
    tiling = small if problem.seqlen_q * problem.heads // problem.heads_kv <= small.block_m else large
    tiling = replace(tiling, warps_n=groups)
    while tiling.shared_bytes(problem.head_dim) > shared:
        tiling = replace(tiling, stages=tiling.stages - 1)
    return specification(problem, tiling, SPLIT_KEYS // tiling.tile)


def specification(problem: Problem, tiling: Tiling, split: int = 0) -> KernelSpec:
    """The kernel of one tiling for a problem; `split` tiles of keys are a part of a fixed size, 0 for any."""
    packed = tiling.cluster > 1 and problem.packed_queries and problem.batch > 1
    return _specification(problem.any_size, tiling, _layout(problem, tiling), split, problem.value_dim, packed)


def _layout(problem: Problem, tiling: Tiling) -> str:
    """How keys lie for tiles of so many."""
    if not problem.varlen:
        return "CONTIGUOUS"
    if problem.cache and problem.varlen * 2 == tiling.block_n:
        return "HALF_TILES"
    return "ANY_PAGES" if problem.varlen % tiling.block_n else "WHOLE_TILES"


@functools.lru_cache(maxsize=1024)
def _specification(
    problem: Problem, tiling: Tiling, layout: str, split: int, value_dim: int, packed: bool
) -> KernelSpec:
    """specification() for any problem of that kind, whatever its size."""
    mask, programmatic = problem.mask or MaskKind(), capability_of(problem.target) >= (9, 0)
    right = mask.right or problem.causal is not None
    flags = ", ".join(BOOLEAN[flag] for flag in (mask.left, right, mask.softcap, mask.alibi))
    arguments = {
        "T": CPP_TYPE[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "BLOCK_N": tiling.block_n,
        "ROW_TILES": tiling.row_tiles,
        "WARPS_M": tiling.warps_m,
        "WARPS_N": tiling.warps_n,
        "STAGES": tiling.stages,
        "KEPT": min(tiling.kept, ceil(problem.head_dim / 16)),
        "PACK": problem.heads // problem.heads_kv,
        "LAYOUT": f"microsdpa::ampere::varlen::{layout}",
        "CLUSTER": tiling.cluster,
        "PACKED": BOOLEAN[packed],
        "PROGRAMMATIC": BOOLEAN[programmatic],
        "MASKS": f"microsdpa::ampere::varlen::Masks<{flags}, {CPP_TYPE[mask.sinks]}>",
        "EMBEDDING": "void",
        "SPLIT": split,
        "MOST_PARTS": MOST_PARTS if split else 0,
        "CACHE": _cache(problem.cache),
    }
    arguments |= {"VALUE_DIM": value_dim} if value_dim else {}
    if tiling == MANY_NARROW and columns_of(problem.head_dim, None) > FREE_COLUMNS:
        arguments |= {"VALUE_DIM": value_dim or problem.head_dim, "RESIDENT": tiling.resident}
    chip, shared_bytes = chip_of(problem.target), tiling.shared_bytes(problem.head_dim, problem.cache)
    return KernelSpec(
        name="ampere/varlen",
        source="ampere/varlen/kernel.cu",
        template="microsdpa::ampere::varlen::attention",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=tiling.threads,
        block_m=tiling.block_m,
        shared_bytes=shared_bytes,
        local_memory=SPILLS if problem.head_dim >= 128 or tiling.row_tiles > 1 or mask.alibi or problem.cache else "",
        pack=problem.heads // problem.heads_kv,
        cluster=tiling.cluster,
        max_ctas=_resident(tiling, shared_bytes, problem.target) * chip.sms,
        programmatic=programmatic,
        params="microsdpa::CacheParams" if problem.cache else "microsdpa::VarlenParams",
    )


def _cache(kind: CacheKind | None) -> str:
    if kind is None:
        return "void"
    names = "microsdpa::ampere::varlen"
    return f"{names}::EightBits<{names}::{CACHE_FORMAT[kind.dtype]}, {BOOLEAN[kind.each_token]}>"


def _embedding(change: RowChange) -> str:
    weights = f", {CPP_TYPE[change.weights]}" if change.weights else ""
    arguments = f"{change.rotary}, {BOOLEAN[change.interleaved]}, {CPP_TYPE[change.angles]}{weights}"
    return f"microsdpa::ampere::varlen::Embedding<{arguments}>"


def _append_params(problem: Problem, change: RowChange) -> str:
    """The C++ type of the parameter of a kernel that appends."""
    return f"microsdpa::{'Normed' if change.weights else 'Cache' if problem.cache else 'Append'}Params"


def appends_itself(spec: KernelSpec, problem: Problem) -> bool:
    """Whether attention's kernel appends and changes rows, too: each tile of rows takes what it sees itself."""
    few = problem.cache is None and spec.name == "ampere/varlen"
    return few and problem.seqlen_q * spec.pack <= min(spec.block_m, MOST_NEW_KEYS * spec.pack)


def appending(spec: KernelSpec, problem: Problem, change: RowChange) -> KernelSpec:
    """The kernel of attention that writes new keys and values to the cache, and changes them and queries."""
    arguments = dict(spec.template_args) | {"EMBEDDING": _embedding(change)}
    return replace(spec, template_args=tuple(arguments.items()), params=_append_params(problem, change))


def append(problem: Problem, change: RowChange) -> KernelSpec:
    """The kernel that writes new keys and values to the cache, and changes them and queries."""
    programmatic = capability_of(problem.target) >= (9, 0)
    arguments = {
        "T": CPP_TYPE[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "EMBEDDING": _embedding(change),
        "PAGED": BOOLEAN[problem.varlen != 0],
        "PROGRAMMATIC": BOOLEAN[programmatic],
        "CACHE": _cache(problem.cache),
    }
    arguments |= {"VALUE_DIM": problem.value_dim} if problem.value_dim else {}
    return KernelSpec(
        name="ampere/varlen",
        source="ampere/varlen/append.cu",
        template="microsdpa::ampere::varlen::append",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=APPEND_THREADS,
        block_m=1,
        programmatic=programmatic,
        params=_append_params(problem, change),
    )


def append_grid(problem: Problem, queries: int, new_keys: bool, changes_query: bool) -> Grid:
    """CTAs that append and change rows: a thread for every 16 bytes, and a power of two for every row."""
    rows = (2 * problem.heads_kv if new_keys else 0) + (problem.heads if changes_query else 0)
    lanes = 1 << (problem.head_dim // 8 - 1).bit_length()
    return ceil(queries * rows * lanes / APPEND_THREADS), 1, 1


def workspace_bytes(spec: KernelSpec) -> int:
    """Scratch memory of a call whose keys are divided: two partial outputs for each CTA, or all parts."""
    arguments = dict(spec.template_args)
    grain = 16 if arguments["CACHE"] == "void" else 32
    columns = ceil(int(arguments["HEAD_DIM"]) / grain) * grain
    slots = max(int(arguments["MOST_PARTS"]), 2 * spec.max_ctas)
    return slots * spec.block_m * (columns + 2) * 4


def is_batch_invariant(spec: KernelSpec) -> bool:
    """Whether parts of keys have a fixed size."""
    return dict(spec.template_args)["SPLIT"] != "0"


def divides_keys(spec: KernelSpec, problem: Problem, queries: int) -> bool:
    """Whether CTAs take equal parts of all keys, for `queries` of all sequences together.

    They do where a sequence has one tile of rows, as in decoding, and where there are fewer tiles than CTAs, unless the
    parts are too many to be counted. Else each CTA takes a tile, with the keys that it sees.
    """
    if is_batch_invariant(spec):
        return True
    rows = -(-queries * problem.heads // 16) + problem.batch * problem.heads_kv
    if spec.cluster > 1 or rows * -(-problem.seqlen_k // 16) > MOST_WORK:
        return False
    one = problem.seqlen_q * spec.pack <= spec.block_m
    return one or ceil(queries * spec.pack / spec.block_m) * problem.heads_kv <= spec.max_ctas


def heads_abreast(heads_kv: int) -> int:
    """Neighbouring key heads whose CTAs take the same keys side by side: those of a token lie together in memory."""
    return max(heads for heads in range(1, MOST_ABREAST + 1) if heads_kv % heads == 0)


def further_tiles(spec: KernelSpec, queries: int) -> int:
    """Tiles of rows at most that sequences of packed queries have behind their first ones, where clusters have them."""
    return max(0, queries * spec.pack - 1) // spec.block_m if ("PACKED", BOOLEAN[True]) in spec.template_args else 0


def grid_of(spec: KernelSpec, problem: Problem, queries: int) -> Grid:
    """CTAs of a launch: as many as run at a time, one for every tile of rows that there may be, or clusters."""
    if spec.cluster > 1:
        return spec.cluster, problem.heads_kv, problem.batch + further_tiles(spec, queries)
    if divides_keys(spec, problem, queries):
        abreast = heads_abreast(problem.heads_kv)
        return (spec.max_ctas, 1, 1) if is_batch_invariant(spec) else (abreast, spec.max_ctas // abreast, 1)
    return (queries * spec.pack // spec.block_m + problem.batch) * problem.heads_kv, 1, 1
