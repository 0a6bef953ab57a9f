"""Ranges of sizes for which one kernel is the choice, found by choosing once with numbers that know their range.

The rules that choose a kernel compare sizes, and what they compute from these, with numbers. Here they run with sizes
that stand for all in a range. Each comparison narrows the range to where its answer stays the same. So all sizes that
are left go the same way through the rules, and come to the same kernel: no list of the rules' limits is kept anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

from microsdpa.kernels.problem import MaskKind, Problem
from microsdpa.kernels.select import chosen
from microsdpa.kernels.spec import MAX_GRID_YZ, KernelSpec

TIMES = 8
"""Sizes are looked at up to so many times those of the problem: limits of all sizes together cost none of them then."""
FEWEST_BATCHES = 64
"""Batch sizes up to here are looked at in any case."""

FEWEST = 4
"""Sizes of a range that is worth its search."""

Corner = Callable[[int, int], Any]
"""A number, by a batch size and a length."""
Ends = tuple[int, int, int, int]
"""First and last batch size, first and last length."""


class SizeRange(NamedTuple):
    """Sizes for which a kernel is the choice.

    Attributes:
        first: of the lengths of K.
        queries_follow: whether S_q is S_k in all of them; else it is that of the problem.
    """

    first_batch: int
    last_batch: int
    first: int
    last: int
    queries_follow: bool


class _TooFew(Exception):
    """Hardly a size but that of the problem is left."""


class _Box:
    """The range that is left, around the sizes of a problem."""

    def __init__(self, batch: int, length: int, ends: Ends, batch_first: bool) -> None:
        self.point = (batch, batch, length, length)
        self.ends = ends
        self.sides = (1, 0, 3, 2) if batch_first else (3, 2, 1, 0)

    def narrow(self, holds: Callable[[Ends], bool]) -> None:
        """Narrow the range to one for which `holds` is true, as it is for the point and for parts of such a range.

        One side after the other is as far from the point as it can be.
        """
        if holds(self.ends):
            return
        found = list(self.point)
        for side in self.sides:
            near, far = self.point[side], self.ends[side]
            found[side] = far
            if holds((found[0], found[1], found[2], found[3])):
                continue
            while abs(far - near) > 1:
                found[side] = middle = (near + far) // 2
                if holds((found[0], found[1], found[2], found[3])):
                    near = middle
                else:
                    far = middle
            found[side] = near
        self.ends = found[0], found[1], found[2], found[3]
        if (found[1] - found[0] + 1) * (found[3] - found[2] + 1) < FEWEST:
            raise _TooFew


class _Size:
    """A number that sizes decide about, which either rises or falls with batch size and length alike.

    It is no key of a dictionary or a cache, whose look-up would not narrow the range.
    """

    __slots__ = "at", "box", "falls", "value"
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, box: _Box, at: Corner, falls: bool = False) -> None:
        self.box, self.at, self.falls = box, at, falls
        self.value = at(box.point[0], box.point[2])

    def low(self, ends: Ends) -> Any:
        """The least value in a range."""
        return self.at(ends[1], ends[3]) if self.falls else self.at(ends[0], ends[2])

    def high(self, ends: Ends) -> Any:
        """The largest."""
        return self.at(ends[0], ends[2]) if self.falls else self.at(ends[1], ends[3])

    def pinned(self) -> Any:
        """The value, in a range where there is no other."""
        self.box.narrow(lambda ends: bool(self.low(ends) == self.high(ends)))
        return self.value

    def _is_below(self, other: Any, or_equal: bool) -> bool:
        """self < other, or self <= other."""
        low, high = _ends_of(other)
        below = self.value <= _value(other) if or_equal else self.value < _value(other)
        if below and or_equal:
            self.box.narrow(lambda ends: bool(self.high(ends) <= low(ends)))
        elif below:
            self.box.narrow(lambda ends: bool(self.high(ends) < low(ends)))
        elif or_equal:
            self.box.narrow(lambda ends: bool(self.low(ends) > high(ends)))
        else:
            self.box.narrow(lambda ends: bool(self.low(ends) >= high(ends)))
        return bool(below)

    def __lt__(self, other: Any) -> bool:
        return self._is_below(other, False)

    def __le__(self, other: Any) -> bool:
        return self._is_below(other, True)

    def __gt__(self, other: Any) -> bool:
        return not self._is_below(other, True)

    def __ge__(self, other: Any) -> bool:
        return not self._is_below(other, False)

    def __eq__(self, other: object) -> bool:
        if self.value == _value(other):
            return bool(self.pinned() == _pinned(other))
        return not (self < other or self > other)

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        return int(self.pinned())

    def __float__(self) -> float:
        return float(self.pinned())

    def __neg__(self) -> _Size:
        at = self.at
        return _Size(self.box, lambda batch, length: -at(batch, length), not self.falls)

    def __add__(self, other: Any) -> _Size:
        at = self.at
        if isinstance(other, _Size) and other.falls == self.falls:
            others = other.at
            return _Size(self.box, lambda batch, length: at(batch, length) + others(batch, length), self.falls)
        number = _pinned(other)
        return _Size(self.box, lambda batch, length: at(batch, length) + number, self.falls)

    __radd__ = __add__

    def __sub__(self, other: Any) -> _Size:
        return self.__add__(-other)

    def __rsub__(self, other: Any) -> _Size:
        return self.__neg__().__add__(other)

    def __mul__(self, other: Any) -> _Size:
        at, ends = self.at, self.box.ends
        if isinstance(other, _Size):
            both_rise = not (self.falls or other.falls) and self.low(ends) >= 0 and other.low(ends) >= 0
            if both_rise:
                others = other.at
                return _Size(self.box, lambda batch, length: at(batch, length) * others(batch, length))
        number = _pinned(other)
        return _Size(self.box, lambda batch, length: at(batch, length) * number, self.falls != (number < 0))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> _Size:
        at, number = self.at, _pinned(other)
        return _Size(self.box, lambda batch, length: at(batch, length) // number, self.falls != (number < 0))

    def __truediv__(self, other: Any) -> _Size:
        at, number = self.at, _pinned(other)
        return _Size(self.box, lambda batch, length: at(batch, length) / number, self.falls != (number < 0))

    def __rfloordiv__(self, other: Any) -> Any:
        return other // self.pinned()

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.pinned()

    def __divmod__(self, other: Any) -> tuple[int, _Size]:
        number = _pinned(other)
        quotient: int = (self // number).pinned()
        return quotient, self - quotient * number

    def __mod__(self, other: Any) -> _Size:
        return self.__divmod__(other)[1]

    def __ceil__(self) -> _Size:
        at = self.at
        return _Size(self.box, lambda batch, length: ceil(at(batch, length)), self.falls)


def _value(number: Any) -> Any:
    return number.value if isinstance(number, _Size) else number


def _pinned(number: Any) -> Any:
    return number.pinned() if isinstance(number, _Size) else number


def _ends_of(number: Any) -> tuple[Callable[[Ends], Any], Callable[[Ends], Any]]:
    """The least and the largest value of a number in a range."""
    if isinstance(number, _Size):
        return number.low, number.high
    return (lambda _: number), (lambda _: number)


def range_of(problem: Problem, spec: KernelSpec, impl: str = "auto", batch_first: bool = False) -> SizeRange | None:
    """Sizes around those of a problem for which chosen() gives `spec` too, as it does for the problem; None for none.

    Where S_q is S_k it stays so. Beside tensors of masks and norms or rotary embedding the batch size stays.
    `batch_first` says which side of the range is to be long where not both can be, batch sizes or lengths.
    """
    try:
        return search(problem, spec, impl, batch_first)
    except TypeError:  # of a number that was to be a key
        return None


def search(problem: Problem, spec: KernelSpec, impl: str, batch_first: bool) -> SizeRange | None:
    """range_of(), which a number that is used as a key ends.

    Raises:
        TypeError: one is.
    """
    batch, length = problem.batch, problem.seqlen_k
    follows, fixed = problem.seqlen_q == length > 1, problem.prologue is not None or has_tensors(problem.mask)
    if length < 2 or (fixed and follows) or any(stage.tile_lists is not None for stage in spec.stages):
        return None  # longer lists take more memory, and more CTAs
    batches = (batch, batch) if fixed else (1, min(max(TIMES * batch, FEWEST_BATCHES), MAX_GRID_YZ))
    box = _Box(batch, length, (*batches, 2, TIMES * length), batch_first)
    lengths: Any = _Size(box, lambda _, length: length)
    entries: Any = batch if fixed else _Size(box, lambda batch, _: batch)
    try:
        found = chosen(problem.with_sizes(entries, lengths if follows else problem.seqlen_q, lengths), impl)
    except _TooFew:
        return None
    return SizeRange(*box.ends, follows) if found is spec else None


def has_tensors(mask: MaskKind | None) -> bool:
    """Whether there are tensors among masks."""
    return mask is not None and (mask.tensor is not None or mask.alibi or mask.sinks is not None)
