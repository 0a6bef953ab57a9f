"""Ceilings of the GPU at hand, measured: the matrix rates and the memory bandwidth that it really has."""

from __future__ import annotations

from dataclasses import replace

import torch

from microsdpa.evidence import environment
from microsdpa.evidence.devices import DEVICES, Device
from microsdpa.evidence.statistics import median
from microsdpa.kernels.problem import target_of

PRODUCT_SIZE, COPY_BYTES, REPEATS = 8192, 2**31, 15


def measure() -> Device:
    """A Device whose figures were measured now, on random data, on the current GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    slug = environment.gpu_slug(properties.name)
    clock = int(environment.max_sm_clock_mhz() or 0)
    known = DEVICES.get(slug)
    tflops = [("float16", _product_tflops(torch.float16))]
    if (properties.major, properties.minor) >= (8, 9):
        tflops.append(("e4m3", _product_tflops(torch.float8_e4m3fn)))
    base = known or next(iter(DEVICES.values()))
    return replace(
        base,
        name=slug,
        target=target_of((properties.major, properties.minor)),
        multiprocessors=properties.multi_processor_count,
        boost_mhz=clock or base.boost_mhz,
        tflops=tuple(tflops),
        dram_gb_s=_copy_gb_s(),
        l2_mib=properties.L2_cache_size / 2**20,
        sources=(f"measured on {properties.name}: products of {PRODUCT_SIZE}^3, a copy of {COPY_BYTES >> 20} MiB",),
    )


def _product_tflops(dtype: torch.dtype) -> float:
    a = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda")
    b = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda")
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device="cuda")
        left, right = a.to(dtype), b.to(dtype).t()
        seconds = _seconds(lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16))
    else:
        left, right = a.to(dtype), b.to(dtype)
        seconds = _seconds(lambda: left @ right)
    return 2 * PRODUCT_SIZE**3 / seconds / 1e12


def _copy_gb_s() -> float:
    source = torch.randint(0, 100, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source)) / 1e9


def _seconds(run: object) -> float:
    assert callable(run)
    samples = []
    for _ in range(REPEATS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return median(samples[3:]).value
