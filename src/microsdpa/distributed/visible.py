"""Which keys the queries of one rank see, as calls of sdpa on slices of the whole sequence of keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from microsdpa.call import documents
from microsdpa.distributed.layout import Chunk, Layout, take
from microsdpa.kernels.problem import Causal

UNBOUNDED = -1


class Piece(NamedTuple):
    """One call of sdpa: queries that lie side by side, and the keys that they may see.

    Attributes:
        at: the first query's place in the shard.
        length: queries.
        start: the first key's place in the sequence.
        stop: one past the last key's; `start` where no key is seen.
        causal: the alignment in the slice; None without a causal mask.
        window: as sdpa has it, in the slice.
        ranged: whether ranges of keys say what is seen, in place of the two before.
    """

    at: int
    length: int
    start: int
    stop: int
    causal: Causal | None = None
    window: tuple[int, int] | None = None
    ranged: bool = False


@dataclass(frozen=True)
class Visible:
    """What every query of a sequence sees.

    Attributes:
        queries, keys: the layouts.
        causal, window: as sdpa has them, over whole sequences.
        documents: whether document ids hide keys, too.
    """

    queries: Layout
    keys: Layout
    causal: Causal | None
    window: tuple[int, int]
    documents: bool

    @property
    def shift(self) -> int:
        """Query i stands at key i + shift."""
        return self.keys.total - self.queries.total if self.causal == "lower_right" else 0

    @property
    def ends(self) -> tuple[int, int]:
        """The window's ends with the causal mask in it; -1 is no end."""
        left, right = self.window
        return left, 0 if self.causal is not None else right

    def span(self, chunk: Chunk) -> tuple[int, int]:
        """The first key that a chunk of queries may see, and one past the last; equal where there is none."""
        left, right = self.ends
        first = 0 if left == UNBOUNDED else chunk.start + self.shift - left
        stop = self.keys.total if right == UNBOUNDED else chunk.stop + self.shift + right
        first, stop = max(first, 0), min(stop, self.keys.total)
        return (first, stop) if first < stop and chunk.length else (0, 0)

    def piece(self, chunk: Chunk) -> Piece:
        """The call of a chunk of queries."""
        start, stop = self.span(chunk)
        left, right = self.ends
        plain = Piece(chunk.at, chunk.length, start, stop)
        if start == stop or (self.ends == (UNBOUNDED, UNBOUNDED) and not self.documents):
            return plain
        if right == 0 and stop == chunk.stop + self.shift and not self.documents:
            return plain._replace(causal="lower_right", window=None if left == UNBOUNDED else (left, UNBOUNDED))
        return plain._replace(ranged=True)

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """The calls of every rank, of each the longest first."""
        found = [[self.piece(chunk) for chunk in shard if chunk.length] for shard in self.queries.shards]
        return tuple(tuple(sorted(calls, key=lambda piece: piece.start - piece.stop)) for calls in found)

    @cached_property
    def needs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Spans of keys that each rank reads, by rank: disjoint and in order."""
        found = []
        for shard in self.queries.shards:
            merged: list[tuple[int, int]] = []
            for start, stop in sorted(self.span(chunk) for chunk in shard):
                if merged and start <= merged[-1][1]:
                    merged[-1] = merged[-1][0], max(stop, merged[-1][1])
                elif start < stop:
                    merged.append((start, stop))
            found.append(tuple(merged))
        return tuple(found)

    @cached_property
    def sends(self) -> tuple[tuple[tuple[Chunk, ...], ...], ...]:
        """What a rank sends to each: sends[source][target] are the chunks of its shard that the target reads."""
        ranks = range(self.keys.world)
        return tuple(tuple(self._sent(source, target) for target in ranks) for source in ranks)

    def _sent(self, source: int, target: int) -> tuple[Chunk, ...]:
        found = []
        for chunk in self.keys.shards[source]:
            for start, stop in self.needs[target]:
                first, end = max(start, chunk.start), min(stop, chunk.stop)
                if first < end:
                    found.append(Chunk(first, end - first, chunk.at + first - chunk.start))
        return tuple(found)

    def ranges(self, rank: int, device: torch.device) -> torch.Tensor:
        """The first key that each query of a rank sees and one past the last, int32 [1, 1, S_local, 2]."""
        left, right = self.ends
        places = torch.arange(self.queries.total, dtype=torch.int64, device=device)
        place = take(places, self.queries, rank, 0) + self.shift
        first = torch.zeros_like(place) if left == UNBOUNDED else place - left
        stop = torch.full_like(place, self.keys.total) if right == UNBOUNDED else place + right + 1
        bounds = torch.stack([first, stop], dim=-1).clamp_(0, self.keys.total)
        return bounds.int()[None, None]

    def mask(self, rank: int, ids: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """What a rank's queries see, with documents: int32 ranges [B | 1, 1, S_local, 2] or bool [.., S_local, S_k].

        `ids` are those of all queries [B | 1, S_q] and of all keys [B | 1, S_k].
        """
        of_query, of_key = ids
        found = take(documents.find(of_query, of_key), self.queries, rank, 2)
        ranges = self.ranges(rank, of_query.device)
        if found.dtype == torch.bool:
            key = torch.arange(self.keys.total, device=of_query.device)
            return found & (ranges[..., :1] <= key) & (key < ranges[..., 1:])
        first, stop = (torch.maximum(found[..., 0], ranges[..., 0]), torch.minimum(found[..., 1], ranges[..., 1]))
        return torch.stack([first, stop], dim=-1)


def of_piece(mask: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The rows of a piece, of a mask over all keys, as an attn_mask of the piece's slice of keys."""
    rows = mask[:, :, piece.at : piece.at + piece.length]
    if mask.dtype == torch.bool:
        return rows[..., piece.start : piece.stop]
    return (rows - piece.start).clamp_(0, piece.stop - piece.start)


def arguments(piece: Piece, mask: torch.Tensor | None) -> dict[str, Any]:
    """What sdpa is told of the masks of a piece."""
    if piece.ranged:
        assert mask is not None
        return {"attn_mask": of_piece(mask, piece)}
    return {"causal": piece.causal, "window": piece.window}
