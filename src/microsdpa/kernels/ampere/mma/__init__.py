"""Attention on mma.sync, with tiles for the problem."""
