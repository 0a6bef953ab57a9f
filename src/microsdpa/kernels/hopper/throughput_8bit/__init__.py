"""Attention on wgmma with Q, K, V and P in 8 bits."""
