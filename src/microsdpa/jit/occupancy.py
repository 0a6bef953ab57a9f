"""Occupancy: how many CTAs of a compiled kernel one SM holds at a time, and what keeps it from holding more.

The rules and figures are those of the CUDA C++ Programming Guide, "Compute Capabilities" (technical specifications per
compute capability), and of the CUDA Occupancy Calculator (allocation granularities).
"""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.problem import capability_of

WARP = 32
REGISTERS = 65_536  # 32-bit, of an SM, in four equal parts
PARTITIONS = 4
REGISTER_UNIT = 256  # registers are given to warps in multiples of this
SHARED_UNIT = 128  # bytes
RESERVED_SHARED = 1024  # bytes of every CTA, for the system


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one SM: resident warps and CTAs, bytes of shared memory, and bytes that one CTA may ask for."""

    warps: int
    ctas: int
    shared_bytes: int
    shared_bytes_of_cta: int


_KB = 1024
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
        "registers": REGISTERS // PARTITIONS // warp_registers * PARTITIONS // warps,
        "shared memory": sm.shared_bytes // cta_shared if shared_bytes <= sm.shared_bytes_of_cta else 0,
    }
    limit = min(limits, key=lambda name: limits[name])
    ctas = limits[limit]
    return Occupancy(ctas, ctas * warps, ctas * warps / sm.warps, limit)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
