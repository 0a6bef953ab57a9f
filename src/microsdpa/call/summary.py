"""Masks of booleans with a summary: what a row shows of every 32 keys, behind its booleans in memory.

Kernels that list tiles read the summary, a byte for 32 keys, and booleans only where it says that some are hidden.
"""

from __future__ import annotations

import weakref
from typing import TypeGuard

import torch

GRANULE = 32
"""Keys of a byte of the summary: 0 shows none of them, 1 some, 2 all that there are."""
ALIGNMENT = 128
"""Bytes that the booleans of a row, and its summary, are filled up to."""

_made: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def summed(mask: torch.Tensor) -> torch.Tensor:
    """Memory of a bool mask [B, H, S_q, S_k] with its summary: uint8 [B, H, S_q, W], W a multiple of 128."""
    *outer, keys = mask.shape
    granules = -(-keys // GRANULE)
    first = -(-keys // ALIGNMENT) * ALIGNMENT
    width = first + -(-granules // ALIGNMENT) * ALIGNMENT
    memory = torch.zeros(*outer, width, dtype=torch.uint8, device=mask.device)
    memory[..., :keys] = mask
    filled = memory[..., : granules * GRANULE]  # zeros behind the last key, which first has room for
    shown = filled.view(*outer, granules, GRANULE).sum(dim=-1, dtype=torch.int32)
    existing = torch.full((granules,), GRANULE, dtype=torch.int32, device=mask.device)
    existing[-1] = keys - (granules - 1) * GRANULE
    memory[..., first : first + granules] = (shown > 0).byte() + (shown == existing).byte()
    _made[id(memory)] = memory
    return memory


def is_summed(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether summed() made this tensor."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8 and _made.get(id(tensor)) is tensor
