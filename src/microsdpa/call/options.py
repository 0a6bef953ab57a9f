"""The options of a call, and their number in the plans' keys."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from microsdpa.kernels import ALL_FAMILIES, VARLEN_FAMILIES
from microsdpa.kernels.problem import PRECISIONS, Causal, Precision

LOWER_RIGHT = 2
_ALIGNMENTS: dict[tuple[bool, str | None], int] = {
    (False, None): 0,
    (True, None): 1,
    (True, "upper_left"): 1,
    (False, "upper_left"): 1,
    (False, "lower_right"): LOWER_RIGHT,
}
"""Numbers of (is_causal, causal)."""
_PRECISIONS: dict[str | None, int] = {precision: number for number, precision in enumerate((None, *PRECISIONS))}


def _impls() -> dict[tuple[str, str | None], int]:
    """Numbers of (impl, precision). Kernels with 8-bit operands run with any precision, or with scales and None."""
    numbers = {("auto", precision): number for precision, number in _PRECISIONS.items()}
    for index, family in enumerate(ALL_FAMILIES, start=1):
        for precision, number in _PRECISIONS.items():
            if family.eight_bit or precision is None:
                code = index * len(_PRECISIONS) + number
                numbers |= {(family.name, precision): code, (family.short_name, precision): code}
    return numbers


OPTIONS: dict[tuple[object, ...], int] = {
    (*causal, gqa, *impl): causal_number | gqa << 2 | impl_number << 3
    for (causal, causal_number), gqa, (impl, impl_number) in product(
        _ALIGNMENTS.items(), (False, True), _impls().items()
    )
}
"""A number for every valid (is_causal, causal, enable_gqa, impl, precision): their part of a plan's key."""

VARLEN_BIT = 1 << 20
"""Set in the number of a call's options where it has sequences of many lengths."""
INTERLEAVED_BIT = 1 << 21
INVARIANT_BIT = 1 << 26
"""Set where a sequence's bits may not depend on the others of its batch."""
DETERMINISTIC_BIT = 1 << 22
"""Set in the number of a call for gradients whose bits shall be the same each time."""
DROPOUT_BIT = 1 << 23
"""Set where the call drops probabilities."""
PROLOGUE_BIT = 1 << 25
"""Set where the call has norms or rotary embedding."""
LAYER_NORM_BIT = 1 << 28
UNROTATED_KEY_BIT = 1 << 27
CONTINUED_BIT = 1 << 30
"""Set where the call goes on from an output and an LSE of other keys."""
TURNED_BIT = 1 << 29
"""Set, beside VARLEN_BIT, where tensors are [B, H, S, D] as those of sdpa, and scales of every token [B, H_kv, S_k]."""
VARLEN_OPTIONS: dict[tuple[object, ...], int] = {
    (causal, interleaved, invariant, impl): OPTIONS[False, "lower_right" if causal else None, True, impl, None]
    | VARLEN_BIT
    | INTERLEAVED_BIT * interleaved
    | INVARIANT_BIT * invariant
    for causal in (False, True)
    for interleaved in (False, True)
    for invariant in (False, True)
    for impl in ("auto", *(family.name for family in VARLEN_FAMILIES))
}
"""A number for every valid (causal, rotary_interleaved, batch_invariant, impl) of sdpa_varlen."""


class Options(NamedTuple):
    """What a call asks for beside its tensors: arguments of sdpa, not validated yet."""

    is_causal: bool = False
    causal: Causal | None = None
    scale: float | None = None
    enable_gqa: bool = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    impl: str = "auto"
    precision: Precision | None = None
    dropout_p: float = 0.0

    @property
    def code(self) -> int:
        """The number of these options in the plans' keys.

        Raises:
            KeyError: one of them is not valid.
        """
        code = OPTIONS[self.is_causal, self.causal, self.enable_gqa, self.impl, self.precision]
        return code | DROPOUT_BIT if self.dropout_p else code


PLAIN = Options()
PLAIN_CODE = PLAIN.code
