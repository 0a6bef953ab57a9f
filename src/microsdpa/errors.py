"""Errors of the public API: each says what was expected, what came and what to do instead."""

from __future__ import annotations

from typing import Any


class MicrosdpaError(Exception):
    """Base class of every error that microsdpa raises on purpose.

    Errors can be copied and pickled, with their fields.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle and copy keep. Python's own way would call the class with the message in place of its fields."""
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[MicrosdpaError], args: tuple[Any, ...]) -> MicrosdpaError:
    """An error with this message and without its fields, which unpickling adds."""
    return kind.__new__(kind, *args)


# The messages below are assigned to `args`: torch.compile cannot trace a call of Exception's constructor.


class InvalidArgument(MicrosdpaError, ValueError):
    """An argument that no attention call could accept.

    Attributes:
        argument: name of the offending argument.
        expected: what the argument must be.
        got: what came.
        hint: what to do instead.
    """

    def __init__(self, argument: str, *, expected: str, got: str, hint: str) -> None:
        self.argument, self.expected, self.got, self.hint = argument, expected, got, hint
        self.args = (f"{argument}: expected {expected}, got {got}; {hint}",)


class UnknownArgument(InvalidArgument, TypeError):
    """A name that is no argument of the function that was called; a TypeError too, as Python's own is."""


class UnsupportedProblem(MicrosdpaError, NotImplementedError):
    """A well-formed attention call that no kernel here computes.

    Attributes:
        reason: why it is refused.
        nearest: the nearest thing that works.
    """

    def __init__(self, reason: str, *, nearest: str) -> None:
        self.reason, self.nearest = reason, nearest
        self.args = (f"{reason}; nearest supported: {nearest}",)


class CompileError(MicrosdpaError, RuntimeError):
    """NVRTC refused a kernel, or the compiled kernel broke its resource promise.

    Attributes:
        summary: what failed, in one line.
        log: what the compiler said.
        source: path of the expanded source that was compiled, or None when it could not be written.
    """

    def __init__(self, summary: str, *, log: str, source: str | None) -> None:
        self.summary, self.log, self.source = summary, log, source
        where = f"\nsource: {source}" if source else ""
        self.args = (f"{summary}{where}\n{log}".rstrip(),)
