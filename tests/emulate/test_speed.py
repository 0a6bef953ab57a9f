"""How long the emulator takes: the headline shape ten seconds on two cores, small calls one, in any kernel.

CPU time stretches as well where other processes have the caches, the memory and the other half of a core. A kernel
fails that takes four times as long in the best of three runs: what would make the emulator useless, and no load does.
"""

from __future__ import annotations

import time

import pytest

import microsdpa
from microsdpa.evidence.inputs import Case, make
from microsdpa.kernels import EIGHT_BIT_FAMILIES, FAMILIES

EIGHT_BIT = {family.name for family in EIGHT_BIT_FAMILIES}
# One of the mission's eight heads, which two cores share; CPU time, since a build and other processes are none of it.
MARGIN, RUNS = 4, 3
BOUNDS = [(Case(1, 1, 512, 512, 64), 10.0 * 2 / 8), (Case(1, 2, 64, 64, 64), 1.0)]


@pytest.mark.parametrize("kernel", [*(family.name for family in FAMILIES), *sorted(EIGHT_BIT)])
def test_every_kernel_is_fast_enough(kernel: str) -> None:
    for case, seconds in BOUNDS:
        tensors = make(case)
        options: dict[str, object] = {}
        if kernel == "hopper/throughput_8bit_qk":
            options = {"precision": "int8_fp16"}  # which quantizes in the emulator as well
        elif kernel in EIGHT_BIT:
            quantized = [microsdpa.quantize(x, "e4m3", "head") for x in tensors]
            tensors = tuple(x.values for x in quantized)  # type: ignore[assignment]
            options = {f"{name}_scale": x.scale for name, x in zip("qkv", quantized, strict=True)}
        taken = []
        for _ in range(RUNS):
            start = time.process_time()
            microsdpa.sdpa(*tensors, **options, impl=f"emulate:{kernel}")  # type: ignore[call-overload]
            taken.append(time.process_time() - start)
            if taken[-1] < seconds:
                break
        assert min(taken) < MARGIN * seconds, case
