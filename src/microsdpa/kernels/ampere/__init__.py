"""Kernels on mma.sync, for sm_80 and newer."""
