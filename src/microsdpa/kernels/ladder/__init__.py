"""The ladder: teaching kernels, one idea per rung."""
