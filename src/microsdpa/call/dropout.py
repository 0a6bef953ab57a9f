"""The dropout of a call: its argument, and the random numbers that decide."""

from __future__ import annotations

import functools
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


@functools.lru_cache
def kept_of(dropout_p: float) -> tuple[int, float]:
    """How many of 65,536 probabilities are kept, and the factor of those, 0 where none is, for a valid `dropout_p`.

    It is rounded to a multiple of 2**-16; a probability below 1 keeps some.
    """
    kept = 0 if dropout_p == 1.0 else max(1, round((1.0 - dropout_p) * 65536))
    return kept, 65536 / kept if kept else 0.0


def check_state(rng_state: object, query: torch.Tensor) -> torch.Tensor:
    """Seed and offset of a call with dropout.

    Raises:
        InvalidArgument: they are not two int64 side by side on query's device.
    """
    sound = isinstance(rng_state, torch.Tensor) and rng_state.dtype == torch.int64 and tuple(rng_state.shape) == (2,)
    if not sound or rng_state.device != query.device or rng_state.stride() != (1,):  # type: ignore[attr-defined]
        raise InvalidArgument(
            "rng_state",
            expected=f"two int64 side by side on {query.device}, where dropout_p is over 0",
            got=_described(rng_state),
            hint="torch.randint(2**62, (2,), device=query.device) draws seed and offset",
        )
    return rng_state  # type: ignore[return-value]


def _described(given: object) -> str:
    if not isinstance(given, torch.Tensor):
        return repr(given)
    return f"{list(given.shape)} of {given.dtype} on {given.device} with strides {list(given.stride())}"


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
