"""Specifications of hopper/latency/kernel.cu, and the choice among its configurations."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.common import PANEL_BYTES
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
    masks_type,
    prologue_type,
    prologued_params,
    refused_head_dim,
)

BLOCK_M = BLOCK_N = 64
"""Queries of a CTA, and keys of a tile."""
WARPGROUPS = 2
PANEL = 64
"""Columns of a box."""
MASK_BYTES = ELEMENT_BYTES | {"bool": 1, "float32": 4}
"""Of an element of a mask that bulk copies can bring."""
HEAD_DIMS = range(8, 129, 8)
"""Head dimensions whose rows a bulk copy can read."""
TAIL = 16
"""Columns of a tile's last box, where it is a narrow one."""
TILE_DIMS = (64, 80, 96, 128)
"""Columns of the tiles that there are kernels for."""


@functools.lru_cache
def padded(head_dim: int) -> int:
    """Columns of the tiles for one of HEAD_DIMS: bulk copies fill those beyond a tensor's with zeros."""
    return min(dim for dim in TILE_DIMS if dim >= head_dim)


def tail(head_dim: int) -> int:
    """Columns of the last box of one of TILE_DIMS, where it is a narrow one; 0 without one."""
    return TAIL if head_dim % PANEL == TAIL else 0


RING_SPILLS = "in a ring the next tile's mask takes the registers that are left: a few of them are stored, once a tile"
MASKS_SPILL = "with several masks at once some bytes of addresses, once a tile"
UNROLLED_SPILLS = "four rounds under masks take a few registers more than there are: they are stored, once"

PROLOGUE_SPILLS = "a row of a tile beside scores and outputs may take more registers than there are: a few are stored"


