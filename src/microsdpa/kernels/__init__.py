"""Kernel specifications: what is compiled, and how it is launched, for a given problem."""

from microsdpa.kernels.registry import (
    ALL_FAMILIES,
    EIGHT_BIT_FAMILIES,
    FAMILIES,
    ONE_LENGTH,
    VARLEN_FAMILIES,
    Family,
    catalogue,
    configurations,
    emulated_target,
    family_named,
)
from microsdpa.kernels.spec import Grid, KernelSpec, Rejection, TensorMap, oversized

__all__ = [
    "ALL_FAMILIES",
    "EIGHT_BIT_FAMILIES",
    "FAMILIES",
    "ONE_LENGTH",
    "VARLEN_FAMILIES",
    "Family",
    "Grid",
    "KernelSpec",
    "Rejection",
    "TensorMap",
    "catalogue",
    "configurations",
    "emulated_target",
    "family_named",
    "oversized",
]
