"""Floors: the time that no kernel can go below on a device, by what each part of the work costs at its ceiling."""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.evidence.devices import EXP2_PER_CLOCK, Device
from microsdpa.evidence.inputs import Case
from microsdpa.kernels import problem

ELEMENT_BYTES = problem.ELEMENT_BYTES | dict.fromkeys(("e4m3", "int8", "int8_fp8", "int8_fp16", "e4m3_fp16"), 1)
"""Of Q, K, V and O at least: with 8 bits V and O may have 16."""


@dataclass(frozen=True)
class Floor:
    """Lower bounds of one call, in microseconds; each part alone, as if everything else were free.

    Attributes:
        matmul_us: both matrix products on the tensor cores.
        exp2_us: one exponential a score on the special-function units.
        dram_us: every tensor once through device memory; counts only when cold.
    """

    matmul_us: float
    exp2_us: float
    dram_us: float

    @property
    def warm_us(self) -> float:
        """With the inputs in L2: the larger of the two parts that the SMs do."""
        return max(self.matmul_us, self.exp2_us)

    @property
    def cold_us(self) -> float:
        """With the inputs in device memory."""
        return max(self.warm_us, self.dram_us)

    def binding(self, cold: bool = False) -> str:
        """The part that the floor is."""
        parts = {"matrix products": self.matmul_us, "exp2": self.exp2_us}
        if cold:
            parts["memory"] = self.dram_us
        return max(parts, key=lambda name: parts[name])


def visible_scores(case: Case) -> int:
    """Scores that a mask lets through: no kernel can compute fewer. A mask tensor is taken to let none through."""
    if case.masks:
        return 0
    if case.causal is None:
        per_head = case.seqlen_q * case.seqlen_k
    else:
        diagonal = case.seqlen_k - case.seqlen_q if case.causal == "lower_right" else 0
        per_head = sum(min(case.seqlen_k, max(0, i + diagonal + 1)) for i in range(case.seqlen_q))
    return case.batch * case.heads * per_head


def flops(case: Case) -> int:
    """Floating-point operations as they are quoted: 4 * B * H * S_q * S_k * D, halved when causal."""
    total = 4 * case.batch * case.heads * case.seqlen_q * case.seqlen_k * case.head_dim
    return total // 2 if case.causal else total


def tensor_bytes(case: Case, arithmetic: str = "") -> int:
    """Bytes of Q, K, V and O, each once; in 8 bits when the arithmetic is, else as the case has them."""
    rows = 2 * case.heads * case.seqlen_q + 2 * case.kv_heads * case.seqlen_k
    return case.batch * rows * case.head_dim * ELEMENT_BYTES.get(arithmetic, ELEMENT_BYTES[case.dtype])


def floor(case: Case, device: Device, arithmetic: str = "") -> Floor | None:
    """The floor of a case on a device, None when its tensor cores do not have the type."""
    peak = device.peak(arithmetic or case.dtype)
    if peak is None:
        return None
    clock_hz = device.boost_mhz * 1e6
    scores = visible_scores(case)
    return Floor(
        matmul_us=4 * case.head_dim * scores / peak / 1e6,
        exp2_us=scores / (EXP2_PER_CLOCK * device.multiprocessors * clock_hz) * 1e6,
        dram_us=tensor_bytes(case, arithmetic) / device.dram_gb_s / 1e3,
    )
