"""Plans of calls whose sizes are new: what is kept of the calls before, and when sizes around them are looked for."""

from __future__ import annotations

import threading
from typing import Any

from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.ranges import SizeRange, has_tensors, range_of
from microsdpa.kernels.select import chosen
from microsdpa.runtime import launcher


class Kind:
    """Calls that differ in batch size, lengths and strides alone.

    Attributes:
        problem: one of them, of no sizes.
        kernel: the one that is asked for.
    """

    SHORTEST_PAUSE, LONGEST_PAUSE = 15, 63
    """New sizes without a search, after searches that found nothing."""

    def __init__(self, problem: Problem, kernel: str) -> None:
        _ = problem.any_size  # which problems of other sizes then have from it
        self.problem, self.kernel = problem, kernel
        self.batch = self.pause = 0
        self.left = 1  # a program with two sizes is not to wait for a search

    def others(self, problem: Problem, spec: KernelSpec) -> SizeRange | None:
        """Sizes around those of a problem for which `spec` is the choice too; None where nobody looks."""
        batch_first, self.batch = self.batch != problem.batch, problem.batch
        if self.left:
            self.left -= 1
            return None
        found = range_of(problem, spec, self.kernel, batch_first)
        self.pause = self.left = 0 if found else min(2 * self.pause + self.SHORTEST_PAUSE, self.LONGEST_PAUSE)
        return found


_MAX_KINDS = 4096
_kinds: list[Kind] = []
"""By the numbers of launcher.register_kind()."""
_numbers: dict[tuple[Problem, str], int] = {}
_numbering = threading.Lock()


def note_kind(problem: Problem, kernel: str, call: launcher.Call) -> None:
    """Let resized() know calls that differ from this one, which is valid, in batch size, lengths and strides alone."""
    if has_tensors(problem.mask) or problem.prologue is not None or problem.continued or not problem.bulk:
        return
    kind = problem.with_sizes(0, 0, 0), kernel
    with _numbering:
        number = _numbers.setdefault(kind, len(_kinds))
        if number == len(_kinds) < _MAX_KINDS:
            _kinds.append(Kind(*kind))
    if number < _MAX_KINDS:
        launcher.register_kind(number, *call)


def resized(number: int, call: launcher.Call) -> Any:
    """Make the plan of a call that differs from one before in batch size, lengths and strides alone, and launch it.

    `number` is of its kind, as launcher.launch_or_kind() gives it. What validation looks at is in the key of a kind, or
    is looked at in C++ (runtime/plans.h); the output is new. Gives what launcher.launch does, and None where no kernel
    computes the call.
    """
    kind = _kinds[number]
    batch, _, seqlen_q, _ = call[0].shape
    problem = kind.problem.with_sizes(batch, seqlen_q, call[1].shape[2])
    spec = chosen(problem, kind.kernel)
    if spec is None:
        return None
    return launcher.prepare_and_launch(problem, spec, call, kind.others(problem, spec))


_MAX_DECODING = 256
_decoding: dict[tuple[int, int, int, int], int] = {}
"""The length of K of the latest call without a plan that had this batch size, heads, queries and specification."""


def others(problem: Problem, spec: KernelSpec, kernel: str) -> SizeRange | None:
    """Sizes around those of a call that was checked for which `spec` is the choice too.

    They are looked for where K has another length than in the latest such call, as it has in decoding.
    """
    # Specifications are long to hash, and so are problems. Calls that share a kind by chance are looked at in vain.
    kind, length = (problem.batch, problem.heads, problem.seqlen_q, id(spec)), problem.seqlen_k
    before = _decoding.get(kind, length)
    if len(_decoding) >= _MAX_DECODING:
        _decoding.clear()
    _decoding[kind] = length
    return None if before == length else range_of(problem, spec, kernel)
