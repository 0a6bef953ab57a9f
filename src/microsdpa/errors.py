"""Errors of the public API: each says what was expected, what came and what to do instead."""

from __future__ import annotations


class MicrosdpaError(Exception):
    """Base class of every error that microsdpa raises on purpose."""


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
        super().__init__(f"{argument}: expected {expected}, got {got}; {hint}")


class UnsupportedProblem(MicrosdpaError, NotImplementedError):
    """A well-formed attention call that no kernel here computes.

    Attributes:
        reason: why it is refused.
        nearest: the nearest thing that works.
    """

    def __init__(self, reason: str, *, nearest: str) -> None:
        self.reason, self.nearest = reason, nearest
        super().__init__(f"{reason}; nearest supported: {nearest}")


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
        super().__init__(f"{summary}{where}\n{log}".rstrip())
