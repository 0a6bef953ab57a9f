"""Specification of the Hopper kernel with P V in E4M3 (cuda/hopper/fwd_throughput_fp8.cu)."""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.problem import capability_of
from microsdpa.specs.chip import chip_of
from microsdpa.specs.eight_bit_problem import CPP_TYPE, PARAMS, EightBitProblem
from microsdpa.specs.spec import KernelSpec, Rejection, TensorMap

ROWS = 64
"""Queries of a consumer warpgroup."""
MAX_TILES = 2**29
"""Query tiles that the kernel counts."""
HEAD_DIMS = (64, 128, 256)
PANEL = 128
"""Channels of a tile that are copied together, at most."""
QUERIES = 128
FEWEST_TILES = {"fp8": {64: 48, 128: 32}, "int8_fp8": {64: 48, 128: 32}, "int8_fp16": {64: 128, 128: 48}}
"""Tiles of QUERIES queries from which on a kernel on wgmma is faster than the rungs on mma.sync (H200), by D."""
WIDE_SPILLS = "at D = 256 O takes 128 registers, beside which a few numbers of the loop find no place"
CPP_CODE = {"fp8": "__nv_fp8_e4m3", "int8_fp8": "signed char"}
"""Of Q and K."""
PROMOTED_KEYS = 4096
"""Over so many the tensor cores sum P V, where they do."""
WORKS = 4
"""Descriptions of query tiles in shared memory, 20 bytes each."""


@dataclass(frozen=True)
class Tiles:
    """A configuration, apart from what the problem itself decides.

    Attributes:
        block_n: keys of a tile.
        consumers: warpgroups that compute, with 64 queries each.
        stages: tiles of K, and of V^T, that there is room for.
        value_stages: tiles of V that wait for their transposition.
    """

    block_n: int
    consumers: int
    stages: int
    value_stages: int = 2

    @property
    def block_m(self) -> int:
        """Queries of a CTA."""
        return ROWS * self.consumers

    def query_stages(self, head_dim: int, terms: int) -> int:
        """Query tiles that there is room for."""
        return 2 if head_dim * terms <= 256 else 1

    def promotes(self, seqlen_k: int) -> bool:
        """Whether sums of the tensor cores are added up in shared memory: more than two consumers, and many keys."""
        return self.consumers > 2 and -(-seqlen_k // self.block_n) > -(-PROMOTED_KEYS // self.block_n)

    def shared_bytes(self, head_dim: int, terms: int, key_scales: bool, promotes: bool) -> int:
        """Fp8Storage's size (fp8_shared.cuh)."""
        query_stages = self.query_stages(head_dim, terms)
        tiles = query_stages * terms * self.block_m + (2 * self.stages + self.value_stages) * self.block_n
        scales = self.stages * 4 * (self.block_n if key_scales else 4)
        promoted = 4 * self.block_m * head_dim if promotes else 16
        barriers = WORKS * 20 + 4 * self.value_stages + (2 * query_stages + 4 * self.stages + 2 * self.value_stages) * 8
        return -(-(tiles * head_dim + scales + promoted + barriers) // 1024) * 1024


def tiles_for(problem: EightBitProblem) -> Tiles:
    """The configuration for a problem: as many keys a tile as registers hold.

    More than two consumers were measured with one code an element and one scale a head (docs/hopper-fp8.md).
    """
    if problem.operands == "fp8" and problem.query_terms == 1 and problem.key_block == 0 and problem.head_dim <= 128:
        return Tiles(64, consumers=4, stages=3) if problem.head_dim == 64 else Tiles(96, consumers=3, stages=2)
    return Tiles(block_n={64: 192, 128: 128, 256: 64}[problem.head_dim], consumers=2, stages=3)


def too_small(problem: EightBitProblem) -> Rejection | None:
    """Why impl="auto" passes over a kernel on wgmma: measurements (docs/tuning-log.md). Others have no D = 256."""
    if problem.head_dim == 256:
        return None
    tiles = problem.batch * problem.heads * -(-problem.seqlen_q // QUERIES)
    fewest = FEWEST_TILES[problem.operands][problem.head_dim]
    if tiles >= (fewest if problem.seqlen_q >= QUERIES else chip_of(problem.target).sms):
        return None
    return Rejection(
        f"{tiles} tiles of {QUERIES} queries are too few for it: other kernels are faster",
        "more heads or longer sequences",
    )


def specification(problem: EightBitProblem, tiles: Tiles) -> KernelSpec:
    """The kernel of one configuration for a problem."""
    boolean = {True: "true", False: "false"}
    columns = min(problem.head_dim, PANEL)
    integers = problem.operands == "int8_fp8"
    key_scales = integers or problem.key_block != 0
    promotes = tiles.promotes(problem.seqlen_k)
    arguments = {
        "T": CPP_TYPE[problem.dtype],
        "CODE": CPP_CODE[problem.operands],
        "HEAD_DIM": problem.head_dim,
        "TERMS": problem.query_terms,
        "BLOCK_N": tiles.block_n,
        "CONSUMERS": tiles.consumers,
        "STAGES": tiles.stages,
        "VALUE_STAGES": tiles.value_stages,
        "QUERY_STAGES": tiles.query_stages(problem.head_dim, problem.query_terms),
        "KEY_SCALES": boolean[key_scales],
        "PROMOTES": boolean[promotes],
        "CAUSAL": boolean[problem.causal is not None],
    }
    return KernelSpec(
        name="hopper/fwd_throughput_fp8",
        source="hopper/fwd_throughput_fp8.cu",
        template="microsdpa::throughput_fp8_attention",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=128 * (1 + tiles.consumers),
        block_m=tiles.block_m,
        local_memory=WIDE_SPILLS if problem.head_dim == 256 else "",
        shared_bytes=tiles.shared_bytes(problem.head_dim, problem.query_terms, key_scales, promotes),
        max_ctas=chip_of(problem.target).sms,
        tensor_maps=(
            TensorMap("query", ROWS, columns, columns),
            TensorMap("key", tiles.block_n, columns, columns),
            TensorMap("value", tiles.block_n, columns, columns),
        ),
        programmatic=True,
        params=PARAMS,
    )


def throughput(problem: EightBitProblem) -> KernelSpec | Rejection:
    """The kernel for P and V in E4M3."""
    if problem.operands not in CPP_CODE:
        return Rejection("V is not E4M3", "E4M3 tensors with scales, or precision='int8_fp8'")
    if problem.operands == "int8_fp8" and problem.query_terms != 1:
        return Rejection("a query has two INT8 codes an element", "one code an element")
    if problem.head_dim not in HEAD_DIMS:
        nearest = min(HEAD_DIMS, key=lambda d: abs(d - problem.head_dim))
        return Rejection(f"head_dim {problem.head_dim} is not 64, 128 or 256", f"head_dim {nearest}")
    if capability_of(problem.target) != (9, 0):
        return Rejection(f"{problem.target} has no wgmma, which is sm_90a's", "a GPU of compute capability 9.0")
    tiles = tiles_for(problem)
    if problem.batch * problem.heads * -(-problem.seqlen_q // tiles.block_m) > MAX_TILES:
        return Rejection(f"more than {MAX_TILES} query tiles", "a smaller batch")
    return specification(problem, tiles)
