"""Specifications of the mma.sync production kernel (cuda/ampere/)."""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.problem import VECTOR_BYTES, Problem, capability_of
from microsdpa.specs.spec import MAX_GRID_X, KernelSpec, Rejection

CPP_TYPE = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
HEAD_DIMS = range(16, 257, 16)
ELEMENT = 2
"""Bytes of an element."""


@dataclass(frozen=True)
class Tiling:
    """A configuration of ampere/fwd_mma.cu, apart from what the problem itself decides.

    Attributes:
        block_n: keys of a tile.
        row_tiles: 16-row tiles of queries that a warp owns.
        warps_m: warps that share keys, each with its own rows.
        warps_n: groups of such warps, each with its own keys.
        stages: tiles of K and V in shared memory, of each group.
        resident: all of a group's keys are loaded at once; they must fit its `stages` tiles.
        kept: blocks of 16 columns of Q that stay in registers; at most all.
        step: keys whose scores are in registers at a time; 0 for block_n.
        ctas: CTAs that an SM shall hold at once, which bounds the registers.
        split: CTAs among which the keys are divided.
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
        ring = 2 * self.stages * self.block_n * head_dim * ELEMENT
        streaming = self.block_m * head_dim * ELEMENT + self.warps_n * ring
        merging = self.warps_n * self.block_m * (4 * (head_dim + 8) + 8)
        return streaming if self.warps_n == self.split == 1 else -(-max(streaming, merging) // 128) * 128


def specification(problem: Problem, tiling: Tiling, pack: int = 1) -> KernelSpec:
    """The kernel of one tiling for a problem."""
    boolean = {True: "true", False: "false"}
    programmatic = capability_of(problem.target) >= (9, 0)
    arguments = {
        "T": CPP_TYPE[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "BLOCK_N": tiling.block_n,
        "ROW_TILES": tiling.row_tiles,
        "WARPS_M": tiling.warps_m,
        "WARPS_N": tiling.warps_n,
        "STAGES": tiling.stages,
        "RESIDENT": boolean[tiling.resident],
        "KEPT": min(tiling.kept, problem.head_dim // 16),
        "STEP": tiling.step or tiling.block_n,
        "CTAS": tiling.ctas,
        "CAUSAL": boolean[problem.causal is not None],
        "PACK": pack,
        "SPLIT": tiling.split,
        "PROGRAMMATIC": boolean[programmatic],
    }
    return KernelSpec(
        name="ampere/fwd_mma",
        source="ampere/fwd_mma.cu",
        template="microsdpa::attention_forward",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=tiling.threads,
        block_m=tiling.block_m,
        shared_bytes=tiling.shared_bytes(problem.head_dim),
        split=tiling.split,
        pack=pack,
        programmatic=programmatic,
        workspace_row_bytes=tiling.split * (4 * problem.head_dim + 8) if tiling.split > 1 else 0,
        then=_merge(problem, tiling.split, programmatic) if tiling.split > 1 else None,
    )


def _merge(problem: Problem, split: int, programmatic: bool) -> KernelSpec:
    """The kernel that adds up the parts of a split problem."""
    block_m = max(1, 512 // problem.head_dim)  # 128 threads with four columns each
    arguments = (CPP_TYPE[problem.dtype], problem.head_dim, block_m, split, "true" if programmatic else "false")
    return KernelSpec(
        name="ampere/fwd_mma",
        source="ampere/fwd_merge.cu",
        template="microsdpa::attention_merge",
        template_args=tuple(
            zip(("T", "HEAD_DIM", "BLOCK_M", "SPLIT", "PROGRAMMATIC"), map(str, arguments), strict=True)
        ),
        threads=block_m * problem.head_dim // 4,
        block_m=block_m,
        programmatic=programmatic,
        workspace_row_bytes=split * (4 * problem.head_dim + 8),
    )


def forward(problem: Problem) -> KernelSpec | Rejection:
    """The production kernel."""
    if problem.head_dim not in HEAD_DIMS:
        nearest = min(max(16, round(problem.head_dim / 16) * 16), 256)
        return Rejection(f"head_dim {problem.head_dim} is not a multiple of 16 up to 256", f"head_dim {nearest}")
    if capability_of(problem.target) < (8, 0):
        return Rejection(f"{problem.target} is older than sm_80", "a GPU of compute capability 8.0 or newer")
    if problem.alignment < VECTOR_BYTES:
        return Rejection(
            f"rows that are not aligned to {VECTOR_BYTES} bytes", f"tensors whose rows start on {VECTOR_BYTES} bytes"
        )
    small = problem.head_dim <= 128
    spec = specification(problem, Tiling(block_n=64 if small else 32, row_tiles=1, warps_m=4, kept=16 if small else 0))
    if spec.grid(problem)[0] > MAX_GRID_X:
        return Rejection(f"{spec.grid(problem)[0]} tiles exceed the {MAX_GRID_X} CTAs of one launch", "a smaller batch")
    return spec
