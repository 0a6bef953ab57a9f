"""The families of kernels: what there is, and what each can compute. policy.py says which of them should run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, product
from types import ModuleType
from typing import Any

from microsdpa.kernels.ada.mma_8bit import spec as ada_mma_8bit
from microsdpa.kernels.ampere.general import spec as ampere_general
from microsdpa.kernels.ampere.mma import spec as ampere_mma
from microsdpa.kernels.ampere.varlen import spec as ampere_varlen
from microsdpa.kernels.backward.spec import backward_catalogue
from microsdpa.kernels.eight_bit import ALL_HEAD_DIMS
from microsdpa.kernels.hopper.backward import spec as hopper_backward
from microsdpa.kernels.hopper.latency import eight_bit as hopper_latency_8bit
from microsdpa.kernels.hopper.latency import spec as hopper_latency
from microsdpa.kernels.hopper.split import spec as hopper_split
from microsdpa.kernels.hopper.throughput import spec as hopper_throughput
from microsdpa.kernels.hopper.throughput_8bit import spec as hopper_fp8
from microsdpa.kernels.hopper.throughput_8bit_qk import spec as hopper_int8
from microsdpa.kernels.hopper.varlen import spec as hopper_varlen
from microsdpa.kernels.ladder import eight_bit_spec as eight_bit_ladder
from microsdpa.kernels.ladder import spec as ladder
from microsdpa.kernels.problem import (
    ELEMENT_BYTES,
    OPERANDS,
    VECTOR_BYTES,
    CacheKind,
    Causal,
    DType,
    MaskKind,
    Operands,
    Problem,
    PrologueKind,
)
from microsdpa.kernels.prologue import spec as prologue_rows
from microsdpa.kernels.quantize.spec import quantize_catalogue
from microsdpa.kernels.spec import KernelSpec, Rejection

EMULATED_TARGET = "sm_89"
"""GPU that the emulator chooses kernels for, unless a kernel that needs another one is named."""


@dataclass(frozen=True)
class Family:
    """Kernels of one design.

    Attributes:
        specify: gives the configuration for a problem, or says why there is none.
        emulated_target: the GPU that the emulator takes when the family is named.
        masks: whether the family knows masks other than the causal one, at least for some problems.
        ranges: whether it knows ranges of keys, which are int32, and tables of blocks, which are uint8, as masks.
        any_layout: whether it takes any head dimension and alignment.
        dropout: whether it drops probabilities.
        prologue: whether it has norms and rotary embedding of Q and K, without dropout.
        value_dims: whether V and O may have fewer columns than Q and K.
        continues: whether it goes on from an output and an LSE of other keys, without dropout, norms and rotary
            embedding.
        eight_bit: whether its problems have 8-bit operands; those of the other families have none.
        varlen: whether its problems have sequences of many lengths; those of the other families have none.
        short_sums: operands of which its scores are sums of 14 bits, as wgmma makes them of E4M3 products.
        configurations: every configuration that computes a problem, by a name for a table; for a family with a choice.
    """

    name: str
    summary: str
    specify: Callable[[Problem], KernelSpec | Rejection]
    emulated_target: str = EMULATED_TARGET
    masks: bool = False
    ranges: bool = False
    any_layout: bool = False
    dropout: bool = False
    prologue: bool = False
    value_dims: bool = False
    continues: bool = False
    eight_bit: bool = False
    varlen: bool = False
    short_sums: tuple[Operands, ...] = ()
    configurations: Callable[[Problem], dict[str, KernelSpec]] = lambda _: {}

    @property
    def short_name(self) -> str:
        """The name up to the rung's number: "ladder/01" for "ladder/01_scalar"."""
        return self.name.split("_")[0] if self.name.startswith("ladder/") else self.name


