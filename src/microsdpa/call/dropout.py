"""The dropout of a call: its argument, and the random numbers that decide."""

from __future__ import annotations

from typing import NamedTuple

import torch

from microsdpa.errors import InvalidArgument


class Random(NamedTuple):
    """Where the random numbers of one call come from.

    Attributes:
        drawn: seed and offset, two int64 on the device of the call; None for the two numbers that follow.
        seed: from -2**63 to 2**63 - 1.
        offset: in torch's generator's stream, a multiple of 4.
        state: two int64 on the device that seed and offset are left in; None where nobody wants them.
    """

    drawn: torch.Tensor | None
    seed: int = 0
    offset: int = 0
    state: torch.Tensor | None = None

    @property
    def in_memory(self) -> torch.Tensor | None:
        """Seed and offset, two int64 on the device, once the call is launched."""
        return self.state if self.drawn is None else self.drawn


Dropping = tuple[float, torch.Tensor]
"""The probability to drop, over 0, and seed and offset of the call, two int64 on its device."""


def check(dropout_p: object) -> float:
    """The probability of a call's argument.

    Raises:
        InvalidArgument: it is none.
    """
    number = isinstance(dropout_p, (int, float)) and not isinstance(dropout_p, bool)
    if not number or not 0.0 <= dropout_p <= 1.0:  # type: ignore[operator]
        raise InvalidArgument(
            "dropout_p",
            expected="a probability, from 0 to 1",
            got=repr(dropout_p),
            hint="pass 0.0 outside of training",
        )
    return float(dropout_p)  # type: ignore[arg-type]
