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
        start: the first key's place in the tensor of keys.
        stop: one past the last key's; `start` where no key is seen.
        place: the first key's place in the sequence.
        causal: the alignment in the slice; None without a causal mask.
        window: as sdpa has it, in the slice.
        ranged: whether ranges of keys say what is seen, in place of the two before.
    """

    at: int
    length: int
    start: int
    stop: int
    place: int
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
        return self._span(chunk, Chunk(0, self.keys.total, 0))

    def _span(self, chunk: Chunk, keys: Chunk) -> tuple[int, int]:
        left, right = self.ends
        first = 0 if left == UNBOUNDED else chunk.start + self.shift - left
        stop = keys.stop if right == UNBOUNDED else chunk.stop + self.shift + right
        first, stop = max(first, keys.start), min(stop, keys.stop)
        return (first, stop) if first < stop and chunk.length else (keys.start, keys.start)

    def _piece(self, chunk: Chunk, keys: Chunk) -> Piece:
        """The call of a chunk of queries, on a chunk of keys."""
        start, stop = self._span(chunk, keys)
        left, right = self.ends
        local = keys.at - keys.start
        plain = Piece(chunk.at, chunk.length, start + local, stop + local, start)
        if start == stop:
            return plain
        starts = left == UNBOUNDED or start >= chunk.stop - 1 + self.shift - left
        ends = right == UNBOUNDED or stop <= chunk.start + self.shift + right + 1
        if self.documents:
            return plain._replace(ranged=True)
        if starts and ends:
            return plain
        if right == 0 and stop == chunk.stop + self.shift:
            return plain._replace(causal="lower_right", window=None if left == UNBOUNDED else (left, UNBOUNDED))
        return plain._replace(ranged=True)

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """The calls of every rank, of each the longest first."""
        whole = Chunk(0, self.keys.total, 0)
        found = [[self._piece(chunk, whole) for chunk in shard if chunk.length] for shard in self.queries.shards]
        return tuple(tuple(sorted(calls, key=lambda piece: piece.start - piece.stop)) for calls in found)

    @property
    def whole(self) -> Piece:
        """The call of all queries on all keys."""
        piece = Piece(0, self.queries.total, 0, self.keys.total, 0, self.causal)
        if self.documents:
            return piece._replace(causal=None, ranged=True)
        return piece if self.window == (UNBOUNDED, UNBOUNDED) else piece._replace(window=self.window)

    def blocks(self, rank: int, source: int) -> tuple[Piece, ...]:
        """The calls of a rank on the shard of keys of another; those that see nothing are left out."""
        found: list[Piece] = []
        for chunk in self.queries.shards[rank]:
            row: list[Piece] = []
            for keys in self.keys.shards[source]:
                piece = self._piece(chunk, keys)
                if piece.start == piece.stop:
                    continue
                before = row[-1] if row else None
                follows = before is not None and before.stop == piece.start and _is_plain(before)
                # Under a causal mask the first query has to see all that the merged call has ahead of this chunk.
                reaches = piece.causal is None or piece.place <= chunk.start + self.shift + 1
                if before is not None and follows and reaches and not piece.ranged and piece.window is None:
                    row[-1] = piece._replace(start=before.start, place=before.place)
                else:
                    row.append(piece)
            found += row
        if len(found) == 2 and all(map(_is_plain, found)):
            first, second = found
            same = (first.start, first.stop) == (second.start, second.stop)
            if same and first.at + first.length == second.at:
                return (first._replace(length=first.length + second.length),)
        return tuple(found)

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
        """What a rank sends to each: sends[source][target] are the parts of its shard that the target reads.

        Chunks that lie side by side here and there are one part.
        """
        ranks = range(self.keys.world)
        return tuple(tuple(self._sent(source, target) for target in ranks) for source in ranks)

    def _sent(self, source: int, target: int) -> tuple[Chunk, ...]:
        found: list[Chunk] = []
        for chunk in self.keys.shards[source]:
            for start, stop in self.needs[target]:
                first, end = max(start, chunk.start), min(stop, chunk.stop)
                if first >= end:
                    continue
                sent = Chunk(first, end - first, chunk.at + first - chunk.start)
                before = found[-1] if found else None
                if before is not None and (before.stop, before.at + before.length) == (sent.start, sent.at):
                    found[-1] = before._replace(length=before.length + sent.length)
                else:
                    found.append(sent)
        return tuple(found)

    def ranges(self, rank: int | None, device: torch.device) -> torch.Tensor:
        """The first key that each query of a rank, or of all, sees and one past the last, int32 [1, 1, S, 2]."""
        left, right = self.ends
        places = torch.arange(self.queries.total, dtype=torch.int64, device=device)
        place = (places if rank is None else take(places, self.queries, rank, 0)) + self.shift
        first = torch.zeros_like(place) if left == UNBOUNDED else place - left
        stop = torch.full_like(place, self.keys.total) if right == UNBOUNDED else place + right + 1
        bounds = torch.stack([first, stop], dim=-1).clamp_(0, self.keys.total)
        return bounds.int()[None, None]

    def mask(self, rank: int | None, ids: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """What a rank's queries see, with documents: int32 ranges [B | 1, 1, S_local, 2] or bool [.., S_local, S_k].

        `ids` are those of all queries [B | 1, S_q] and of all keys [B | 1, S_k].
        """
        of_query, of_key = ids
        found = documents.find(of_query, of_key)
        found = found if rank is None else take(found, self.queries, rank, 2)
        ranges = self.ranges(rank, of_query.device)
        if found.dtype == torch.bool:
            key = torch.arange(self.keys.total, device=of_query.device)
            return found & (ranges[..., :1] <= key) & (key < ranges[..., 1:])
        first = torch.maximum(found[..., 0], ranges[..., 0])
        stop = torch.minimum(found[..., 1], ranges[..., 1])
        return torch.stack([first, stop], dim=-1)


def _is_plain(piece: Piece) -> bool:
    """Whether all queries of a piece see all of its keys."""
    return piece.causal is None and piece.window is None and not piece.ranged


def of_piece(mask: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The rows of a piece, of a mask over all keys, as an attn_mask of the piece's slice of keys."""
    rows = mask[:, :, piece.at : piece.at + piece.length]
    if mask.dtype == torch.bool:
        return rows[..., piece.place : piece.place + piece.stop - piece.start]
    return (rows - piece.place).clamp_(0, piece.stop - piece.start)


def arguments(piece: Piece, mask: torch.Tensor | None) -> dict[str, Any]:
    """What sdpa is told of the masks of a piece."""
    if piece.ranged:
        assert mask is not None
        return {"attn_mask": of_piece(mask, piece)}
    return {"causal": piece.causal, "window": piece.window}