FAMILIES: tuple[Family, ...] = (
    Family(
        "hopper/latency",
        "small problems: wgmma and TMA, keys shared by a pair of CTAs; sm_90a",
        hopper_latency.latency,
        emulated_target="sm_90a",
        masks=True,
        ranges=True,
        prologue=True,
        configurations=hopper_latency.configurations,
    ),
    Family(
        "hopper/split",
        "problems of about one tile of queries an SM: four warpgroups share its keys; sm_90a",
        hopper_split.split,
        emulated_target="sm_90a",
        configurations=hopper_split.configurations,
    ),
    Family(
        "hopper/throughput",
        "problems that fill the chip: wgmma and TMA, specialised warps, CTAs that stay; sm_90a",
        hopper_throughput.throughput,
        emulated_target="sm_90a",
        masks=True,
        ranges=True,
        dropout=True,
        value_dims=True,
        continues=True,
        configurations=hopper_throughput.configurations,
    ),
    Family(
        "ampere/mma",
        "mma.sync tensor cores, cp.async, swizzled shared memory; sm_80 and newer",
        ampere_mma.forward,
        masks=True,
        ranges=True,
        configurations=ampere_mma.configurations,
    ),
    Family(
        "ampere/general",
        "every mask, head dimension and layout, on mma.sync; sm_80 and newer",
        ampere_general.forward,
        masks=True,
        ranges=True,
        any_layout=True,
        dropout=True,
        prologue=True,
        continues=True,
    ),
    Family("ladder/01_scalar", "FP32 arithmetic on the CUDA cores; no tensor cores", ladder.scalar),
    Family("ladder/02_wmma", "tensor cores through C++ wmma", ladder.wmma),
    Family("ladder/03_cp_async", "and asynchronous copies of K and V, double-buffered", ladder.cp_async),
    Family("ladder/04_mma_sync", "mma.sync on swizzled shared memory, P in registers", ladder.mma_sync),
    Family("ladder/05_warp_roles", "and warps that only copy beside warps that only compute", ladder.warp_roles),
    Family("ladder/06_persistent", "and CTAs that take one tile after the other", ladder.persistent),
    Family("ladder/07_tuned", "rung 04 with tiles for the problem and the keys divided among warps", ladder.tuned),
)

"""Families for operands of 16 bits."""

EIGHT_BIT_FAMILIES: tuple[Family, ...] = (
    Family(
        "hopper/latency_8bit",
        "hopper/latency with E4M3 or INT8 wgmma for Q K^T, and V widened to FP16; sm_90a",
        hopper_latency_8bit.latency,
        emulated_target="sm_90a",
        masks=True,
        ranges=True,
        eight_bit=True,
        short_sums=("fp8",),
    ),
    Family(
        "hopper/throughput_8bit",
        "E4M3 or INT8 wgmma for Q K^T, E4M3 for P V, TMA, V transposed on its way; sm_90a",
        hopper_fp8.throughput,
        emulated_target="sm_90a",
        masks=True,
        ranges=True,
        eight_bit=True,
        short_sums=("fp8",),
    ),
    Family(
        "hopper/throughput_8bit_qk",
        "INT8 wgmma for Q K^T, 16 bits for P V, TMA; sm_90a",
        hopper_int8.throughput,
        emulated_target="sm_90a",
        masks=True,
        ranges=True,
        eight_bit=True,
    ),
    *(
        Family(name, summary, specify, eight_bit=True)
        for name, summary, specify in (
            (
                "ada/mma_8bit",
                "8-bit mma.sync, tiles for the problem, keys divided among warps; sm_89 and newer",
                ada_mma_8bit.mma_8bit,
            ),
            ("ladder/11_8bit_cp_async", "8-bit mma.sync, asynchronous copies, E4M3 or INT8", eight_bit_ladder.cp_async),
            ("ladder/08_fp8_scalar", "E4M3 dequantized on load, FP32 arithmetic", eight_bit_ladder.scalar),
            ("ladder/09_fp8_mma", "Q K^T by 8-bit mma.sync, P and V in FP16", eight_bit_ladder.mma),
            ("ladder/10_fp8_probability", "P V by 8-bit mma.sync too", eight_bit_ladder.probability),
            (
                "ladder/12_8bit_persistent",
                "rung 11 with copying warps and persistent CTAs",
                eight_bit_ladder.persistent,
            ),
        )
    ),
)
"""Families for 8-bit operands."""

VARLEN_FAMILIES: tuple[Family, ...] = (
    Family(
        "hopper/varlen",
        "packed prompts, prompts on a cache and large groups of heads on wgmma and TMA; sm_90a",
        hopper_varlen.forward,
        emulated_target="sm_90a",
        masks=True,
        value_dims=True,
        varlen=True,
    ),
    Family(
        "ampere/varlen",
        "packed sequences and paged caches on mma.sync: lengths on the device, keys divided among CTAs",
        ampere_varlen.forward,
        masks=True,
        value_dims=True,
        varlen=True,
    ),
)
"""Families for sequences of many lengths."""

ONE_LENGTH = replace(VARLEN_FAMILIES[0], specify=hopper_varlen.for_one_length, varlen=False, value_dims=False)
"""The first of them for sequences of one length, dense ones: the same kernel in calls of `sdpa`."""

ALL_FAMILIES = (*FAMILIES, *EIGHT_BIT_FAMILIES, *VARLEN_FAMILIES)


