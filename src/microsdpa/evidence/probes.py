"""The emulator against a GPU, instruction by instruction, on the same inputs (cuda/probes/instructions.cu)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

import microsdpa
from microsdpa.emulate import build
from microsdpa.emulate.run import Schedule
from microsdpa.emulate.run import launch as emulate
from microsdpa.evidence import results
from microsdpa.evidence.inputs import Case
from microsdpa.jit import compile_kernel
from microsdpa.jit.signature import code_signature
from microsdpa.problem import capability_of
from microsdpa.runtime.launcher import load_kernel
from microsdpa.specs import KernelSpec

BLOCKS = 64
INSTRUCTIONS, WMMA = "probes/instructions.cu", "probes/wmma.cu"

Words = torch.Tensor
"""int32 tensor: the bits of 32-bit words."""


class ProbeParams(ctypes.Structure):
    """ProbeParams of cuda/probes/instructions.cu."""

    _fields_ = (("input", ctypes.c_void_p), ("out", ctypes.c_void_p))


@dataclass(frozen=True)
class Probe:
    """One instruction's kernel.

    Attributes:
        words_in, words_out: 32-bit words that every thread reads and writes.
        make: inputs, [threads, words_in].
        view: how output words are compared: "bits", or as "float32" or "float16" numbers.
        ulp: the distance allowed, in units in the last place of the result or of `scale`; 0 for bitwise.
        target: the oldest target that has the instruction.
        scale: for sums, the magnitudes that were added up, [threads, words_out].
    """

    name: str
    template: str
    words_in: int
    words_out: int
    make: Callable[[int, torch.Generator], Words]
    arguments: tuple[str, ...] = ()
    view: str = "bits"
    ulp: float = 0.0
    target: str = "sm_80"
    threads: int = 32
    scale: Callable[[Words], torch.Tensor] | None = None
    source: str = INSTRUCTIONS
    shared_bytes: int = 0

    @property
    def spec(self) -> KernelSpec:
        """The probe as a kernel."""
        counts = (("IN", str(self.words_in)), ("OUT", str(self.words_out)))
        further = tuple((f"ARGUMENT_{i}", value) for i, value in enumerate(self.arguments))
        return KernelSpec(
            name=f"probe/{self.name}",
            source=self.source,
            template=f"microsdpa::probe_{self.template}",
            template_args=counts + further,
            threads=self.threads,
            block_m=1,
            shared_bytes=self.shared_bytes,
        )


def _bits(x: torch.Tensor) -> Words:
    return x.contiguous().view(torch.int32)


def _random_bits(words: int) -> Callable[[int, torch.Generator], Words]:
    def make(threads: int, generator: torch.Generator) -> Words:
        return torch.randint(-(2**31), 2**31, (threads, words), generator=generator, dtype=torch.int64).to(torch.int32)

    return make


def _floats(low: float, high: float, words: int) -> Callable[[int, torch.Generator], Words]:
    """Uniform floats, with every special value among the first."""
    special = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        1e-40,
        -1e-40,
        448.0,
        464.0,
        480.0,
        -1e9,
        0.001953125,
        2.0**-10,
    ]

    def make(threads: int, generator: torch.Generator) -> Words:
        x = torch.rand(threads * words, generator=generator) * (high - low) + low
        x[: len(special)] = torch.tensor(special)
        return _bits(x.view(threads, words))

    return make


def _half_pairs(threads: int, generator: torch.Generator) -> Words:
    x = (torch.rand(threads, 2, generator=generator) * 40 - 25).half()
    x[:4] = torch.tensor([[0.0, -0.0], [math.inf, -math.inf], [math.nan, 1.0], [-24.5, 16.0]]).half()
    return _bits(x)


def _mma(dtype: torch.dtype) -> Callable[[int, torch.Generator], Words]:
    """Operands of one mma per warp: A in 4 words, B in 2, D in 4 floats."""

    def make(threads: int, generator: torch.Generator) -> Words:
        per_word = 4 // dtype.itemsize
        if dtype == torch.int8:
            operands = torch.randint(-128, 128, (threads, 6 * per_word), generator=generator).to(dtype)
            d = torch.randint(-(2**20), 2**20, (threads, 4), generator=generator).to(torch.int32)
        else:
            operands = torch.randn(threads, 6 * per_word, generator=generator).to(dtype)
            d = _bits(torch.randn(threads, 4, generator=generator))
        return torch.cat([_bits(operands), d], dim=1)

    return make


def _mma_magnitude(dtype: torch.dtype) -> Callable[[Words], torch.Tensor]:
    """Sum of the magnitudes that each element of D adds up, |A| |B| + |D|: what its rounding errors are relative to."""
    per_word = 4 // dtype.itemsize
    depth = 8 * per_word

    def scale(words: Words) -> torch.Tensor:
        warps = words.view(-1, 32, 10)
        elements = warps[:, :, :6].contiguous().view(dtype).double().abs()
        start = warps[:, :, 6:].contiguous().view(torch.float32).double().abs()
        a = torch.zeros(len(warps), 16, depth, dtype=torch.float64)
        b = torch.zeros(len(warps), depth, 8, dtype=torch.float64)
        for lane in range(32):  # the fragments of cuda/ptx/mma.cuh
            group, t = divmod(lane, 4)
            for i in range(4):
                row, column = group + 8 * (i % 2), per_word * t + 4 * per_word * (i // 2)
                a[:, row, column : column + per_word] = elements[:, lane, per_word * i : per_word * (i + 1)]
            for i in range(2):
                row = per_word * t + 4 * per_word * i
                b[:, row : row + per_word, group] = elements[:, lane, per_word * (4 + i) : per_word * (5 + i)]
        products = a @ b
        lanes = torch.arange(32)[:, None]
        part = torch.arange(4)
        return (products[:, lanes // 4 + 8 * (part // 2), 2 * (lanes % 4) + part % 2] + start).view(-1, 4)

    return scale


def _wmma(dtype: torch.dtype) -> Callable[[int, torch.Generator], Words]:
    """Operands of one product per warp: A and B in 8 words of each lane, C in 8."""

    def make(threads: int, generator: torch.Generator) -> Words:
        warps = threads // 32
        operands = _bits(torch.randn(warps, 512, generator=generator).to(dtype))
        c = _bits(torch.randn(warps, 256, generator=generator))
        return torch.cat([operands, c], dim=1).view(threads, 16)

    return make


def _wmma_magnitude(dtype: torch.dtype, layout: str) -> Callable[[Words], torch.Tensor]:
    """The same for wmma; the probe halves its result."""

    def scale(words: Words) -> torch.Tensor:
        warps = words.view(-1, 512)
        a, b = warps[:, :256].contiguous().view(dtype).double().abs().view(-1, 2, 16, 16).unbind(1)
        c = warps[:, 256:].contiguous().view(torch.float32).double().abs().view(-1, 16, 16).mT
        products = a @ b.mT if layout == "row" else a.mT @ b
        return ((products + c) / 2).reshape(-1, 8)

    return scale


def _rows(threads: int, generator: torch.Generator) -> Words:
    return torch.cat(
        [_random_bits(4)(threads, generator), torch.randint(0, 2**30, (threads, 1), generator=generator)], 1
    ).to(torch.int32)


def _aligned_rows(threads: int, generator: torch.Generator) -> Words:
    """Rows of eight words, so that a row's first four can be copied 16 bytes at a time."""
    return torch.cat([_rows(threads, generator), _random_bits(3)(threads, generator)], dim=1)


