"""Attention on wgmma with Q and K in INT8, and V and P in 16 bits."""
