"""Masks of booleans, and in the same memory a summary, bits, and lists of the tiles of keys that rows see.

A row of memory has S_k booleans; a byte for every 32 keys that says whether it shows none, some or all of them; a bit
for each key; and, in the first row of every 128, which tiles of keys these rows see. Kernels of 128 queries a CTA go
through that list, and read bits only where some are hidden; smaller ones read the summary.
"""

from __future__ import annotations

import weakref
from typing import TypeGuard

import torch

GRANULE = 32
"""Keys of a byte of the summary: 0 shows none of them, 1 some, 2 all that there are."""
GROUP = 128
"""Keys whose bits are 16 bytes, a word of 32 bits for each of four lanes: bit 2 n + e of a lane is key
8 n + 2 lane + e, as an accumulator has them."""
ALIGNMENT = 128
"""Bytes that each part of a row is filled up to, except that lists follow each other."""
TILE_ROWS = 128
"""Queries of a list."""
TILE_KEYS = 128, 96, 64
"""Keys of the tiles of each list, in the lists' order in memory.

A list has integers of 4 bytes: how many tiles it names, and for each twice its number, plus 1 if nothing is hidden.
"""

_made: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def summed(mask: torch.Tensor) -> torch.Tensor:
    """Memory of a bool mask [B, H, S_q, S_k], its summary, its bits and its lists.

    Returns:
        uint8 [B, H, S_q, W], W a multiple of 128.
    """
    *outer, keys = mask.shape
    summary_at, bits_at, lists_at, width = _places(keys)
    memory = torch.zeros(*outer, width, dtype=torch.uint8, device=mask.device)
    memory[..., :keys] = mask
    granules = -(-keys // GRANULE)
    filled = memory[..., : granules * GRANULE]  # zeros behind the last key, for which the first part has room
    shown = filled.view(*outer, granules, GRANULE).sum(dim=-1, dtype=torch.int32)
    existing = torch.full((granules,), GRANULE, dtype=torch.int32, device=mask.device)
    existing[-1] = keys - (granules - 1) * GRANULE
    summary = (shown > 0).byte() + (shown == existing).byte()
    memory[..., summary_at : summary_at + granules] = summary
    bits = _bits(memory[..., :summary_at])
    memory[..., bits_at : bits_at + bits.shape[-1]] = bits
    for tile_keys in TILE_KEYS:
        listed = _list(summary, tile_keys)
        size = 4 * listed.shape[-1]
        memory[..., ::TILE_ROWS, lists_at : lists_at + size].view(torch.int32).copy_(listed)
        lists_at += size
    _made[id(memory)] = memory
    return memory


def _filled(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _places(keys: int) -> tuple[int, int, int, int]:
    """Bytes from a row's start to its summary, its bits, its lists and its end."""
    summary = _filled(keys)
    bits = summary + _filled(-(-keys // GRANULE))
    lists = bits + _filled((-(-keys // GROUP) + 1) * GROUP // 8)  # a kernel may read one group more
    return summary, bits, lists, lists + _filled(sum(4 + -(-keys // tile) * 4 for tile in TILE_KEYS))


def _bits(booleans: torch.Tensor) -> torch.Tensor:
    """Uint8 [.., bytes] of uint8 [.., keys] that are 0 or 1, of whole groups."""
    *outer, keys = booleans.shape
    # Of a group: the byte of a lane's word, the four pairs of keys in it, the lane, the key of a pair.
    apart = booleans.view(*outer, keys // GROUP, 4, 4, 4, 2)
    found = torch.zeros(*outer, keys // GROUP, 4, 4, dtype=torch.uint8, device=booleans.device)
    for pair in range(4):
        for key in range(2):
            found |= apart[..., pair, :, key] << (2 * pair + key)
    return found.transpose(-1, -2).flatten(-3)


def _list(summary: torch.Tensor, tile_keys: int) -> torch.Tensor:
    """Int32 [.., query tiles, 1 + key tiles] of a summary [.., S_q, granules]: a number, and so many entries.

    A list has one entry at least, so that rows without keys are written too.
    """
    *outer, rows, granules = summary.shape
    each = tile_keys // GRANULE
    query_tiles, key_tiles = -(-rows // TILE_ROWS), -(-granules // each)
    missing = 0, key_tiles * each - granules, 0, query_tiles * TILE_ROWS - rows
    shape = *outer, query_tiles, TILE_ROWS, key_tiles, each
    some = torch.nn.functional.pad(summary, missing, value=0).view(shape).amax(dim=(-1, -3)) > 0
    every = torch.nn.functional.pad(summary, missing, value=2).view(shape).amin(dim=(-1, -3)) == 2
    counts = some.sum(dim=-1, keepdim=True, dtype=torch.int32)
    order = some.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    entries = 2 * order.int() + every.gather(-1, order)
    listed = torch.arange(key_tiles, device=summary.device) < counts
    return torch.cat([counts.clamp(min=1), entries.where(listed, 0)], dim=-1)


def is_summed(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether summed() made this tensor."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8 and _made.get(id(tensor)) is tensor
