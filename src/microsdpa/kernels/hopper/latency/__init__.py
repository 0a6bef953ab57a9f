"""Attention on wgmma for small problems."""
