"""Specifications of hopper/backward: gradients with five products, whose sums of dQ are added in global memory."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from microsdpa.kernels.chip import L2_PART, chip_of
from microsdpa.kernels.hopper.common import ROWS, WIDTHS
from microsdpa.kernels.problem import VECTOR_BYTES, Causal, DType, MaskKind, Problem, capability_of
from microsdpa.kernels.spec import (
    BOOLEAN,
    CPP_TYPE,
    DROPOUT_TYPE,
    MAX_GRID_X,
    MAX_NUMBER,
    Grid,
    KernelSpec,
    Rejection,
    TensorMap,
    dropped_params,
)

NAME = "hopper/backward"
PARAMS = "microsdpa::backward::BackwardParams"
CONSUMERS = 2
BOX = 64
"""Columns of a panel."""
LARGEST_HEAD_DIM = 256
LARGEST_JOINT = 128
"""Columns up to which the registers of a consumer hold dK and dV of its keys together; else it holds one of them."""
THREADS = 256
"""Of a CTA of the kernels ahead and behind."""
SPILLS = "with dropout, masks or tiles of 80 queries some numbers of a turn, which are read once a turn"
Name = Literal["query", "key", "value", "grad_out", "grad_query", "grad_key", "grad_value"]


@dataclass(frozen=True)
class Tiling:
    """A configuration of the kernel.

    Attributes:
        columns: of its tiles; those past the head dimension are zeros. Products have the next one of WIDTHS. Over 128
            columns both consumers have the same keys.
        block_m: queries of a tile.
        query_stages: tiles of Q that there is room for.
        grad_stages: the same of dO.
        in_order: whether sums of dQ are added in an order that is always the same.
        whole: whether a CTA has all keys of its head: dQ is no sum then, and there is no kernel behind.
        ranged: whether queries see ranges of keys.
    """

    columns: int
    block_m: int
    query_stages: int = 3
    grad_stages: int = 2
    in_order: bool = False
    whole: bool = False
    ranged: bool = False

    @property
    def wide(self) -> bool:
        """Whether the kernel is that of wide.cu."""
        return self.columns > LARGEST_JOINT

    @property
    def block_n(self) -> int:
        """Keys of a CTA."""
        return ROWS if self.wide else ROWS * CONSUMERS

    @property
    def range_bytes(self) -> int:
        """Of what is known of the ranges of keys that the queries of a tile see."""
        return (2 * self.block_m + 4) * 4 if self.ranged else 0

    @property
    def parts(self) -> int:
        """Of the sums of dQ of a tile."""
        return self.columns // BOX if self.wide else CONSUMERS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: SharedStorage of shared.cuh, or WideStorage."""
        owned = 2 * self.block_n * self.columns * 2
        walked = (self.query_stages + self.grad_stages) * self.block_m * self.columns * 2
        # dS of two tiles, or dS and P of one.
        ds = self.block_n * self.block_m * (2 + 4 if self.wide else 2 * 2)
        sums = 4 * (CONSUMERS * ROWS * BOX if self.wide else self.block_m * self.columns)
        rows = self.query_stages * (2 * self.block_m * 4 + self.range_bytes)
        rows += 128 if self.ranged else 0  # their alignment
        barriers = 8 * (1 + 2 * self.query_stages + 2 * self.grad_stages + (0 if self.wide else 4))
        return ceil((owned + walked + ds + sums + rows + barriers) / 1024) * 1024

    def tiles(self, problem: Problem) -> int:
        """Tiles of queries of all heads."""
        return problem.batch * problem.heads * ceil(problem.seqlen_q / self.block_m)

    def workspace_bytes(self, problem: Problem) -> int:
        """LSE and delta of every row of every tile, its sums of dQ, and how many tiles of keys have added to them."""
        rows = self.block_m * 4 * 2 + self.range_bytes
        return self.tiles(problem) * (rows if self.whole else rows + self.block_m * 4 * self.columns + 4 * self.parts)


TILINGS = (
    Tiling(64, 128),
    Tiling(128, 64),
    Tiling(192, 64, query_stages=2),
    Tiling(256, 64, query_stages=2, grad_stages=1),
)
"""By columns: as many stages as shared memory holds."""
MANY_QUERIES = Tiling(128, 80, query_stages=2)
"""For more than 112 columns and many queries: wider products read less of shared memory for each of their numbers. The
last tile has more zeros, and so have those on the diagonal of a causal mask."""
MANY, MANY_CAUSAL = 2048, 8192
"""Queries from which it is faster."""


