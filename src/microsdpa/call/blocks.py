"""Block masks: which blocks of keys each block of queries sees, in full or in part."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from microsdpa.call.summary import summed
from microsdpa.errors import InvalidArgument

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

LEAST_BLOCK = 64
"""Rows and keys of a block at least: kernels skip tiles of so many keys."""
MAX_MASK_CHUNK = 2**26
"""Scores for which a mask_mod is asked at a time."""
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Sizes = tuple[int, int]


class BlockTable:
    """Which blocks of keys each block of queries sees; the argument block_mask of sdpa.

    Its entries are checked once, when it is made, for which the device is waited for. Calls only read it; the tensors
    that it was made of may be changed afterwards.

    Attributes:
        seqlens: (S_q, S_k).
        block_size: (queries, keys) of a block. The last blocks may reach beyond the sequences.
        partial_counts: int32 [B | 1, H | 1, query blocks]: how many blocks of keys a block of queries sees in part.
        partial_indices: int32 [B | 1, H | 1, query blocks, key blocks]: which ones, ascending; 0 behind the last.
        full_counts: the same for blocks of which every score counts.
        full_indices: the same.
        memory: uint8 [B | 1, H | 1, S_q, W]: what all blocks together show, S_k bytes a query, and a summary of them
            (summary.py).
    """

    def __init__(
        self,
        table: torch.Tensor,
        block_size: int | Sizes,
        seqlen_q: int,
        seqlen_k: int,
        *,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Make one of a table of blocks.

        Args:
            table: bool [B | 1, H | 1, query blocks, key blocks], or the last two, or three, of its dimensions: whether
                a block is seen.
            block_size: of the queries and the keys, or one number for both, at least 64.
            seqlen_q: S_q.
            seqlen_k: S_k.
            mask: bool, broadcastable to [B | 1, H | 1, S_q, S_k]: what the blocks show of their scores; None for all.

        Raises:
            InvalidArgument: the table has another shape or type.
        """
        sizes = _check_block_size(block_size)
        seqlens = seqlen_q, seqlen_k
        if not all(isinstance(length, int) and length > 0 for length in seqlens):
            hint = "pass the lengths of query and key"
            raise InvalidArgument("seqlen_q, seqlen_k", expected="integers over 0", got=repr(seqlens), hint=hint)
        blocks = [-(-length // size) for length, size in zip(seqlens, sizes, strict=True)]
        if not isinstance(table, torch.Tensor) or table.dtype != torch.bool:
            got = str(table.dtype) if isinstance(table, torch.Tensor) else type(table).__name__
            raise InvalidArgument("table", expected="a bool tensor", got=got, hint="call .to(torch.bool)")
        if not 2 <= table.dim() <= 4 or list(table.shape[-2:]) != blocks:
            raise InvalidArgument(
                "table",
                expected=f"shape [B, H, {blocks[0]}, {blocks[1]}], a block for each {sizes[0]} of {seqlen_q} queries "
                f"and {sizes[1]} of {seqlen_k} keys",
                got=f"shape {list(table.shape)}",
                hint="B and H may be 1, or be left out",
            )
        table = table[(None,) * (4 - table.dim())]
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool):
            got = str(mask.dtype) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise InvalidArgument("mask", expected="a bool tensor", got=got, hint="call .to(torch.bool)")
        self._fill(table, sizes, seqlens, mask)

    def _fill(self, table: torch.Tensor, sizes: Sizes, seqlens: Sizes, mask: torch.Tensor | None) -> None:
        self.seqlens, self.block_size = seqlens, sizes
        shown = _by_element(table, sizes, seqlens)
        self.memory = summed(shown if mask is None else shown & mask.to(table.device))
        some, every = _kinds(self.mask, sizes)
        self.partial_counts, self.partial_indices = _lists(some & ~every)
        self.full_counts, self.full_indices = _lists(every)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and unpickled tables have memory of their own."""
        vars(self).update(state)
        self.memory = summed(self.mask)

    @property
    def mask(self) -> torch.Tensor:
        """What all blocks together show: bool [B | 1, H | 1, S_q, S_k], a view of `memory`."""
        return self.memory[..., : self.seqlens[1]].view(torch.bool)

    @staticmethod
    def of(block_mask: BlockMask) -> BlockTable:
        """The table of a BlockMask of torch.nn.attention.flex_attention.

        Its kv_num_blocks and kv_indices, and those of full blocks, are taken, and its mask_mod is asked once for every
        score of the partial blocks' rows, with the batch entries and heads that the BlockMask has.

        Raises:
            InvalidArgument: an entry is out of range, or there twice; the message names it.
        """
        sizes = _check_block_size(block_mask.BLOCK_SIZE)
        seqlen_q, seqlen_k = block_mask.seq_lengths
        blocks = -(-seqlen_q // sizes[0]), -(-seqlen_k // sizes[1])
        partial = _table_of("kv", block_mask.kv_num_blocks, block_mask.kv_indices, blocks)
        if block_mask.full_kv_num_blocks is None:
            full = torch.zeros_like(partial)
        else:
            full = _table_of("full_kv", block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks)
        both = partial & full
        if bool(both.any()):
            entry = both.nonzero()[0].tolist()
            hint = "a block is one of the two"
            raise InvalidArgument(
                "block_mask", expected="blocks in kv_indices or in full_kv_indices", got=f"{entry} in both", hint=hint
            )
        found = object.__new__(BlockTable)
        shown = _asked(block_mask.mask_mod, partial, sizes, (seqlen_q, seqlen_k))
        found._fill(partial | full, sizes, (seqlen_q, seqlen_k), shown | _by_element(full, sizes, (seqlen_q, seqlen_k)))
        return found

    def check(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Refuse a table that is of other sequences than query [B, H, S_q, D] and key [B, H_kv, S_k, D].

        Raises:
            InvalidArgument: it is.
        """
        if self.seqlens != (query.shape[2], key.shape[2]):
            raise InvalidArgument(
                "block_mask",
                expected=f"one for S_q = {query.shape[2]} and S_k = {key.shape[2]}",
                got=f"one for {self.seqlens[0]} and {self.seqlens[1]}",
                hint="make it for these lengths",
            )
        for letter, size, whole in zip("BH", self.memory.shape[:2], query.shape[:2], strict=True):
            if size not in (1, whole):
                got, hint = f"{size}", "make it for all of them, or for one"
                raise InvalidArgument("block_mask", expected=f"{letter} = 1 or {whole}", got=got, hint=hint)
        if self.memory.device != query.device:
            raise InvalidArgument(
                "block_mask",
                expected=f"one on {query.device}, as query is",
                got=str(self.memory.device),
                hint="make it of tensors there",
            )


_known: dict[int, tuple[weakref.ref[Any], BlockTable]] = {}


def table_of(block_mask: object) -> BlockTable:
    """The table of a BlockTable or a BlockMask, which is looked at once as long as it lives.

    Raises:
        InvalidArgument: it is neither, or an entry is out of range; or a BlockMask is first seen in a CUDA graph.
    """
    if isinstance(block_mask, BlockTable):
        return block_mask
    name = id(block_mask)
    known = _known.get(name)
    if known is not None and known[0]() is block_mask:
        return known[1]
    if not all(hasattr(block_mask, part) for part in ("kv_num_blocks", "kv_indices", "seq_lengths", "BLOCK_SIZE")):
        raise InvalidArgument(
            "block_mask",
            expected="a BlockMask of torch.nn.attention.flex_attention or a microsdpa.BlockTable",
            got=type(block_mask).__name__,
            hint="microsdpa.BlockTable(table, block_size, S_q, S_k) is one of a bool table",
        )
    counts = block_mask.kv_num_blocks  # type: ignore[attr-defined]
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(
            "block_mask",
            expected="one that was looked at before the capture",
            got="a new BlockMask",
            hint="make a microsdpa.BlockTable.of(block_mask) of it before, or call sdpa once",
        )
    found = BlockTable.of(block_mask)  # type: ignore[arg-type]
    _known[name] = weakref.ref(block_mask, lambda _: _known.pop(name, None)), found
    return found


def _check_block_size(block_size: object) -> Sizes:
    pair = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    numbers = [size for size in pair if isinstance(size, int) and not isinstance(size, bool) and size >= LEAST_BLOCK]
    if len(pair) != 2 or len(numbers) != 2:
        raise InvalidArgument(
            "block_size",
            expected=f"(queries, keys) of a block, integers of at least {LEAST_BLOCK}",
            got=repr(block_size),
            hint="128 is the block size of BlockMask",
        )
    return numbers[0], numbers[1]


def _table_of(name: str, counts: torch.Tensor, indices: torch.Tensor | None, blocks: Sizes) -> torch.Tensor:
    """Bool [B | 1, H | 1, *blocks] of the lists of a BlockMask; no entry is used before it is known to be in range."""
    rows, columns = blocks
    if indices is not None:
        counts, indices = counts[(None,) * (3 - counts.dim())], indices[(None,) * (4 - indices.dim())]
    if indices is None or counts.dim() != 3 or indices.dim() != 4 or counts.shape != indices.shape[:3]:
        shapes = f"{list(counts.shape)} and {None if indices is None else list(indices.shape)}"
        raise InvalidArgument(
            "block_mask",
            expected=f"{name}_num_blocks [B, H, {rows}] and {name}_indices [B, H, {rows}, {columns}]",
            got=shapes,
            hint="make it with create_block_mask, or with BlockMask.from_kv_blocks",
        )
    if counts.shape[2] != rows:
        raise InvalidArgument(
            "block_mask",
            expected=f"{rows} rows of blocks in {name}_num_blocks, as seq_lengths and BLOCK_SIZE say",
            got=str(counts.shape[2]),
            hint="make it for these lengths",
        )
    width = indices.shape[3]
    _refuse_entry(f"{name}_num_blocks", counts, (counts < 0) | (counts > min(width, columns)), min(width, columns))
    listed = torch.arange(width, device=counts.device) < counts[..., None]
    _refuse_entry(f"{name}_indices", indices, listed & ((indices < 0) | (indices >= columns)), columns - 1)
    kept = torch.where(listed, indices.long(), columns)
    seen = torch.zeros(*counts.shape, columns + 1, dtype=torch.int32, device=counts.device)
    seen.scatter_add_(3, kept, torch.ones_like(kept, dtype=torch.int32))
    seen = seen[..., :columns]
    if bool((seen > 1).any()):
        b, h, row, column = (seen > 1).nonzero()[0].tolist()
        got = f"block {column} twice in {name}_indices[{b}, {h}, {row}]"
        raise InvalidArgument("block_mask", expected="every block of a row once", got=got, hint="remove the second one")
    return seen == 1


def _refuse_entry(name: str, values: torch.Tensor, wrong: torch.Tensor, most: int) -> None:
    """Raise an error that names the first wrong entry of a tensor."""
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise InvalidArgument(
            "block_mask",
            expected=f"{name}{place} from 0 to {most}",
            got=str(int(values[tuple(place)])),
            hint="make it with create_block_mask, or correct this entry",
        )


def _by_element(table: torch.Tensor, sizes: Sizes, seqlens: Sizes) -> torch.Tensor:
    """Bool [.., S_q, S_k] of a table of blocks [.., query blocks, key blocks]."""
    rows, keys = (
        torch.arange(length, device=table.device) // size for length, size in zip(seqlens, sizes, strict=True)
    )
    return table[:, :, rows][..., keys]


def _asked(mask_mod: MaskMod, partial: torch.Tensor, sizes: Sizes, seqlens: Sizes) -> torch.Tensor:
    """What a mask_mod says of the rows of blocks that have partial ones: bool [B | 1, H | 1, S_q, S_k]."""
    from torch.nn.attention.flex_attention import create_mask

    (batch, heads, _, _), (seqlen_q, seqlen_k) = partial.shape, seqlens
    found = torch.zeros(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool, device=partial.device)
    needed = partial.any(dim=3).any(dim=1).any(dim=0).tolist()
    for first, last in _chunks(needed, sizes[0], seqlen_q, batch * heads * seqlen_k):

        def shifted(b: Any, h: Any, i: Any, j: Any, first: int = first) -> torch.Tensor:
            return mask_mod(b, h, i + first, j)

        part = create_mask(shifted, batch, heads, last - first, seqlen_k, device=partial.device)
        found[:, :, first:last] = part.to(torch.bool)
    return found


def _chunks(needed: list[bool], block: int, seqlen: int, row_scores: int) -> Iterator[Sizes]:
    """(first, last) rows of the blocks that are needed, a few at a time."""
    most = max(1, MAX_MASK_CHUNK // max(1, row_scores))
    for index, wanted in enumerate(needed):
        end = min(seqlen, (index + 1) * block)
        for first in range(index * block, end if wanted else 0, most):
            yield first, min(end, first + most)


def _kinds(mask: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a block shows any of its scores, and whether it shows all: bool [.., query blocks, key blocks]."""
    counts = mask
    for dim, size in ((3, sizes[1]), (2, sizes[0])):
        parts = torch.split(counts, size, dim=dim)
        counts = torch.stack([part.sum(dim=dim, dtype=torch.int32) for part in parts], dim=dim)
    rows, keys = (
        torch.tensor([min(size, length - at) for at in range(0, length, size)], device=mask.device)
        for length, size in zip(mask.shape[2:], sizes, strict=True)
    )
    return counts > 0, counts == rows[:, None] * keys


def _lists(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and ascending indices of what a table [.., query blocks, key blocks] has; 0 behind the last index."""
    counts = table.sum(dim=3, dtype=torch.int32)
    order = table.to(torch.int8).argsort(dim=3, descending=True, stable=True)
    listed = torch.arange(table.shape[3], device=table.device) < counts[..., None]
    return counts, order.where(listed, 0).int()
