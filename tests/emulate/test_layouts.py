"""The structs that Python fills are those of C++: the host's compiler compares sizes and the place of every member."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import replace

import pytest

from microsdpa.emulate import abi, build
from microsdpa.errors import CompileError
from microsdpa.evidence import fp8_products, probes
from microsdpa.kernels import KernelSpec, catalogue, eight_bit_params, params
from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.latency import spec as hopper_latency
from microsdpa.kernels.hopper.latency.eight_bit import EightBitLatency
from microsdpa.kernels.problem import MaskKind, Problem
from microsdpa.kernels.spec import CPP_TYPE

Structs = dict[str, type[ctypes.Structure]]
KERNELS: dict[str, Structs] = {
    "common/mask_params.cuh": {"AttentionParams": params.Params, "MaskedParams": params.MaskedParams},
    "backward/terms.cu": {"Strides": params.Strides, "backward::BackwardParams": params.BackwardParams},
    "backward/mask.cu": {
        "DropoutParams": params.DropoutParams,
        "Dropped<microsdpa::MaskedParams>": params.DroppedParams,
        "Dropped<microsdpa::backward::BackwardParams>": params.DroppedBackwardParams,
    },
    "common/varlen_params.cuh": {
        name: getattr(abi, name)
        for name in ("VarlenParams", "OneLengthParams", "AppendParams", "CacheParams", "NormedParams")
    },
    "common/prologue_params.cuh": {
        "PrologueParams": params.PrologueParams,
        "Prologued": params.ProloguedParams,
    },
    "hopper/latency/kernel.cu": {
        "hopper::latency::Scaled<microsdpa::AttentionParams>": eight_bit_params.ScaledParams,
        "hopper::latency::Scaled<microsdpa::MaskedParams>": eight_bit_params.ScaledMaskedParams,
    },
    "hopper/throughput_8bit/kernel.cu": {"hopper::EightBitMasked": eight_bit_params.EightBitMasked},
    "common/eight_bit_params.cuh": {
        name: getattr(eight_bit_params, name)
        for name in ("ByteStrides", "RowScales", "ChannelScales", "EightBitParams")
    },
    "quantize/fused.cu": {"quantize::QuantizeParams": eight_bit_params.QuantizeParams},
    "quantize/restore_lse.cu": {"quantize::RestoreLseParams": eight_bit_params.RestoreLseParams},
    "probes/probe.cuh": {"ProbeParams": probes.ProbeParams},
    "probes/fp8_products.cu": {"ProductParams": fp8_products.ProductParams},
}
RUNTIME: Structs = {
    f"emulator::{name}": getattr(abi, name)
    for name in ("Buffer", "TensorView", "Launch", "SiteCounters", "Counters", "Outcome")
}
MEMBERS = {
    params.MaskedParams: lambda name: name if name == "call" else f"masks.{name}",
    eight_bit_params.EightBitMasked: lambda name: name if name == "call" else f"masks.{name}",
    abi.OneLengthParams: lambda name: "query" if name == "call" else name,  # a base, which begins with it
    abi.CacheParams: lambda name: "call" if name == "append" else name,  # a base, which begins with it
    abi.NormedParams: lambda name: "call" if name == "cached" else name,
}
"""What C++ calls members, where that is not what Python does."""


def alias(cpp: str) -> str:
    """A name without brackets, which a macro takes."""
    return f"Compared_{re.sub(r'[^A-Za-z0-9]', '_', cpp)}"


def assertions(structs: Structs) -> str:
    """One line for each fact of a struct."""
    lines = []
    for name, struct in structs.items():
        cpp = f"microsdpa::{name}"
        lines.append(f"using {alias(cpp)} = {cpp};")
        cpp = alias(cpp)
        lines.append(f'static_assert(sizeof({cpp}) == {ctypes.sizeof(struct)}, "size");')
        for member, *_ in struct._fields_:
            there = MEMBERS.get(struct, str)(member)
            lines.append(f'static_assert(offsetof({cpp}, {there}) == {getattr(struct, member).offset}, "{there}");')
    return "#include <cstddef>\n" + "\n".join(lines) + "\n"


def compile_text(text: str) -> None:
    command = [*build.kernel_command(), "-fsyntax-only", "-x", "c++", "-"]
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if run.returncode:
        raise CompileError("refused", log=run.stderr, source=None)


@pytest.mark.parametrize("source", KERNELS)
def test_parameters_are_laid_out_as_the_kernels_read_them(source: str) -> None:
    compile_text(f"{build.expanded(source)}\n{assertions(KERNELS[source])}")


def test_the_emulators_structs_are_laid_out_as_its_runtime_reads_them() -> None:
    compile_text((build.HERE / "runtime/launch.h").read_text().replace("#pragma once", "") + assertions(RUNTIME))


def test_every_struct_that_python_fills_is_compared() -> None:
    compared = {struct for structs in (*KERNELS.values(), RUNTIME) for struct in structs.values()}
    for module in (abi, params, eight_bit_params, probes, fp8_products):
        found = {s for s in vars(module).values() if isinstance(s, type) and issubclass(s, ctypes.Structure)}
        assert found <= compared


@pytest.mark.parametrize(
    ("before", "after"), [("int64 head;", "int32 head;"), ("  int64 row;\n", ""), ("int64 batch;\n  int64 head;", "")]
)
def test_another_layout_is_found(before: str, after: str) -> None:
    text = build.expanded("common/eight_bit_params.cuh")
    assert before in text
    with pytest.raises(CompileError, match="refused"):
        compile_text(f"{text.replace(before, after)}\n{assertions(KERNELS['common/eight_bit_params.cuh'])}")


ALIGNMENT = 'static_assert(alignof(T) <= 1024, "dynamic shared memory starts on 1024 bytes");'
SOURCES = sorted({spec.source for spec in catalogue("sm_90a") if spec.shared_bytes})


MASKS_BROUGHT = {f"Masks<{CPP_TYPE[t]}": MaskKind(t, bulk=True) for t in ("bool", "float16", "bfloat16", "float32")}


def configurations(source: str) -> list[KernelSpec]:
    """Up to three configurations of a kernel, those that differ most."""
    found = [spec for spec in catalogue("sm_90a") if spec.source == source and spec.shared_bytes]
    return found[:: max(1, -(-len(found) // 3))]


def _struct_bytes_8bit(spec: KernelSpec) -> int:
    """Of hopper/latency_8bit without a mask that bulk copies bring."""
    values = dict(spec.template_args)
    terms, key_scales = values["OPERANDS"].removesuffix(">").split(", ")[2:]
    choice = EightBitLatency(int(values["CLUSTER"]), int(values["ROUNDS"]))
    size = choice.shared_bytes(int(values["HEAD_DIM"]), int(terms), key_scales == "true")
    assert spec.shared_bytes == max(size, chip_of("sm_90a").shared_per_sm // 2)
    return size


def struct_bytes(spec: KernelSpec) -> int:
    """The size that Python computes of a kernel's struct: what the launch asks for, but where it asks for more."""
    if spec.name == "hopper/latency_8bit":
        return _struct_bytes_8bit(spec)
    if spec.name != "hopper/latency":
        return spec.shared_bytes
    sizes = {name: int(value) for name, value in spec.template_args if value.isdigit()}
    choice = hopper_latency.Latency(sizes["CLUSTER"], sizes["STAGES"], sizes["ROUNDS"])
    kind = next((kind for name, kind in MASKS_BROUGHT.items() if name in spec.expression), None)
    mask = replace(kind, per_query=sizes["MASK_ROWS"] > 1) if kind and "MASK_ROWS" in sizes else None
    size = choice.shared_bytes(sizes["HEAD_DIM"], mask)
    assert spec.shared_bytes == max(size, chip_of("sm_90a").shared_per_sm // 2)
    return size


def assert_struct_size(spec: KernelSpec, size: int) -> None:
    text = build.expanded(spec.source)
    assert text.count(ALIGNMENT) == 1
    text = text.replace(ALIGNMENT, f'static_assert(sizeof(T) == {size}, "another size");')
    if spec.template_args[-1][0] == "MAPS":  # a pack: the emulator's compiler deduces it, and takes no address of it
        function = replace(spec, template_args=spec.template_args[:-1]).expression
        maps = ", ".join(["map"] * len(spec.tensor_maps))
        compile_text(
            f"{text}\nvoid launch({spec.params} params, microsdpa::TensorMap map) {{ {function}(params, {maps}); }}"
        )
    else:
        compile_text(f"{text}\nauto* const kernel = &{spec.expression};\n")


@pytest.mark.parametrize("source", SOURCES)
def test_a_launch_asks_for_the_shared_memory_of_the_kernels_struct(source: str) -> None:
    for spec in configurations(source):
        assert_struct_size(spec, struct_bytes(spec))


@pytest.mark.parametrize("mask", MASKS_BROUGHT.values(), ids=str)
@pytest.mark.parametrize("per_query", [False, True])
def test_a_launch_asks_for_the_room_of_a_mask_that_bulk_copies_bring(mask: MaskKind, per_query: bool) -> None:
    problem = Problem(1, 8, 8, 512, 512, 64, "float16", mask=replace(mask, per_query=per_query))
    for cluster in (1, 2):
        spec = hopper_latency.specification(problem, hopper_latency.configuration(problem, cluster))
        assert_struct_size(spec, struct_bytes(spec))


@pytest.mark.parametrize("head_dim", [72, 96, 128])
def test_a_launch_asks_for_the_room_of_every_head_dimension(head_dim: int) -> None:
    spec = hopper_latency.latency(Problem(1, 8, 8, 512, 512, head_dim, "float16"))
    assert isinstance(spec, KernelSpec)
    assert_struct_size(spec, struct_bytes(spec))


@pytest.mark.parametrize("off", [-16, 16])
def test_another_size_of_the_struct_is_found(off: int) -> None:
    spec = configurations("hopper/split/kernel.cu")[0]
    with pytest.raises(CompileError, match="refused") as caught:
        assert_struct_size(spec, struct_bytes(spec) + off)
    assert "another size" in caught.value.log
