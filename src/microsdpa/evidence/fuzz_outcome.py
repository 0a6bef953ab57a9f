"""What a random call came to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from microsdpa.evidence import compare

LSE_SLACK = 1e-5
"""What FP32 may cost the LSE, as a part of the largest: rounded scores, which its tolerance is from, can be exact."""


@dataclass(frozen=True)
class Outcome:
    """What a call came to.

    Attributes:
        call: a Call of fuzz_calls, or a VarlenCall.
        kind: "passed", "refused", where a kernel that was named does not compute the call, or what is wrong with it.
        failure: what is wrong in words; empty if nothing is.
        errors: of the output, and `allowed`, the largest absolute one that it may have.
    """

    call: Any
    kind: str = "passed"
    failure: str = ""
    errors: compare.Errors | None = None
    allowed: float = 0.0

    @property
    def use(self) -> float:
        """The largest error as a part of what is allowed."""
        return self.errors.max_abs / self.allowed if self.errors and self.allowed else 0.0


def failed(outcome: Outcome, kind: str, failure: str, allowed: float | None = None) -> Outcome:
    """The outcome of a call with something that is wrong."""
    more = "" if allowed is None else f", {allowed:.3g} allowed"
    return replace(outcome, kind=kind, failure=failure + more)
