"""What several of Hopper's kernels share."""

from __future__ import annotations

from math import ceil

ROWS = 64
"""Rows of a product of wgmma, and of a consumer warpgroup."""
WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
"""Columns of a product of wgmma: every n that kernels/ptx/wgmma.cuh has."""
PANEL_BYTES = 128
"""Of a row of a box at most: the copies' pattern repeats."""


def panel(head_dim: int) -> int:
    """Columns of a box of Q, K, V and O."""
    return 32 if head_dim % 64 == 32 else 64


def tail(head_dim: int) -> int:
    """Columns of a tile's last box, where it is a narrow one; 0 without one."""
    return 16 if head_dim % 64 == 16 else 0


def stored_columns(head_dim: int) -> int:
    """Columns of a tile in shared memory."""
    end = tail(head_dim)
    return ceil((head_dim - end) / panel(head_dim)) * panel(head_dim) + end
