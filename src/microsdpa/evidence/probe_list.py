"""The probes: instructions of cuda/ptx/, each with its inputs and the distance from a GPU's results that is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from microsdpa.specs import KernelSpec, TensorMap

BLOCKS = 64
INSTRUCTIONS, WMMA = "probes/instructions.cu", "probes/wmma.cu"
HOPPER, WGMMA = "probes/hopper.cu", "probes/wgmma.cu"

Words = torch.Tensor
"""int32 tensor: the bits of 32-bit words."""


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
    cluster: int = 1
    tensor_maps: tuple[TensorMap, ...] = ()

    def seen(self, words: Words) -> torch.Tensor:
        """The words as the probe's tensor maps see them: [1, BLOCKS / cluster, rows, 64 halves]."""
        return words.view(torch.float16).view(1, BLOCKS // self.cluster, -1, 64) if self.tensor_maps else words

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
            cluster=self.cluster,
            tensor_maps=self.tensor_maps,
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


def _wgmma(dtype: torch.dtype, n: int) -> Callable[[int, torch.Generator], Words]:
    """Operands of one wgmma per warpgroup: A [64][32 bytes] in 4 words of a thread, B [n][32 bytes], D in n / 2."""

    def make(threads: int, generator: torch.Generator) -> Words:
        words = 4 + n // 16
        if dtype == torch.int8:
            operands = torch.randint(-128, 128, (threads, 4 * words), generator=generator).to(dtype)
            d = torch.randint(-(2**20), 2**20, (threads, n // 2), generator=generator).to(torch.int32)
        else:
            operands = torch.randn(threads, words * 4 // dtype.itemsize, generator=generator).to(dtype)
            d = _bits(torch.randn(threads, n // 2, generator=generator))
        return torch.cat([_bits(operands), d], dim=1)

    return make


def _wgmma_magnitude(dtype: torch.dtype, n: int) -> Callable[[Words], torch.Tensor]:
    """The same for wgmma."""

    def scale(words: Words) -> torch.Tensor:
        groups = words.view(-1, 128, words.shape[1])

        def matrix(first: int, last: int, rows: int) -> torch.Tensor:
            return groups[:, :, first:last].contiguous().view(dtype).double().abs().view(len(groups), rows, -1)

        products = matrix(0, 4, 64) @ matrix(4, 4 + n // 16, n).mT
        thread, i = torch.arange(128)[:, None], torch.arange(n // 2)
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
        start = groups[:, :, 4 + n // 16 :].contiguous().view(torch.float32).double().abs()
        return (products[:, row, i // 4 * 8 + 2 * (thread % 4) + i % 2] + start).view(-1, n // 2)

    return scale


def _wgmma_probes() -> list[Probe]:
    """Every swizzle and both majors at n = 64; every width, type and A in registers in one layout."""
    f16, e4m3 = ("f16", "__half", torch.float16), ("e4m3", "__nv_fp8_e4m3", torch.float8_e4m3fn)
    bf16, s8 = ("bf16", "__nv_bfloat16", torch.bfloat16), ("s8", "signed char", torch.int8)
    swizzles = {0: "NONE", 32: "BYTES_32", 64: "BYTES_64", 128: "BYTES_128"}
    layouts = [(*f16, 64, s, a, b, False) for s, a, b in product(swizzles, "km", "km")]
    layouts += [(*one, 64, s, "k", "k", False) for one in (e4m3, s8) for s in swizzles]
    layouts += [(*bf16, 64, 128, "k", "m", False), (*bf16, 64, 128, "k", "k", True)]
    layouts += [(*f16, n, 128, "k", "m", True) for n in (32, 64, 96, 128, 192, 256)]
    layouts += [(*e4m3, n, 128, "k", "k", True) for n in (64, 128)] + [(*s8, 64, 128, "k", "k", True)]
    majors = {"k": "microsdpa::Major::K", "m": "microsdpa::Major::MN"}
    return [
        Probe(
            f"wgmma_{name}_n{n}_{swizzle}_{'r' if registers else a}{b}",
            "wgmma",
            4 + n // 16 + n // 2,
            n // 2,
            _wgmma(dtype, n),
            (
                cpp,
                "int" if dtype == torch.int8 else "float",
                str(n),
                f"microsdpa::Swizzle::{swizzles[swizzle]}",
                majors[a],
                majors[b],
                "true" if registers else "false",
            ),
            "bits" if dtype == torch.int8 else "float32",
            # The FP8 accumulator keeps about 14 bits, which the emulator does not model: 2^11 of FP32's last places.
            {torch.int8: 0.0, torch.float8_e4m3fn: 2048.0}.get(dtype, 1.0),
            "sm_90a",
            128,
            None if dtype == torch.int8 else _wgmma_magnitude(dtype, n),
            WGMMA,
            128 * (64 + n),
        )
        for name, cpp, dtype, n, swizzle, a, b, registers in layouts
    ]


def _tma_probes() -> list[Probe]:
    """Boxes of every swizzle, inside the tensor and past each of its edges; stores; multicast to a pair."""
    shared = 64 * 128 + 1024
    probes = []
    for swizzle, (place, column, row) in product(
        (0, 32, 64, 128), (("inside", 0, 0), ("before", 0, -3), ("past_rows", 0, 21), ("past_columns", 48, 5))
    ):
        columns = (swizzle or 128) // 2
        box, arguments = columns * 2 * 64, (str(column), str(row), str(columns * 2 * 64))
        load, store = TensorMap("query", 64, columns, swizzle), TensorMap("out", 64, columns, swizzle)
        name = f"{swizzle}_{place}"
        common = {"target": "sm_90a", "threads": 128, "source": HOPPER, "shared_bytes": shared}
        make = _random_bits(16)
        probes.append(
            Probe(f"tma_load_{name}", "tma_load", 16, box // 512, make, arguments, tensor_maps=(load,), **common)  # type: ignore[arg-type]
        )
        if row >= 0:  # an H200 takes a store to a negative row for an illegal instruction
            probes.append(
                Probe(f"tma_store_{name}", "tma_store", 16, 16, make, arguments, tensor_maps=(store,), **common)  # type: ignore[arg-type]
            )
    pair = TensorMap("query", 32, 64, 128)
    return [
        *probes,
        Probe(
            "tma_multicast",
            "tma_multicast",
            16,
            16,
            _random_bits(16),
            (str(64 * 128),),
            target="sm_90a",
            threads=128,
            source=HOPPER,
            shared_bytes=shared,
            cluster=2,
            tensor_maps=(pair,),
        ),
    ]


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
    Probe("permute", "permute", 2, 3, _random_bits(2), source="probes/permute.cu"),
    Probe("vote", "vote", 1, 4, _random_bits(1)),
    *_wgmma_probes(),
    *_tma_probes(),
    Probe(
        "cluster",
        "cluster",
        2,
        10,
        _floats(-9.0, 9.0, 2),
        target="sm_90a",
        source=HOPPER,
        shared_bytes=2048,
        cluster=2,
    ),
    Probe("mbarrier", "mbarrier", 1, 4, _random_bits(1), target="sm_90a", threads=64, source=HOPPER, shared_bytes=256),
    Probe("warp_role", "warp_role", 1, 2, _random_bits(1), target="sm_90a", threads=256, source=HOPPER),
    Probe("stmatrix", "stmatrix", 4, 4, _random_bits(4), target="sm_90a", source=HOPPER, shared_bytes=512),
    Probe("named_barrier", "named_barrier", 1, 1, _random_bits(1), threads=64),
)
