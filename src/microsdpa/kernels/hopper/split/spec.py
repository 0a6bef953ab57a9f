"""Specifications of hopper/split/kernel.cu, for problems of about one tile of queries an SM."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import ceil

from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.common import ROWS
from microsdpa.kernels.problem import ELEMENT, VECTOR_BYTES, Problem, capability_of
from microsdpa.kernels.spec import BOOLEAN, CPP_TYPE, KernelSpec, Rejection, TensorMap, refused_head_dim

BLOCK_N = ROWS
"""Keys of a tile, and its queries."""
HEAD_DIM = 64
WARPGROUPS = 4


@dataclass(frozen=True)
class Split:
    """A configuration of hopper/split/kernel.cu.

    Attributes:
        query_tiles: tiles of 64 queries of a CTA; its four warpgroups share out the keys of each.
    """

    query_tiles: int

    def __str__(self) -> str:
        """For a table."""
        return f"{self.block_m} queries, {self.groups} parts of the keys"

    @property
    def block_m(self) -> int:
        """Queries of a CTA."""
        return ROWS * self.query_tiles

    @property
    def groups(self) -> int:
        """Warpgroups that share the keys of a query tile."""
        return WARPGROUPS // self.query_tiles

    def shared_bytes(self, stages: int) -> int:
        """SharedStorage's size (shared.cuh)."""
        tiles = (self.query_tiles + 2 * self.groups * stages) * ROWS * HEAD_DIM * ELEMENT
        given = self.query_tiles * (self.groups - 1) * ROWS * HEAD_DIM * 4
        parts = self.query_tiles * self.groups * ROWS * 8
        return ceil((tiles + given + parts + (self.query_tiles + 3 * self.groups * stages) * 8) / 1024) * 1024

    def stages(self, shared_per_cta: int) -> int:
        """Tiles of K, and of V, that fit, of each part of the keys."""
        return max(stages for stages in range(1, 8) if self.shared_bytes(stages) <= shared_per_cta)


CANDIDATES = (Split(1), Split(2))
START_CLOCKS, ROUND_CLOCKS = 5400, {1: 2180, 2: 1820}
"""Clocks of a launch whose CTAs are on the chip at once: without keys, and of a round, by query tiles a CTA (H100)."""


def specification(problem: Problem, choice: Split) -> KernelSpec:
    """The kernel of one configuration for a problem."""
    return _specification(problem.any_size, choice)


@functools.lru_cache(maxsize=1024)
def _specification(problem: Problem, choice: Split) -> KernelSpec:
    """specification() for any problem of that kind, whatever its size."""
    stages = choice.stages(chip_of(problem.target).shared_per_cta)
    arguments = {
        "T": CPP_TYPE[problem.dtype],
        "QUERY_TILES": choice.query_tiles,
        "STAGES": stages,
        "GROUP": problem.heads // problem.heads_kv,
        "CAUSAL": BOOLEAN[problem.causal is not None],
    }
    return KernelSpec(
        name="hopper/split",
        source="hopper/split/kernel.cu",
        template="microsdpa::hopper::split::attention",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=128 * WARPGROUPS,
        block_m=choice.block_m,
        shared_bytes=choice.shared_bytes(stages),
        low_occupancy="four warpgroups share all registers of an SM: wgmma wants few that hold much",
        grid_order="xyz",
        tensor_maps=(TensorMap("query", ROWS, 64), TensorMap("key", BLOCK_N, 64), TensorMap("value", BLOCK_N, 64)),
        programmatic=True,
    )


def split(problem: Problem) -> KernelSpec | Rejection:
    """The kernel for problems of about one tile of queries an SM."""
    if capability_of(problem.target) != (9, 0):
        return Rejection(f"{problem.target} has no wgmma, which is sm_90a's", "a GPU of compute capability 9.0")
    if problem.head_dim != HEAD_DIM:
        return refused_head_dim(problem.head_dim, (HEAD_DIM,))
    if problem.alignment < VECTOR_BYTES:
        return Rejection(
            f"rows that are not aligned to {VECTOR_BYTES} bytes", f"tensors whose rows start on {VECTOR_BYTES} bytes"
        )
    return specification(problem, choose(problem))


def choose(problem: Problem) -> Split:
    """One query tile a CTA while all of them are on an SM at once."""
    return CANDIDATES[0] if _query_tiles(problem) <= chip_of(problem.target).sms else CANDIDATES[1]


def clocks(problem: Problem) -> int:
    """Clocks of a launch whose CTAs are on the chip at once."""
    choice = choose(problem)
    return START_CLOCKS + ROUND_CLOCKS[choice.query_tiles] * -(-problem.seqlen_k // (BLOCK_N * choice.groups))


def _query_tiles(problem: Problem) -> int:
    return problem.batch * problem.heads * -(-problem.seqlen_q // ROWS)


def configurations(problem: Problem) -> dict[str, KernelSpec]:
    """Those of hopper/split, by the queries of a CTA."""
    return {str(choice): specification(problem, choice) for choice in CANDIDATES}
