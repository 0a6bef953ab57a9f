"""Kernels that fit their chip: no local memory, and at least one CTA to an SM."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from microsdpa.jit import compile_kernel
from microsdpa.jit.inspect import resources_from_cubin
from microsdpa.jit.occupancy import occupancy
from microsdpa.kernels import KernelSpec

VERIFIED_TARGET = "sm_90a"
VERIFIED = {
    *("hopper/latency", "hopper/latency_8bit", "hopper/throughput_8bit", "ampere/mma", "ada/mma_8bit"),
    *("quantize/fused", "quantize/restore_lse"),
    *("ladder/08_fp8_scalar", "ladder/09_fp8_mma", "ladder/10_fp8_probability"),
    *("ladder/11_8bit_cp_async", "ladder/12_8bit_persistent"),
}
"""Families of which test_verify_kernels.py compiles as many for that target as a third of the catalogue, or more."""


def check_that_they_fit(specs: Iterable[KernelSpec], target: str) -> None:
    """Compile kernels: no local memory but what a specification gives the reason of, and a CTA fits an SM."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        kernels = list(pool.map(lambda spec: compile_kernel(spec, target), specs))
    for kernel in kernels:
        spec, resources = kernel.spec, kernel.resources
        said = f"{spec.expression} for {target}"
        assert not resources.uses_local_memory or spec.local_memory, said
        assert resources.registers > 16, said
        shared_bytes = resources.shared_bytes + spec.shared_bytes
        assert occupancy(kernel.target, spec.threads, resources.registers, shared_bytes).ctas >= 1, said
        assert kernel.cubin[:4] == b"\x7fELF", said
        assert spec.template.split("::")[-1] in kernel.symbol, said
        # A cubin does not say what of its local memory are spills.
        seen = dataclasses.replace(resources, spill_store_bytes=0, spill_load_bytes=0)
        assert resources_from_cubin(kernel.cubin, kernel.target) == seen, said
