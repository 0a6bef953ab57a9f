"""Attention with all tokens of a part of the heads on every rank: all-to-all ahead and behind (Ulysses).

Rank r computes heads r * H / W to (r + 1) * H / W. They are exchanged in groups: while a group is computed, the next
one comes and the one before goes back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from microsdpa.distributed import collective
from microsdpa.distributed.agreement import Agreement
from microsdpa.distributed.collective import on
from microsdpa.distributed.compute import Grads, Inputs, Pair, Result, attend_piece, differentiate_piece
from microsdpa.distributed.layout import Layout, put, take
from microsdpa.distributed.model import parts_of_heads


def groups_of(agreed: Agreement, heads_kv: int) -> list[tuple[int, int]]:
    """Groups of a rank's key heads, by their numbers on the rank."""
    mine = heads_kv // agreed.keys.world
    parts = parts_of_heads(mine, agreed.together)
    return [(mine * part // parts, mine * (part + 1) // parts) for part in range(parts)]


def to_heads(
    agreed: Agreement, tensor: torch.Tensor, layout: Layout, low: int, high: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Heads `low` to `high` of this rank's part, [B, heads, S, ...], of shards [B, H, S_local, ...] of all ranks.

    The list has what must not be freed before the stream has been waited for.
    """
    world, mine = layout.world, tensor.shape[1] // layout.world
    shape = tensor.shape[0], high - low, layout.longest, *tensor.shape[3:]
    packed = tensor.new_zeros((world, *shape))
    for rank in range(world):
        packed[rank, :, :, : tensor.shape[2]] = tensor[:, rank * mine + low : rank * mine + high]
    come = torch.empty_like(packed)
    dist.all_to_all_single(come, packed, group=agreed.group)
    whole = tensor.new_empty((tensor.shape[0], high - low, layout.total, *tensor.shape[3:]))
    for rank in range(world):
        put(come[rank], whole, layout, rank, 2)
    return whole, [packed, come]


def to_tokens(
    agreed: Agreement, whole: torch.Tensor, layout: Layout, shard: torch.Tensor, low: int, high: int
) -> list[torch.Tensor]:
    """The way back: heads `low` to `high` of every rank's part [B, heads, S, ...] into shards [B, H, S_local, ...].

    It gives what must not be freed before the stream has been waited for.
    """
    world, mine = layout.world, shard.shape[1] // layout.world
    shape = whole.shape[0], high - low, layout.longest, *whole.shape[3:]
    packed = whole.new_zeros((world, *shape))
    for rank in range(world):
        packed[rank, :, :, : layout.lengths[rank]] = take(whole, layout, rank, 2)
    come = torch.empty_like(packed)
    dist.all_to_all_single(come, packed, group=agreed.group)
    for rank in range(world):
        shard[:, rank * mine + low : rank * mine + high] = come[rank, :, :, : shard.shape[2]]
    return [packed, come]


class _Streams:
    """The caller's stream, and one on which heads come and go; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.side = collective.side_streams(device)[0] if device.type == "cuda" else None
        self.kept: list[torch.Tensor] = []
        self.join_side()

    def join_side(self) -> None:
        """Let the side stream wait for what was launched on the caller's."""
        if self.side is not None and self.main is not None:
            self.side.wait_stream(self.main)

    def join_main(self) -> None:
        """Let the caller's stream wait for what was launched on the side stream."""
        if self.side is not None and self.main is not None:
            self.main.wait_stream(self.side)

    def bring(self, agreed: Agreement, tensors: list[tuple[torch.Tensor, Layout, int, int]]) -> list[torch.Tensor]:
        """Heads of some tensors, from the side stream."""
        found = []
        with on(self.side):
            for tensor, layout, low, high in tensors:
                whole, kept = to_heads(agreed, tensor, layout, low, high)
                self.kept += [whole, *kept]
                found.append(whole)
        return found


def forward(
    agreed: Agreement, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, lse: bool
) -> Result:
    """Output [B, H, S_local, D] and LSE [B, H, S_local] of this rank's queries."""
    groups, shared, piece = groups_of(agreed, key.shape[1]), query.shape[1] // key.shape[1], agreed.visible.whole
    out = torch.empty_like(query)
    sums = query.new_empty(query.shape[:3], dtype=torch.float32) if lse else None
    streams = _Streams(query.device)

    def bring(number: int) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        low, high = groups[number]
        of_query = query, agreed.queries, low * shared, high * shared
        found = streams.bring(agreed, [of_query, (key, agreed.keys, low, high), (value, agreed.keys, low, high)])
        return found, None if streams.side is None else streams.side.record_event()

    coming = bring(0)
    for number, (low, high) in enumerate(groups):
        (queries, keys, values), come = coming
        if number + 1 < len(groups):
            coming = bring(number + 1)
        if streams.main is not None and come is not None:
            streams.main.wait_event(come)
        result = torch.empty_like(queries)
        of_rows = None if sums is None else queries.new_empty(queries.shape[:3], dtype=torch.float32)
        attend_piece(agreed, piece, (queries, keys, values), mask, result, of_rows)
        streams.join_side()
        with on(streams.side):
            of = low * shared, high * shared
            streams.kept += [result, *to_tokens(agreed, result, agreed.queries, out, *of)]
            if sums is not None and of_rows is not None:
                streams.kept += [of_rows, *to_tokens(agreed, of_rows, agreed.queries, sums, *of)]
    streams.join_main()
    return out, sums


def backward(
    agreed: Agreement, inputs: Inputs, result: Pair, grads: Grads, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's shards; all tensors are exchanged again."""
    (query, key, value), (out, lse), (grad_out, grad_lse) = inputs, result, grads
    groups, shared, piece = groups_of(agreed, key.shape[1]), query.shape[1] // key.shape[1], agreed.visible.whole
    found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    streams = _Streams(query.device)
    of_queries = [query, out, lse, grad_out] + ([] if grad_lse is None else [grad_lse])
    for low, high in groups:
        of = low * shared, high * shared
        asked = [(tensor, agreed.queries, *of) for tensor in of_queries]
        asked += [(tensor, agreed.keys, low, high) for tensor in (key, value)]
        queries, outs, rows, grad_outs, *rest, keys, values = streams.bring(agreed, asked)
        streams.join_main()
        sums = tuple(torch.zeros_like(tensor, dtype=torch.float32) for tensor in (queries, keys, values))
        given = (queries, keys, values), (outs, rows), (grad_outs, rest[0] if rest else None)
        differentiate_piece(agreed, piece, *given, mask, (sums[0], sums[1], sums[2]))
        made = [total.to(query.dtype) for total in sums]
        streams.join_side()
        layouts = agreed.queries, agreed.keys, agreed.keys
        with on(streams.side):
            for total, layout, shard, at in zip(made, layouts, found, (of, (low, high), (low, high)), strict=True):
                streams.kept += [total, *to_tokens(agreed, total, layout, shard, *at)]
    streams.join_main()
    return found
