"""Published ceilings of GPUs: what their vendor says that they can do at most, with the source of each figure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from microsdpa.errors import InvalidArgument
from microsdpa.kernels.chip import CHIPS

EXP2_PER_CLOCK = 16
"""MUFU results a clock and SM, compute capability 8.0 to 12.0: CUDA C++ Programming Guide, arithmetic instructions."""

FP32_LANES = {"sm_80": 64}
"""FP32 multiply-adds a clock and SM where they are not 128; the same table."""

MIXED = {
    "bfloat16": ("float16", "float16"),
    "int8_fp8": ("int8", "e4m3"),
    "int8_fp16": ("int8", "float16"),
    "e4m3_fp16": ("e4m3", "float16"),
}
"""What Q K^T, and what P V is computed in, where it is not the type's own name."""


@dataclass(frozen=True)
class Device:
    """Ceilings of a GPU.

    Attributes:
        tflops: dense tensor-core TFLOP/s (TOP/s for int8) by type, with FP32 (int32) accumulation.
        boost_mhz: the clock that `tflops` is stated at.
        dram_gb_s: memory bandwidth in GB/s.
        sources: where the figures are from.
    """

    name: str
    target: str
    multiprocessors: int
    boost_mhz: int
    tflops: tuple[tuple[str, float], ...]
    dram_gb_s: float
    l2_mib: float
    sources: tuple[str, ...]

    def peak(self, arithmetic: str) -> float | None:
        """TFLOP/s of a type, or of two halves of the work in two types; None when the tensor cores do not have it.

        That of "float32" is the CUDA cores'.
        """
        if arithmetic == "float32":
            return 2 * FP32_LANES.get(self.target, 128) * self.multiprocessors * self.boost_mhz / 1e6
        first, second = (dict(self.tflops).get(name) for name in MIXED.get(arithmetic, (arithmetic, arithmetic)))
        if first is None or second is None:
            return None
        return first if first == second else 2 / (1 / first + 1 / second)


_HOPPER = Device(
    name="h100",
    target="sm_90a",
    multiprocessors=CHIPS[9, 0].sms,
    boost_mhz=1830,
    tflops=(("float16", 989.4), ("e4m3", 1978.9), ("int8", 1978.9)),
    dram_gb_s=3350,
    l2_mib=50,
    sources=(
        "NVIDIA H100 Tensor Core GPU Architecture whitepaper, v1.04, table 3 (H100 SXM5, dense figures)",
        "NVIDIA H100 Tensor Core GPU datasheet (3.35 TB/s)",
    ),
)

DEVICES: dict[str, Device] = {
    "h200": replace(
        _HOPPER,
        name="h200",
        dram_gb_s=4800,
        sources=(
            "NVIDIA H200 Tensor Core GPU datasheet (4.8 TB/s; the matrix rates are the H100's)",
            _HOPPER.sources[0],
        ),
    ),
    "h100": _HOPPER,
    "a100": Device(
        name="a100",
        target="sm_80",
        multiprocessors=CHIPS[8, 0].sms,
        boost_mhz=1410,
        tflops=(("float16", 312.0), ("int8", 624.0)),
        dram_gb_s=2039,
        l2_mib=40,
        sources=(
            "NVIDIA A100 80GB Tensor Core GPU datasheet (SXM4)",
            "NVIDIA A100 Tensor Core GPU Architecture whitepaper, v1.0",
        ),
    ),
    "l4": Device(
        name="l4",
        target="sm_89",
        multiprocessors=CHIPS[8, 9].sms,
        boost_mhz=2040,
        tflops=(("float16", 121.0), ("e4m3", 242.0), ("int8", 242.0)),
        dram_gb_s=300,
        l2_mib=48,
        sources=(
            "NVIDIA L4 Tensor Core GPU datasheet (half of its figures, which are with sparsity)",
            "NVIDIA Ada GPU Architecture whitepaper, v2.1 (AD104: 48 MB L2)",
        ),
    ),
    "rtx4090": Device(
        name="rtx4090",
        target="sm_89",
        multiprocessors=128,
        boost_mhz=2520,
        tflops=(("float16", 165.2), ("e4m3", 330.3), ("int8", 660.6)),
        dram_gb_s=1008,
        l2_mib=72,
        sources=("NVIDIA Ada GPU Architecture whitepaper, v2.1, appendix A (FP32 accumulation, dense)",),
    ),
}


def named(name: str) -> Device:
    """The device called `name`.

    Raises:
        InvalidArgument: there are no figures for it; the message names those that there are.
    """
    if name not in DEVICES:
        raise InvalidArgument("device", expected=f"one of {', '.join(DEVICES)}", got=repr(name), hint="name a device")
    return DEVICES[name]
