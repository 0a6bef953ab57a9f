"""Attention with all keys and values in every rank's memory: gathered in groups of heads while others are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from microsdpa.distributed import collective, symmetric
from microsdpa.distributed.agreement import Agreement
from microsdpa.distributed.collective import on
from microsdpa.distributed.compute import Grads, Inputs, Pair, Result, attend_piece, differentiate_piece
from microsdpa.distributed.layout import take


def compute_streams(gather: symmetric.Gather | collective.Gather) -> list[torch.cuda.Stream]:
    """Streams that pieces are computed on in turn: one fills the SMs that the end of the other leaves."""
    return [] if gather.main is None or gather.compute is None else [gather.main, gather.compute]


def gather_of(agreed: Agreement, key: torch.Tensor, value: torch.Tensor) -> symmetric.Gather | collective.Gather:
    """The gather of keys and values, of which nothing travels yet."""
    groups = agreed.head_groups
    if agreed.transport == "symmetric":
        return symmetric.Gather(agreed.group, (key, value), agreed.visible, groups, agreed.by_token)
    return collective.Gather(agreed.group, (key, value), agreed.visible, groups)


@contextmanager
def kept_up(gather: symmetric.Gather | collective.Gather) -> Iterator[None]:
    """A context that sends and takes what is left where this rank fails, so that no other waits for it."""
    try:
        yield
    except BaseException:
        for number in range(gather.begun, len(gather.heads)):
            gather.start(number)
        for number in range(gather.taken, len(gather.heads)):
            gather.wait(number, *([] if gather.main is None else [gather.main]))
        gather.finish()
        raise
    gather.finish()


def forward(
    agreed: Agreement, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, lse: bool
) -> Result:
    """Output [B, H, S_local, D] and LSE [B, H, S_local] of this rank's queries."""
    gather = gather_of(agreed, key, value)
    out = torch.empty_like(query)
    sums = query.new_empty(query.shape[:3], dtype=torch.float32) if lse else None
    shared = query.shape[1] // key.shape[1]
    streams, turn = compute_streams(gather), 0
    with kept_up(gather):
        gather.start(0)
        for number, (low, high) in enumerate(gather.heads):
            if number + 1 < len(gather.heads):
                gather.start(number + 1)
            keys, values = gather.wait(number, *streams)
            of = slice(low * shared, high * shared)
            for piece in agreed.calls:
                turn += 1
                stream = streams[turn % len(streams)] if streams else None
                with on(None if stream is gather.main else stream):
                    inputs = query[:, of], keys, values
                    attend_piece(agreed, piece, inputs, mask, out[:, of], None if sums is None else sums[:, of])
    return out, sums


def backward(
    agreed: Agreement, inputs: Inputs, result: Pair, grads: Grads, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's shards. Keys and values are gathered again; sums over ranks are in the ranks' order."""
    query, key, value = inputs
    gather = gather_of(agreed, key, value)
    d_query = torch.zeros_like(query, dtype=torch.float32)
    d_key, d_value = torch.empty_like(key), torch.empty_like(value)
    shared = query.shape[1] // key.shape[1]
    kept: list[torch.Tensor] = []
    with kept_up(gather):
        gather.start(0)
        for number, (low, high) in enumerate(gather.heads):
            if number + 1 < len(gather.heads):
                gather.start(number + 1)
            keys, values = gather.wait(number, *([] if gather.main is None else [gather.main]))
            of = slice(low * shared, high * shared)
            parts = [torch.zeros(keys.shape, dtype=torch.float32, device=keys.device) for _ in range(2)]
            for piece in agreed.visible.pieces[agreed.rank]:
                (out, lse), (grad_out, grad_lse) = result, grads
                of_result, of_grads = (
                    (out[:, of], lse[:, of]),
                    (grad_out[:, of], None if grad_lse is None else grad_lse[:, of]),
                )
                sums = d_query[:, of], parts[0], parts[1]
                differentiate_piece(agreed, piece, (query[:, of], keys, values), of_result, of_grads, mask, sums)
            kept += sum_over_ranks(agreed, parts, (d_key[:, low:high], d_value[:, low:high]))
    if gather.main is not None:
        gather.main.wait_stream(collective.side_streams(query.device)[0])
    del kept
    return d_query.to(query.dtype), d_key, d_value


def sum_over_ranks(
    agreed: Agreement, parts: list[torch.Tensor], sums: tuple[torch.Tensor, torch.Tensor]
) -> list[torch.Tensor]:
    """Send every rank its part of the gradients [B, heads, S_k, D], and add what comes to `sums`, this rank's.

    It gives what must not be freed before the side stream has been waited for.
    """
    layout, first = agreed.keys, sums[0]
    shape = layout.world, len(parts), *parts[0].shape[:2], layout.longest, parts[0].shape[3]
    packed = first.new_zeros(shape)
    for rank in range(layout.world):
        for index, part in enumerate(parts):
            packed[rank, index, :, :, : layout.lengths[rank]] = take(part, layout, rank, 2)
    side = None
    if first.is_cuda:
        side = collective.side_streams(first.device)[0]
        side.wait_stream(torch.cuda.current_stream(first.device))
    with on(side):
        come = torch.empty_like(packed)
        dist.all_to_all_single(come, packed, group=agreed.group)
        for index, total in enumerate(sums):
            total.copy_(come[:, index, :, :, : total.shape[2]].sum(dim=0, dtype=torch.float32))
    return [packed, come]
