"""Attention with all keys and values in every rank's memory: gathered in groups of heads while others are computed."""

from __future__ import annotations

import torch

from microsdpa.attention.api import sdpa
from microsdpa.distributed import collective, symmetric
from microsdpa.distributed.agreement import Agreement
from microsdpa.distributed.collective import on
from microsdpa.distributed.visible import Piece, arguments

Result = tuple[torch.Tensor, "torch.Tensor | None"]
MOST_GROWTH = 4.0
FIRST_PART = 16
"""The first group has 1 / FIRST_PART of the heads, if that is one."""


def head_groups(heads: int, ratio: float) -> list[tuple[int, int]]:
    """Groups of heads: the first of each and one past the last. The first group is small, as nothing hides its way.

    While a group is computed the next one travels, which may be `ratio` times as large: the time of computing a head
    over that of its transfer.
    """
    growth = min(max(ratio, 1.0), MOST_GROWTH)
    found, low, size = [], 0, float(max(1, heads // FIRST_PART))
    while low < heads:
        high = low + int(size)
        if heads - high < size / 2:
            high = heads
        found.append((low, high))
        low, size = high, size * growth
    return found


def attend_piece(
    agreed: Agreement,
    piece: Piece,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attention of one piece into `out` [B, H, S_local, D] and `lse` [B, H, S_local].

    `inputs` are the queries of this rank, and all keys and values.
    """
    query, key, value = inputs
    rows = slice(piece.at, piece.at + piece.length)
    if piece.start == piece.stop:
        out[:, :, rows] = 0
        if lse is not None:
            lse[:, :, rows] = -torch.inf
        return
    seen = slice(piece.start, piece.stop)
    found = sdpa(
        *(query[:, :, rows], key[:, :, seen], value[:, :, seen]),
        **arguments(piece, mask),
        scale=agreed.scale,
        softcap=agreed.softcap,
        enable_gqa=True,
        return_lse=lse is not None,
        out=out[:, :, rows],
    )
    if lse is not None:
        lse[:, :, rows] = found[1]


def compute_streams(gather: symmetric.Gather | collective.Gather) -> list[torch.cuda.Stream]:
    """Streams that pieces are computed on in turn: one fills the SMs that the end of the other leaves."""
    return [] if gather.main is None or gather.compute is None else [gather.main, gather.compute]


def forward(
    agreed: Agreement, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, lse: bool
) -> Result:
    """Output [B, H, S_local, D] and LSE [B, H, S_local] of this rank's queries."""
    groups = head_groups(key.shape[1], agreed.ratio)
    gather: symmetric.Gather | collective.Gather
    if agreed.transport == "symmetric":
        gather = symmetric.Gather(agreed.group, (key, value), agreed.visible, groups, agreed.by_token)
    else:
        gather = collective.Gather(agreed.group, (key, value), agreed.visible, groups)
    out = torch.empty_like(query)
    sums = query.new_empty(query.shape[:3], dtype=torch.float32) if lse else None
    shared = query.shape[1] // key.shape[1]
    pieces = agreed.visible.pieces[agreed.rank]
    streams = compute_streams(gather)
    gather.start(0)
    for number, (low, high) in enumerate(groups):
        if number + 1 < len(groups):
            gather.start(number + 1)
        keys, values = gather.wait(number, *streams)
        of = slice(low * shared, high * shared)
        for index, piece in enumerate(pieces):
            with on(streams[index % len(streams)] if streams else None):
                inputs = query[:, of], keys, values
                attend_piece(agreed, piece, inputs, mask, out[:, of], None if sums is None else sums[:, of])
    gather.finish()
    return out, sums