def varlen_kernel(spec: KernelSpec) -> ModuleType:
    """How a kernel of VARLEN_FAMILIES is launched, by its module's grid_of(), divides_keys() and workspace_bytes()."""
    return hopper_varlen if spec.name == "hopper/varlen" else ampere_varlen


@functools.lru_cache(maxsize=256)
def family_named(name: str) -> Family | None:
    """The family called `name`, by its full or its short name; None when there is none."""
    return next((f for f in ALL_FAMILIES if name in (f.name, f.short_name)), None)


def emulated_target(impl: str) -> str:
    """The GPU that the emulator takes for "auto" or a kernel's name."""
    family = family_named(impl)
    return family.emulated_target if family else EMULATED_TARGET


def configurations(problem: Problem) -> dict[str, KernelSpec]:
    """Every configuration of the production kernels that computes a problem, by a name for a table."""
    found: dict[str, KernelSpec] = {}
    for family in FAMILIES:
        if problem.mask is None and not family.name.startswith("ladder/"):
            specs = family.configurations(problem) if isinstance(family.specify(problem), KernelSpec) else {}
            found |= {f"{family.name}, {label}": spec for label, spec in specs.items()}
    return found


ROTARY = ampere_varlen.RowChange(64, False, "float32")
GENERAL_HEAD_DIMS = (40, 64, 128, 256)
SHOWN_HEAD_DIMS = (72, *range(16, 257, 16))
PROLOGUE_KINDS = (
    PrologueKind(64, angles="float32", query_norm="rms", key_norm="rms", weights="float16"),
    PrologueKind(128, True, angles="float16", query_positions="int32", key_positions="int64"),
    PrologueKind(query_norm="layer", key_norm="layer", weights="float32", biased=True),
)
MASK_KINDS: tuple[MaskKind | None, ...] = (
    None,
    MaskKind("bool", left=True),
    MaskKind("float32", True, True, True, True, "float32"),
    MaskKind(right=True, softcap=True, sinks="float16"),
)
UNALIGNED_NUMBERS = MaskKind("float16", per_head=True, per_query=True, unaligned=True)


def catalogue(target: str, *, every: bool = False) -> list[KernelSpec]:
    """Configurations that the families make for `target`.

    By default a few of each family, among which are every head dimension, dtype, mask and alignment; with `every`, all
    combinations of them. A family that takes any head dimension is shown at a few. The kernels for 8-bit operands come
    last, by default those for one head dimension.
    """
    specs: dict[KernelSpec, None] = {}
    dtypes: tuple[DType, ...] = ("float16", "bfloat16")
    masks: tuple[Causal | None, ...] = (None, "upper_left")
    variants = list(product(dtypes, masks, (False, True)))  # the last: rows that are aligned to elements only
    opposites = [(5, 2), (0, 7), (6, 1), (3, 4)]  # two variants that have nothing in common, four times
    for family in FAMILIES:
        found = 0
        kinds = MASK_KINDS if family.any_layout else (None,)
        for head_dim in GENERAL_HEAD_DIMS if family.any_layout else SHOWN_HEAD_DIMS:
            results = [
                family.specify(
                    Problem(
                        *(1, 8, 8, 512, 512, head_dim, dtype),
                        causal=causal,
                        mask=kinds[(found + i) % len(kinds)],
                        alignment=ELEMENT_BYTES[dtype] if unaligned else VECTOR_BYTES,
                        target=target,
                    )
                )
                for i, (dtype, causal, unaligned) in enumerate(variants)
            ]
            chosen = range(len(variants)) if every else opposites[found % len(opposites)]
            for i in chosen:
                # A family that refuses unaligned rows is shown with aligned ones.
                result = results[i] if isinstance(results[i], KernelSpec) else results[i - i % 2]
                if isinstance(result, KernelSpec):
                    specs |= dict.fromkeys(result.stages)
            found += any(isinstance(result, KernelSpec) for result in results)
        if family.dropout:
            for head_dim, dtype in zip(GENERAL_HEAD_DIMS, cycle(dtypes)):
                sizes = 1, 8, 8, 512, 512, head_dim, dtype
                result = family.specify(Problem(*sizes, causal="upper_left", dropout=True, target=target))
                if isinstance(result, KernelSpec):
                    specs[result] = None
        if family.continues:
            for head_dim, dtype in zip(GENERAL_HEAD_DIMS, cycle(dtypes)):
                sizes = 1, 8, 8, 512, 512, head_dim, dtype
                result = family.specify(Problem(*sizes, causal="lower_right", continued=True, target=target))
                if isinstance(result, KernelSpec):
                    specs[result] = None
        if family.prologue:
            for prologue, head_dim in zip(PROLOGUE_KINDS, (64, 128, 72), strict=True):
                sizes = 1, 8, 8, 512, 512, head_dim, "float16"
                result = family.specify(Problem(*sizes, prologue=prologue, target=target))
                if isinstance(result, KernelSpec):
                    specs[result] = None
        if family.masks and not family.any_layout:
            for kind, dtype in zip((*MASK_KINDS[1:], UNALIGNED_NUMBERS), cycle(dtypes)):
                result = family.specify(Problem(1, 8, 2, 1, 4096, 128, dtype, mask=kind, target=target))
                if isinstance(result, KernelSpec):
                    specs |= dict.fromkeys(result.stages)
    specs |= dict.fromkeys(_prologue_catalogue(target))
    specs |= dict.fromkeys([*backward_catalogue(target), *hopper_backward.catalogue(target)])
    specs |= dict.fromkeys(_varlen_catalogue(target))
    quantized = [*_eight_bit_catalogue(target), *quantize_catalogue(target)]
    if not every:
        quantized = [s for s in quantized if ("HEAD_DIM", "64") in s.template_args and _is_of_half(s)]
        quantized = [s for s in quantized if ("CAUSAL", "false") not in s.template_args]
    return [*specs, *quantized, *_masked_eight_bit_catalogue(target, every)]


