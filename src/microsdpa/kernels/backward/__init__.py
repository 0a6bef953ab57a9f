"""Gradients of every call, on mma.sync and wgmma."""
