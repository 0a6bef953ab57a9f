"""Attention with all keys and values in every rank's memory: gathered in groups of heads while others are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from microsdpa.distributed import collective, symmetric
from microsdpa.distributed.agreement import Agreement
from microsdpa.distributed.collective import on
from microsdpa.distributed.compute import (
    Grads,
    Inputs,
    Pair,
    Result,
    attend_piece,
    differentiate_piece,
    foreign_call,
)
from microsdpa.distributed.layout import take
from microsdpa.distributed.visible import Piece
from microsdpa.runtime import launcher

Gather = symmetric.Gather | collective.Gather
Attend = Callable[[torch.cuda.Stream | None, Piece, Inputs, torch.Tensor, "torch.Tensor | None"], None]
"""Attention of a piece of some heads on a stream: query, key and value, the output and the LSE."""


def gather_of(
    agreed: Agreement, key: torch.Tensor, value: torch.Tensor, spread: bool, recorded: bool = False
) -> Gather:
    """The gather of keys and values, of which nothing travels yet.

    spread: whether launches take turns on two streams: one fills the SMs that the end of the other leaves.
    recorded: whether what travels by symmetric memory is not played, but kept.
    """
    groups, visible = agreed.head_groups, agreed.visible
    if agreed.transport == "symmetric":
        given = agreed.group, (key, value), visible, groups, agreed.by_token
        return symmetric.Gather(*given, spread, recorded)
    return collective.Gather(agreed.group, (key, value), visible, groups, spread)


@contextmanager
def kept_up(gather: Gather) -> Iterator[None]:
    """A context that sends and takes what is left where this rank fails, so that no other waits for it."""
    try:
        yield
    except BaseException:
        for number in range(gather.begun, len(gather.heads)):
            gather.start(number)
        for number in range(gather.taken, len(gather.heads)):
            gather.wait(number)
        gather.finish()
        raise
    gather.finish()


def forward(
    agreed: Agreement, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, lse: bool
) -> Result:
    """Output [B, H, S_local, D] and LSE [B, H, S_local] of this rank's queries."""
    inputs = query, key, value
    played = _played(agreed, inputs, mask, lse)
    if played is not None:
        return played
    gather = gather_of(agreed, key, value, _is_spread(agreed))
    with kept_up(gather):
        result = _results(query, lse)

        def attend(
            stream: torch.cuda.Stream | None, piece: Piece, given: Inputs, out: torch.Tensor, sums: torch.Tensor | None
        ) -> None:
            with on(None if stream is gather.main else stream):
                attend_piece(agreed, piece, given, mask, out, sums)

        _attend_all(agreed, gather, query, result, attend)
    if isinstance(gather, symmetric.Gather):
        _record(agreed, inputs, mask, result)
    return result


def _is_spread(agreed: Agreement) -> bool:
    return len(agreed.head_groups) * len(agreed.calls) > 1


def _results(query: torch.Tensor, lse: bool) -> Result:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32) if lse else None


def _come(gather: Gather, query: torch.Tensor) -> Iterator[tuple[slice, slice, list[torch.Tensor]]]:
    """Heads of queries, heads of keys, and keys and values of each group, while the next group travels."""
    shared = query.shape[1] // gather.tensors[0].shape[1]
    gather.start(0)
    for number, (low, high) in enumerate(gather.heads):
        if number + 1 < len(gather.heads):
            gather.start(number + 1)
        yield slice(low * shared, high * shared), slice(low, high), gather.wait(number)


def _attend_all(agreed: Agreement, gather: Gather, query: torch.Tensor, result: Result, attend: Attend) -> None:
    """Let all groups of heads travel, and call `attend` for what is to be computed of each."""
    (out, sums), turn = result, 0
    for of, _, (keys, values) in _come(gather, query):
        for piece in agreed.calls:
            turn += 1
            stream = gather.streams[turn % len(gather.streams)] if gather.streams else None
            attend(stream, piece, (query[:, of], keys, values), out[:, of], None if sums is None else sums[:, of])


def _kind(agreed: Agreement, inputs: Inputs, lse: bool) -> tuple[object, ...]:
    """What calls have in common that play the same operations; shapes are in the agreement."""
    query, key, value = inputs
    return agreed, query.stride(), key.stride(), value.stride(), lse


def _played(agreed: Agreement, inputs: Inputs, mask: torch.Tensor | None, lse: bool) -> Result | None:
    """The result of a call whose operations are known; None for another one."""
    if agreed.transport != "symmetric" or forward_ad._current_level >= 0:
        return None
    buffer = symmetric.known_buffer(agreed.group)
    prepared = None if buffer is None else buffer.prepared.get(_kind(agreed, inputs, lse))
    if prepared is None or prepared.mask is not mask:
        return None
    try:
        out, sums = _results(inputs[0], lse)
    except torch.OutOfMemoryError:
        return None  # the long way fails, too, and sends what others wait for
    return (out, sums) if prepared.play(*inputs, out, sums) else None


def _record(agreed: Agreement, inputs: Inputs, mask: torch.Tensor | None, result: Result) -> None:
    """Keep what a call that was just made plays, for those like it."""
    query, key, value = inputs
    kind, buffer = _kind(agreed, inputs, result[1] is not None), symmetric.known_buffer(agreed.group)
    own = mask is None or mask is vars(agreed).get("ranges")
    if buffer is None or kind in buffer.prepared or not own:
        return
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    gather = gather_of(agreed, key, value, _is_spread(agreed), recorded=True)
    assert isinstance(gather, symmetric.Gather)
    calls: list[launcher.Call | None] = []

    def attend(
        stream: torch.cuda.Stream | None, piece: Piece, given: Inputs, out: torch.Tensor, sums: torch.Tensor | None
    ) -> None:
        gather.operations.launch(gather.handle(stream), len(calls))
        calls.append(foreign_call(agreed, piece, given, mask, out, sums))

    _attend_all(agreed, gather, query, result, attend)
    gather.finish()
    known, play = [call for call in calls if call is not None], None
    # Shards that are copied first have no place of their own.
    if len(known) == len(calls) and gather.tensors[0] is key and gather.tensors[1] is value:
        play = launcher.prepared_exchange(buffer.context, gather.operations.packed(), (*inputs, *result), known)
    buffer.remember(kind, None if play is None else symmetric.Prepared(play, mask))


def backward(
    agreed: Agreement, inputs: Inputs, result: Pair, grads: Grads, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's shards. Keys and values are gathered again; sums over ranks are in the ranks' order."""
    query, key, value = inputs
    gather = gather_of(agreed, key, value, spread=False)
    d_query = torch.zeros_like(query, dtype=torch.float32)
    d_key, d_value = torch.empty_like(key), torch.empty_like(value)
    kept: list[torch.Tensor] = []
    with kept_up(gather):
        for of, of_keys, (keys, values) in _come(gather, query):
            parts = [torch.zeros(keys.shape, dtype=torch.float32, device=keys.device) for _ in range(2)]
            for piece in agreed.visible.pieces[agreed.rank]:
                (out, lse), (grad_out, grad_lse) = result, grads
                of_result, of_grads = (
                    (out[:, of], lse[:, of]),
                    (grad_out[:, of], None if grad_lse is None else grad_lse[:, of]),
                )
                sums = d_query[:, of], parts[0], parts[1]
                differentiate_piece(agreed, piece, (query[:, of], keys, values), of_result, of_grads, mask, sums)
            kept += sum_over_ranks(agreed, parts, (d_key[:, of_keys], d_value[:, of_keys]))
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