def _is_of_half(spec: KernelSpec) -> bool:
    """Whether a kernel around 8-bit operands has FP16 for its 16-bit type."""
    arguments = dict(spec.template_args)
    return "__half" in arguments.get("T", arguments.get("OPERANDS", ""))


def _prologue_catalogue(target: str) -> list[KernelSpec]:
    """Kernels ahead of attention: every kind of norms and angles, for one head dimension or another and both types."""
    heads = cycle(((8, 8), (8, 2), (3, 1)))
    found = []
    for prologue, head_dim, dtype in product(PROLOGUE_KINDS, (64, 128, 256), ("float16", "bfloat16")):
        of_query, of_key = next(heads)
        sizes = 1, of_query, of_key, 512, 512, head_dim, dtype
        result = prologue_rows.rows(Problem(*sizes, prologue=prologue, target=target))  # type: ignore[arg-type]
        if isinstance(result, KernelSpec):
            found.append(result)
    return found


def _varlen_catalogue(target: str) -> list[KernelSpec]:
    """A few configurations for sequences of many lengths: every choice of tiles, layout and mask among them."""
    shared = {"causal": "lower_right", "target": target}
    masks = cycle((None, None, MaskKind(left=True), MaskKind(None, True, True, True, True, "float32"), None))
    layouts: Iterator[tuple[int, DType]]
    layouts = cycle(((16, "bfloat16"), (0, "float16"), (1, "float16"), (64, "bfloat16"), (32, "float16")))
    specs: dict[KernelSpec, None] = {}
    for head_dim, (batch, queries) in product((64, 72, 128, 256), ((1, 1), (8, 1), (8, 8), (8, 16), (8, 512))):
        page, dtype = next(layouts)
        sizes = batch, 32, 8, queries, 4096, head_dim, dtype
        problem = Problem(*sizes, mask=next(masks), varlen=page, **shared)  # type: ignore[arg-type]
        if isinstance(found := ampere_varlen.forward(problem), KernelSpec):
            specs[found] = None
            normed = (replace(ROTARY, weights=dtype),) if head_dim == 128 else ()
            for change in (ampere_varlen.RowChange() if page == 1 else ROTARY, *normed):
                specs[ampere_varlen.append(problem, change)] = None
                if ampere_varlen.appends_itself(found, problem):
                    specs[ampere_varlen.appending(found, problem, change)] = None
    kinds = cycle((CacheKind("e4m3"), CacheKind("int8", True), CacheKind("int8")))
    for head_dim, (batch, queries) in product((64, 128, 256), ((1, 1), (8, 1), (8, 8), (8, 512))):
        page, dtype = next(layouts)
        sizes = batch, 32, 8, queries, 4096, head_dim, dtype
        problem = Problem(*sizes, mask=next(masks), varlen=page, cache=next(kinds), **shared)  # type: ignore[arg-type]
        if isinstance(found := ampere_varlen.forward(problem), KernelSpec):
            specs[found] = None
    layouts = cycle(((16, "bfloat16"), (0, "float16"), (64, "bfloat16"), (8, "float16")))
    forms = ((8, 8, 512), (8, 1, 4), (300, 1, 2), (8, 1, 2), (120, 1, 2))  # sequences, key heads, queries
    for head_dim, (batch, heads_kv, queries) in product(hopper_varlen.TILES, forms):
        if batch != 8 and head_dim > hopper_varlen.LARGEST_OF_FEW:
            continue  # its tiles are the same
        page, dtype = next(layouts)
        sizes = batch, 32, heads_kv, queries, 4096, head_dim, dtype
        problem = Problem(*sizes, mask=next(masks), varlen=page, **shared)  # type: ignore[arg-type]
        if isinstance(found := hopper_varlen.forward(problem), KernelSpec):
            specs[found] = None
    for forward, queries in ((ampere_varlen.forward, 1), (ampere_varlen.forward, 40), (hopper_varlen.forward, 512)):
        problem = Problem(8, 16, 16, queries, 4096, 192, "bfloat16", varlen=0, value_dim=128, **shared)  # type: ignore[arg-type]
        if isinstance(found := forward(problem), KernelSpec):
            specs |= dict.fromkeys((found, ampere_varlen.append(problem, ROTARY)))
    # Calls of one length, of whose queries bulk copies bring whole ones, and cp.async rows.
    for one_length in ((32, 14, 2, 24, 1500, 64, "bfloat16"), (8, 37, 1, 30, 3000, 80, "float16")):
        result = hopper_varlen.for_one_length(Problem(*one_length, **shared))  # type: ignore[arg-type]
        if isinstance(result, KernelSpec):
            specs[result] = None
    return list(specs)