PROBES = (
    Probe("ex2", "ex2", 1, 1, _floats(-140.0, 128.0, 1), view="float32", ulp=2.0),
    Probe("ex2_f16x2", "ex2_f16x2", 1, 1, _half_pairs, view="float16", ulp=1.0),
    Probe("cvt_e4m3_from_f32", "e4m3_from_floats", 2, 1, _floats(-600.0, 600.0, 2), target="sm_89"),
    Probe("cvt_e4m3_from_small_f32", "e4m3_from_floats", 2, 1, _floats(-0.1, 0.1, 2), target="sm_89"),
    Probe("cvt_f16_from_e4m3", "halves_from_e4m3", 1, 1, _random_bits(1), view="float16", target="sm_89"),
    Probe("cvt_f16_bf16_from_f32", "round", 1, 2, _random_bits(1), view="float32"),
    Probe(
        "mma_f16", "mma", 10, 4, _mma(torch.float16), ("__half",), "float32", 1.0, scale=_mma_magnitude(torch.float16)
    ),
    Probe(
        "mma_bf16",
        "mma",
        10,
        4,
        _mma(torch.bfloat16),
        ("__nv_bfloat16",),
        "float32",
        1.0,
        scale=_mma_magnitude(torch.bfloat16),
    ),
    Probe(
        "mma_e4m3",
        "mma_e4m3",
        10,
        4,
        _mma(torch.float8_e4m3fn),
        (),
        "float32",
        1.0,
        "sm_89",
        scale=_mma_magnitude(torch.float8_e4m3fn),
    ),
    *(
        Probe(
            f"wmma_{name}_{layout}",
            "wmma",
            16,
            8,
            _wmma(dtype),
            (cpp, f"nvcuda::wmma::{layout}_major", f"nvcuda::wmma::{other}_major"),
            "float32",
            1.0,
            scale=_wmma_magnitude(dtype, layout),
            source=WMMA,
        )
        for name, cpp, dtype in (("f16", "__half", torch.float16), ("bf16", "__nv_bfloat16", torch.bfloat16))
        for layout, other in (("row", "col"), ("col", "row"))
    ),
    Probe("mma_s8", "mma_s8", 10, 4, _mma(torch.int8)),
    *(
        Probe(
            f"ldmatrix_x{count}{'_trans' if trans else ''}",
            "ldmatrix",
            5,
            count,
            _rows,
            ("true" if trans else "false",),
        )
        for count in (1, 2, 4)
        for trans in (False, True)
    ),
    *(Probe(f"cp_async_{size}", "cp_async", 8, 4, _aligned_rows, (str(size),)) for size in (4, 8, 16)),
    Probe("cp_async_groups", "cp_async_groups", 2, 2, _random_bits(2)),
    Probe("dynamic_shared", "dynamic_shared", 1, 1, _random_bits(1), shared_bytes=128),
    Probe("shfl", "shuffle", 2, 8, _random_bits(2)),
    Probe("vote", "vote", 1, 4, _random_bits(1)),
    Probe("named_barrier", "named_barrier", 1, 1, _random_bits(1), threads=64),
)


