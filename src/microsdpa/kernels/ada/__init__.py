"""Kernels for Ada (sm_89) and newer GPUs without wgmma."""
