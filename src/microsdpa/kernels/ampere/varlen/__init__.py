"""Attention for sequences of many lengths, packed or in pages, on mma.sync."""
