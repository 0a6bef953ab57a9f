"""Which code a row was measured with, and whether the library would now run other code for it."""

from __future__ import annotations

import torch

from microsdpa.attention.explain import Explanation
from microsdpa.errors import MicrosdpaError
from microsdpa.evidence import recorded
from microsdpa.evidence.recorded import problem_of
from microsdpa.evidence.results import Row
from microsdpa.jit.signature import code_signature
from microsdpa.kernels import emulated_target
from microsdpa.kernels.problem import DType, Precision
from microsdpa.kernels.quantize.spec import SCHEMES, fused_for
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

__all__ = ["is_stale", "of_call", "of_precision", "problem_of"]


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
    precision: Precision, shape: dict[str, int], dtype: DType, mask: str, target: str, impl: str = "auto"
) -> dict[str, str]:
    """What a call that quantizes runs now: the code signatures of both of its kernels."""
    problem = recorded.quantized_problem(precision, shape, dtype, mask, target)
    quantizer = fused_for(SCHEMES[precision], problem)
    return {
        "code_signature": code_signature(select(problem, impl).spec, target),
        "quantiser_signature": code_signature(quantizer, target),
    }


def is_stale(row: Row, target: str) -> bool:
    """Whether the library would now run other code for a row of this library than what was measured."""
    try:
        kernels = recorded.of_row(row, target)
    except MicrosdpaError:
        return True
    return any(code_signature(kernel.spec, target) != row[name] for name, kernel in kernels.items() if name in row)
