"""Policy: which kernel should run. A specification says what its kernel can compute; the rules here say what it is for.

impl="auto" tries the kernels of PREFERENCES in their order. A kernel is skipped where a later one is faster: its rule
gives the reason. The limits are measurements on an H200, in part on an H100 (docs/log, docs/hopper-split.md and
docs/hopper-throughput.md). The ladder's kernels teach, and run where they are named.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from microsdpa.kernels.ampere.mma.tiles import packed_heads, splits_long_keys
from microsdpa.kernels.ampere.varlen import spec as ampere_varlen
from microsdpa.kernels.backward import spec as backward
from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.backward import spec as hopper_backward
from microsdpa.kernels.hopper.latency import spec as hopper_latency
from microsdpa.kernels.hopper.split import spec as hopper_split
from microsdpa.kernels.hopper.throughput import spec as hopper_throughput
from microsdpa.kernels.hopper.throughput_8bit import spec as hopper_throughput_8bit
from microsdpa.kernels.hopper.varlen import spec as hopper_varlen
from microsdpa.kernels.problem import ELEMENT, VECTOR_BYTES, Operands, Problem, capability_of
from microsdpa.kernels.registry import ONE_LENGTH, Family, family_named
from microsdpa.kernels.spec import MAX_GRID_YZ, KernelSpec, Rejection

TILE = 64
"""Queries of a wgmma tile."""
DECODING_QUERIES = 16
"""Up to so many queries a head, ampere/mma's tiles of 16 rows are faster."""
SEPARATE_HEADS = 32
"""From so many heads on that share no keys, SMs are busy enough with tiles of 64 rows."""
MOST_DECODED_KEYS, MOST_SEPARATE_KEYS = 128, 512
"""Keys up to which tiles of 64 rows decode as fast, and the same for heads that share no keys."""
FEWEST_WIDE_HEADS, MANY_WIDE_HEADS = 16, 48
"""Above D = 128: heads from which less than 64 queries each are worth wgmma, if keys are few; and whatever they are."""
WIDEST_HALF_EMPTY = 160
"""D up to which tiles of wgmma that are less than half full are as fast as ampere/mma, with few heads and keys."""
MOST_ROWS_OF_MMA = 32
"""Rows of a sequence and key head up to which ampere/varlen decodes as fast as memory allows."""
MOST_KEYS_OF_MMA = 2048
"""Keys of few sequences up to which clusters of ampere/varlen are as fast as those of hopper/varlen, or faster."""
WIDEST_NARROW = 128
"""D up to which hopper/latency computes as well."""
MOST_KEYS_OF_GENERAL, MOST_KEYS_OF_DOCUMENTS = 1024, 3072
"""Keys up to which ampere/general was measured to be the fastest kernel, and the same under document_ids."""
LONG_DOCUMENTS, MOST_LONG_DOCUMENTS = 1024, 4096
"""Tokens over which kernels that skip what documents hide are faster than hopper/latency, and ampere/general's most."""
MOST_PARTS_OF_WGMMA, MOST_PARTS_OF_ODD_ROWS = 16, 32
"""CTAs for the keys of a tile from which on ampere/mma's are faster than eight of hopper/throughput's above D = 64: at
multiples of 32, and at the other multiples of 16."""
WORTH_DIVIDING = 0.97
"""Part of another kernel's clocks up to which keys are divided among CTAs: the clocks are estimates."""
ROWS_OF_MMA = 16
"""Rows of a tile of ampere/mma."""
SMS_OF_SEPARATE_HEADS, KEYS_OF_SEPARATE_HEADS = 0.45, 20e6
"""What tiles of 16 heads that share a key head have at most where they are the fastest, as measured on an H100: a part
of the SMs, and elements of K, each tile's counted."""
MOST_QUERIES_OF_SHARED_TILES = 256
"""Queries up to which tiles that heads share were measured: of more, a head's own tiles are nearly full."""
FEWEST_KEYS_OF_QUERY = 2
"""Keys for each query from which on a causal mask hides little."""
WORTH_SHARING = 0.9
"""Part of other kernels' clocks up to which hopper/varlen is taken: the clocks are estimates."""
HALF_EMPTY = 0.75
"""Clocks of hopper/throughput's tiles above D = 128 whose second warpgroup has no queries, in those of full ones."""
START_OF_MMA, COPIED_OF_CLOCK = 7000, 2700
"""Clocks of a launch of ampere/mma, and bytes of keys that the tiles of all SMs get from L2 in a clock."""
MOST_ROUNDS_OF_LATENCY = 8
"""Tiles of hopper/latency an SM, up to which it is faster than finding the tiles that a mask shows."""
EIGHT_BIT_TILE = 128
FEWEST_TILES: dict[Operands, dict[int, int]] = {
    "fp8": {64: 48, 128: 32},
    "int8_fp8": {64: 48, 128: 32},
    "int8_fp16": {64: 128, 128: 48},
}
"""Tiles of EIGHT_BIT_TILE queries from which on 8-bit wgmma is faster than 8-bit mma.sync, by head dimension."""


