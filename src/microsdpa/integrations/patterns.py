"""PatternMask: a mask that attention reads as arguments, and everything else as the bool tensor that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from microsdpa.kernels.problem import Causal

EVERYTHING = -1
"""End of a pattern that hides nothing on its side, as in sdpa's window."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """What sdpa is to be called with in place of a mask of S_q x S_k.

    Attributes:
        start: first key that a query sees; the keys before it are cut off.
        stop: end of the keys that a query sees; the keys from it on are cut off.
        causal: alignment of the causal mask within the keys that are left.
        window: ends of the window within them.
        padding: bool [B, 1, 1, stop - start], where False hides; None when no key of them is padding.
        documents: integers [B, S]: a query sees keys of its own number alone; None for one document.
    """

    start: int
    stop: int
    causal: Causal | None = None
    window: tuple[int, int] | None = None
    padding: torch.Tensor | None = None
    documents: torch.Tensor | None = None


def describe(seqlen_q: int, seqlen_k: int, position: int, left: int, right: int) -> Pattern | None:
    """The pattern in which query i sees keys i + position - left to i + position + right; None if there is no such.

    An end of -1 hides nothing on its side. A right end of 0 makes a causal mask.
    """
    if right == 0:
        if seqlen_q < 1 or not 0 <= position <= seqlen_k - seqlen_q:
            return None
        stop = position + seqlen_q
        start = 0 if left == EVERYTHING else max(0, position - left)
        if seqlen_q == 1:
            return Pattern(start, stop)
        hides = left != EVERYTHING and stop - start > left + 1
        causal: Causal = "upper_left" if position == start else "lower_right"
        return Pattern(start, stop, causal, (left, EVERYTHING) if hides else None)
    if left == right == EVERYTHING:
        return Pattern(0, seqlen_k)
    return Pattern(0, seqlen_k, None, (left, right)) if position == 0 else None


class PatternMask(torch.Tensor):
    """A bool mask [B, 1, S_q, S_k], where False hides, without its B * S_q * S_k elements.

    An attention function takes `pattern` while `untouched`. `hides_nothing` says whether every query sees every key,
    which is known ahead, for each layer asks. Any other operation, such as a slice, makes the elements
    and gives a plain tensor. From then on the elements count, because a view of them may have been written.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    pattern: Pattern
    hides_nothing: bool
    untouched: bool
    _elements: torch.Tensor | None

    @staticmethod
    def __new__(cls, batch: int, seqlen_q: int, seqlen_k: int, pattern: Pattern, device: torch.device) -> PatternMask:
        """The mask of a batch; `pattern` is within S_k keys."""
        shape = (batch, 1, seqlen_q, seqlen_k)
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.pattern, mask.untouched, mask._elements = pattern, True, None
        whole = pattern.start == 0 and pattern.stop == seqlen_k and pattern.causal is None and pattern.window is None
        mask.hides_nothing = whole and pattern.padding is None and pattern.documents is None
        return mask

    def tensor(self) -> torch.Tensor:
        """The plain tensor that the mask stands for, the same at every call; not to be written."""
        if self._elements is None:
            self._elements = self._make()
        return self._elements

    def _touch(self) -> torch.Tensor:
        self.untouched = False
        return self.tensor()

    def _make(self) -> torch.Tensor:
        pattern = self.pattern
        _, _, seqlen_q, seqlen_k = self.shape
        length = pattern.stop - pattern.start
        column = torch.arange(length, device=self.device)
        row = torch.arange(seqlen_q, device=self.device)[:, None]
        if pattern.causal == "lower_right":
            row = row + length - seqlen_q
        seen = torch.ones(seqlen_q, length, dtype=torch.bool, device=self.device)
        left, right = pattern.window or (EVERYTHING, EVERYTHING)
        if pattern.causal is not None:
            seen &= column <= row
        elif right != EVERYTHING:
            seen &= column <= row + right
        if left != EVERYTHING:
            seen &= column >= row - left
        whole = seen[None, None] if pattern.padding is None else seen & pattern.padding
        if pattern.documents is not None:
            whole = whole & (pattern.documents[:, None, :, None] == pattern.documents[:, None, None])
        whole = torch.nn.functional.pad(whole, (pattern.start, seqlen_k - pattern.stop), value=False)
        return whole.expand(self.shape).contiguous()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Every operation on the mask works on the plain tensor."""
        plain = tree_map_only(PatternMask, PatternMask._touch, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy of the plain tensor."""
        return self.tensor().clone()
