"""Options of sdpa: their numbers in the plans' keys, and the arguments that only some calls have."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, TypedDict

from microsdpa.specs import FAMILIES

if TYPE_CHECKING:
    import torch

    from microsdpa.specs.eight_bit import Operands


class Further(TypedDict, total=False):
    """Keyword arguments of sdpa that a plain call leaves out; together they cost it one test."""

    attn_mask: torch.Tensor | None
    window: tuple[int, int] | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    precision: Operands | None
    q_scale: torch.Tensor | float | None
    k_scale: torch.Tensor | float | None
    v_scale: torch.Tensor | float | None


def _option_codes() -> dict[tuple[object, ...], int]:
    """A number for every valid combination of (is_causal, causal, enable_gqa, impl), the plans' key for them."""
    impls = {"auto": 0}
    for index, family in enumerate(FAMILIES, start=1):
        impls |= {family.name: index, family.short_name: index}
    alignments: dict[tuple[bool, str | None], int] = {
        (False, None): 0,
        (True, None): 1,
        (True, "upper_left"): 1,
        (False, "upper_left"): 1,
        (False, "lower_right"): 2,
    }
    return {
        (*causal, gqa, impl): causal_code | gqa << 2 | impl_code << 3
        for (causal, causal_code), gqa, (impl, impl_code) in product(alignments.items(), (False, True), impls.items())
    }


OPTIONS = _option_codes()
