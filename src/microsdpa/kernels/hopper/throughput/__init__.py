"""Attention on wgmma for problems that fill the chip."""
