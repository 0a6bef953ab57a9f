"""Occupancy: how many CTAs of a compiled kernel one SM holds at a time, and what keeps it from holding more.

The limits are those of kernels/chip.py; the rules, and the units in which things are given out, are those of the CUDA
Occupancy Calculator.
"""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.kernels.chip import MULTIPROCESSORS, REGISTERS_PER_SM, RESERVED_SHARED, WARP
from microsdpa.kernels.problem import capability_of

PARTITIONS = 4  # of an SM, among which its registers are divided
REGISTER_UNIT = 256  # registers are given to warps in multiples of this
SHARED_UNIT = 128  # bytes


@dataclass(frozen=True)
class Occupancy:
    """What one SM holds.

    Attributes:
        ctas: CTAs at a time; 0 when not even one fits.
        warps: of these CTAs.
        fraction: of the warps that the SM could hold.
        limit: what is used up first: "warps", "CTAs", "registers" or "shared memory".
    """

    ctas: int
    warps: int
    fraction: float
    limit: str


def occupancy(target: str, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Occupancy of CTAs of `threads` threads of `registers` registers each, with `shared_bytes` of shared memory.

    `shared_bytes` is static and dynamic shared memory together.

    Raises:
        KeyError: the figures of `target` are not known here.
    """
    sm = MULTIPROCESSORS[capability_of(target)]
    warps = -(-threads // WARP)
    warp_registers = _round_up(registers * WARP, REGISTER_UNIT)
    cta_shared = _round_up(shared_bytes + RESERVED_SHARED, SHARED_UNIT)
    limits = {
        "warps": sm.warps // warps,
        "CTAs": sm.ctas,
        "registers": REGISTERS_PER_SM // PARTITIONS // warp_registers * PARTITIONS // warps,
        "shared memory": sm.shared_bytes // cta_shared if shared_bytes <= sm.shared_bytes_of_cta else 0,
    }
    limit = min(limits, key=lambda name: limits[name])
    ctas = limits[limit]
    return Occupancy(ctas, ctas * warps, ctas * warps / sm.warps, limit)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
