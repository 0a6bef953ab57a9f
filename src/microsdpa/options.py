"""Options of sdpa: their numbers in the plans' keys."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from microsdpa.kernels import EIGHT_BIT_FAMILIES, FAMILIES, Family
from microsdpa.kernels.problem import OPERANDS

_ALIGNMENTS: dict[tuple[bool, str | None], int] = {
    (False, None): 0,
    (True, None): 1,
    (True, "upper_left"): 1,
    (False, "upper_left"): 1,
    (False, "lower_right"): 2,
}
"""Codes of (is_causal, causal)."""


def _impls(families: Iterable[Family]) -> dict[str, int]:
    impls = {"auto": 0}
    for index, family in enumerate(families, start=1):
        impls |= {family.name: index, family.short_name: index}
    return impls


OPTIONS: dict[tuple[object, ...], int] = {
    (*causal, gqa, impl): causal_code | gqa << 2 | impl_code << 3
    for (causal, causal_code), gqa, (impl, impl_code) in product(
        _ALIGNMENTS.items(), (False, True), _impls(FAMILIES).items()
    )
}
"""A number for every valid combination of (is_causal, causal, enable_gqa, impl), the plans' key for them."""

EIGHT_BIT_OPTIONS: dict[tuple[object, ...], int] = {
    (*causal, gqa, impl, precision): causal_code | gqa << 2 | precision_code << 3 | impl_code << 5
    for (causal, causal_code), gqa, (impl, impl_code), (precision_code, precision) in product(
        _ALIGNMENTS.items(), (False, True), _impls(EIGHT_BIT_FAMILIES).items(), enumerate((None, *OPERANDS))
    )
}
"""The same for calls with 8-bit operands, which have a precision or, where that is None, scales."""
