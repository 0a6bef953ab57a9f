"""Specifications of the kernels that compute gradients (kernels/backward/)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Literal

from microsdpa.kernels.chip import L2_PART, chip_of
from microsdpa.kernels.problem import ELEMENT_BYTES, VECTOR_BYTES, MaskKind, Problem, capability_of
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

MAX_HEAD_DIM = 256
LARGEST_JOINT = 128
"""Head dimension up to which the registers of a warp hold dK and dV of its keys together."""
NAME = "backward"
PARAMS = "microsdpa::backward::BackwardParams"
SPILLS = "it computes what no other kernel does: refused, the call would have no gradient"
TERMS_WARPS = 4
SMALL_THREADS = 256


@dataclass(frozen=True)
class Tiling:
    """A configuration of the gradients' kernel.

    Attributes:
        row_tiles: 16-row tiles that a warp owns.
        warps: of a CTA.
        block_walk: rows of a tile that is walked over.
        step: of these rows, those whose products are in registers at a time.
        stages: tiles in shared memory.
        ctas: CTAs that an SM shall hold at once, which bounds the registers.
        wgmma: whether warpgroups multiply by wgmma, with one row tile a warp; else warps do by mma.sync.
        bulk: whether walked rows are brought by bulk copies.
    """

    row_tiles: int = 1
    warps: int = 4
    block_walk: int = 64
    step: int = 32
    stages: int = 2
    ctas: int = 2
    wgmma: bool = False
    bulk: bool = False

    @property
    def block_own(self) -> int:
        """Rows that a CTA owns."""
        return 16 * self.row_tiles * self.warps

    def columns(self, head_dim: int) -> int:
        """Columns of a tile: TILE_COLUMNS of kernel.cu."""
        step = 16 if not self.wgmma else 32 if head_dim <= LARGEST_NARROW_PANELS else 64
        return ceil(head_dim / step) * step

    def shared_bytes(self, head_dim: int, weighted: bool) -> int:
        """Dynamic shared memory: the owned rows, the ring, what is known of the walked rows, barriers, votes."""
        columns = self.columns(head_dim)
        rows = 2 * self.block_own + 2 * self.stages * self.block_walk
        terms = self.stages * self.block_walk * terms_bytes(weighted)
        return ceil((2 * columns * rows + terms + 8 * (self.warps + self.stages)) / 128) * 128


def terms_bytes(weighted: bool) -> int:
    """Of what is known of a row: two numbers, or four."""
    return 16 if weighted else 8


def is_weighted(problem: Problem) -> bool:
    """Whether a mask of numbers may make the LSE of a row so large that its rounding shows."""
    return problem.mask is not None and problem.mask.tensor not in (None, "bool", "int32")


LARGEST_NARROW_PANELS = 160
"""Head dimension up to which tiles for wgmma have panels of 32 columns, else of 64."""
LEAST_WGMMA = 17
"""Head dimension from which on wgmma is used, whose tiles have 32 columns at least."""
SHORT = 256
"""Rows up to which three CTAs of one warpgroup an SM are faster than one of two."""
FEWEST_WIDE_TILES = 2
"""Tiles of 128 rows for each SM from which on an mma.sync warp has two row tiles: fewer leave SMs idle."""


def choose(problem: Problem) -> Tiling:
    """The tiling for a problem: on a Hopper measured, elsewhere by what shared memory and registers hold."""
    columns, mask = ceil(problem.head_dim / 16) * 16, problem.mask
    if capability_of(problem.target) == (9, 0) and problem.head_dim >= LEAST_WGMMA:
        bulk = problem.bulk and _load_bytes(problem) == VECTOR_BYTES
        if columns > LARGEST_JOINT:
            return Tiling(warps=8, block_walk=32, ctas=1, wgmma=True, bulk=bulk)
        if columns <= 64 and max(problem.seqlen_q, problem.seqlen_k) <= SHORT:
            return Tiling(ctas=3, wgmma=True, bulk=bulk)
        crowded = columns > 64 and (problem.dropout or (mask is not None and mask.tensor is not None))
        return Tiling(warps=8, block_walk=128, step=32 if crowded else 64, ctas=1, wgmma=True, bulk=bulk)
    if columns > LARGEST_JOINT:
        tiling = Tiling(block_walk=32, ctas=1)
        fits = tiling.shared_bytes(problem.head_dim, is_weighted(problem)) <= chip_of(problem.target).shared_per_cta
        return tiling if fits else replace(tiling, stages=1, step=16)
    wide = problem.batch * problem.heads_kv * problem.seqlen_k >= FEWEST_WIDE_TILES * 128 * chip_of(problem.target).sms
    if columns <= 64 and wide and mask is None:
        return Tiling(row_tiles=2, block_walk=32) if capability_of(problem.target) < (9, 0) else Tiling(2, step=16)
    return Tiling(step=16 if columns > 64 and mask is not None and mask.tensor is not None else 32)


def is_for_small(problem: Problem) -> bool:
    """Whether the kernels are faster than cuDNN's backward pass, as measured on an H200: short rows, or few tiles.

    Not where their tiles have columns too many: at D = 72 the products of hopper/backward have fewer.
    """
    tiling, columns = choose(problem), ceil(problem.head_dim / 16) * 16
    if capability_of(problem.target) != (9, 0) or not tiling.wgmma or tiling.columns(problem.head_dim) > columns:
        return False
    tiles = problem.batch * (
        problem.heads * ceil(problem.seqlen_q / 128) + problem.heads_kv * ceil(problem.seqlen_k / 128)
    )
    return max(problem.seqlen_q, problem.seqlen_k) <= SHORT or tiles <= chip_of(problem.target).sms


def refusal(problem: Problem, tiling: Tiling) -> Rejection | None:
    """Why there is no gradient of a problem; None where there is one."""
    if capability_of(problem.target) < (8, 0):
        return Rejection(f"{problem.target} is older than sm_80", "a GPU of compute capability 8.0 or newer")
    if problem.head_dim > MAX_HEAD_DIM:
        return Rejection(
            f"head_dim {problem.head_dim} is over {MAX_HEAD_DIM}", f"head_dim {MAX_HEAD_DIM}", MAX_HEAD_DIM
        )
    ctas = max(gradients_grid(problem, tiling)[0], terms_grid(problem)[0])
    if ctas > MAX_GRID_X:
        return Rejection(f"{ctas} tiles exceed the {MAX_GRID_X} CTAs of one launch", "a smaller batch")
    rows = problem.seqlen_q * (problem.heads // problem.heads_kv)
    if max(problem.seqlen_q + problem.seqlen_k, rows, problem.batch * problem.heads) > MAX_NUMBER:
        return Rejection("more rows or heads than a kernel counts", "a smaller batch or shorter sequences")
    return None


def _masks(problem: Problem) -> dict[str, str]:
    mask = problem.mask or MaskKind()
    return {
        "MASK": CPP_TYPE[mask.tensor],
        "LEFT": BOOLEAN[mask.left],
        "RIGHT": BOOLEAN[mask.right or problem.causal is not None],
        "SOFTCAP": BOOLEAN[mask.softcap],
        "ALIBI": BOOLEAN[mask.alibi],
    }


def _load_bytes(problem: Problem) -> int:
    vectors = problem.alignment >= VECTOR_BYTES and problem.head_dim % 8 == 0
    return VECTOR_BYTES if vectors else ELEMENT_BYTES[problem.dtype]


def _spec(problem: Problem, source: str, template: str, arguments: dict[str, str | int], threads: int) -> KernelSpec:
    """One of the kernels; all have the same parameter, and wait for the kernel ahead of them."""
    programmatic = capability_of(problem.target) >= (9, 0)
    arguments = arguments | {"PROGRAMMATIC": BOOLEAN[programmatic]}
    return KernelSpec(
        name=NAME,
        source=f"backward/{source}.cu",
        template=f"microsdpa::backward::{template}",
        template_args=tuple((name, str(value)) for name, value in arguments.items()),
        threads=threads,
        block_m=1,
        local_memory=SPILLS,
        programmatic=programmatic,
        params=PARAMS,
    )


def _dropped(problem: Problem, spec: KernelSpec) -> KernelSpec:
    """A kernel that may drop probabilities, as it is for a problem."""
    arguments = *spec.template_args, ("DROPOUT", DROPOUT_TYPE[problem.dropout])
    return replace(spec, template_args=arguments, params=dropped_params(PARAMS, problem.dropout))


def terms(problem: Problem) -> KernelSpec:
    """The kernel ahead: LSE and delta of every row."""
    arguments: dict[str, str | int] = {
        "T": CPP_TYPE[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "WARPS": TERMS_WARPS,
        "LOAD_BYTES": _load_bytes(problem),
        **_masks(problem),
        "SINK": CPP_TYPE[problem.mask.sinks if problem.mask else None],
    }
    return _spec(problem, "terms", "row_terms", arguments, 32 * TERMS_WARPS)


def _terms_rows(problem: Problem) -> int:
    """Rows of a CTA of the kernel ahead: as many lanes have a row as read it at once."""
    chunks = ceil(problem.head_dim * ELEMENT_BYTES[problem.dtype] / _load_bytes(problem))
    lanes = 32 if is_weighted(problem) or chunks > 16 else 16 if chunks > 8 else 8 if chunks > 4 else 4
    return TERMS_WARPS * 32 // lanes


def terms_grid(problem: Problem) -> Grid:
    """CTAs of the kernel ahead."""
    return ceil(problem.batch * problem.heads * problem.seqlen_q / _terms_rows(problem)), 1, 1


def gradients(problem: Problem, tiling: Tiling, slopes: bool = False) -> KernelSpec:
    """The kernel that sums dQ, dK and dV; with `slopes` also the parts of the slopes' gradients."""
    arguments: dict[str, str | int] = {
        "T": CPP_TYPE[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "ROW_TILES": tiling.row_tiles,
        "WARPS": tiling.warps,
        "BLOCK_WALK": tiling.block_walk,
        "STEP": tiling.step,
        "STAGES": tiling.stages,
        "CTAS": tiling.ctas,
        "LOAD_BYTES": _load_bytes(problem),
        "WGMMA": BOOLEAN[tiling.wgmma],
        "APART": BOOLEAN[problem.head_dim > LARGEST_JOINT],
        **_masks(problem),
        "SLOPES": BOOLEAN[slopes],
    }
    template = "gradients_bulk" if tiling.bulk else "gradients"
    return replace(
        _dropped(problem, _spec(problem, "kernel", template, arguments, 32 * tiling.warps)),
        block_m=tiling.block_own,
        shared_bytes=tiling.shared_bytes(problem.head_dim, is_weighted(problem)),
        tensor_maps=_tensor_maps(problem, tiling) if tiling.bulk else (),
    )


def _tensor_maps(problem: Problem, tiling: Tiling) -> tuple[TensorMap, ...]:
    """Boxes of a panel's columns, of at most 64 rows."""
    panel, rows = 64 if tiling.columns(problem.head_dim) % 64 == 0 else 32, min(64, tiling.block_walk)
    names: tuple[Literal["query", "key", "value", "grad_out"], ...] = ("query", "key", "value", "grad_out")
    return tuple(TensorMap(name, rows, panel, 2 * panel) for name in names)


def gradients_grid(problem: Problem, tiling: Tiling) -> Grid:
    """CTAs that own keys, and then those that own queries."""
    keys = problem.batch * problem.heads_kv * ceil(problem.seqlen_k / tiling.block_own)
    queries = problem.batch * problem.heads * ceil(problem.seqlen_q / tiling.block_own)
    return keys * (2 if problem.head_dim > LARGEST_JOINT else 1) + queries, 1, 1


def heads_together(problem: Problem) -> tuple[int, int]:
    """Key heads, and query heads, whose CTAs run side by side: what they walk over stays in the L2 cache."""
    row = 2 * problem.head_dim * ELEMENT_BYTES[problem.dtype]
    group = problem.heads // problem.heads_kv
    by_keys = L2_PART // max(1, problem.seqlen_q * group * row)
    by_queries = L2_PART // max(1, problem.seqlen_k * row) * group
    return (
        max(1, min(by_keys, problem.batch * problem.heads_kv)),
        max(1, min(by_queries, problem.batch * problem.heads)),
    )


def parts_of_slope(problem: Problem, tiling: Tiling) -> int:
    """Parts of a head's slope gradient: one of each warp that owns queries."""
    return ceil(problem.seqlen_q / tiling.block_own) * tiling.warps


def workspace_bytes(problem: Problem, tiling: Tiling, slopes: bool) -> tuple[int, int]:
    """Scratch memory of a call, and the bytes from its start to the parts of the slopes' gradients."""
    rows = problem.batch * problem.heads * problem.seqlen_q * terms_bytes(is_weighted(problem))
    return rows + 4 * problem.batch * problem.heads * parts_of_slope(problem, tiling) * slopes, rows


def sink_gradients(problem: Problem, tile_rows: int = 0) -> KernelSpec:
    """The kernel that sums the sinks' gradients, a CTA for each head.

    `tile_rows`: rows of a tile of queries where hopper/backward leaves what is known of them; 0 for backward/.
    """
    assert problem.mask is not None
    weighted = f"microsdpa::backward::RowTerms<{BOOLEAN[is_weighted(problem)]}>"
    arguments: dict[str, str | int] = {
        "SINK": CPP_TYPE[problem.mask.sinks],
        "ROWS": f"microsdpa::backward::TiledTerms<{tile_rows}>" if tile_rows else weighted,
        "THREADS": SMALL_THREADS,
    }
    return _spec(problem, "small", "sink_gradients", arguments, SMALL_THREADS)


def slope_gradients(problem: Problem) -> KernelSpec:
    """The kernel that sums the slopes' gradients of their parts, a CTA for each slope."""
    return _spec(problem, "small", "slope_gradients", {"THREADS": SMALL_THREADS}, SMALL_THREADS)


MASK_WARPS = 4
MASK_BLOCK = 16 * MASK_WARPS
"""Queries and keys of a tile of the mask's gradient."""


def mask_gradient(problem: Problem) -> KernelSpec:
    """The kernel that sums the gradient of a mask of numbers."""
    arguments: dict[str, str | int] = {
        "T": CPP_TYPE[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "WARPS": MASK_WARPS,
        "LOAD_BYTES": _load_bytes(problem),
        **_masks(problem),
    }
    spec = _dropped(problem, _spec(problem, "mask", "mask_gradient", arguments, 32 * MASK_WARPS))
    columns = ceil(problem.head_dim / 16) * 16
    tiles, sums = 4 * MASK_BLOCK * columns * 2, 4 * MASK_BLOCK * (MASK_BLOCK + 1)
    return replace(spec, block_m=MASK_BLOCK, shared_bytes=ceil((tiles + sums) / 128) * 128)


def mask_grid(shape: tuple[int, int, int, int]) -> Grid:
    """CTAs for a mask of this shape, [B, H, S_q, S_k] or 1 in places."""
    batch, heads, rows, columns = shape
    return batch * heads * ceil(rows / MASK_BLOCK) * ceil(columns / MASK_BLOCK), 1, 1


def backward_catalogue(target: str) -> list[KernelSpec]:
    """Configurations for `target`: head dimensions, masks and alignments, a few of each."""
    kinds: tuple[tuple[int, MaskKind | None, int], ...] = (
        (64, None, VECTOR_BYTES),
        (128, None, VECTOR_BYTES),
        (128, MaskKind("bool", left=True), VECTOR_BYTES),
        (64, MaskKind("float32", True, True, True, True, "float32"), VECTOR_BYTES),
        (40, MaskKind("int32"), ELEMENT_BYTES["float16"]),
        (256, MaskKind(right=True, sinks="float16"), VECTOR_BYTES),
    )
    specs: dict[KernelSpec, None] = {}
    for (head_dim, mask, alignment), dropout in (*product(kinds, (False,)), *product(kinds[:2] + kinds[3:4], (True,))):
        sizes = 4, 32, 8, 2048, 2048, head_dim
        shared = {"causal": "upper_left", "alignment": alignment, "target": target, "dropout": dropout}
        problem = Problem(*sizes, "float16", mask=mask, **shared)  # type: ignore[arg-type]
        tiling = choose(problem)
        if isinstance(refusal(problem, tiling), Rejection):
            continue
        kind = mask or MaskKind()
        found = [terms(problem), gradients(problem, tiling, kind.alibi)]
        found += [slope_gradients(problem)] if kind.alibi else []
        found += [sink_gradients(problem)] if kind.sinks else []
        found += [mask_gradient(problem)] if is_weighted(problem) else []
        specs |= dict.fromkeys(found)
    return list(specs)
