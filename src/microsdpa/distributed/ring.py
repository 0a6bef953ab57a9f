"""Attention while keys and values go round the ranks: memory for two shards of them, and partial results are merged.

Few partial results are merged by the launches of attention themselves, into an output of 16 bits that is rounded each
time. Many are added up in FP32, in launches of their own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from microsdpa.distributed import collective
from microsdpa.distributed.agreement import Agreement
from microsdpa.distributed.collective import on
from microsdpa.distributed.compute import (
    Grads,
    Inputs,
    Pair,
    Result,
    attend_piece,
    continue_piece,
    differentiate_piece,
)
from microsdpa.distributed.visible import Piece

MOST_ROUNDINGS = 4
"""Partial results of a query that launches of attention merge; more would be rounded too often."""


class _Ring:
    """Tensors that go from rank to rank: to the next one, from the one before."""

    def __init__(self, agreed: Agreement, device: torch.device) -> None:
        self.agreed, self.group = agreed, agreed.group
        self.main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.side = collective.side_streams(device)[0] if device.type == "cuda" else None
        world = agreed.keys.world
        self.next = dist.get_global_rank(self.group, (agreed.rank + 1) % world)
        self.before = dist.get_global_rank(self.group, (agreed.rank - 1) % world)
        self.kept: list[torch.Tensor] = []

    def turn(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        """Send a tensor [n, B, H_kv, S, D] on, once it is computed, and give the one that comes, of another length."""
        come = tensor.new_empty((*tensor.shape[:3], length, tensor.shape[4]))
        if self.side is not None and self.main is not None:
            self.side.wait_stream(self.main)
        with on(self.side):
            calls = []
            if tensor.numel():
                calls.append(dist.P2POp(dist.isend, tensor, self.next, self.group))
            if come.numel():
                calls.append(dist.P2POp(dist.irecv, come, self.before, self.group))
            for work in dist.batch_isend_irecv(calls) if calls else ():
                work.wait()
        self.kept += [tensor, come]
        return come

    def arrive(self) -> None:
        """Let the caller's stream wait for what comes."""
        if self.side is not None and self.main is not None:
            self.main.wait_stream(self.side)


def forward(
    agreed: Agreement, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, lse: bool
) -> Result:
    """Output [B, H, S_local, D] and LSE [B, H, S_local] of this rank's queries."""
    world, ring = agreed.keys.world, _Ring(agreed, query.device)
    total: _InLaunches | _InFp32 = (_InLaunches if _are_few(agreed) else _InFp32)(agreed, query, mask)
    here = torch.stack([key, value])
    for step in range(world):
        source = (agreed.rank - step) % world
        if step + 1 < world:
            come = ring.turn(here, agreed.keys.lengths[(source - 1) % world])
        for piece in agreed.visible.blocks(agreed.rank, source):
            total.add(piece, here[0], here[1])
        if step + 1 < world:
            ring.arrive()
            here = come
    return total.result(lse)


def _are_few(agreed: Agreement) -> bool:
    """Whether no query of this rank has more than MOST_ROUNDINGS partial results."""
    counts = [0] * len(agreed.visible.queries.shards[agreed.rank])
    for source in range(agreed.keys.world):
        for piece in agreed.visible.blocks(agreed.rank, source):
            for index, chunk in enumerate(agreed.visible.queries.shards[agreed.rank]):
                counts[index] += piece.at <= chunk.at < piece.at + piece.length
    return max(counts, default=0) <= MOST_ROUNDINGS


class _InLaunches:
    """Partial results that the launches of attention merge themselves."""

    def __init__(self, agreed: Agreement, query: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.agreed, self.query, self.mask = agreed, query, mask
        self.out = torch.zeros_like(query)
        self.chunks = agreed.visible.queries.shards[agreed.rank]
        self.sums = [
            torch.full((*query.shape[:2], chunk.length), -torch.inf, dtype=torch.float32, device=query.device)
            for chunk in self.chunks
        ]

    def add(self, piece: Piece, key: torch.Tensor, value: torch.Tensor) -> None:
        """Compute a piece, of one chunk of queries or of several that see the same."""
        for chunk, lse in zip(self.chunks, self.sums, strict=True):
            if chunk.length and piece.at <= chunk.at < piece.at + piece.length:
                own = piece._replace(at=chunk.at, length=chunk.length)
                continue_piece(self.agreed, own, (self.query, key, value), self.mask, self.out, lse)

    def result(self, lse: bool) -> Result:
        """Output and, on demand, LSE."""
        return self.out, torch.cat(self.sums, dim=2) if lse else None


class _InFp32:
    """Partial results that are added up in FP32."""

    def __init__(self, agreed: Agreement, query: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.agreed, self.query, self.mask = agreed, query, mask
        self.total = torch.zeros_like(query, dtype=torch.float32)
        self.sums = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)

    def add(self, piece: Piece, key: torch.Tensor, value: torch.Tensor) -> None:
        """Compute a piece."""
        rows = slice(piece.at, piece.at + piece.length)
        out, lse = self.query.new_empty(self.query.shape), torch.empty_like(self.sums)
        attend_piece(self.agreed, piece, (self.query, key, value), self.mask, out, lse)
        merge(self.total[:, :, rows], self.sums[:, :, rows], out[:, :, rows], lse[:, :, rows])

    def result(self, lse: bool) -> Result:
        """Output and, on demand, LSE."""
        return self.total.to(self.query.dtype), self.sums if lse else None


def merge(total: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Add a partial output [B, H, S, D] with its LSE [B, H, S] to `total` and `sums`, in place, both FP32."""
    both = torch.logaddexp(sums, lse)
    shown = both != -torch.inf  # the difference of two infinities is no number
    old, new = (torch.where(shown, (one - both).exp(), 0.0)[..., None] for one in (sums, lse))
    total.mul_(old).add_(out * new)
    sums.copy_(both)


def backward(
    agreed: Agreement, inputs: Inputs, result: Pair, grads: Grads, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's shards. Those of keys and values go round with them, in FP32."""
    (query, key, value), world, ring = inputs, agreed.keys.world, _Ring(agreed, inputs[0].device)
    d_query = torch.zeros_like(query, dtype=torch.float32)
    here = torch.stack([key, value])
    d_here = torch.zeros_like(here, dtype=torch.float32)
    for step in range(world):
        source = (agreed.rank - step) % world
        length = agreed.keys.lengths[(source - 1) % world]
        if step + 1 < world:
            come = ring.turn(here, length)
        for piece in agreed.visible.blocks(agreed.rank, source):
            sums = d_query, d_here[0], d_here[1]
            differentiate_piece(agreed, piece, (query, here[0], here[1]), result, grads, mask, sums)
        d_here = ring.turn(d_here, length)
        ring.arrive()
        if step + 1 < world:
            here = come
    return d_query.to(query.dtype), d_here[0].to(key.dtype), d_here[1].to(value.dtype)
