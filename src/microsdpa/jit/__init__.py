"""Run-time compilation: from a KernelSpec and a target to a cubin, through a cache keyed by its signature."""

from microsdpa.jit.build import CompiledKernel, compile_kernel, is_compiled, unexcused

__all__ = ["CompiledKernel", "compile_kernel", "is_compiled", "unexcused"]