def _tiles(problem: Problem, queries: int = TILE) -> int:
    """Tiles of so many queries, of all heads."""
    return problem.batch * problem.heads * -(-problem.seqlen_q // queries)


def _decodes(problem: Problem) -> bool:
    """Whether few queries meet so many keys that ampere/mma is faster than tiles of 64 queries.

    It has all heads of a key head in one tile of 16 rows, and parts of the keys for every SM.
    """
    if problem.seqlen_q > DECODING_QUERIES:
        return problem.head_dim <= WIDEST_NARROW and problem.mask is None and _splits_long_keys(problem)
    heads = problem.batch * problem.heads
    if heads > chip_of(problem.target).sms:
        return True
    separate = problem.heads == problem.heads_kv and heads >= SEPARATE_HEADS
    return problem.seqlen_k > (MOST_SEPARATE_KEYS if separate else MOST_DECODED_KEYS)


def _splits_long_keys(problem: Problem) -> bool:
    """Whether ampere/mma has so many CTAs for the keys of each tile of queries that it is faster than wgmma."""
    if not splits_long_keys(problem):
        return False
    parts = MOST_PARTS_OF_WGMMA if problem.head_dim % 32 == 0 else MOST_PARTS_OF_ODD_ROWS
    fewer = parts * _tiles(problem) <= chip_of(problem.target).sms
    return fewer or problem.head_dim <= 64 or hopper_throughput.divided(problem) is None


def takes_heads_as_queries(problem: Problem) -> bool:
    """Whether the many query heads of a key head, of one query each, are computed as the queries of one head.

    Else ampere/mma has tiles of 16 heads, and reads all keys for each. That keeps more SMs busy where there are few.
    """
    if problem.seqlen_q != 1 or problem.heads <= ROWS_OF_MMA * problem.heads_kv or problem.causal == "upper_left":
        return False
    changed = problem.mask is not None or problem.prologue is not None or problem.dropout or problem.continued
    if changed or problem.operands is not None or problem.varlen is not None:
        return False
    tiles = problem.batch * problem.heads_kv * -(-(problem.heads // problem.heads_kv) // ROWS_OF_MMA)
    busy = tiles > SMS_OF_SEPARATE_HEADS * chip_of(problem.target).sms
    return busy or tiles * problem.seqlen_k * problem.head_dim > KEYS_OF_SEPARATE_HEADS


def with_shared_tiles(problem: Problem) -> KernelSpec | None:
    """The kernel of hopper/varlen, whose tiles have the rows of all query heads of a key head, where it is faster.

    That is what its clocks and those of the other kernels are expected to be; None where one of these is faster.
    """
    if problem.heads == problem.heads_kv or not 1 < problem.seqlen_q <= MOST_QUERIES_OF_SHARED_TILES:
        return None
    if capability_of(problem.target) != (9, 0):
        return None
    further = problem.prologue is not None or problem.dropout or problem.continued or problem.value_dim > 0
    if further or problem.operands is not None or problem.varlen is not None or not problem.bulk:
        return None
    if problem.causal is not None and problem.seqlen_k < FEWEST_KEYS_OF_QUERY * problem.seqlen_q:
        return None
    if problem.mask is not None and (problem.mask.left or problem.mask.right):
        return None  # the keys that a window leaves may be too few for what its tiles take at least
    found = ONE_LENGTH.specify(problem)
    if isinstance(found, Rejection) or _is_for_general(problem):
        return None
    return found if hopper_varlen.clocks(problem, found) < WORTH_SHARING * _clocks_of_heads(problem) else None


def other_than_shared_tiles(_: Problem) -> Rejection:
    """Why the kernels of `candidates` are not taken where with_shared_tiles() gives one."""
    return Rejection(
        "its tiles have the queries of one head: hopper/varlen, with those of all heads of a key head, is faster",
        "fewer heads of a key head, fewer keys or more queries",
    )


def _clocks_of_heads(problem: Problem) -> float:
    """Clocks of the kernel that is the fastest of those with tiles of one head each, or few of it."""
    wide = problem.head_dim > WIDEST_NARROW
    if not wide and _is_for_split(problem):
        return hopper_split.clocks(problem)
    if problem.head_dim in hopper_throughput.HEAD_DIMS and _is_for_throughput(problem):
        clocks = hopper_throughput.least_clocks(problem)
        return HALF_EMPTY * clocks if wide and problem.seqlen_q <= TILE else clocks
    if wide or _decodes(problem):
        return _clocks_of_mma(problem)
    return hopper_latency.several_tiles_clocks(problem, _rounds(problem))


def _clocks_of_mma(problem: Problem) -> float:
    """Clocks of ampere/mma, whose tiles have 16 rows and read all keys."""
    heads = problem.batch * problem.heads_kv
    tiles = heads * -(-problem.seqlen_q * (problem.heads // problem.heads_kv) // ROWS_OF_MMA)
    row = problem.seqlen_k * problem.head_dim * 2 * ELEMENT
    read, copied = heads * row / hopper_varlen.BYTES_OF_CLOCK, tiles * row / COPIED_OF_CLOCK
    return START_OF_MMA + (read if read > copied else copied)


def _is_for_split(problem: Problem) -> bool:
    """Whether hopper/split is the fastest kernel.

    That is where all CTAs of two query tiles are on the chip at once, but not those of one; and for long keys where
    hopper/latency has no SM to spare for a second CTA a query tile.
    """
    queries = problem.seqlen_q
    if problem.head_dim != 64 or problem.mask is not None or queries <= TILE:
        return False
    sms, heads = chip_of(problem.target).sms, problem.batch * problem.heads
    tiles = heads * -(-queries // TILE)
    if tiles > sms:
        found = heads * -(-queries // (2 * TILE)) <= sms
    else:
        found = 2 * tiles > sms and hopper_split.clocks(problem) < hopper_latency.one_tile_clocks(problem)
    return found and not _beats(_divided_clocks(problem), hopper_split.clocks(problem))


def _divided_clocks(problem: Problem) -> float | None:
    """Clocks of hopper/throughput with keys divided among CTAs; None where it does not divide them."""
    if problem.seqlen_q < TILE or problem.head_dim not in hopper_throughput.HEAD_DIMS:
        return None
    found = hopper_throughput.divided(problem)
    return None if found is None else found[1]


def _shares_keys(problem: Problem) -> bool:
    """Whether hopper/throughput, whose CTAs share keys, is faster than hopper/latency with a CTA for each tile."""
    divided = _divided_clocks(problem)
    if divided is None or _tiles(problem) > chip_of(problem.target).sms:
        return False
    return _beats(divided, hopper_latency.one_tile_clocks(problem)) and not _decodes(problem)


def _beats(divided: float | None, other: float) -> bool:
    return divided is not None and divided < WORTH_DIVIDING * other


def _fills_tiles_of_wide_heads(problem: Problem) -> bool:
    """Whether less than a tile of queries a head is faster in hopper/throughput than in ampere/mma, above D = 128.

    ampere/mma multiplies slower, but has parts of the keys for the SMs that few heads leave idle.
    """
    queries, heads = problem.seqlen_q, problem.batch * problem.heads
    if queries <= DECODING_QUERIES or heads < FEWEST_WIDE_HEADS:
        return False
    if heads >= MANY_WIDE_HEADS:
        return True
    half_full, several = queries >= TILE // 2, heads >= 2 * FEWEST_WIDE_HEADS
    if problem.seqlen_k > MOST_SEPARATE_KEYS:
        return half_full and several
    return half_full or several or problem.head_dim <= WIDEST_HALF_EMPTY


def _rounds(problem: Problem) -> int:
    """Tiles of queries that the busiest SM takes."""
    return -(-_tiles(problem) // chip_of(problem.target).sms)


def _is_for_general(problem: Problem) -> bool:
    """Whether ampere/general is the fastest kernel: short sequences, which are mostly the beginnings and ends of CTAs.

    Its CTAs of four warps start and end beside one another on an SM. Those of wgmma have one SM each.
    """
    if problem.dropout or problem.seqlen_q <= DECODING_QUERIES or problem.batch > MAX_GRID_YZ:  # not measured
        return False
    if capability_of(problem.target) != (9, 0):
        return False
    if _has_long_documents(problem):
        return problem.head_dim <= 64 and max(problem.seqlen_q, problem.seqlen_k) <= MOST_LONG_DOCUMENTS
    most = _wide_keys_of_general if problem.head_dim > WIDEST_NARROW else _keys_of_general
    return hopper_throughput.seen_keys(problem) <= most(problem, _rounds(problem))


def _has_long_documents(problem: Problem) -> bool:
    """Whether an SM has one tile of queries at most, of so many tokens that documents may hide much from it."""
    if problem.mask is None or problem.mask.tensor != "int32" or problem.head_dim > WIDEST_NARROW:
        return False
    return _rounds(problem) == 1 and min(problem.seqlen_q, problem.seqlen_k) > LONG_DOCUMENTS


def _wide_keys_of_general(problem: Problem, rounds: int) -> int:
    """Keys up to which ampere/general is the fastest kernel above D = 128 (docs/log/hopper-throughput.md)."""
    queries, tensor = problem.seqlen_q, None if problem.mask is None else problem.mask.tensor
    if tensor == "uint8":
        if rounds == 1:
            return 64 if queries <= 2 * TILE else 32
        return 256 if queries <= TILE else 96 if rounds > 2 and queries <= 2 * TILE else 0
    if tensor is not None:
        if rounds == 1:
            return 256 if tensor == "int32" and queries > 2 * TILE else 128
        if queries <= TILE:
            return 64
        return 32 if rounds <= MOST_ROUNDS_OF_LATENCY else 0
    if problem.causal == "upper_left" and queries <= 2 * TILE:
        return 96 if rounds == 1 else 64
    if queries <= TILE // 2:
        return 64
    return 32 if queries <= TILE or rounds == 1 else 0


def _keys_of_general(problem: Problem, rounds: int) -> int:
    """Keys up to which ampere/general is the fastest kernel up to D = 128 (docs/log/hopper-throughput.md)."""
    narrow, middle = problem.head_dim <= 32, problem.head_dim <= 64
    tensor = None if problem.mask is None else problem.mask.tensor
    if tensor == "uint8":
        return _keys_of_general_under_blocks(problem.seqlen_q, rounds)
    if rounds == 1:
        return 32 if tensor == "bool" and problem.seqlen_q <= 32 else 0
    if tensor == "int32":
        return _keys_of_general_under_documents(problem, rounds)
    if problem.seqlen_q <= TILE:
        if narrow:
            return 128 if rounds == 2 else MOST_KEYS_OF_GENERAL if tensor else 256
        if rounds == 2 or not middle:
            return 64
        return 128 if tensor in (None, "bool") else MOST_KEYS_OF_GENERAL
    if tensor is None:
        if problem.seqlen_q > 2 * TILE or not (narrow or (middle and 2 < rounds <= 8)):
            return 32 if problem.seqlen_k <= 32 and rounds <= MOST_ROUNDS_OF_LATENCY else 0
        if problem.causal:
            return 128
        return 64 if not narrow else 128 if rounds <= 8 else 96
    per_query = problem.mask is not None and problem.mask.per_query
    if tensor == "bool" and narrow:
        return 384 if per_query else 256 if rounds <= 4 else 128
    if tensor == "bool":
        return 64 if middle or per_query or rounds <= 8 else 0
    if middle and not narrow and problem.mask is not None and problem.mask.unaligned and not problem.mask.per_batch:
        return 144
    return 256 if narrow else 64 if middle else 0


def _keys_of_general_under_blocks(queries: int, rounds: int) -> int:
    """_keys_of_general() under a block_mask."""
    if queries <= TILE:
        return 64 if rounds == 1 else 384 if rounds == 2 else 512
    if queries <= 2 * TILE:
        return 64 if rounds <= 2 else 96
    return 32 if rounds == 1 else 64 if rounds == 2 else 0


def _keys_of_general_under_documents(problem: Problem, rounds: int) -> int:
    """_keys_of_general() under document_ids."""
    narrow, middle = problem.head_dim <= 32, problem.head_dim <= 64
    if problem.seqlen_q <= TILE:
        return MOST_KEYS_OF_DOCUMENTS if middle or rounds > 2 else 64
    if narrow:
        return 2048 if rounds == 2 else 768 if rounds <= MOST_ROUNDS_OF_LATENCY else 512
    return 96 if middle and problem.seqlen_q <= 2 * TILE else 0


def _lists_take_longer(problem: Problem) -> bool:
    """Whether masks of few tiles cost hopper/throughput more than hopper/latency.

    The former lists the tiles that booleans show, in a launch ahead; the list of a mask of all queries (padding) is
    short. It reads ranges ahead of its first copies. The latter reads rows that are not on 16 bytes byte by byte.
    """
    mask, keys = problem.mask, problem.seqlen_k
    if mask is None:
        return False
    rounds = _rounds(problem)
    if mask.tensor is None:
        return (mask.left or mask.right) and rounds <= 2 and keys <= 256
    if mask.tensor == "int32":
        return rounds <= 3 and keys <= (256 if problem.head_dim <= 64 else 128)
    if mask.tensor != "bool":
        return False
    if not mask.bulk:
        return keys <= 128 and rounds <= (2 if mask.per_query else 4)
    if mask.per_query:
        return keys <= (384 if problem.head_dim <= 64 else 256) and rounds <= MOST_ROUNDS_OF_LATENCY
    return keys <= 256 and rounds <= (MOST_ROUNDS_OF_LATENCY if keys <= 128 else 4)


def _is_better_listed(problem: Problem) -> bool:
    """Whether few queries under a boolean mask are fastest in hopper/throughput.

    It skips what padding hides. And it reads rows that are not on 16 bytes once for all heads.
    """
    mask, keys = problem.mask, problem.seqlen_k
    if mask is None or mask.tensor != "bool" or problem.seqlen_q <= DECODING_QUERIES:
        return False
    rounds = _rounds(problem)
    if rounds == 1:
        return False
    if mask.per_query:
        return not mask.bulk and rounds > 2 and keys > 256
    return keys > (512 if mask.bulk else 256)


def _listed_table_is_faster(problem: Problem) -> bool:
    """Whether hopper/throughput is faster than hopper/latency under a block_mask, whose listed tiles alone it visits.

    The limits were measured with 10% to 80% of the blocks visible (docs/log/hopper-throughput.md).
    """
    if _rounds(problem) > 1:
        return True
    if problem.seqlen_q <= 2 * TILE:
        return problem.seqlen_k > 256
    return problem.seqlen_k > (768 if problem.head_dim <= 64 else 512)


def _is_for_throughput(problem: Problem) -> bool:
    """Whether hopper/throughput is the fastest kernel.

    Against hopper/latency, for D up to 128, that is where the latter's tiles of 64 queries are more than the SMs, but
    for few keys under a boolean mask; against ampere/mma, where there are queries for a warpgroup or many heads, unless
    long keys want to be divided.
    """
    if problem.head_dim not in hopper_latency.HEAD_DIMS:
        if problem.seqlen_q < TILE:
            alone = problem.mask is not None  # ampere/mma does not compute it
            return (alone and problem.seqlen_q > DECODING_QUERIES) or _fills_tiles_of_wide_heads(problem)
        return problem.mask is not None or not _splits_long_keys(problem)
    if problem.mask is not None and problem.mask.tensor == "uint8":
        return _listed_table_is_faster(problem)
    if problem.seqlen_q <= TILE:
        return _is_better_listed(problem) or (problem.mask is None and _shares_keys(problem))
    if _has_long_documents(problem):
        return True
    if _tiles(problem) <= chip_of(problem.target).sms:
        return _shares_keys(problem)
    return not _lists_take_longer(problem)


def changes_in_launch(problem: Problem) -> bool:
    """Whether attention's own launch should make the norms and the rotary embedding of Q and K.

    That is where each warpgroup of hopper/latency has one tile of keys: measured at (1, 12, 197, 64), it takes less
    time than attention behind separate kernels. With more keys every tile of queries would change all of them anew,
    which took longer than a launch ahead (docs/log/prologue.md).
    """
    if capability_of(problem.target) != (9, 0) or problem.alignment < VECTOR_BYTES or not problem.bulk:
        return False
    rounds = hopper_latency.key_rounds(problem, hopper_latency.cluster_for(problem))
    return problem.head_dim <= hopper_latency.PANEL and rounds == 1 and not _fits_latency_less(problem)


def _fits_latency_less(problem: Problem) -> bool:
    """Whether a later kernel is faster than hopper/latency."""
    if _decodes(problem) or _is_for_split(problem) or _is_for_general(problem):
        return True
    return problem.head_dim in hopper_throughput.HEAD_DIMS and _is_for_throughput(problem)


def _other_than_latency(problem: Problem) -> Rejection:
    if _is_for_general(problem):
        return _for_general(problem)
    if _decodes(problem):
        return Rejection(
            f"{problem.seqlen_k} keys are too many for tiles of {TILE} queries with {problem.seqlen_q} in "
            f"{problem.heads} heads: ampere/mma is faster",
            "fewer keys, or more queries",
        )
    if _is_for_split(problem):
        return Rejection(
            "its CTAs of two warpgroups do not fill the chip as hopper/split's do",
            "fewer heads or shorter sequences",
        )
    if _has_long_documents(problem):
        return Rejection(
            f"it computes what documents hide, too, and more than {LONG_DOCUMENTS} tokens: hopper/throughput is faster",
            "fewer tokens",
        )
    if _tiles(problem) <= chip_of(problem.target).sms and problem.mask is None:
        return Rejection(
            f"{problem.seqlen_k} keys of few tiles of queries: hopper/throughput, whose CTAs share them, is faster",
            "fewer keys",
        )
    return Rejection(
        f"its tiles of {TILE} queries are more than the SMs: hopper/throughput is faster",
        "fewer heads or shorter sequences",
    )


def _for_general(problem: Problem) -> Rejection:
    if _has_long_documents(problem):
        return Rejection(
            f"documents hide much of {problem.seqlen_k} keys from few heads: ampere/general's small CTAs are faster",
            "more heads or more tokens",
        )
    return Rejection(
        f"{problem.seqlen_q} queries and {problem.seqlen_k} keys of {problem.batch * problem.heads} heads in all are "
        "mostly beginnings and ends: ampere/general's small CTAs are faster",
        "fewer heads or longer sequences",
    )


def _other_than_split(problem: Problem) -> Rejection:
    if _is_for_general(problem):
        return _for_general(problem)
    return Rejection(
        "its CTAs would leave SMs idle, come in several rounds or have all of many keys",
        "about 16,384 queries of all heads",
    )


def _other_than_throughput(problem: Problem) -> Rejection:
    if _is_for_general(problem):
        return _for_general(problem)
    if _lists_take_longer(problem):
        verb = "finding" if problem.mask is not None and problem.mask.tensor == "int32" else "listing"
        return Rejection(f"{verb} the tiles of its mask takes longer than hopper/latency", "more keys or heads")
    if problem.mask is not None and problem.mask.tensor == "uint8":
        return Rejection("one tile of queries an SM and few keys: hopper/latency is faster", "more keys or heads")
    return Rejection("too few queries for its tiles: other kernels are faster", "more heads or longer sequences")


def _fills_sms(problem: Problem) -> bool:
    """Whether tiles of 64 queries do not fit the SMs: else tiles of 128 queries would leave half of these empty."""
    if _tiles(problem) <= chip_of(problem.target).sms:
        return False
    return problem.mask is None or not isinstance(hopper_throughput_8bit.throughput(problem), Rejection)


def _other_than_eight_bit_latency(_: Problem) -> Rejection:
    return Rejection(
        f"its tiles of {TILE} queries are more than the SMs: hopper/throughput_8bit is faster",
        "fewer heads or shorter sequences",
    )


def _is_too_small_for_eight_bit(problem: Problem) -> bool:
    """Other kernels with 8-bit operands have no D = 256, and none but hopper/latency_8bit has masks.

    Where heads that share a key head are packed, ada/mma_8bit has one tile of few rows for as many tiles here.
    """
    if problem.operands is None or problem.head_dim not in FEWEST_TILES[problem.operands] or problem.mask is not None:
        return False
    if packed_heads(problem) > 1:
        return True
    fewest = FEWEST_TILES[problem.operands][problem.head_dim]
    least = fewest if problem.seqlen_q >= EIGHT_BIT_TILE else chip_of(problem.target).sms
    return _tiles(problem, EIGHT_BIT_TILE) < least


def _other_than_eight_bit_throughput(problem: Problem) -> Rejection:
    if packed_heads(problem) > 1:
        return Rejection(
            f"{problem.seqlen_q} queries leave its tiles of {EIGHT_BIT_TILE} empty: ada/mma_8bit has all heads of a "
            "key head in one",
            "more queries",
        )
    return Rejection(
        f"{_tiles(problem, EIGHT_BIT_TILE)} tiles of {EIGHT_BIT_TILE} queries are too few for it: other kernels are "
        "faster",
        "more heads or longer sequences",
    )


def _packed_rows(problem: Problem) -> int:
    """Rows of a sequence and key head."""
    return problem.seqlen_q * problem.heads // problem.heads_kv


def _other_than_hopper_varlen(problem: Problem) -> Rejection:
    return Rejection(
        f"{_packed_rows(problem)} rows of a sequence and key head do not fill its tiles of {TILE}, or clusters share "
        "the few keys of so few sequences: ampere/varlen is faster",
        "more queries of a sequence, more query heads of a key head, more keys, or more sequences",
    )


def _is_for_ampere_varlen(problem: Problem) -> bool:
    if _packed_rows(problem) <= MOST_ROWS_OF_MMA:
        return True
    return ampere_varlen.is_shared(problem) and problem.seqlen_k <= MOST_KEYS_OF_MMA


class Rule(NamedTuple):
    """When impl="auto" skips a kernel, because a later one is faster, and what is said of it.

    The words are made where someone reads them: choosing a kernel for a new length takes a third less time without.
    """

    skips: Callable[[Problem], bool]
    words: Callable[[Problem], Rejection]


_NEVER = Rule(lambda _: False, lambda _: Rejection("", ""))
"""Of a kernel that no later one is faster than."""

PREFERENCES: dict[str, Rule] = {
    "hopper/latency": Rule(_fits_latency_less, _other_than_latency),
    "hopper/split": Rule(lambda problem: not _is_for_split(problem) or _is_for_general(problem), _other_than_split),
    "hopper/throughput": Rule(
        lambda problem: not _is_for_throughput(problem) or _is_for_general(problem), _other_than_throughput
    ),
    "ampere/mma": Rule(_is_for_general, _for_general),
    "ampere/general": _NEVER,
    "hopper/latency_8bit": Rule(_fills_sms, _other_than_eight_bit_latency),
    "hopper/throughput_8bit": Rule(_is_too_small_for_eight_bit, _other_than_eight_bit_throughput),
    "hopper/throughput_8bit_qk": Rule(_is_too_small_for_eight_bit, _other_than_eight_bit_throughput),
    "ada/mma_8bit": _NEVER,
    "hopper/varlen": Rule(_is_for_ampere_varlen, _other_than_hopper_varlen),
    "ampere/varlen": _NEVER,
}
"""The kernels that impl="auto" tries, in this order, with the rule of each; the most general one comes last."""


def _automatic(eight_bit: bool, varlen: bool) -> tuple[Family, ...]:
    families = filter(None, map(family_named, PREFERENCES))
    return tuple(family for family in families if (family.eight_bit, family.varlen) == (eight_bit, varlen))


_AUTOMATIC = {kind: _automatic(*kind) for kind in ((False, False), (True, False), (False, True))}


def candidates(problem: Problem, impl: str) -> tuple[Family, ...]:
    """Kernels that `impl` admits for a problem: those of PREFERENCES for "auto", else the one of that name, or none.

    ONE_LENGTH is none of PREFERENCES: with_shared_tiles() says where it comes ahead of them.
    """
    kind = problem.operands is not None, problem.varlen is not None
    if impl == "auto":
        return _AUTOMATIC[kind]
    if impl == ONE_LENGTH.name and kind == (False, False):
        return (ONE_LENGTH,)
    family = family_named(impl)
    return (family,) if family and (family.eight_bit, family.varlen) == kind else ()


def skips(family: Family, problem: Problem) -> bool:
    """Whether impl="auto" skips a kernel, whether or not it computes the problem."""
    return not few_are_left(problem) and PREFERENCES[family.name].skips(problem)


def in_turn(problem: Problem) -> tuple[Family, ...]:
    """The kernels that impl="auto" tries for a problem and does not skip.

    Where operands have 16 bits and sequences one length, rules share questions, which are then asked once: a new size
    waits for this.
    """
    if problem.operands is not None or problem.varlen is not None or problem.value_dim or problem.continued:
        found = candidates(problem, "auto")
        return found if few_are_left(problem) else tuple([f for f in found if not PREFERENCES[f.name].skips(problem)])
    if _is_for_general(problem):
        return _GENERAL
    split, throughput = _is_for_split(problem), _is_for_throughput(problem)
    less = split or _decodes(problem) or (throughput and problem.head_dim in hopper_throughput.HEAD_DIMS)
    return _NOT_SKIPPED[less, split, throughput]


def _not_skipped(less: bool, split: bool, throughput: bool) -> tuple[Family, ...]:
    skipped = {"hopper/latency": less, "hopper/split": not split, "hopper/throughput": not throughput}
    return tuple(family for family in _AUTOMATIC[False, False] if not skipped.get(family.name))


_NOT_SKIPPED = {answers: _not_skipped(*answers) for answers in product((False, True), repeat=3)}
"""By whether a later kernel is faster than hopper/latency, and whether hopper/split and hopper/throughput are."""


_GENERAL = tuple(family for family in _AUTOMATIC[False, False] if family.name == "ampere/general")


def few_are_left(problem: Problem) -> bool:
    """Whether no kernel is skipped: for dense V of other columns than Q and K, and for an output of other keys."""
    return (problem.value_dim > 0 and problem.varlen is None) or problem.continued


def skip_reason(family: Family, problem: Problem) -> Rejection | None:
    """Why impl="auto" skips a kernel, whether or not it computes the problem; None when it does not skip it."""
    rule = PREFERENCES[family.name]
    return rule.words(problem) if skips(family, problem) else None


LEAST_GRADIENT_FLOPS, LEAST_FLOPS_OF_OTHER_HEADS = 2.0**37, 2.0**36.5
"""Of the five products of a gradient, from which on 0.3 ms of the GPU hide a node in Python: at head dimensions that 64
divides, and at others."""
HEADS_CUDNN_FILLS_UP = range(72, 161)
"""Head dimensions where cuDNN's backward pass is the slower one under a boolean mask, unless 64 divides them: 1.04 to
1.27 times the time at 400 and 1,024 tokens on an H200."""


def five_products(problem: Problem, deterministic: bool) -> hopper_backward.Tiling | Rejection:
    """The tiling of hopper/backward for gradients, or why backward/ makes them."""
    found = hopper_backward.choose(problem, deterministic)
    if isinstance(found, hopper_backward.Tiling) and found.whole:
        few = Rejection("few CTAs, which have all keys of a head, and many queries each", "more heads")
        return found if _is_worth_whole_keys(problem, found) else few
    if problem.mask is not None and problem.mask.softcap:
        return found  # two products more have scores to cap, which take longer than the other two kernels
    if backward.is_for_small(problem):
        return Rejection("few tiles, or short ones: its three kernels cost more than two products", "longer sequences")
    return found


def _is_worth_whole_keys(problem: Problem, tiling: hopper_backward.Tiling) -> bool:
    """Whether CTAs with all keys of a head beat seven products: one for each SM, or with few queries each."""
    few = problem.seqlen_q * problem.heads // problem.heads_kv <= tiling.block_n
    return few or hopper_backward.gradients_grid(problem, tiling)[0] >= chip_of(problem.target).sms


def beats_torch_backward(problem: Problem) -> bool:
    """Whether this library's kernels make a gradient faster than torch's backward passes, as measured on an H200.

    Against cuDNN's that is hopper/backward wherever it runs; without it, where there are few tiles, and under a boolean
    mask where cuDNN fills up heads.
    """
    if isinstance(five_products(problem, False), hopper_backward.Tiling) or backward.is_for_small(problem):
        return True
    hidden = problem.mask is not None and problem.mask.tensor == "bool"
    filled = problem.head_dim in HEADS_CUDNN_FILLS_UP and problem.head_dim % 64 != 0
    return hidden and filled and backward.choose(problem).wgmma


def is_worth_a_node(problem: Problem) -> bool:
    """Whether the gradient is to be hopper/backward's in spite of the time that a node in Python costs the host."""
    flops = 10 * problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k * problem.head_dim
    least = LEAST_FLOPS_OF_OTHER_HEADS if problem.head_dim % 64 else LEAST_GRADIENT_FLOPS
    enough = flops / (2 if problem.causal else 1) >= least
    return enough and isinstance(five_products(problem, False), hopper_backward.Tiling)
