"""What the ranks of a group have agreed upon for one kind of call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from microsdpa.distributed.layout import Layout
from microsdpa.distributed.model import Estimate
from microsdpa.distributed.visible import Piece, Visible

Method = Literal["all_gather", "ring", "heads"]
Transport = Literal["symmetric", "collective"]


@dataclass(frozen=True, eq=False)
class Agreement:
    """What the ranks of a group have agreed upon for one kind of call.

    Attributes:
        group: the group.
        rank: this rank in it.
        visible: layouts and masks.
        method: how data travels.
        transport: by what.
        by_token: whether the keys and values of all ranks lie in memory as [B, S, H, D].
        ratio: estimate of the time of computing a head over that of its transfer.
        estimates: of the methods that could compute the call, the shortest first.
        because: why the method was chosen.
        softcap, scale: as sdpa has them.
    """

    group: dist.ProcessGroup
    rank: int
    visible: Visible
    method: Method
    transport: Transport
    by_token: bool
    ratio: float
    estimates: tuple[Estimate, ...]
    because: str
    softcap: float | None
    scale: float | None

    def __str__(self) -> str:
        """A few lines for a person."""
        lines = [f"method     {self.method}", f"transport  {self.transport}", f"because    {self.because}"]
        lines += [f"estimate   {estimate}" for estimate in self.estimates]
        return "\n".join(lines)

    @property
    def calls(self) -> tuple[Piece, ...]:
        """All calls of sdpa that this rank makes for a group of heads."""
        if self.method == "heads":
            return (self.visible.whole,)
        if self.method == "all_gather":
            return self.visible.pieces[self.rank]
        sources = range(self.keys.world)
        return tuple(piece for source in sources for piece in self.visible.blocks(self.rank, source))

    @property
    def queries(self) -> Layout:
        """The layout of the queries."""
        return self.visible.queries

    @property
    def keys(self) -> Layout:
        """The layout of the keys."""
        return self.visible.keys