def _eight_bit_catalogue(target: str) -> list[KernelSpec]:
    """Every configuration that the families for 8-bit operands make for `target`; of packed heads one of each kind."""
    specs: dict[KernelSpec, None] = {}
    dtypes: tuple[DType, ...] = ("float16", "bfloat16")
    masks: tuple[Causal | None, ...] = (None, "upper_left")
    heads = 8, 256  # few tiles of queries, and many
    blocks = 1, 0  # every key has a scale, or all of a head share one
    for block, family, head_dim, dtype, causal, operands, terms, h in product(
        blocks, EIGHT_BIT_FAMILIES, ALL_HEAD_DIMS, dtypes, masks, OPERANDS, (1, 2), heads
    ):
        if (terms == 2 and operands == "int8_fp8") or (block == 0 and (terms, operands) != (1, "fp8")):
            continue
        problem = Problem(
            *(1, h, h, 512, 512, head_dim, dtype),
            causal=causal,
            target=target,
            operands=operands,
            query_terms=terms,
            key_block=block,
        )
        if isinstance(result := family.specify(problem), KernelSpec):
            specs[result] = None
    for family, head_dim, operands in product(EIGHT_BIT_FAMILIES, ALL_HEAD_DIMS, OPERANDS):
        sizes = 1, 8, 2, 1, 4096, head_dim, "float16"
        problem = Problem(*sizes, "lower_right", target=target, operands=operands)  # type: ignore[arg-type]
        result = family.specify(problem)
        if isinstance(result, KernelSpec) and result.pack > 1:
            specs[result] = None
    return list(specs)


def _masked_eight_bit_catalogue(target: str, every: bool) -> list[KernelSpec]:
    """The kernels for 8-bit operands with masks: one kind of each family, or with `every` all of MASK_KINDS and ranges.

    Of more keys than hopper/latency_8bit holds, and with ranges, that is hopper/throughput_8bit, or with V of 16 bits
    hopper/throughput_8bit_qk.
    """
    kinds = (*MASK_KINDS[1:], MaskKind("int32", per_query=True)) if every else MASK_KINDS[-1:]
    narrow: tuple[tuple[Operands, int, int], ...] = ("fp8", 0, 1), ("int8_fp8", 1, 1)
    wide: tuple[tuple[Operands, int, int], ...] = ("int8_fp16", 1, 2), ("int8_fp16", 1, 1)
    specs: dict[KernelSpec, None] = {}
    for family, head_dim in product(EIGHT_BIT_FAMILIES, (64, 128) if every else (64,)):
        if not family.masks:
            continue
        made = wide if family.name == "hopper/throughput_8bit_qk" else narrow
        for kind, (operands, block, terms) in zip(kinds, cycle(made)):
            sizes = 1, 8, 8, 512, 512, head_dim, "float16"
            shared: dict[str, Any] = {"operands": operands, "key_block": block, "query_terms": terms}
            problem = Problem(*sizes, mask=kind, target=target, **shared)  # type: ignore[arg-type]
            if isinstance(result := family.specify(problem), KernelSpec):
                specs[result] = None
    return list(specs)