def choose(problem: Problem, deterministic: bool = False) -> Tiling | Rejection:
    """The tiling for a problem, or why the kernel does not compute it.

    `deterministic` asks for the same bits each time.
    """
    if capability_of(problem.target) != (9, 0):
        return Rejection(f"{problem.target} has no wgmma", "sm_90a")
    if problem.head_dim > LARGEST_HEAD_DIM or problem.head_dim % 8:
        return Rejection(
            f"head_dim {problem.head_dim} is not a multiple of 8 up to {LARGEST_HEAD_DIM}",
            f"head_dim {LARGEST_HEAD_DIM}",
            LARGEST_HEAD_DIM,
        )
    if (refusal := _refuse_mask(problem.mask or MaskKind(), deterministic)) is not None:
        return refusal
    if not problem.bulk or problem.alignment < VECTOR_BYTES:
        return Rejection("tensor maps cannot describe the tensors", "rows that start on 16 bytes")
    tiling = next(tiling for tiling in TILINGS if problem.head_dim <= tiling.columns)
    if _has_many_queries(problem) and not _is_whole(problem, tiling):
        tiling = MANY_QUERIES
    tiling = replace(tiling, ranged=problem.mask is not None and problem.mask.tensor == "int32")
    ctas = max(gradients_grid(problem, tiling)[0], tiling.tiles(problem))
    if ctas > MAX_GRID_X:
        return Rejection(f"{ctas} tiles exceed the {MAX_GRID_X} CTAs of one launch", "a smaller batch")
    rows = (problem.seqlen_q + tiling.block_m) * (problem.heads // problem.heads_kv)
    if max(problem.seqlen_q + problem.seqlen_k, rows, problem.batch * problem.heads) > MAX_NUMBER:
        return Rejection("more rows or heads than a kernel counts", "a smaller batch or shorter sequences")
    if _is_whole(problem, tiling):
        return replace(tiling, whole=True)
    return replace(tiling, in_order=deterministic)


def _refuse_mask(mask: MaskKind, deterministic: bool) -> Rejection | None:
    """Why the kernel does not compute a call with a mask tensor."""
    if mask.tensor == "int32" and deterministic:
        return Rejection(f"there is {mask}: tiles of keys that add to dQ are not counted", "any order")
    if mask.tensor in (None, "int32") or (mask.tensor == "bool" and not mask.per_query):
        return None
    return Rejection(f"there is {mask}", "ranges of keys, or booleans that are the same for all queries")


def _has_many_queries(problem: Problem) -> bool:
    """Whether MANY_QUERIES is the faster tiling."""
    if problem.mask is not None and (problem.mask.softcap or problem.mask.tensor is not None):
        return False
    columns = WIDTHS[bisect_left(WIDTHS, problem.head_dim)]
    many = MANY if problem.causal is None else MANY_CAUSAL
    return columns == MANY_QUERIES.columns and problem.seqlen_q >= many and not problem.dropout


def _is_whole(problem: Problem, tiling: Tiling) -> bool:
    """Whether a CTA has all keys of a head, and comes to every query."""
    every = problem.causal != "lower_right" or problem.seqlen_q <= problem.seqlen_k
    every = every and not (problem.mask is not None and (problem.mask.left or problem.mask.right))
    return not tiling.wide and problem.seqlen_k <= tiling.block_n and every


def heads_together(problem: Problem, tiling: Tiling) -> int:
    """Key heads whose CTAs run side by side: Q, dO and the sums of dQ that they walk over stay in the L2 cache.

    They are at least as many as the chip has room for at once.
    """
    row = tiling.columns * (2 + 2 + 4) * (problem.heads // problem.heads_kv)
    at_once = chip_of(problem.target).sms // ceil(problem.seqlen_k / tiling.block_n)
    return max(1, min(max(L2_PART // (row * problem.seqlen_q), at_once), problem.batch * problem.heads_kv))


def _spec(
    source: str,
    template: str,
    arguments: dict[str, str | int],
    threads: int,
    tiling: Tiling,
    dropout: bool = False,
    **others: object,
) -> KernelSpec:
    """One of the kernels; all have the same parameter, and wait for the kernel ahead of them."""
    return KernelSpec(
        name=NAME,
        source=f"hopper/backward/{source}.cu",
        template=f"microsdpa::hopper::backward::{template}",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=threads,
        block_m=tiling.block_m,
        programmatic=True,
        params=dropped_params(PARAMS, dropout),
        **others,  # type: ignore[arg-type]
    )


def prepare(problem: Problem, tiling: Tiling) -> KernelSpec:
    """The kernel ahead: LSE and delta of every row, and zeros for the sums of dQ."""
    arguments: dict[str, str | int] = {"T": CPP_TYPE[problem.dtype], "HEAD_DIM": problem.head_dim}
    arguments |= {
        "BLOCK_M": tiling.block_m,
        "SUMS": 0 if tiling.whole else tiling.block_m * tiling.columns,
        "THREADS": THREADS,
        **({"RANGED": BOOLEAN[True]} if tiling.ranged else {}),
    }
    return _spec("prepare", "prepare", arguments, THREADS, tiling)


def gradients(problem: Problem, tiling: Tiling) -> KernelSpec:
    """The kernel that sums dK and dV, and adds to dQ."""
    mask = problem.mask or MaskKind()
    arguments: dict[str, str | int] = {
        "T": CPP_TYPE[problem.dtype],
        "HEAD_DIM": WIDTHS[bisect_left(WIDTHS, problem.head_dim)],
        **({} if tiling.wide else {"BLOCK_M": tiling.block_m}),
        "QUERY_STAGES": tiling.query_stages,
        "GRAD_STAGES": tiling.grad_stages,
        "IN_ORDER": BOOLEAN[tiling.in_order],
        "MASK": CPP_TYPE[mask.tensor],
        "LEFT": BOOLEAN[mask.left],
        "RIGHT": BOOLEAN[mask.right or problem.causal is not None],
        "SOFTCAP": BOOLEAN[mask.softcap],
        "ALIBI": BOOLEAN[mask.alibi],
        **({"DROPOUT": DROPOUT_TYPE[problem.dropout]} if problem.dropout or tiling.whole else {}),
        **({"MAPS": "microsdpa::TensorMap"} if tiling.whole else {}),
    }
    boxes: tuple[tuple[Name, int], ...] = (
        *(("query", tiling.block_m), ("key", tiling.block_n), ("value", tiling.block_n)),
        *(("grad_out", tiling.block_m), ("grad_key", ROWS), ("grad_value", ROWS)),
        *((("grad_query", ROWS),) if tiling.whole else ()),
    )
    source = ("wide", "gradients_wide") if tiling.wide else ("kernel", "gradients")
    return _spec(
        *(*source, arguments, 128 * (1 + CONSUMERS), tiling, problem.dropout),
        shared_bytes=tiling.shared_bytes,
        local_memory=SPILLS if problem.dropout or mask != MaskKind() or tiling.block_m % BOX else "",
        tensor_maps=tuple(TensorMap(name, rows, BOX) for name, rows in boxes),
    )


def finish(problem: Problem, tiling: Tiling) -> KernelSpec:
    """The kernel behind: dQ of its sums."""
    arguments: dict[str, str | int] = {"T": CPP_TYPE[problem.dtype], "HEAD_DIM": problem.head_dim}
    arguments |= {"BLOCK_M": tiling.block_m, "THREADS": THREADS}
    return _spec("finish", "finish", arguments, THREADS, tiling)


def tiles_grid(problem: Problem, tiling: Tiling) -> Grid:
    """CTAs of the kernels ahead and behind: one for each tile of queries."""
    return tiling.tiles(problem), 1, 1


def gradients_grid(problem: Problem, tiling: Tiling) -> Grid:
    """One CTA for each tile of keys."""
    return problem.batch * problem.heads_kv * ceil(problem.seqlen_k / tiling.block_n), 1, 1


def catalogue(target: str) -> list[KernelSpec]:
    """Configurations for `target`: head dimensions, types and masks, a few of each."""
    specs: dict[KernelSpec, None] = {}
    plain: tuple[tuple[int, DType, Causal | None, int, bool], ...] = (
        *((64, "float16", None, 2048, False), (128, "bfloat16", "upper_left", 2048, False)),
        *((72, "float16", None, 2048, False), (128, "float16", None, 2048, False)),
        (192, "float16", None, 2048, False),
        *((40, "float16", "upper_left", 2048, False), (160, "bfloat16", None, 2048, False)),
        *((96, "bfloat16", None, 128, False), (112, "float16", "upper_left", 2048, True)),
        *((256, "bfloat16", "upper_left", 2048, False), (64, "bfloat16", None, 128, False)),
        *((64, "float16", None, 2048, True), (128, "bfloat16", "upper_left", 2048, True)),
        *((256, "float16", None, 2048, True), (128, "float16", "upper_left", 128, True)),
    )
    masked: tuple[tuple[int, DType, Causal | None, int, bool, MaskKind], ...] = (
        (64, "float16", "upper_left", 2048, False, MaskKind(left=True)),
        (128, "bfloat16", None, 2048, False, MaskKind(left=True, right=True, softcap=True, alibi=True)),
        (64, "bfloat16", None, 2048, True, MaskKind(softcap=True)),
        (128, "float16", "upper_left", 2048, False, MaskKind("int32", per_batch=True, per_query=True)),
        (64, "float16", None, 2048, False, MaskKind("int32", per_batch=True, per_query=True)),
        (64, "bfloat16", None, 2048, False, MaskKind("bool", per_batch=True)),
        (64, "float16", None, 128, False, MaskKind("bool", per_batch=True, alibi=True)),
        (256, "float16", None, 2048, False, MaskKind("int32", softcap=True, per_query=True)),
        (192, "bfloat16", "upper_left", 2048, False, MaskKind("bool", left=True)),
    )
    for head_dim, dtype, causal, seqlen_k, dropout, mask in (*((*one, None) for one in plain), *masked):
        sizes = 4, 32, 8, 2048, seqlen_k, head_dim
        problem = Problem(*sizes, dtype, causal=causal, mask=mask, target=target, dropout=dropout)
        tiling = choose(problem)
        if isinstance(tiling, Tiling):
            kernels = prepare(problem, tiling), gradients(problem, tiling), finish(problem, tiling)
            specs |= dict.fromkeys(kernels[: 2 if tiling.whole else 3])
    return list(specs)
