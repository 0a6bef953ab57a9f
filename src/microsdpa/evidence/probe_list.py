"""The probes: instructions of kernels/ptx/, each with its inputs and the allowed distance from a GPU's results."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

from microsdpa.evidence.probe_operands import (
    Make,
    Scale,
    Words,
    aligned_rows,
    floats,
    half_pairs,
    mma,
    mma_magnitude,
    random_bits,
    rows,
    wgmma,
    wgmma_magnitude,
    wmma,
    wmma_magnitude,
)
from microsdpa.kernels import KernelSpec, TensorMap
from microsdpa.kernels.hopper.common import WIDTHS

BLOCKS = 64
INSTRUCTIONS, WMMA = "probes/instructions.cu", "probes/wmma.cu"
HOPPER, WGMMA = "probes/hopper.cu", "probes/wgmma.cu"
ADDED, FROM_ZERO = "microsdpa::Start::ADDED", "microsdpa::Start::ZERO"


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
    make: Make
    arguments: tuple[str, ...] = ()
    view: str = "bits"
    ulp: float = 0.0
    target: str = "sm_80"
    threads: int = 32
    scale: Scale | None = None
    source: str = INSTRUCTIONS
    shared_bytes: int = 0
    cluster: int = 1
    tensor_maps: tuple[TensorMap, ...] = ()
    blocks: int = BLOCKS

    def seen(self, words: Words) -> torch.Tensor:
        """The words as the probe's tensor maps see them: [1, blocks / cluster, rows, 64 halves]."""
        return words.view(torch.float16).view(1, self.blocks // self.cluster, -1, 64) if self.tensor_maps else words

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


def _wgmma_probe(
    name: str, template: str, element: tuple[str, torch.dtype], n: int, rest: tuple[str, ...], blocks: int = BLOCKS
) -> Probe:
    """A probe of one width, or of all of them when n is the largest."""
    cpp, dtype = element
    exact = dtype == torch.int8
    widths = WIDTHS if n == max(WIDTHS) else (n,)
    added = rest[-1] != FROM_ZERO
    return Probe(
        f"wgmma_{name}",
        template,
        4 + n // 16 + n // 2,
        sum(widths) // 2,
        wgmma(dtype, n),
        (cpp, "int" if exact else "float", *rest),
        "bits" if exact else "float32",
        0.0 if dtype in (torch.int8, torch.float8_e4m3fn) else 1.0,
        "sm_90a",
        128,
        None if exact else wgmma_magnitude(dtype, widths, added),
        WGMMA,
        128 * (64 + n),
        blocks=blocks,
    )


def _wgmma_probes() -> list[Probe]:
    """Every swizzle and both majors at n = 64, then every width of every type, A in shared memory and in registers."""
    f16, bf16 = ("__half", torch.float16), ("__nv_bfloat16", torch.bfloat16)
    e4m3, s8 = ("__nv_fp8_e4m3", torch.float8_e4m3fn), ("signed char", torch.int8)
    majors = {"k": "microsdpa::Major::K", "m": "microsdpa::Major::MN"}
    swizzles = {0: "NONE", 32: "BYTES_32", 64: "BYTES_64", 128: "BYTES_128"}
    layouts = [("f16", f16, s, a, b, ADDED) for s, a, b in product(swizzles, "km", "km")]
    layouts += [(name, one, s, "k", "k", ADDED) for name, one in (("e4m3", e4m3), ("s8", s8)) for s in swizzles]
    layouts += [("f16", f16, 128, "k", "m", FROM_ZERO), ("s8", s8, 128, "k", "k", FROM_ZERO)]
    widths = (("f16", f16, "m"), ("bf16", bf16, "m"), ("bf16", bf16, "k"), ("e4m3", e4m3, "k"), ("s8", s8, "k"))
    return [
        *(
            _wgmma_probe(
                f"{name}_n64_{swizzle}_{a}{b}{'' if start == ADDED else '_from_zero'}",
                "wgmma",
                element,
                64,
                ("64", f"microsdpa::Swizzle::{swizzles[swizzle]}", majors[a], majors[b], start),
            )
            for name, element, swizzle, a, b, start in layouts
        ),
        *(
            _wgmma_probe(
                f"{name}_widths_{'r' if registers == 'true' else 'k'}{b}",
                "wgmma_widths",
                element,
                max(WIDTHS),
                (majors[b], registers),
                blocks=8,
            )
            for name, element, b in widths
            for registers in ("false", "true")
        ),
    ]


def _tma_probes() -> list[Probe]:
    """Boxes of every swizzle and of several heads, inside the tensor and past its edges; stores; multicast."""
    shared = 64 * 128 + 1024
    common = {"target": "sm_90a", "threads": 128, "source": HOPPER, "shared_bytes": shared}
    probes = []
    for swizzle, (place, column, row) in product(
        (0, 32, 64, 128), (("inside", 0, 0), ("before", 0, -3), ("past_rows", 0, 21), ("past_columns", 48, 5))
    ):
        columns = (swizzle or 128) // 2
        box, arguments = columns * 2 * 64, (str(column), str(row), str(columns * 2 * 64))
        load, store = TensorMap("query", 64, columns, swizzle), TensorMap("out", 64, columns, swizzle)
        name = f"{swizzle}_{place}"
        make = random_bits(16)
        probes.append(
            Probe(f"tma_load_{name}", "tma_load", 16, box // 512, make, arguments, tensor_maps=(load,), **common)  # type: ignore[arg-type]
        )
        if row >= 0:  # an H200 takes a store to a negative row for an illegal instruction
            probes.append(
                Probe(f"tma_store_{name}", "tma_store", 16, 16, make, arguments, tensor_maps=(store,), **common)  # type: ignore[arg-type]
            )
    for name, column, head in (("inside", 0, 3), ("past", 48, -3)):
        heads = TensorMap("query", 4, 64, 128, heads=16)
        arguments, name = (str(column), str(head), str(64 * 128)), f"tma_load_heads_{name}"
        probes.append(Probe(name, "tma_load", 16, 16, random_bits(16), arguments, tensor_maps=(heads,), **common))  # type: ignore[arg-type]
    pair = TensorMap("query", 32, 64, 128)
    return [
        *probes,
        Probe(
            "bulk",
            "bulk",
            4,
            8,
            floats(-100.0, 100.0, 4),
            target="sm_90a",
            view="float32",
            source=HOPPER,
            shared_bytes=1024,
        ),
        Probe(
            "tma_multicast",
            "tma_multicast",
            16,
            16,
            random_bits(16),
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
    Probe("ex2", "ex2", 1, 1, floats(-140.0, 128.0, 1), view="float32", ulp=2.0),
    Probe("rcp", "rcp", 1, 1, floats(-100.0, 100.0, 1), view="float32", ulp=1.0),
    Probe("rsqrt", "rsqrt", 1, 1, floats(2.0**-60, 2.0**60, 1), view="float32", ulp=2.0),
    Probe("ex2_f16x2", "ex2_f16x2", 1, 1, half_pairs, view="float16", ulp=1.0),
    Probe("cvt_e4m3_from_f32", "e4m3_from_floats", 2, 1, floats(-600.0, 600.0, 2), target="sm_89"),
    Probe("cvt_e4m3_from_small_f32", "e4m3_from_floats", 2, 1, floats(-0.1, 0.1, 2), target="sm_89"),
    Probe("cvt_four_e4m3_from_f32", "four_e4m3_from_floats", 4, 1, floats(-600.0, 600.0, 4), target="sm_89"),
    Probe("cvt_f16_from_e4m3", "halves_from_e4m3", 1, 1, random_bits(1), view="float16", target="sm_89"),
    Probe("cvt_f16_bf16_from_f32", "round", 1, 2, random_bits(1), view="float32"),
    Probe("mma_f16", "mma", 10, 4, mma(torch.float16), ("__half",), "float32", 1.0, scale=mma_magnitude(torch.float16)),
    Probe(
        "mma_bf16",
        "mma",
        10,
        4,
        mma(torch.bfloat16),
        ("__nv_bfloat16",),
        "float32",
        1.0,
        scale=mma_magnitude(torch.bfloat16),
    ),
    Probe(
        "mma_e4m3",
        "mma_e4m3",
        10,
        4,
        mma(torch.float8_e4m3fn),
        (),
        "float32",
        1.0,
        "sm_89",
        scale=mma_magnitude(torch.float8_e4m3fn),
    ),
    *(
        Probe(
            f"wmma_{name}_{layout}",
            "wmma",
            16,
            8,
            wmma(dtype),
            (cpp, f"nvcuda::wmma::{layout}_major", f"nvcuda::wmma::{other}_major"),
            "float32",
            1.0,
            scale=wmma_magnitude(dtype, layout),
            source=WMMA,
        )
        for name, cpp, dtype in (("f16", "__half", torch.float16), ("bf16", "__nv_bfloat16", torch.bfloat16))
        for layout, other in (("row", "col"), ("col", "row"))
    ),
    Probe("mma_s8", "mma_s8", 10, 4, mma(torch.int8)),
    *(
        Probe(
            f"ldmatrix_x{count}{'_trans' if trans else ''}",
            "ldmatrix",
            5,
            count,
            rows,
            ("true" if trans else "false",),
        )
        for count in (1, 2, 4)
        for trans in (False, True)
    ),
    *(Probe(f"cp_async_{size}", "cp_async", 8, 4, aligned_rows, (str(size),)) for size in (4, 8, 16)),
    Probe("cp_async_groups", "cp_async_groups", 2, 2, random_bits(2)),
    Probe("dynamic_shared", "dynamic_shared", 1, 1, random_bits(1), shared_bytes=128),
    Probe("shfl", "shuffle", 2, 8, random_bits(2)),
    Probe("permute", "permute", 2, 3, random_bits(2), source="probes/permute.cu"),
    Probe("opaque", "opaque", 1, 2, random_bits(1)),
    Probe("pause", "pause", 1, 1, random_bits(1)),
    Probe("vote", "vote", 1, 4, random_bits(1)),
    *_wgmma_probes(),
    *_tma_probes(),
    Probe(
        "cluster",
        "cluster",
        2,
        14,
        floats(-9.0, 9.0, 2),
        target="sm_90a",
        source=HOPPER,
        shared_bytes=2048,
        cluster=2,
    ),
    *(
        Probe(
            name,
            "mbarrier",
            1,
            4,
            random_bits(1),
            (asleep,),
            target="sm_90a",
            threads=64,
            source=HOPPER,
            shared_bytes=256,
        )
        for name, asleep in (("mbarrier", "false"), ("mbarrier_asleep", "true"))
    ),
    Probe("warp_role", "warp_role", 1, 2, random_bits(1), target="sm_90a", threads=256, source=HOPPER),
    Probe("stmatrix", "stmatrix", 4, 4, random_bits(4), target="sm_90a", source=HOPPER, shared_bytes=512),
    Probe("named_barrier", "named_barrier", 1, 1, random_bits(1), threads=64),
)
