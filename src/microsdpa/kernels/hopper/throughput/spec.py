"""Specifications of hopper/throughput/kernel.cu: its tiles, which are legal for a problem, and which is chosen."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import ceil, inf

from microsdpa.kernels.chip import CLUSTERS, chip_of
from microsdpa.kernels.hopper.common import PANEL_BYTES, ROWS, panel, stored_columns, tail
from microsdpa.kernels.problem import (
    ELEMENT,
    ELEMENT_BYTES,
    VECTOR_BYTES,
    MaskKind,
    Problem,
    capability_of,
)
from microsdpa.kernels.spec import (
    BOOLEAN,
    CPP_TYPE,
    KernelSpec,
    Rejection,
    TensorMap,
    TileLists,
    dropped_params,
    masks_type,
    refused_head_dim,
)

WORKS = 4
"""Descriptions of query tiles in shared memory."""
WORK_BYTES, RANGED_WORK_BYTES = 16, 32
"""Of a description, and of one where rows see ranges of keys."""
DEEPEST = 6
"""Tiles of K, and of V, at most: more would not be ahead of anything."""
ALONE = 0.6
"""Part of a query tile's time that does not become less when some of its consumers have no rows (H200)."""
SHOWING = ("bool", "int32", "uint8")
"""Element types of masks that say which keys are visible: booleans, ranges of keys, tables of blocks."""
MOST_LISTED = 128
"""Keys of a tile in a list (tile_list.cuh)."""
LIST_WARPS = 16
"""Of a CTA of the kernel that lists the tiles of a boolean mask. More of them start later."""
MARK_THREADS = 256
"""Of the kernel that reads a mask ahead of its lists."""
FEW_KEY_TILES, MANY_KEY_TILES = 3, 16
"""Tiles of keys up to which a list is made in one launch, where lists are few, and in any case."""
MAX_TILES = 2**29
"""Query tiles that the kernel counts."""


def out_columns(head_dim: int) -> int:
    """Columns of O that wait in shared memory to be stored."""
    whole = head_dim <= 128 or head_dim % 64
    return stored_columns(head_dim) if whole else 128 if head_dim % 128 == 0 else 64


@dataclass(frozen=True)
class Tiles:
    """A configuration of hopper/throughput/kernel.cu, apart from what the problem itself decides.

    Attributes:
        consumers: warpgroups that compute, of 64 queries each.
        block_n: keys of a tile.
        overlap: whether a warpgroup's exponentials run beside its own P V, in turn with the other warpgroup's.
        tile_clocks: clocks of an SM for a tile of keys, all warpgroups together, in long sequences (H200).
        around_clocks: clocks more for each query tile (H200).
        ctas: CTAs of a cluster that share the keys of a query tile.
    """

    consumers: int
    block_n: int
    overlap: bool
    tile_clocks: int
    around_clocks: int
    ctas: int = 1

    def __str__(self) -> str:
        """For a table."""
        shared = f", {self.ctas} CTAs" if self.ctas > 1 else ""
        return f"{self.block_m} x {self.block_n}{' overlapped' if self.overlap else ''}{shared}"

    @functools.cached_property
    def block_m(self) -> int:
        """Queries of a CTA."""
        return ROWS * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers, and a warpgroup of which one thread copies."""
        return 128 * (self.consumers + 1)

    def mask_bytes(self, head_dim: int, element: int, unaligned: bool) -> int:
        """MaskRing's size (shared.cuh), for a mask of numbers of so many bytes."""
        stages = 2 if head_dim <= 64 and element == 2 else 1
        each = ROWS * (self.block_n * element + VECTOR_BYTES * unaligned) + 16
        return ceil(stages * self.consumers * each / 1024) * 1024 if element else 0

    def shared_bytes(
        self,
        head_dim: int,
        stages: int,
        query_stages: int,
        mask_element: int = 0,
        unaligned: bool = False,
        work_bytes: int = WORKS * WORK_BYTES,
    ) -> int:
        """SharedStorage's size (shared.cuh); `work_bytes`: of descriptions of query tiles."""
        tiles = (query_stages * self.block_m + 2 * stages * self.block_n) * stored_columns(head_dim) * ELEMENT
        tiles += self.block_m * out_columns(head_dim) * ELEMENT
        barriers = (2 * query_stages + 4 * stages) * 8
        # Of WithPartner (divided.cuh), for each consumer: statistics of rows, and barriers.
        partner = 8 * self.consumers * (ROWS + self.ctas.bit_length()) if self.ctas > 1 else 0
        behind_masks = ceil((tiles + work_bytes + barriers + partner) / 1024) * 1024
        return self.mask_bytes(head_dim, mask_element, unaligned) + behind_masks

    @functools.lru_cache  # noqa: B019 (tiles are a few constants)
    def rings(
        self,
        head_dim: int,
        shared_per_cta: int,
        mask_element: int = 0,
        unaligned: bool = False,
        work_bytes: int = WORKS * WORK_BYTES,
    ) -> tuple[int, int] | None:
        """(tiles of K and of V, tiles of Q) that fit: two query tiles if two of the others fit as well."""
        for query_stages in (2, 1):
            for stages in range(DEEPEST, 1, -1):
                size = self.shared_bytes(head_dim, stages, query_stages, mask_element, unaligned, work_bytes)
                if size <= shared_per_cta:
                    return stages, query_stages
        return None


