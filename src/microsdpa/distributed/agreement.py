"""What the ranks of a group have agreed upon for one kind of call."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist

from microsdpa.distributed.layout import Layout
from microsdpa.distributed.model import Estimate
from microsdpa.distributed.visible import UNBOUNDED, Piece, Visible, arguments, of_piece
from microsdpa.errors import MicrosdpaError

Method = Literal["all_gather", "ring", "heads"]
Transport = Literal["symmetric", "collective"]


@dataclass(frozen=True, eq=False)
class Agreement:
    """What the ranks of a group have agreed upon for one kind of call.

    Attributes:
        reference: to the group. It is weak, as agreements are remembered: a group ends when it is destroyed, and torch
            joins its threads. One of gloo's that outlives the interpreter would abort the process.
        rank: this rank in the group.
        visible: layouts and masks.
        method: how data travels.
        transport: by what.
        by_token: whether the keys and values of all ranks lie in memory as [B, S, H, D].
        together: whether all queries of a rank are computed in one launch, which fills the SMs better in short calls.
        device: of this rank's tensors.
        head_groups: of key heads, which are gathered one after another.
        estimates: of the methods that could compute the call, the shortest first.
        because: why the method was chosen.
        softcap, scale: as sdpa has them.
    """

    reference: weakref.ReferenceType[dist.ProcessGroup]
    rank: int
    visible: Visible
    method: Method
    transport: Transport
    by_token: bool
    together: bool
    device: torch.device
    head_groups: list[tuple[int, int]]
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
    def group(self) -> dist.ProcessGroup:
        """The group.

        Raises:
            MicrosdpaError: it was destroyed.
        """
        found = self.reference()
        if found is None:
            raise MicrosdpaError(
                "the process group of this attention was destroyed; compute its gradient before "
                "torch.distributed.destroy_process_group()"
            )
        return found

    @cached_property
    def calls(self) -> tuple[Piece, ...]:
        """All calls of sdpa that this rank makes for a group of heads."""
        if self.method == "heads":
            return (self.visible.whole,)
        if self.method == "ring":
            sources = range(self.keys.world)
            return tuple(piece for source in sources for piece in self.visible.blocks(self.rank, source))
        pieces = self.visible.pieces[self.rank]
        # Between the spans of a window lies memory that nobody has written to.
        if not self.together or len(pieces) < 2 or self.visible.window[0] != UNBOUNDED:
            return pieces
        length, stop = sum(piece.length for piece in pieces), max(piece.stop for piece in pieces)
        return (Piece(0, length, 0, stop, 0, ranged=True),)

    @cached_property
    def ranges(self) -> torch.Tensor | None:
        """What this rank's queries see where slices of keys do not say it and there are no documents."""
        found = self.new_ranges()
        if found is not None:
            pieces = {*self.calls, *self.visible.pieces[self.rank]}
            self._ranges_of.update((piece, of_piece(found, piece)) for piece in pieces if piece.ranged)
            if found.is_cuda:  # later calls may be on other streams
                torch.cuda.current_stream(found.device).synchronize()
        return found

    @cached_property
    def _ranges_of(self) -> dict[Piece, torch.Tensor]:
        """Those of `ranges` that a piece has, in its slice of keys."""
        return {}

    def arguments(self, piece: Piece, mask: torch.Tensor | None) -> dict[str, Any]:
        """What sdpa is told of the masks of a piece; `mask` is `ranges`, or what documents make of it."""
        if piece.ranged and mask is vars(self).get("ranges"):
            known = self._ranges_of.get(piece)
            if known is not None:
                return {"attn_mask": known}
        return arguments(piece, mask)

    def new_ranges(self) -> torch.Tensor | None:
        """`ranges`, made anew: memory of a CUDA graph that is captured belongs to it alone."""
        if self.visible.documents or not any(piece.ranged for piece in self.calls):
            return None
        return self.visible.ranges(None if self.method == "heads" else self.rank, self.device)

    @property
    def queries(self) -> Layout:
        """The layout of the queries."""
        return self.visible.queries

    @property
    def keys(self) -> Layout:
        """The layout of the keys."""
        return self.visible.keys
