"""What several of Hopper's kernels share."""

from __future__ import annotations

ROWS = 64
"""Rows of a product of wgmma, and of a consumer warpgroup."""
PANEL_BYTES = 128
"""Of a row of a box at most: the copies' pattern repeats."""