@dataclass(frozen=True)
class Latency:
    """A configuration of hopper/latency/kernel.cu, apart from what the problem itself decides.

    Attributes:
        cluster: CTAs that share a query tile, each with a part of the keys.
        stages: tiles of K and V that each warpgroup has room for.
        rounds: tiles of each warpgroup, all resident; 0 for a ring of `stages`.
    """

    cluster: int
    stages: int
    rounds: int

    def value_tiles(self, head_dim: int) -> int:
        """Tiles of V that one copy brings: with few copies, all."""
        return WARPGROUPS * self.stages if head_dim - tail(head_dim) == PANEL and self.stages <= 2 else 1

    def shared_bytes(self, head_dim: int, mask: MaskKind | None = None) -> int:
        """SharedStorage's size (shared.cuh), for one of TILE_DIMS."""
        quadruples = -(-head_dim // 16 // WARPGROUPS)
        columns = -(-(head_dim - tail(head_dim)) // PANEL) * PANEL + tail(head_dim)
        tiles = (BLOCK_M + 2 * WARPGROUPS * self.stages * BLOCK_N) * columns * ELEMENT
        merging = (
            (WARPGROUPS * 2 + WARPGROUPS * 2) * quadruples * 128 * 16  # from the neighbour; from the peer, twice
            + WARPGROUPS * 2 * (BLOCK_M // 2) * (8 + 2 * 4)  # the peer's rows; references and sums
            + WARPGROUPS * 16
        )
        copies = WARPGROUPS * self.stages + WARPGROUPS * self.stages // self.value_tiles(head_dim)
        barriers = (1 + copies + 2 * (WARPGROUPS + 1)) * 8
        return self.mask_bytes(mask) + -(-(tiles + merging + barriers) // 1024) * 1024

    def mask_bytes(self, mask: MaskKind | None) -> int:
        """MaskTiles' size (mask_tiles.cuh), of a mask that bulk copies bring; 0 for none."""
        if mask is None or mask.tensor is None or not mask.bulk or not self.rounds:
            return 0
        bytes_of_row = self.rounds * WARPGROUPS * BLOCK_N * MASK_BYTES[mask.tensor]
        return bytes_of_row * (BLOCK_M if mask.per_query else 8) + 1024

    def brings(self, head_dim: int, mask: MaskKind | None, shared_per_cta: int) -> bool:
        """Whether bulk copies bring the mask: as far as tensor maps describe it, and it fits."""
        return self.mask_bytes(mask) > 0 and self.shared_bytes(head_dim, mask) <= shared_per_cta


def mask_map(mask: MaskKind) -> TensorMap:
    """The boxes in which bulk copies bring a mask tensor."""
    assert mask.tensor is not None
    rows = BLOCK_M if mask.per_query else 1
    swizzle = 0 if mask.tensor == "bool" else PANEL_BYTES
    columns = BLOCK_N if mask.tensor == "bool" and rows > 1 else PANEL_BYTES // MASK_BYTES[mask.tensor]
    return TensorMap("attn_mask", rows, columns, swizzle)


START_CLOCKS, STEP = 2700, 32
ROUND_CLOCKS = {32: (1850, 1890), 64: (2000, 2160), 96: (2450, 2600), 128: (2650, 2680)}
"""Clocks of a launch with one query tile an SM: without keys, and by head dimension for each round of keys (H100).

Of one CTA a query tile, and of two. Without a mask, keys that fill their tiles take up to a fifth less.
"""
UNROLLED = 0.8
"""Of those clocks, what few rounds take."""
ANOTHER_START = 1.5
"""Starts that each of several query tiles of an SM takes, one after the other."""
UNALIGNED, MOST_UNROLLED = 1.5, 4
"""Times as long in more rounds than these, where rows are no multiple of the 32 bytes that memory gives at a time."""


def one_tile_clocks(problem: Problem) -> float:
    """Clocks of a launch without masks but the causal one, with one query tile an SM at most."""
    cluster = cluster_for(problem)
    rounds, each = key_rounds(problem, cluster), ROUND_CLOCKS[-(-problem.head_dim // STEP) * STEP]
    if rounds <= MOST_UNROLLED:
        return START_CLOCKS + rounds * each[cluster - 1] * UNROLLED
    clocks = START_CLOCKS + rounds * each[cluster - 1]
    return UNALIGNED * clocks if problem.head_dim % 16 else clocks


def several_tiles_clocks(problem: Problem, tiles: int) -> float:
    """Clocks of a launch without masks but the causal one whose busiest SM has so many query tiles."""
    cluster = cluster_for(problem)
    each = UNROLLED * ROUND_CLOCKS[-(-problem.head_dim // STEP) * STEP][cluster - 1]
    rounds, start = key_rounds(problem, cluster), START_CLOCKS if tiles == 1 else ANOTHER_START * START_CLOCKS
    clocks = tiles * (start + rounds * each)
    return UNALIGNED * clocks if problem.head_dim % 16 and rounds > MOST_UNROLLED else clocks


def key_rounds(problem: Problem, cluster: int) -> int:
    """Tiles of keys that each warpgroup of a cluster computes for the query tile that sees the most."""
    return -(-problem.seqlen_k // (BLOCK_N * WARPGROUPS * cluster))


def configuration(problem: Problem, cluster: int) -> Latency:
    """The configuration with `cluster` CTAs a query tile: everything resident when it fits, else the deepest ring."""
    rounds, shared_bytes = key_rounds(problem, cluster), chip_of(problem.target).shared_per_cta
    is_causal = problem.causal is not None
    return _configuration(padded(problem.head_dim), is_causal, problem.mask, cluster, int(rounds), shared_bytes)


@functools.lru_cache(maxsize=1024)
def _configuration(
    head_dim: int, is_causal: bool, mask: MaskKind | None, cluster: int, rounds: int, shared_bytes: int
) -> Latency:
    deepest = _deepest(cluster, head_dim, shared_bytes)
    # Unrolled rounds are code; past four of them the loop costs as little. Four do not fit the registers at D = 64 with
    # a mask and a peer, nor at D = 80.
    most = 3 if tail(head_dim) or (head_dim == 64 and is_causal and cluster == 2) else 4
    unrolled = Latency(cluster, rounds, rounds)
    if mask is not None:
        most = min(most, _most_masked(mask))
    return unrolled if rounds <= min(deepest, most) else Latency(cluster, deepest, 0)


def _most_masked(mask: MaskKind) -> int:
    """Rounds that are unrolled under masks. S begins with numbers in two of them, and with none behind a soft cap."""
    if mask.tensor in (None, "bool", "int32", "uint8"):
        return 4
    return 0 if mask.softcap else 2


@functools.lru_cache
def _deepest(cluster: int, head_dim: int, shared_bytes: int) -> int:
    """Tiles of K and V for each warpgroup that fit so much shared memory."""
    return max(s for s in range(1, 7) if Latency(cluster, s, 0).shared_bytes(head_dim) <= shared_bytes)


def specification(problem: Problem, choice: Latency) -> KernelSpec:
    """The kernel of one configuration for a problem."""
    whole = problem.seqlen_k % (BLOCK_N * WARPGROUPS * choice.cluster) == 0
    return _specification(problem.any_size, choice, whole)


@functools.lru_cache(maxsize=1024)
def _specification(problem: Problem, choice: Latency, whole: bool) -> KernelSpec:
    """specification() for any problem of that kind; `whole`: the keys fill the tiles."""
    head_dim, mask = padded(problem.head_dim), problem.mask
    right = problem.causal is not None or (mask is not None and mask.right)
    arguments = {
        "T": CPP_TYPE[problem.dtype],
        "HEAD_DIM": head_dim,
        "COLUMNS": problem.head_dim,
        "CLUSTER": choice.cluster,
        "STAGES": choice.stages,
        "ROUNDS": choice.rounds,
        "GROUP": problem.heads // problem.heads_kv,
        "CAUSAL": BOOLEAN[right],
        "MASKED": BOOLEAN[right or not whole],
        "MASKS": masks_type(mask),
    }
    chip = chip_of(problem.target)
    box = mask if choice.brings(head_dim, mask, chip.shared_per_cta) else None
    maps = [
        TensorMap("query", BLOCK_M, PANEL),
        TensorMap("key", BLOCK_N, PANEL),
        TensorMap("value", BLOCK_N * choice.value_tiles(head_dim), PANEL),
    ]
    rows = 0
    if tail(head_dim):
        maps += [replace(wide, columns=TAIL, swizzle=TAIL * ELEMENT) for wide in maps]
    if box and box.tensor:
        maps.append(mask_map(box))
        rows = maps[-1].rows
    if problem.prologue or len(maps) > 3:
        arguments |= {"MASK_ROWS": rows, "PROLOGUE": prologue_type(problem.prologue)}
    if len(maps) > 3:
        arguments["MAPS"] = ", ".join(["microsdpa::TensorMap"] * (len(maps) - 3))
    # One CTA an SM: with two, the next launch's CTAs would crowd on the SMs that this one left idle.
    alone = chip.shared_per_sm // 2
    return KernelSpec(
        name="hopper/latency",
        source="hopper/latency/kernel.cu",
        template="microsdpa::hopper::latency::attention",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=128 * WARPGROUPS,
        block_m=BLOCK_M,
        shared_bytes=max(choice.shared_bytes(head_dim, box), alone),
        local_memory=_spills(problem, choice),
        low_occupancy="one CTA an SM, of two warpgroups: of a call this small, no SM has more to do",
        cluster=choice.cluster,
        split=choice.cluster,
        grid_order="xyz",
        tensor_maps=tuple(maps),
        programmatic=True,
        params=prologued_params("microsdpa::MaskedParams" if mask else "microsdpa::AttentionParams", problem.prologue),
    )


def _spills(problem: Problem, choice: Latency) -> str:
    """Why a configuration may use local memory; empty where it may not."""
    if problem.prologue and (choice.rounds in (0, 4) or problem.mask is not None or problem.head_dim > PANEL):
        return PROLOGUE_SPILLS
    mask = problem.mask
    if mask is None:
        return ""
    several = mask.tensor is not None and (mask.alibi or mask.softcap or mask.sinks is not None)
    return {0: RING_SPILLS, 4: UNROLLED_SPILLS}.get(choice.rounds, MASKS_SPILL if several else "")


def latency(problem: Problem) -> KernelSpec | Rejection:
    """The kernel for small problems."""
    if capability_of(problem.target) != (9, 0):
        return Rejection(f"{problem.target} has no wgmma, which is sm_90a's", "a GPU of compute capability 9.0")
    if problem.head_dim not in HEAD_DIMS:
        return refused_head_dim(problem.head_dim, HEAD_DIMS, f"a multiple of 8 up to {HEAD_DIMS[-1]}")
    if problem.alignment < VECTOR_BYTES:
        return Rejection(
            f"rows that are not aligned to {VECTOR_BYTES} bytes", f"tensors whose rows start on {VECTOR_BYTES} bytes"
        )
    choice = configuration(problem, cluster_for(problem))
    if problem.prologue and not choice.rounds and padded(problem.head_dim) > PANEL:
        return Rejection(
            f"at head_dim {problem.head_dim} its ring of tiles has no registers for {problem.prologue}",
            "fewer keys, or head_dim 64",
        )
    return specification(problem, choice)


def cluster_for(problem: Problem) -> int:
    """CTAs that share a query tile."""
    ctas = problem.batch * problem.heads * -(-problem.seqlen_q // BLOCK_M)
    fits = 2 * ctas <= chip_of(problem.target).sms
    return 2 if fits and problem.seqlen_k > WARPGROUPS * BLOCK_N else 1


def configurations(problem: Problem) -> dict[str, KernelSpec]:
    """Those of hopper/latency, by the CTAs that share a query tile."""
    named = {1: "one CTA a tile", 2: "two CTAs a tile"}
    return {label: specification(problem, configuration(problem, cluster)) for cluster, label in named.items()}
