"""Kernels for Hopper (sm_90a), on wgmma and bulk copies."""
