"""What is known of the GPUs: the limits of one SM by compute capability, and one chip for each compilation target.

Limits are those of the CUDA C++ Programming Guide, "Compute Capabilities" (technical specifications); chips are from
NVIDIA's data sheets.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from microsdpa.kernels.problem import capability_of


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one SM: resident warps and CTAs, bytes of shared memory, and bytes that one CTA may ask for."""

    warps: int
    ctas: int
    shared_bytes: int
    shared_bytes_of_cta: int


_KB = 1024
RESERVED_SHARED = _KB
"""Bytes of an SM's shared memory that each CTA costs beside its own."""
L2_PART = 2**24
"""Bytes that CTAs which run side by side walk over, at most, to find them in the L2 cache."""
WARP = 32
REGISTERS_PER_SM = 65_536
MULTIPROCESSORS = {
    (8, 0): Multiprocessor(64, 32, 164 * _KB, 163 * _KB),
    (8, 6): Multiprocessor(48, 16, 100 * _KB, 99 * _KB),
    (8, 7): Multiprocessor(48, 16, 164 * _KB, 163 * _KB),
    (8, 9): Multiprocessor(48, 24, 100 * _KB, 99 * _KB),
    (9, 0): Multiprocessor(64, 32, 228 * _KB, 227 * _KB),
    (10, 0): Multiprocessor(64, 32, 228 * _KB, 227 * _KB),
    (12, 0): Multiprocessor(48, 24, 100 * _KB, 99 * _KB),
}


@dataclass(frozen=True)
class Chip:
    """A chip that kernel selection reckons with.

    Attributes:
        name: the card that stands for the target.
        sms: streaming multiprocessors.
        sm: limits of each.
        mma_flops: FP16 floating-point operations of an SM in a clock by mma.sync with FP32 accumulation.
        clock_ghz: boost clock.
    """

    name: str
    sms: int
    sm: Multiprocessor
    mma_flops: int
    clock_ghz: float

    @property
    def shared_per_cta(self) -> int:
        """Bytes of shared memory that one CTA may use."""
        return self.sm.shared_bytes_of_cta

    @property
    def shared_per_sm(self) -> int:
        """Bytes for all CTAs of an SM; each CTA takes 1 KB more than it uses."""
        return self.sm.shared_bytes

    @property
    def threads_per_sm(self) -> int:
        """Resident threads of an SM."""
        return WARP * self.sm.warps


CHIPS: dict[tuple[int, int], Chip] = {
    (8, 0): Chip("A100", 108, MULTIPROCESSORS[8, 0], 2048, 1.41),
    (8, 6): Chip("RTX 3090", 82, MULTIPROCESSORS[8, 6], 512, 1.70),
    (8, 9): Chip("L4", 58, MULTIPROCESSORS[8, 9], 1024, 2.04),
    (9, 0): Chip("H200", 132, MULTIPROCESSORS[9, 0], 2500, 1.98),
    (12, 0): Chip("RTX 5090", 170, MULTIPROCESSORS[12, 0], 1024, 2.41),
}


CLUSTERS = {2: 66, 4: 30, 8: 15, 16: 7}
"""How many clusters of so many CTAs, one an SM, an H200 holds at a time."""


@functools.lru_cache
def chip_of(target: str) -> Chip:
    """The chip for a target: that of its compute capability, or of the nearest older one that is known."""
    capability = capability_of(target)
    known = [c for c in CHIPS if c <= capability]
    return CHIPS[max(known)] if known else CHIPS[min(CHIPS)]
