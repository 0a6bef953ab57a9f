"""Specifications of the kernels around quantized attention.

One quantizes Q, K and V; the other gives the LSE back what smoothing K took off it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from microsdpa.kernels.eight_bit import ALL_HEAD_DIMS, HEAD_DIMS, MIN_CAPABILITY
from microsdpa.kernels.problem import DType, Operands, Precision, Problem, capability_of
from microsdpa.kernels.spec import BOOLEAN, CPP_TYPE, Grid, KernelSpec

GROUPS, CHUNK, LANES = 32, 8, 8
"""Sums of rows, channels that are loaded at once, and threads of a row, at most, where rows are added up."""
PARTS = 8
"""Of a head's rows, in the sums of K's mean; with clusters, a CTA for each."""
LONE_PARTS, PART_CTAS = 4, 128
"""Without clusters: CTAs of a head of which every one has to read all rows, at most, and of all heads."""
RESTORE_THREADS = 128

FormatName = Literal["e4m3", "int8", "sim_u8"]
CPP_FORMAT: dict[str, str] = {"e4m3": "E4m3", "int8": "Int8", "sim_u8": "SimulatedU8"}


@dataclass(frozen=True)
class QuantizationScheme:
    """How Q, K and V are quantized.

    Attributes:
        format: of Q and K.
        value: of V; None leaves V as it is.
        query_terms: terms of Q, side by side; the second is what the first lacks. Of "sim_u8" there is one.
        block: rows of Q and K that share a scale, a power of two.
        head_scale: whether all keys of a head share one instead, from a bound that comes with their mean.
        smooth: whether K's mean is taken off.
        hadamard: whether Q and K are rotated.
    """

    format: FormatName = "e4m3"
    value: FormatName | None = "e4m3"
    query_terms: int = 1
    block: int = 1
    smooth: bool = True
    hadamard: bool = True
    head_scale: bool = False

    @property
    def key_block(self) -> int:
        """Keys of a head that share a scale; 0 when all do."""
        return 0 if self.head_scale else self.block

    @property
    def operands(self) -> Operands:
        """What the attention kernel reads."""
        if self.format == "e4m3":
            return "fp8"
        return "int8_fp16" if self.value is None else "int8_fp8"


SCHEMES: dict[Precision, QuantizationScheme] = {
    "fp8": QuantizationScheme("e4m3", "e4m3", query_terms=2),
    "fp8_fast": QuantizationScheme("e4m3", "e4m3", head_scale=True),
    "int8_fp8": QuantizationScheme("int8", "e4m3"),
    "int8_fp16": QuantizationScheme("int8", None, query_terms=2),
}
"""What sdpa(precision=) does; docs/numerics.md says why."""


UNSMOOTHED = {precision: replace(scheme, smooth=False, head_scale=False) for precision, scheme in SCHEMES.items()}
"""The same where scores of a row must not all move by one amount: under a soft cap, and beside a sink."""


MANY_HEADS = 256
"""Key heads of all batches from which on a CTA a head fills the chip, which then reads its rows twice for itself."""


def has_clusters(target: str, heads_kv: int) -> bool:
    """Whether the CTAs of a head share their sums in a cluster; `heads_kv` of all batches."""
    return capability_of(target) >= (9, 0) and heads_kv < MANY_HEADS


def fused_for(scheme: QuantizationScheme, problem: Problem) -> KernelSpec:
    """The quantizing kernel of a problem."""
    clusters = has_clusters(problem.target, problem.batch * problem.heads_kv)
    return fused(scheme, problem.dtype, problem.head_dim, clusters)


def fused(scheme: QuantizationScheme, dtype: DType, head_dim: int, clusters: bool) -> KernelSpec:
    """The quantizing kernel, whose CTAs of a head are a cluster or not."""
    arguments = {
        "T": CPP_TYPE[dtype],
        "HEAD_DIM": str(head_dim),
        "FORMAT": f"microsdpa::format::{CPP_FORMAT[scheme.format]}",
        "VALUE": f"microsdpa::format::{CPP_FORMAT[scheme.value] if scheme.value else 'None'}",
        "TERMS": str(scheme.query_terms),
        "BLOCK": str(scheme.block),
        "SMOOTH": BOOLEAN[scheme.smooth],
        "HADAMARD": BOOLEAN[scheme.hadamard],
        "CLUSTER": BOOLEAN[clusters],
    }
    if scheme.head_scale:
        arguments["HEAD_SCALE"] = BOOLEAN[True]
    return KernelSpec(
        name="quantize/fused",
        source="quantize/fused.cu",
        template="microsdpa::quantize::quantize_query_key_value",
        template_args=tuple(arguments.items()),
        threads=GROUPS * min(LANES, head_dim // CHUNK),
        block_m=rows_of_cta(scheme),
        params="microsdpa::quantize::QuantizeParams",
        cluster=PARTS if clusters else 1,
        programmatic=clusters,
    )


def rows_of_cta(scheme: QuantizationScheme) -> int:
    """Rows of Q, and without smoothing of K, that a CTA takes: whole blocks."""
    return max(2 * GROUPS, scheme.block)


MOST_TILE_ROWS, MANY_TILES = 256, 1024
"""Rows of Q that a CTA takes at most, where that many CTAs are left: loads of its later rows hide behind work."""


def tile_rows(scheme: QuantizationScheme, heads: int, seqlen_q: int) -> int:
    """Rows of Q, and without smoothing of K, that a CTA takes; `heads` of all batches."""
    rows = rows_of_cta(scheme)
    while rows < MOST_TILE_ROWS and heads * -(-seqlen_q // (2 * rows)) >= MANY_TILES:
        rows *= 2
    return rows


def sum_rows(seqlen_k: int) -> int:
    """Rows of K and V that are one of PARTS in their sums and maxima."""
    return -(-seqlen_k // (PARTS * GROUPS)) * GROUPS


def part_rows(scheme: QuantizationScheme, heads: int, seqlen_k: int, clusters: bool) -> int:
    """Rows of V, and with smoothing of K, that a CTA encodes; `heads` of all batches."""
    rows, parts = rows_of_cta(scheme), PARTS if clusters else max(1, min(LONE_PARTS, PART_CTAS // heads))
    return max(1, -(-seqlen_k // (parts * rows))) * rows


def fused_grid(scheme: QuantizationScheme, problem: Problem) -> Grid:
    """CTAs for K, then V, then Q; with clusters, whole ones for each of them."""
    p, heads_kv = problem, problem.batch * problem.heads_kv
    clusters, rows = has_clusters(p.target, heads_kv), tile_rows(scheme, p.batch * p.heads, p.seqlen_q)
    parts = PARTS if clusters else -(-p.seqlen_k // part_rows(scheme, heads_kv, p.seqlen_k, clusters))
    key_tiles = parts if scheme.smooth else -(-p.seqlen_k // rows)
    counts = heads_kv * key_tiles, heads_kv * parts if scheme.value else 0, p.batch * p.heads * -(-p.seqlen_q // rows)
    unit = PARTS if clusters else 1
    return sum(-(-count // unit) * unit for count in counts), 1, 1


def restore_lse(dtype: DType, head_dim: int) -> KernelSpec:
    """The kernel that adds scale * q . mean(K) to the LSE."""
    arguments = {"T": CPP_TYPE[dtype], "HEAD_DIM": str(head_dim), "THREADS": str(RESTORE_THREADS)}
    return KernelSpec(
        name="quantize/restore_lse",
        source="quantize/restore_lse.cu",
        template="microsdpa::quantize::restore_lse",
        template_args=tuple(arguments.items()),
        threads=RESTORE_THREADS,
        block_m=RESTORE_THREADS * CHUNK // head_dim,
        params="microsdpa::quantize::RestoreLseParams",
    )


def quantize_catalogue(target: str) -> list[KernelSpec]:
    """The configurations that sdpa(precision=) uses on `target`."""
    if capability_of(target) < MIN_CAPABILITY:
        return []
    dtypes: tuple[DType, ...] = ("float16", "bfloat16")
    dims = ALL_HEAD_DIMS if capability_of(target) == (9, 0) else HEAD_DIMS
    quantizers = [
        fused(scheme, dtype, d, clusters)
        for scheme, dtype, d, clusters in product(SCHEMES.values(), dtypes, dims, (has_clusters(target, 1), False))
        if d in HEAD_DIMS or scheme.value is not None
    ]
    return [*dict.fromkeys(quantizers), *(restore_lse(dtype, d) for dtype, d in product(dtypes, dims))]
