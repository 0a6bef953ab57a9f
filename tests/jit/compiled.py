"""What the compiler makes of kernels, from its record, and whether they fit their chip."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from compiler_record import key_of, recorded
from microsdpa.jit import compile_kernel
from microsdpa.jit.inspect import TENSOR_OPCODES, Resources, count_instructions, resources_from_cubin
from microsdpa.jit.occupancy import Occupancy, occupancy
from microsdpa.kernels import KernelSpec

COUNTED = TENSOR_OPCODES | {"LDGSTS", "LDL", "LDSM", "STL", "STSM", "USETMAXREG", "UTMASTG"}
"""Opcodes that tests ask for."""
VERIFIED_TARGET = "sm_90a"
VERIFIED = {
    *("hopper/latency", "hopper/latency_8bit", "hopper/throughput_8bit", "ampere/mma", "ada/mma_8bit"),
    *("quantize/fused", "quantize/restore_lse"),
    *("ladder/08_fp8_scalar", "ladder/09_fp8_mma", "ladder/10_fp8_probability"),
    *("ladder/11_8bit_cp_async", "ladder/12_8bit_persistent"),
}
"""Families of which test_verify_kernels.py compiles as many for that target as a third of the catalogue, or more."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the compiler makes of a kernel.

    Attributes:
        serialised: whether ptxas says that it made wgmma wait (C75xx).
        instructions: how many there are of each of COUNTED; empty where they were not counted.
    """

    spec: KernelSpec
    target: str
    resources: Resources
    serialised: bool
    instructions: dict[str, int]

    @property
    def tensor_instructions(self) -> set[str]:
        """Opcodes of the tensor cores that it has."""
        return {opcode for opcode in TENSOR_OPCODES if self.instructions[opcode]}

    @property
    def held(self) -> Occupancy:
        """What an SM holds of its CTAs."""
        shared = self.resources.shared_bytes + self.spec.shared_bytes
        return occupancy(self.target, self.spec.threads, self.resources.registers, shared)


def figures(spec: KernelSpec, target: str, counted: bool = False) -> Figures:
    """Those of a kernel, which the compiler refuses where it spills and its specification does not say why."""

    def find() -> dict[str, Any]:
        kernel = compile_kernel(spec, target)
        said = f"{spec.expression} for {target}"
        assert kernel.cubin[:4] == b"\x7fELF", said
        assert spec.template.split("::")[-1] in kernel.symbol, said
        # A cubin does not say what of its local memory are spills.
        seen = dataclasses.replace(kernel.resources, spill_store_bytes=0, spill_load_bytes=0)
        assert resources_from_cubin(kernel.cubin, target) == seen, said
        found: dict[str, Any] = {"resources": list(kernel.resources.as_dict().values()), "C75": "C75" in kernel.log}
        if counted:
            counts = count_instructions(kernel.cubin)
            found["instructions"] = {opcode: counts[opcode] for opcode in sorted(COUNTED & counts.keys())}
        return found

    found = recorded(key_of("counted" if counted else "fits", spec, target), find)
    resources = Resources(*found["resources"])
    assert not resources.uses_local_memory or spec.local_memory, f"{spec.expression} for {target}: {resources}"
    instructions = dict.fromkeys(COUNTED, 0) | found["instructions"] if counted else {}
    return Figures(spec, target, resources, found["C75"], instructions)


def all_figures(jobs: Iterable[tuple[KernelSpec, str]], counted: bool = False) -> list[Figures]:
    """figures() of kernels and their targets, several at a time."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(lambda job: figures(*job, counted), jobs))


def check_that_they_fit(specs: Iterable[KernelSpec], target: str) -> None:
    """Kernels have no local memory but what a specification gives the reason of, and a CTA fits an SM."""
    for kernel in all_figures((spec, target) for spec in specs):
        assert kernel.resources.registers > 16, kernel
        assert kernel.held.ctas >= 1, kernel
