"""What kernel selection knows of the GPUs: one chip stands for each compilation target."""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.problem import capability_of


@dataclass(frozen=True)
class Chip:
    """Limits of a chip, from NVIDIA's CUDA programming guide (technical specifications) and data sheets.

    Attributes:
        name: the card that stands for the target.
        sms: streaming multiprocessors.
        shared_per_cta: bytes of shared memory that one CTA may use.
        shared_per_sm: bytes for all CTAs of an SM; each CTA takes 1 KB more than it uses.
        threads_per_sm: resident threads of an SM.
        mma_flops: FP16 floating-point operations of an SM in a clock by mma.sync with FP32 accumulation.
        clock_ghz: boost clock.
    """

    name: str
    sms: int
    shared_per_cta: int
    shared_per_sm: int
    threads_per_sm: int
    mma_flops: int
    clock_ghz: float


CHIPS: dict[tuple[int, int], Chip] = {
    (8, 0): Chip("A100", 108, 163 * 1024, 164 * 1024, 2048, 2048, 1.41),
    (8, 6): Chip("RTX 3090", 82, 99 * 1024, 100 * 1024, 1536, 512, 1.70),
    (8, 9): Chip("L4", 58, 99 * 1024, 100 * 1024, 1536, 1024, 2.04),
    (9, 0): Chip("H200", 132, 227 * 1024, 228 * 1024, 2048, 2500, 1.98),
    (12, 0): Chip("RTX 5090", 170, 99 * 1024, 100 * 1024, 1536, 1024, 2.41),
}
REGISTERS_PER_SM = 65_536


def chip_of(target: str) -> Chip:
    """The chip for a target: that of its compute capability, or of the nearest older one that is known."""
    capability = capability_of(target)
    known = [c for c in CHIPS if c <= capability]
    return CHIPS[max(known)] if known else CHIPS[min(CHIPS)]