CANDIDATES: dict[int, tuple[Tiles, ...]] = {
    32: (Tiles(3, 128, False, 2200, 3100), Tiles(4, 64, False, 1600, 3700), Tiles(2, 128, True, 1900, 3500)),
    48: (Tiles(3, 128, False, 2630, 3100), Tiles(4, 64, False, 1760, 3700), Tiles(2, 128, True, 2210, 3500)),
    64: (Tiles(3, 128, False, 2650, 3100), Tiles(4, 64, False, 1870, 3700), Tiles(2, 128, True, 2210, 3500)),
    80: (Tiles(2, 128, True, 2200, 4000), Tiles(3, 96, False, 2290, 3500), Tiles(3, 64, False, 1650, 3500)),
    96: (Tiles(2, 128, True, 2350, 4000),),
    112: (Tiles(2, 128, True, 2420, 4300),),
    128: (Tiles(2, 128, True, 2600, 4300),),
    160: (Tiles(2, 96, True, 2500, 5200),),
    192: (Tiles(2, 64, True, 1900, 6000),),
    256: (Tiles(2, 64, True, 2400, 7700),),
}
"""Tiles that compile without spills, by head dimension. The clocks for D = 32, 160 and 192 are estimates."""
DIVIDED_DIMS = {ctas: tuple(dim for dim in CANDIDATES if dim // 8 % ctas == 0) for ctas in (2, 4, 8)}
"""Head dimensions of tiles whose keys so many CTAs share: they have as many blocks of eight columns each."""
START_CLOCKS = 3000
"""From the launch to the first product (H200)."""
ADDING_CLOCKS = {2: (1200, 14), 4: (2400, 17), 8: (4500, 20)}
"""Clocks for adding up a query tile's parts of so many CTAs, and more for every column (H100)."""
FEWEST_DIVIDED_KEYS, FEWEST_DIVIDED_KEYS_OF_WIDE = 512, 384
"""Keys from which on they are divided, up to D = 128 and above."""
SLOW_COPIES = 1.6
"""Times as many clocks where bulk copies bring rows that are no multiple of 32 bytes into much wider tiles."""
MOST_TILES_OF_CAUSAL, MOST_TILES = 1.25, 2.0
"""Query tiles up to which keys are divided, for each SM, under a causal mask and without one."""
DROPPING = "microsdpa::hopper::throughput::Dropping<{}>"
CONTINUING = "microsdpa::hopper::throughput::Continuing<{}, {}>"
UNALIGNED = "microsdpa::hopper::throughput::Unaligned<{}>"
DIVIDING = "microsdpa::hopper::throughput::Dividing<{}, {}, {}>"
DIVIDED_SPILLS = "a few words of addresses, once a query tile"
MASK_SPILLS = "with many masks at once some bytes of addresses, once a tile"
MASKED_CANDIDATES: dict[int, tuple[Tiles, ...]] = {
    96: (Tiles(2, 64, True, 1400, 4000),),
    112: (Tiles(2, 64, True, 1400, 4300),),
    128: (Tiles(2, 64, True, 1500, 4300),),
    160: (Tiles(2, 64, True, 1800, 5200),),
}
"""More tiles for masks of numbers, where theirs take shared memory."""
HEAD_DIMS = range(8, max(CANDIDATES) + 1, 8)
"""Head dimensions whose rows a bulk copy can read."""


def padded(problem: Problem) -> int:
    """The head dimension of the problem's kernel: bulk copies fill further columns with zeros.

    Tails and a mask of numbers would be more tensor maps than a kernel gets.
    """
    masked = mask_element(problem) > 0
    return min(dim for dim in CANDIDATES if dim >= problem.head_dim and not (masked and tail(dim)))


def divided_dim(head_dim: int, ctas: int) -> int:
    """The head dimension of the tiles whose keys so many CTAs share."""
    return min(dim for dim in DIVIDED_DIMS[ctas] if dim >= head_dim)


def dividing(problem: Problem) -> tuple[Tiles, ...]:
    """Tiles whose keys CTAs share, where the kernel has them: without masks but the causal one."""
    if problem.mask is not None or problem.dropout or problem.continued:
        return ()
    return _dividing(problem.head_dim)


@functools.lru_cache
def _dividing(head_dim: int) -> tuple[Tiles, ...]:
    found = []
    for ctas, (alone, column) in ADDING_CLOCKS.items():
        dim = divided_dim(head_dim, ctas)
        (tiles,) = (tiles for tiles in CANDIDATES[dim] if tiles.overlap)
        slow = dim > 64 and head_dim % 16 != 0 and dim - head_dim >= 16
        clocks = int(tiles.tile_clocks * (SLOW_COPIES if slow else 1))
        around = tiles.around_clocks + alone + column * dim
        found.append(replace(tiles, ctas=ctas, tile_clocks=clocks, around_clocks=around))
    return tuple(found)


def seen_keys(problem: Problem) -> int:
    """Keys that some query sees: those behind the last query count for nothing under a causal mask."""
    return min(problem.seqlen_q, problem.seqlen_k) if problem.causal == "upper_left" else problem.seqlen_k


def few_tiles_clocks(problem: Problem, tiles: Tiles) -> float:
    """Clocks of a launch without masks but the causal one, of a few query tiles for each SM."""
    chip, ctas, found = chip_of(problem.target), tiles.ctas, query_tiles(problem, tiles)
    places = CLUSTERS[ctas] if ctas > 1 else chip.sms
    longest = -(-seen_keys(problem) // tiles.block_n)
    if problem.causal is not None and not tiles.overlap:
        longest += 1  # of the tiles on the diagonal others wait for
    one = tiles.around_clocks + -(-longest // ctas) * tiles.tile_clocks
    if found <= places:
        return START_CLOCKS + one
    if problem.causal is None:
        if ctas == 1:
            return START_CLOCKS + one * rounds(places, problem.batch * problem.heads, problem.seqlen_q, False, tiles)
        return START_CLOCKS + one * -(-found // places)
    # The shortest tile comes with the longest one that does not stay alone.
    seen_by_all = problem.seqlen_k - problem.seqlen_q if problem.causal == "lower_right" else 0
    shortest = (max(seen_by_all, 0) + tiles.block_m) // tiles.block_n
    turns = -(-found // places)
    if turns == 2:
        together = 2 * longest - 2 * places * (longest - shortest) // found
    else:
        together = found * (longest + shortest) // (2 * places)
    several = turns * tiles.around_clocks + (together // ctas + 1) * tiles.tile_clocks
    return START_CLOCKS + max(one, several)


def divided(problem: Problem) -> tuple[Tiles, float] | None:
    """The fastest tiles whose keys CTAs share, and their clocks; None for many query tiles, few keys or masks."""
    found, most = dividing(problem), MOST_TILES_OF_CAUSAL if problem.causal is not None else MOST_TILES
    if not found or query_tiles(problem, found[0]) > most * chip_of(problem.target).sms:
        return None
    if problem.seqlen_k < (FEWEST_DIVIDED_KEYS_OF_WIDE if problem.head_dim > 128 else FEWEST_DIVIDED_KEYS):
        return None
    best, least = found[0], inf
    for tiles in found:
        clocks = few_tiles_clocks(problem, tiles)
        if clocks < least:
            best, least = tiles, clocks
    return best, least


def least_clocks(problem: Problem) -> float:
    """Clocks of a launch of few query tiles for each SM, with the tiles that are chosen."""
    alone, shared = few_tiles_clocks(problem, choose(problem)), divided(problem)
    return alone if shared is None or alone <= shared[1] else shared[1]


def ends_early(problem: Problem) -> bool:
    """Whether queries see keys up to an end of their own."""
    return problem.causal is not None or (problem.mask is not None and problem.mask.right)


def query_tiles(problem: Problem, tiles: Tiles) -> int:
    """Query tiles of all heads."""
    return problem.batch * problem.heads * ceil(problem.seqlen_q / tiles.block_m)


def rounds(sms: int, heads: int, seqlen_q: int, early: bool, tiles: Tiles) -> float:
    """Times of a whole query tile that the launch takes, for so many heads of all batch entries.

    `early`: queries see keys up to an end of their own. Such tiles share their different lengths out evenly.
    """
    whole, rest = divmod(seqlen_q, tiles.block_m)
    total = heads * (whole + (rest > 0))
    if early and total > sms:
        return total / sms
    if whole == 0 or rest == 0:
        return -(-total // sms)
    busy = -(-rest // ROWS)
    if busy == tiles.consumers:
        return -(-total // sms)
    # Heads' last tiles, in which some consumers are idle, come after all others and fill the CTAs from the last one on.
    last_takes = ALONE + (1 - ALONE) * busy / tiles.consumers
    before, more = divmod(heads * whole, sms)
    free = sms - more if more else 0
    after, left = divmod(max(heads - free, 0), sms)
    with_one_more = before + (more > 0) + last_takes * (after + (left > free))
    with_none = before + last_takes * ((more > 0) + after + (left > 0))
    return max(with_one_more, with_none)


def fitting(problem: Problem) -> tuple[Tiles, ...]:
    """Tiles that compute the problem, and fit its GPU's shared memory and the kernel's registers."""
    return _fitting(problem.any_size)


@functools.lru_cache(maxsize=1024)
def _fitting(problem: Problem) -> tuple[Tiles, ...]:
    """fitting() for any problem of that kind, whatever its size."""
    element, unaligned, head_dim = mask_element(problem), is_unaligned(problem.mask), padded(problem)
    found, shared = CANDIDATES[head_dim], chip_of(problem.target).shared_per_cta
    if element:
        # A mask of numbers leaves no registers for small shares of them, nor, beside a soft cap, for large tiles.
        most = 64 if head_dim > 64 and problem.mask is not None and problem.mask.softcap else 128
        panel, found = PANEL_BYTES // element, (*found, *MASKED_CANDIDATES.get(head_dim, ()))
        found = tuple(t for t in found if t.consumers == 2 and t.block_n <= most and t.block_n % panel == 0)
    elif problem.mask is not None and problem.mask.tensor is not None:
        # Small query tiles visit fewer tiles of keys, where queries have masks of their own. A table lists them.
        most = 2 if problem.mask.per_query or problem.mask.tensor == "uint8" else 3
        found = tuple(t for t in found if t.consumers <= most and t.block_n <= MOST_LISTED)
    if problem.dropout:
        found = tuple(t for t in found if t.consumers == 2)  # of others the registers do not hold random numbers too
    return tuple(t for t in found if t.rings(head_dim, shared, element, unaligned, work_bytes(problem, t)))


def mask_element(problem: Problem) -> int:
    """Bytes of an element of the problem's mask of numbers; 0 without one."""
    kind = problem.mask
    return 0 if kind is None or kind.tensor in (None, *SHOWING) else 4 if kind.tensor == "float32" else 2


def is_unaligned(mask: MaskKind | None) -> bool:
    """Whether there is a mask of numbers whose rows do not start on 16 bytes."""
    return mask is not None and mask.unaligned


def is_ranged(mask: MaskKind | None) -> bool:
    """Whether rows see ranges of keys."""
    return mask is not None and mask.tensor == "int32"


def is_dealt(problem: Problem, tiles: Tiles) -> bool:
    """Whether CTAs take query tiles as they come to them (DEALT_TILES in masks.cuh), of which they keep a count."""
    mask = problem.mask
    if mask is not None and mask.tensor is not None:
        return is_ranged(mask)
    return ends_early(problem) and tiles.overlap and tiles.ctas == 1


def work_bytes(problem: Problem, tiles: Tiles) -> int:
    """Of descriptions of query tiles: of those that are computed, and of those that consumers store."""
    each = RANGED_WORK_BYTES if is_ranged(problem.mask) else WORK_BYTES
    return each * (WORKS + (tiles.consumers if is_dealt(problem, tiles) else 0))


def choose(problem: Problem) -> Tiles:
    """The tiles that are expected to take the fewest clocks."""
    return _cheapest(problem, fitting(problem))


def _cheapest(problem: Problem, found: tuple[Tiles, ...]) -> Tiles:
    """The first tiles with which the launch is expected to take the fewest clocks; a new size waits for this."""
    best = found[0]
    if len(found) == 1:
        return best
    sms, heads, seqlen_k = chip_of(problem.target).sms, problem.batch * problem.heads, problem.seqlen_k
    seqlen_q, least = problem.seqlen_q, inf
    # Behind a long context all query tiles are about as long.
    early = ends_early(problem) and not (problem.causal == "lower_right" and 2 * seqlen_q <= seqlen_k)
    # Query tiles of different lengths are shared out evenly where they are many: heads are a factor of all clocks.
    even = early and heads * -(-seqlen_q // max([tiles.block_m for tiles in found])) > sms
    few = problem.mask is None and early and heads * -(-seqlen_q // (2 * ROWS)) <= 2 * sms
    for tiles in found:
        if few:
            clocks = few_tiles_clocks(problem, tiles)
            if clocks < least:
                best, least = tiles, clocks
            continue
        whole = -(-seqlen_k // tiles.block_n)
        key_tiles = (whole + 1) / 2 if early else whole  # of a query tile, in the mean
        clocks = key_tiles * tiles.tile_clocks + tiles.around_clocks
        clocks *= -(-seqlen_q // tiles.block_m) if even else rounds(sms, heads, seqlen_q, early, tiles)
        if clocks < least:
            best, least = tiles, clocks
    return best


def specification(problem: Problem, tiles: Tiles) -> KernelSpec:
    """The kernel of one configuration for a problem.

    Raises:
        ValueError: the tiles do not fit the shared memory of the problem's GPU.
    """
    return _specification(problem.any_size, tiles, _is_marked(problem, tiles))


def _is_marked(problem: Problem, tiles: Tiles) -> bool:
    """Whether a boolean mask is read ahead of its lists: these are too few CTAs for so many keys."""
    kind = problem.mask
    if kind is None or kind.tensor != "bool" or not kind.per_query:
        return False
    lists, key_tiles = TileLists(tiles.block_m, tiles.block_n).lists(problem), ceil(problem.seqlen_k / tiles.block_n)
    return key_tiles > MANY_KEY_TILES or (key_tiles > FEW_KEY_TILES and 2 * lists < chip_of(problem.target).sms)


@functools.lru_cache(maxsize=1024)
def _specification(problem: Problem, tiles: Tiles, marked: bool) -> KernelSpec:
    """specification() for any problem of that kind, whatever its size."""
    chip, mask = chip_of(problem.target), problem.mask
    head_dim = padded(problem) if tiles.ctas == 1 else divided_dim(problem.head_dim, tiles.ctas)
    element = mask_element(problem)
    listed = mask if mask is not None and mask.tensor == "bool" else None
    works = work_bytes(problem, tiles)
    unaligned = is_unaligned(mask)
    rings = tiles.rings(head_dim, chip.shared_per_cta, element, unaligned, works)
    if rings is None:
        raise ValueError(
            f"tiles: expected some that fit {chip.shared_per_cta} bytes with head_dim {head_dim}, got {tiles}"
        )
    stages, query_stages = rings
    causal = ends_early(problem)
    arguments = {
        "T": CPP_TYPE[problem.dtype],
        "HEAD_DIM": head_dim,
        "BLOCK_N": tiles.block_n,
        "CONSUMERS": tiles.consumers,
        "STAGES": stages,
        "QUERY_STAGES": query_stages,
        "OVERLAP": BOOLEAN[tiles.overlap],
        "CAUSAL": BOOLEAN[causal],
        "MASKS": _policies(problem, tiles),
    }
    columns = panel(head_dim)
    boxes = (("query", ROWS), ("key", tiles.block_n), ("value", tiles.block_n), ("out", ROWS))
    maps = [
        TensorMap(name, rows, columns, columns * ELEMENT_BYTES[problem.dtype])  # type: ignore[arg-type]
        for name, rows in boxes
    ]
    if tail(head_dim):
        narrow = tail(head_dim) * ELEMENT_BYTES[problem.dtype]
        maps += [replace(wide, columns=tail(head_dim), swizzle=narrow) for wide in maps]
        arguments["MAPS"] = ", ".join(["microsdpa::TensorMap"] * len(boxes))
    if element and not unaligned:
        maps.append(TensorMap("attn_mask", ROWS, PANEL_BYTES // element))
        arguments["MAPS"] = "microsdpa::TensorMap"
    params = "microsdpa::AttentionParams" if mask is None else "microsdpa::MaskedParams"
    if problem.dropout:
        params = dropped_params("microsdpa::MaskedParams", True)
    lists = TileLists(tiles.block_m, tiles.block_n) if listed else None
    return KernelSpec(
        name="hopper/throughput",
        source="hopper/throughput/kernel.cu",
        template="microsdpa::hopper::throughput::attention",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=tiles.threads,
        block_m=tiles.block_m,
        shared_bytes=tiles.shared_bytes(head_dim, stages, query_stages, element, unaligned, works),
        low_occupancy=f"{tiles.threads // 32} warps share all registers of an SM: wgmma wants few that hold much",
        cluster=tiles.ctas,
        split=tiles.ctas,
        max_ctas=tiles.ctas * CLUSTERS[tiles.ctas] if tiles.ctas > 1 else chip.sms,
        local_memory=MASK_SPILLS if mask is not None else DIVIDED_SPILLS if tiles.ctas > 1 and head_dim == 256 else "",
        tensor_maps=tuple(maps),
        programmatic=True,
        tile_lists=lists,
        counts=is_dealt(problem, tiles),
        preparation=_list_tiles(lists, listed, causal, marked) if listed and lists else None,
        params=params,
    )


def _policies(problem: Problem, tiles: Tiles) -> str:
    """The C++ type that stands in the place of the masks (policies.cuh)."""
    masks = masks_type(problem.mask, summed=True)
    if problem.mask is not None and problem.mask.unaligned:
        element = CPP_TYPE[problem.mask.tensor]
        masks = masks.replace(f"<{element},", f"<{UNALIGNED.format(element)},", 1)
    if tiles.ctas > 1:
        return DIVIDING.format(masks, tiles.ctas, problem.value_dim or problem.head_dim)
    if problem.continued:
        return CONTINUING.format(masks, problem.head_dim)
    return DROPPING.format(masks) if problem.dropout else masks


def _list_tiles(lists: TileLists, mask: MaskKind, causal: bool, marked: bool) -> KernelSpec:
    """The kernel that says which tiles of keys a mask leaves to each query tile; `marked`, behind one that reads it."""
    if marked:
        marking = _of_lists("mark_tiles", MARK_THREADS, lists, mask, causal)
        listing = _of_lists("list_marked", 32, lists, mask, causal)
        return replace(listing, preparation=replace(marking, grid_order="tiles"))
    return _of_lists("list_tiles", 32 * LIST_WARPS, lists, mask, causal)


def _of_lists(kernel: str, threads: int, lists: TileLists, mask: MaskKind, causal: bool) -> KernelSpec:
    """One of the kernels of list_tiles.cu."""
    arguments = {
        "BLOCK_M": lists.block_m,
        "BLOCK_N": lists.block_n,
        "CAUSAL": BOOLEAN[causal],
        "LEFT": BOOLEAN[mask.left],
        "WARPS": threads // 32,
    }
    if kernel != "list_tiles":
        del arguments["WARPS"]
    return KernelSpec(
        name="hopper/throughput",
        source="hopper/throughput/list_tiles.cu",
        template=f"microsdpa::hopper::throughput::{kernel}",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=threads,
        block_m=lists.block_m,
        low_occupancy="a warp for each list, which is short" if threads == 32 else "",
        local_memory="some compilers keep addresses there, which costs little beside the mask's way from memory",
        grid_order="lists",
        programmatic=True,
        tile_lists=lists,
        params="microsdpa::MaskedParams",
    )


def throughput(problem: Problem) -> KernelSpec | Rejection:
    """The kernel for problems that fill the chip."""
    kind = problem.any_size
    if problem.value_dim and (other := _refuse_value_dim(problem)):
        return other
    found = _admitted(kind)
    if isinstance(found, Rejection):
        return found
    tiles = _cheapest(problem, found)
    shared = divided(problem)
    if shared is not None and shared[1] < few_tiles_clocks(problem, tiles):
        tiles = shared[0]
    if query_tiles(problem, tiles) > MAX_TILES:
        return Rejection(f"{query_tiles(problem, tiles)} query tiles exceed {MAX_TILES}", "a smaller batch")
    return _specification(kind, tiles, _is_marked(problem, tiles))


@functools.lru_cache(maxsize=1024)
def _admitted(problem: Problem) -> tuple[Tiles, ...] | Rejection:
    """The tiles for any problem of that kind, whatever its size and columns of V; or why there are none."""
    if capability_of(problem.target) != (9, 0):
        return Rejection(f"{problem.target} has no wgmma, which is sm_90a's", "a GPU of compute capability 9.0")
    if problem.head_dim not in HEAD_DIMS:
        return refused_head_dim(problem.head_dim, HEAD_DIMS, f"a multiple of 8 up to {HEAD_DIMS[-1]}")
    if problem.alignment < VECTOR_BYTES:
        return Rejection(
            f"rows that are not aligned to {VECTOR_BYTES} bytes", f"tensors whose rows start on {VECTOR_BYTES} bytes"
        )
    if mask_element(problem) and not (problem.mask and (problem.mask.bulk or problem.mask.unaligned)):
        return Rejection("an attn_mask with gaps between keys", "a contiguous attn_mask")
    return _fitting(problem) or Rejection(
        f"an attn_mask of numbers leaves no room for head_dim {problem.head_dim}", "a boolean attn_mask"
    )


def _refuse_value_dim(problem: Problem) -> Rejection | None:
    """Why the kernel cannot compute a V of other columns than Q and K; None when it can."""
    if problem.head_dim not in HEAD_DIMS:
        return None  # which is the first thing to say
    if problem.value_dim > padded(problem):  # bulk copies fill missing columns, and do not store them
        most = f"the {padded(problem)} of the tiles for {problem.head_dim} columns of Q and K"
        return Rejection(f"{problem.value_dim} columns of V are more than {most}", "fewer columns of V")
    if problem.continued:
        return Rejection(
            f"it goes on from outputs of head_dim columns, not {problem.value_dim}",
            f"a value padded to {problem.head_dim} columns",
        )
    return None


def configurations(problem: Problem) -> dict[str, KernelSpec]:
    """Those of hopper/throughput, by their tiles."""
    return {str(tiles): specification(problem, tiles) for tiles in (*fitting(problem), *dividing(problem))}
