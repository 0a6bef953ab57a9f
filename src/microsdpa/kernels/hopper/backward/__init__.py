"""Gradients on wgmma, with five products and sums of dQ in global memory."""
