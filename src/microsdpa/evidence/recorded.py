"""Which kernels a row of a result file stands for, by the specifications of the checkout that asks.

`resign` runs this module of old and new checkouts, without the package's host code: it imports nothing of `evidence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from microsdpa.errors import UnsupportedProblem
from microsdpa.kernels import Grid, KernelSpec, configurations, policy
from microsdpa.kernels.ampere.varlen.spec import RowChange, appending, batch_invariant
from microsdpa.kernels.backward import spec as backward
from microsdpa.kernels.hopper.backward import spec as hopper_backward
from microsdpa.kernels.problem import (
    PRECISIONS,
    CacheKind,
    Causal,
    DType,
    MaskKind,
    Precision,
    Problem,
    PrologueKind,
)
from microsdpa.kernels.quantize.spec import (
    SCHEMES,
    UNSMOOTHED,
    QuantizationScheme,
    fused_for,
    fused_grid,
    has_clusters,
    part_rows,
    sum_rows,
    tile_rows,
)
from microsdpa.kernels.select import select
from microsdpa.kernels.spec import Rejection

Row = dict[str, Any]
OWN_KERNELS = "own kernels"
"""Variant of rows whose gradients this library's kernels made."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of a row, with those that are launched after it.

    Attributes:
        grids: of each stage.
        numbers: what else the host tells the kernels for this problem.
    """

    spec: KernelSpec
    grids: tuple[Grid, ...]
    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: KernelSpec, problem: Problem) -> Kernel:
        """An attention kernel for a problem."""
        numbers = tuple(stage.workspace_bytes(problem) for stage in spec.stages)
        return cls(spec, tuple(stage.grid(problem) for stage in spec.stages), numbers)


def of_row(row: Row, target: str) -> dict[str, Kernel]:
    """The kernels of a row of this library, by the field that has their code signature.

    Raises:
        UnsupportedProblem: no kernel computes what the row was measured on.
    """
    if precision := precision_of(row):
        mask = _mask_kind(row)
        problem = quantized_problem(precision, row["shape"], row["inputs"], row["mask"], target, mask)
        found = {"code_signature": Kernel.of(select(problem, "auto").spec, problem)}
        if "quantiser_signature" in row:
            found["quantiser_signature"] = _quantizer(precision, problem)
        return found
    if operands := row.get("operands"):  # quantized values, as sdpa takes them
        shared: dict[str, Any] = {"operands": operands, "key_block": row.get("key_block", 0), "target": target}
        shared["mask"] = _mask_kind(row)
        quantized = Problem(**_sizes(row["shape"]), dtype=row["inputs"], causal=_causal(row["mask"]), **shared)
        return {"code_signature": Kernel.of(select(quantized, row["requested"]).spec, quantized)}
    plain = problem_of(row, target)
    if row.get("variant") == OWN_KERNELS:
        return {"code_signature": _gradients(plain)}
    if "chosen" in row:  # of `microsdpa tune`: one configuration of many
        return {"code_signature": Kernel.of(_configuration(plain, row["variant"]), plain)}
    if row.get("batch_invariant"):
        return {"code_signature": Kernel.of(batch_invariant(plain), plain)}
    if change := row.get("row_change"):
        spec = appending(select(plain, "auto").spec, plain, RowChange(**change))
        return {"code_signature": Kernel.of(spec, plain)}
    spec = select(plain, row.get("requested") or "auto").spec
    if row["mode"] == "profile":  # a row for each stage
        spec = next((stage for stage in spec.stages if stage.name == row["kernel"]), spec)
    return {"code_signature": Kernel.of(spec, plain)}


def precision_of(row: Row) -> Precision | None:
    """The `precision` of a call that quantizes; rows of `microsdpa accuracy` have it for their dtype."""
    precision = row.get("precision") or (row["dtype"] if row["dtype"] in PRECISIONS else None)
    return cast("Precision | None", precision)


def _mask_kind(row: Row) -> MaskKind | None:
    return MaskKind(**row["mask_kind"]) if row.get("mask_kind") else None


def _scheme(precision: Precision, mask: MaskKind | None) -> QuantizationScheme:
    """How a call with such a mask quantizes."""
    shifted = mask is None or not (mask.softcap or mask.sinks)
    return (SCHEMES if shifted else UNSMOOTHED)[precision]


def quantized_problem(
    precision: Precision,
    shape: dict[str, int],
    dtype: DType,
    mask: str,
    target: str,
    mask_kind: MaskKind | None = None,
) -> Problem:
    """What the attention kernel of a call that quantizes gets; `mask` is its causal alignment."""
    scheme = _scheme(precision, mask_kind)
    return Problem(
        **_sizes(shape),
        dtype=dtype,
        causal=_causal(mask),
        target=target,
        mask=mask_kind,
        operands=scheme.operands,
        query_terms=scheme.query_terms,
        key_block=scheme.key_block,
    )


def problem_of(row: Row, target: str) -> Problem:
    """What a row of this library with 16-bit operands was measured on."""
    sizes = _sizes(row["shape"]) | ({"seqlen_q": row["rounded_queries"]} if "rounded_queries" in row else {})
    return Problem(
        **sizes,
        varlen=row.get("varlen"),
        packed_queries=row.get("packed_queries", False),
        dtype=row["dtype"],
        causal=_causal(row["mask"]),
        mask=_mask_kind(row),
        dropout=row.get("dropout_p", 0.0) > 0.0,
        value_dim=row.get("value_dim", 0),
        continued=row.get("continued", False),
        alignment=row.get("alignment", 16),
        target=target,
        cache=CacheKind(**row["cache_kind"]) if row.get("cache_kind") else None,
        prologue=PrologueKind(**row["prologue_kind"]) if row.get("prologue_kind") else None,
    )


def _gradients(problem: Problem) -> Kernel:
    """The kernel that sums the gradients of query, key and value, where their bits may differ from run to run."""
    tiling = policy.five_products(problem, False)
    if isinstance(tiling, Rejection):
        own = backward.choose(problem)
        return Kernel(backward.gradients(problem, own), (backward.gradients_grid(problem, own),))
    return Kernel(hopper_backward.gradients(problem, tiling), (hopper_backward.gradients_grid(problem, tiling),))


def _quantizer(precision: Precision, problem: Problem) -> Kernel:
    scheme, p = _scheme(precision, problem.mask), problem
    heads_kv = p.batch * p.heads_kv
    rows = part_rows(scheme, heads_kv, p.seqlen_k, has_clusters(p.target, heads_kv))
    numbers = rows, tile_rows(scheme, p.batch * p.heads, p.seqlen_q), sum_rows(p.seqlen_k)
    return Kernel(fused_for(scheme, p), (fused_grid(scheme, p),), numbers)


def _configuration(problem: Problem, label: str) -> KernelSpec:
    """One that `microsdpa tune` timed: by its label, or the library's choice by its kernel's name."""
    found = configurations(problem).get(label)
    if found is None and (chosen := select(problem).spec).name == label:
        return chosen
    if found is None:
        raise UnsupportedProblem(f"no configuration is called {label!r}", nearest="those of microsdpa tune")
    return found


def _sizes(shape: dict[str, int]) -> dict[str, Any]:
    names = {"batch": "b", "heads": "h", "heads_kv": "h_kv", "seqlen_q": "s_q", "seqlen_k": "s_k", "head_dim": "d"}
    return {name: shape[short] for name, short in names.items()}


def _causal(mask: str) -> Causal | None:
    return None if mask == "none" else cast("Causal", mask)
