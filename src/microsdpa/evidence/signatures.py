"""Which code a row was measured with, and whether the library would now run other code for it."""

from __future__ import annotations

from typing import Any, cast

import torch

from microsdpa.eight_bit import choose
from microsdpa.errors import MicrosdpaError
from microsdpa.evidence.results import Row
from microsdpa.explanation import Explanation
from microsdpa.jit.signature import code_signature
from microsdpa.problem import Causal, DType, MaskKind, Problem
from microsdpa.runtime import launcher
from microsdpa.select import select
from microsdpa.specs import emulated_target
from microsdpa.specs.eight_bit import EightBitProblem, Operands
from microsdpa.specs.quantize import RECIPES, fused


def of_call(found: Explanation, query: torch.Tensor, quantizes: bool = False) -> dict[str, object]:
    """The fields of a row that say what ran for a call with such a query."""
    assert found.spec is not None
    target = launcher.target_of_device(query.device) if query.is_cuda else emulated_target("auto")
    fields: dict[str, object] = {
        "kernel": found.spec.name,
        "signature": found.signature,
        "code_signature": code_signature(found.spec, target),
    }
    if quantizes and found.quantizer is not None:
        fields["quantiser_signature"] = code_signature(found.quantizer, target)
    return fields


def of_precision(
    precision: Operands, shape: dict[str, int], dtype: DType, mask: str, target: str, impl: str = "auto"
) -> dict[str, str]:
    """What a call that quantises runs now: the code signatures of both of its kernels."""
    problem = EightBitProblem(
        **_sizes(shape),
        dtype=dtype,
        causal=_causal(mask),
        target=target,
        operands=precision,
        query_terms=RECIPES[precision].query_terms,
    )
    quantiser = fused(RECIPES[precision], dtype, shape["d"])
    return {
        "code_signature": code_signature(choose(problem, impl).spec, target),
        "quantiser_signature": code_signature(quantiser, target),
    }


def is_stale(row: Row, target: str) -> bool:
    """Whether the library would now run other code for a row of this library than what was measured."""
    try:
        if precision := row.get("precision"):
            now = of_precision(precision, row["shape"], row["inputs"], row["mask"], target)
            return any(row[name] != code for name, code in now.items() if name in row)
        if operands := row.get("operands"):  # codes, as sdpa takes them
            shared: dict[str, Any] = {"operands": operands, "key_block": 0, "target": target}
            codes = EightBitProblem(**_sizes(row["shape"]), dtype=row["inputs"], causal=_causal(row["mask"]), **shared)
            return bool(code_signature(choose(codes, row["requested"]).spec, target) != row["code_signature"])
        problem = problem_of(row, target)
        spec = select(problem, row.get("requested") or "auto").spec
    except MicrosdpaError:
        return True
    return bool(code_signature(spec, target) != row["code_signature"])


def problem_of(row: Row, target: str) -> Problem:
    """What a row of this library with 16-bit operands was measured on."""
    return Problem(
        **_sizes(row["shape"]),
        dtype=row["dtype"],
        causal=_causal(row["mask"]),
        mask=MaskKind(**row["mask_kind"]) if row.get("mask_kind") else None,
        alignment=row.get("alignment", 16),
        target=target,
    )


def _sizes(shape: dict[str, int]) -> dict[str, Any]:
    names = {"batch": "b", "heads": "h", "heads_kv": "h_kv", "seqlen_q": "s_q", "seqlen_k": "s_k", "head_dim": "d"}
    return {name: shape[short] for name, short in names.items()}


def _causal(mask: str) -> Causal | None:
    return None if mask == "none" else cast("Causal", mask)
