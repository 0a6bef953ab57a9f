"""Specification of hopper/latency with 8-bit operands: Q K^T in E4M3 or INT8, and V widened to FP16 on its way."""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.latency.spec import (
    BLOCK_M,
    BLOCK_N,
    WARPGROUPS,
    Latency,
    cluster_for,
    key_rounds,
    mask_map,
)
from microsdpa.kernels.problem import MaskKind, Problem, capability_of
from microsdpa.kernels.spec import (
    BOOLEAN,
    CPP_TYPE,
    SCALED_MASKED_PARAMS,
    SCALED_PARAMS,
    KernelSpec,
    Rejection,
    TensorMap,
    masks_type,
    refused_head_dim,
)

HEAD_DIMS = (32, 64, 128)
TILE_DIMS = (64, 128)
"""Columns of the tiles that there are kernels for."""
CPP_QUERY_KEY: dict[str | None, str] = {"fp8": "__nv_fp8_e4m3", "int8_fp8": "signed char"}
"""Of Q and K."""
MOST_ROUNDS = 4
"""Tiles of keys of a warpgroup: all of them are resident."""
MASKED_SPILLS = "what masks keep of a row takes a few registers more than there are: they are stored, once"
UNROLLED_SPILLS = "four rounds take a few registers more than there are: they are stored, once"
WIDENED = 3
"""Bytes of a value of V: as it comes, and in FP16."""


@dataclass(frozen=True)
class EightBitLatency:
    """A configuration, apart from what the problem itself decides.

    Attributes:
        cluster: CTAs that share a query tile, each with a part of the keys.
        rounds: tiles of each warpgroup, all resident.
    """

    cluster: int
    rounds: int

    @property
    def value_tiles(self) -> int:
        """Tiles of V that one copy brings: with few copies, all."""
        return WARPGROUPS * self.rounds if self.rounds <= 2 else 1

    def mask_bytes(self, mask: MaskKind | None) -> int:
        """Of a mask tensor that bulk copies can bring; 0 for none."""
        return Latency(self.cluster, self.rounds, self.rounds).mask_bytes(mask)

    def shared_bytes(self, head_dim: int, terms: int, key_scales: bool) -> int:
        """SharedStorage's size (shared.cuh), for one of TILE_DIMS, without a mask."""
        tiles = WARPGROUPS * self.rounds
        keys = tiles * BLOCK_N
        narrow = keys * head_dim + 4 * (BLOCK_M + head_dim + (keys if key_scales else 4)) + 8 * (1 + tiles)
        operands = (terms * BLOCK_M + keys * WIDENED) * head_dim
        quadruples = head_dim // WARPGROUPS // 16
        merging = (
            (WARPGROUPS * 2 + WARPGROUPS * 2) * quadruples * 128 * 16  # from the neighbour; from the peer, twice
            + WARPGROUPS * 2 * (BLOCK_M // 2) * (8 + 2 * 4)  # the peer's rows; references and sums
            + WARPGROUPS * 16
        )
        barriers = (1 + tiles + tiles // self.value_tiles + 2 * (WARPGROUPS + 1)) * 8
        return -(-narrow // 1024) * 1024 + -(-(operands + merging + barriers) // 1024) * 1024


def padded(head_dim: int) -> int:
    """Columns of the tiles for one of HEAD_DIMS: bulk copies fill those beyond a tensor's with zeros."""
    return min(dim for dim in TILE_DIMS if dim >= head_dim)


def specification(problem: Problem, choice: EightBitLatency) -> KernelSpec | Rejection:
    """The kernel of one configuration for a problem, or why there is none."""
    chip, head_dim, terms = chip_of(problem.target), padded(problem.head_dim), problem.query_terms
    key_scales = problem.key_block != 0
    shared_bytes = choice.shared_bytes(head_dim, terms, key_scales)
    if choice.rounds > MOST_ROUNDS or shared_bytes > chip.shared_per_cta:
        return Rejection(f"{problem.seqlen_k} keys do not fit the shared memory of its CTAs", "fewer keys")
    whole, mask = problem.seqlen_k % (BLOCK_N * WARPGROUPS * choice.cluster) == 0, problem.mask
    right = problem.causal is not None or (mask is not None and mask.right)
    operands = CPP_QUERY_KEY[problem.operands], CPP_TYPE[problem.dtype], str(terms), BOOLEAN[key_scales]
    arguments = {
        "OPERANDS": f"microsdpa::hopper::latency::EightBit<{', '.join(operands)}>",
        "HEAD_DIM": head_dim,
        "COLUMNS": problem.head_dim,
        "CLUSTER": choice.cluster,
        "STAGES": choice.rounds,
        "ROUNDS": choice.rounds,
        "GROUP": problem.heads // problem.heads_kv,
        "CAUSAL": BOOLEAN[right],
        "MASKED": BOOLEAN[right or not whole],
        "MASKS": masks_type(mask),
    }
    maps = [
        TensorMap("query", BLOCK_M, head_dim, head_dim),
        TensorMap("key", BLOCK_N, head_dim, head_dim),
        TensorMap("value", BLOCK_N * choice.value_tiles, head_dim, 0),
    ]
    mask_bytes = choice.mask_bytes(mask)
    if mask is not None and mask_bytes and shared_bytes + mask_bytes <= chip.shared_per_cta:
        maps.append(mask_map(mask))
        shared_bytes += mask_bytes
        arguments |= {"MASK_ROWS": maps[-1].rows, "PROLOGUE": "microsdpa::NoPrologue", "MAPS": "microsdpa::TensorMap"}
    return KernelSpec(
        name="hopper/latency_8bit",
        source="hopper/latency/kernel.cu",
        template="microsdpa::hopper::latency::attention",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=128 * (WARPGROUPS + 1),
        block_m=BLOCK_M,
        shared_bytes=max(shared_bytes, chip.shared_per_sm // 2),  # one CTA an SM, as with 16 bits
        local_memory=UNROLLED_SPILLS if choice.rounds == MOST_ROUNDS else MASKED_SPILLS if mask else "",
        low_occupancy="one CTA an SM, of three warpgroups: of a call this small, no SM has more to do",
        cluster=choice.cluster,
        split=choice.cluster,
        grid_order="xyz",
        tensor_maps=tuple(maps),
        programmatic=True,
        params=SCALED_PARAMS if mask is None else SCALED_MASKED_PARAMS,
    )


def latency(problem: Problem) -> KernelSpec | Rejection:
    """The kernel for small problems with 8-bit operands."""
    if capability_of(problem.target) != (9, 0):
        return Rejection(f"{problem.target} has no wgmma, which is sm_90a's", "a GPU of compute capability 9.0")
    if problem.operands not in CPP_QUERY_KEY:
        return Rejection("V is not E4M3", "E4M3 tensors with scales, or precision='int8_fp8'")
    if problem.operands == "int8_fp8" and problem.query_terms != 1:
        return Rejection("a query has two INT8 values an element", "one value an element")
    if problem.head_dim not in HEAD_DIMS:
        return refused_head_dim(problem.head_dim, HEAD_DIMS)
    cluster = cluster_for(problem)
    return specification(problem, EightBitLatency(cluster, key_rounds(problem, cluster)))
