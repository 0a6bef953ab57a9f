"""Attention on 8-bit mma.sync, with tiles for the problem."""
