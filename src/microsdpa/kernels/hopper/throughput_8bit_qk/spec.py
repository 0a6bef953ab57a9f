"""Specification of hopper/throughput_8bit_qk: INT8 Q K^T, and P V in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.common import ROWS
from microsdpa.kernels.hopper.common.eight_bit import WORKS, kernel, refused, too_many, unread
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.spec import CPP_TYPE, KernelSpec, Rejection, TensorMap

HEAD_DIMS = (64, 128)
QUERY_STAGES = 2
DEEPEST = 6
"""Tiles of K, and of V, at most: more would not be ahead of anything."""
BOX_COLUMNS = 64
"""Channels of V that are copied together."""


@dataclass(frozen=True)
class Tiles:
    """A configuration, apart from what the problem itself decides.

    Attributes:
        block_n: keys of a tile.
        consumers: warpgroups that compute, with 64 queries each.
    """

    block_n: int
    consumers: int = 2

    @property
    def block_m(self) -> int:
        """Queries of a CTA."""
        return ROWS * self.consumers

    def shared_bytes(self, head_dim: int, terms: int, stages: int) -> int:
        """SharedStorage's size (shared.cuh)."""
        rows = QUERY_STAGES * terms * self.block_m + 3 * stages * self.block_n
        scales = stages * 4 * self.block_n
        barriers = WORKS * 20 + (2 * QUERY_STAGES + 4 * stages) * 8
        return -(-(rows * head_dim + scales + barriers) // 1024) * 1024

    def stages(self, head_dim: int, terms: int, shared_per_cta: int) -> int:
        """Tiles of K, and of V, that there is room for."""
        fitting = (n for n in range(DEEPEST, 1, -1) if self.shared_bytes(head_dim, terms, n) <= shared_per_cta)
        return next(fitting)


def tiles_for(problem: Problem) -> Tiles:
    """The configuration for a problem: as many keys a tile as registers hold, or at D = 64 three warpgroups."""
    if problem.query_terms == 1:
        return Tiles(128)
    return Tiles(64, consumers=3) if problem.head_dim == 64 else Tiles(64)


def specification(problem: Problem, tiles: Tiles) -> KernelSpec:
    """The kernel of one configuration for a problem."""
    stages = tiles.stages(problem.head_dim, problem.query_terms, chip_of(problem.target).shared_per_cta)
    return kernel(
        problem,
        "throughput_8bit_qk",
        {
            "T": CPP_TYPE[problem.dtype],
            "HEAD_DIM": problem.head_dim,
            "TERMS": problem.query_terms,
            "BLOCK_N": tiles.block_n,
            "CONSUMERS": tiles.consumers,
            "STAGES": stages,
            "QUERY_STAGES": QUERY_STAGES,
        },
        tiles.consumers,
        tiles.shared_bytes(problem.head_dim, problem.query_terms, stages),
        (
            TensorMap("query", ROWS, problem.head_dim, problem.head_dim),
            TensorMap("key", tiles.block_n, problem.head_dim, problem.head_dim),
            TensorMap("value", tiles.block_n, BOX_COLUMNS, 2 * BOX_COLUMNS),
        ),
    )


def throughput(problem: Problem) -> KernelSpec | Rejection:
    """The kernel for INT8 values of Q and K, and V of 16 bits."""
    if problem.operands != "int8_fp16":
        return Rejection("V is not of 16 bits beside INT8", "precision='int8_fp16'")
    if (refusal := refused(problem, HEAD_DIMS)) is not None:
        return refusal
    if (refusal := unread(problem)) is not None:
        return refusal
    tiles = tiles_for(problem)
    return too_many(problem, tiles.block_m) or specification(problem, tiles)