def inputs(probe: Probe) -> Words:
    """The probe's inputs, always the same."""
    generator = torch.Generator().manual_seed(len(probe.name))
    return probe.make(BLOCKS * probe.threads, generator).contiguous()


def run_emulated(probe: Probe, words: Words, schedule: Schedule | None = None) -> Words:
    """The probe's outputs in the emulator."""
    out = torch.full((len(words), probe.words_out), -1, dtype=torch.int32)
    emulate(
        build.load(probe.spec, params="microsdpa::ProbeParams"),
        lambda at: ProbeParams(at["in"], at["out"]),
        {"in": (words, False), "out": (out, True)},
        grid=(BLOCKS, 1, 1),
        threads=probe.threads,
        shared_bytes=probe.shared_bytes,
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
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    stream = torch.cuda.current_stream().cuda_stream
    (error,) = driver.cuLaunchKernel(
        function, BLOCKS, 1, 1, probe.threads, 1, 1, probe.shared_bytes, stream, ctypes.addressof(arguments), 0
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{probe.name}: cuLaunchKernel failed with {error}")
    return out.cpu()


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
    for probe in PROBES:
        if capability_of(target) < capability_of(probe.target):
            continue
        words = inputs(probe)
        late, early = (run_emulated(probe, words, Schedule(1, late)) for late in (True, False))
        found = distance(probe, words, late, run_on_gpu(probe, words, target))
        passed = found <= probe.ulp and torch.equal(late, early)
        unit = "words differ" if probe.view == "bits" else "ulp of the summed magnitudes" if probe.scale else "ulp"
        rows.append(
            results.row(
                Case(BLOCKS, 1, probe.threads, 1, probe.words_out),
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
