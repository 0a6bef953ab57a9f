"""One call of attention with 8-bit operands, as the specifications of its kernels see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from microsdpa.kernels.problem import Problem

Operands = Literal["fp8", "int8_fp8", "int8_fp16"]
"""What Q and K, and then V and P, are: E4M3; INT8 and E4M3; INT8 and the 16-bit type of the output."""

OPERANDS: tuple[Operands, ...] = get_args(Operands)
HEAD_DIMS = (32, 64, 128)
ALL_HEAD_DIMS = (*HEAD_DIMS, 256)
"""The last one where V is E4M3 and the GPU has wgmma."""
PARAMS = "microsdpa::EightBitParams"
MIN_CAPABILITY = (8, 9)
"""E4M3 products need Ada; INT8 alone would not, but V and P of int8_fp8 do, and the modes share their kernels."""


@dataclass(frozen=True)
class EightBitProblem(Problem):
    """One call of attention with 8-bit operands; `dtype` is the output's.

    Attributes:
        operands: types of Q, K, V and P.
        query_terms: codes of Q whose sum it is, side by side in its rows.
        key_block: keys of a head that share a scale, a power of two; 0 when all do.
    """

    operands: Operands = "fp8"
    query_terms: int = 1
    key_block: int = 1
