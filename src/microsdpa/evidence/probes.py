"""The emulator against a GPU, instruction by instruction, on the same inputs (kernels/probes/instructions.cu)."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import microsdpa
from microsdpa.emulate import build
from microsdpa.emulate.run import Schedule, Shape
from microsdpa.emulate.run import launch as emulate
from microsdpa.evidence import results
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.probe_list import PROBES, Probe
from microsdpa.evidence.probe_operands import Words
from microsdpa.jit import compile_kernel
from microsdpa.jit.signature import code_signature
from microsdpa.kernels import TensorMap
from microsdpa.kernels.problem import capability_of
from microsdpa.runtime.launcher import load_kernel

PARAMS = "microsdpa::ProbeParams"


class ProbeParams(ctypes.Structure):
    """ProbeParams of kernels/probes/instructions.cu."""

    _fields_ = (("input", ctypes.c_void_p), ("out", ctypes.c_void_p))


def inputs(probe: Probe) -> Words:
    """The probe's inputs, always the same."""
    generator = torch.Generator().manual_seed(len(probe.name))
    return probe.make(probe.blocks * probe.threads, generator).contiguous()


def run_emulated(probe: Probe, words: Words, schedule: Schedule | None = None) -> Words:
    """The probe's outputs in the emulator."""
    out = torch.full((len(words), probe.words_out), -1, dtype=torch.int32)
    emulate(
        build.load(probe.spec, params=PARAMS),
        lambda at: ProbeParams(at["query"], at["out"]),
        {"query": (probe.seen(words), False), "out": (probe.seen(out), True)},
        Shape(
            (probe.blocks, 1, 1),
            probe.threads,
            probe.shared_bytes,
            probe.cluster,
            tensor_maps=tuple((box.tensor, box) for box in probe.tensor_maps),
        ),
        schedule=schedule,
    )
    return out


def run_on_gpu(probe: Probe, words: Words, target: str) -> Words:
    """The probe's outputs on the current CUDA device."""
    from cuda.bindings import driver

    device = torch.cuda.current_device()
    kernel = compile_kernel(probe.spec, target)
    function, _ = load_kernel(kernel, device)
    on_gpu = words.cuda()
    out = torch.full((len(words), probe.words_out), -1, dtype=torch.int32, device="cuda")
    params = ProbeParams(on_gpu.data_ptr(), out.data_ptr())
    maps = [_tensor_map(box, probe.seen(on_gpu if box.tensor == "query" else out)) for box in probe.tensor_maps]
    pointers = [ctypes.addressof(params), *(box.getPtr() for box in maps)]
    arguments = (ctypes.c_void_p * len(pointers))(*pointers)
    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = probe.cluster, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = probe.blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = probe.threads, 1, 1
    config.sharedMemBytes, config.hStream = probe.shared_bytes, torch.cuda.current_stream().cuda_stream
    if probe.cluster > 1:
        config.attrs, config.numAttrs = [cluster], 1
    (error,) = driver.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{probe.name}: cuLaunchKernelEx failed with {error}")
    return out.cpu()


def _tensor_map(box: TensorMap, tensor: torch.Tensor) -> Any:
    """The driver's descriptor of a [B, H, S, D] tensor of 16-bit elements."""
    from cuda.bindings import driver

    swizzle = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}[box.swizzle]
    size = tensor.element_size()
    dims = (3, 1, 2, 0) if box.heads else (3, 2, 1, 0)
    lines = (box.heads, box.rows) if box.heads else (box.rows, 1)
    error, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        4,
        tensor.data_ptr(),
        [driver.cuuint64_t(tensor.shape[dim]) for dim in dims],
        [driver.cuuint64_t(size * tensor.stride(dim)) for dim in dims[1:]],
        [driver.cuuint32_t(n) for n in (box.columns, *lines, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with {error}")
    return encoded


def distance(probe: Probe, words: Words, emulated: Words, measured: Words) -> float:
    """Largest distance of two outputs: in units in the last place, or the number of words whose bits differ.

    A NaN in one place only is infinitely far; which NaN it is does not matter.
    """
    if probe.view == "bits":
        return float((emulated != measured).sum())
    dtype = {"float32": torch.float32, "float16": torch.float16}[probe.view]
    a, b = (x.contiguous().view(dtype).double() for x in (emulated, measured))
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return math.inf
    finite = a.isfinite() & b.isfinite()
    info = torch.finfo(dtype)
    if probe.scale is None:
        magnitude = torch.maximum(a.abs(), b.abs()).clamp(min=info.tiny).log2().floor().exp2()
    else:
        magnitude = probe.scale(words)
    last_place = magnitude * info.eps
    gap = ((a - b).abs() / last_place)[finite]
    return float(gap.max()) if gap.numel() else 0.0


def is_stale(row: results.Row, target: str) -> bool:
    """Whether the probe, or the emulator, is no longer what a row was recorded with."""
    probe = next((probe for probe in PROBES if probe.spec.name == row["kernel"]), None)
    if probe is None:
        return True
    current = code_signature(probe.spec, target), build.source_signature(probe.spec)
    return bool(current != (row["code_signature"], row["emulator_signature"]))


def compare_all(target: str, advance: Callable[[str], None] = lambda message: None) -> list[results.Row]:
    """Rows of every probe that `target` has: the emulator's distance from the GPU, and whether it is allowed."""
    rows = []
    chosen = [probe for probe in PROBES if capability_of(target) >= capability_of(probe.target)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # one after another they take a minute
        list(pool.map(lambda probe: build.load(probe.spec, params=PARAMS), chosen))
        list(pool.map(lambda probe: compile_kernel(probe.spec, target), chosen))
    for probe in chosen:
        words = inputs(probe)
        late, early = (run_emulated(probe, words, Schedule(1, late)) for late in (True, False))
        found = distance(probe, words, late, run_on_gpu(probe, words, target))
        passed = found <= probe.ulp and torch.equal(late, early)
        unit = "words differ" if probe.view == "bits" else "ulp of the summed magnitudes" if probe.scale else "ulp"
        rows.append(
            results.row(
                Case(probe.blocks, 1, probe.threads, 1, probe.words_out),
                impl="microsdpa",
                version=microsdpa.__version__,
                kernel=probe.spec.name,
                code_signature=code_signature(probe.spec, target),
                emulator_signature=build.source_signature(probe.spec),
                op="instruction",
                dtype=probe.view,
                mode="verify",
                status="ok" if passed else "wrong",
                reason="" if passed else f"{found} {unit}, allowed {probe.ulp}",
                distance=found if math.isfinite(found) else None,
                allowed=probe.ulp,
                unit=unit,
                compared_words=words.shape[0] * probe.words_out,
            )
        )
        advance(probe.name)
    return rows
