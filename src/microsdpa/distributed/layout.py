"""Who holds which tokens of a sequence that is spread over a group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

Order = Literal["balanced", "contiguous"]


class Chunk(NamedTuple):
    """Tokens that lie side by side, in the sequence and in the shard of one rank.

    Attributes:
        start: the first token's place in the sequence.
        length: tokens.
        at: the first token's place in the shard.
    """

    start: int
    length: int
    at: int

    @property
    def stop(self) -> int:
        """One past the last token's place in the sequence."""
        return self.start + self.length


@dataclass(frozen=True)
class Layout:
    """A sequence in shards.

    Attributes:
        order: "contiguous", rank r has the tokens behind those of rank r - 1; or "balanced", where the sequence is cut
            into 2 W chunks and rank r has chunks r and 2 W - 1 - r, so that a causal mask leaves all ranks equal work.
        lengths: tokens of every rank.
    """

    order: Order
    lengths: tuple[int, ...]

    @property
    def world(self) -> int:
        """Ranks."""
        return len(self.lengths)

    @cached_property
    def total(self) -> int:
        """Tokens of the sequence."""
        return sum(self.lengths)

    @cached_property
    def shards(self) -> tuple[tuple[Chunk, ...], ...]:
        """Chunks of every rank, in the order of its shard."""
        if self.order == "contiguous":
            starts = accumulate(self.lengths, initial=0)
            return tuple((Chunk(start, length, 0),) for start, length in zip(starts, self.lengths, strict=False))
        sizes = even_sizes(self.total, 2 * self.world)
        starts_of = list(accumulate(sizes, initial=0))
        found = []
        for rank in range(self.world):
            last = 2 * self.world - 1 - rank
            head, tail = Chunk(starts_of[rank], sizes[rank], 0), Chunk(starts_of[last], sizes[last], sizes[rank])
            found.append((head, tail))
        return tuple(found)

    @property
    def expected(self) -> tuple[int, ...]:
        """Tokens that every rank has to have: those that it has where the order leaves that open."""
        return tuple(sum(chunk.length for chunk in shard) for shard in self.shards)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest shard."""
        return max(self.lengths)


def even_sizes(total: int, parts: int) -> list[int]:
    """`total` in as many parts, of which the first have one more where it does not divide."""
    size, more = divmod(total, parts)
    return [size + (part < more) for part in range(parts)]


def even(total: int, world: int, order: Order) -> Layout:
    """The layout that shard() makes of a sequence."""
    if order == "contiguous":
        return Layout(order, tuple(even_sizes(total, world)))
    sizes = even_sizes(total, 2 * world)
    return Layout(order, tuple(sizes[rank] + sizes[2 * world - 1 - rank] for rank in range(world)))


def take(tensor: torch.Tensor, layout: Layout, rank: int, dim: int) -> torch.Tensor:
    """The shard of one rank, of a tensor with the whole sequence in dimension `dim`."""
    parts = [tensor.narrow(dim, chunk.start, chunk.length) for chunk in layout.shards[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def put(shard: torch.Tensor, whole: torch.Tensor, layout: Layout, rank: int, dim: int) -> None:
    """Write the shard of one rank to its places in the whole sequence."""
    for chunk in layout.shards[rank]:
        if chunk.length:
            whole.narrow(dim, chunk.start, chunk.length).copy_(shard.narrow(dim, chunk.at, chunk.length))
