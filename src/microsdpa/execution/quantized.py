"""The kernels of a call with 8-bit operands: their parameters, in which only addresses are left open, and one-off runs.

A parameter is made once for shapes and strides; a plan then puts the addresses of each call in, as the emulator does.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from microsdpa.call import tensors
from microsdpa.call.masks import NONE, Masks
from microsdpa.call.scales import FORMAT_DTYPE, block_of
from microsdpa.call.validate import Checked
from microsdpa.errors import UnsupportedProblem
from microsdpa.kernels import KernelSpec, emulated_target
from microsdpa.kernels.eight_bit_params import (
    ByteStrides,
    ChannelScales,
    EightBitMasked,
    EightBitParams,
    QuantizeParams,
    RestoreLseParams,
    RowScales,
    ScaledMaskedParams,
    ScaledParams,
)
from microsdpa.kernels.params import MaskedParams, Params
from microsdpa.kernels.problem import DType, Problem
from microsdpa.kernels.quantize.spec import (
    QuantizationScheme,
    fused_for,
    fused_grid,
    has_clusters,
    part_rows,
    restore_lse,
    sum_rows,
    tile_rows,
)
from microsdpa.kernels.spec import MAX_GRID_X, SCALED_MASKED_PARAMS, SCALED_PARAMS, Grid
from microsdpa.runtime import launcher

ALL_ROWS = 31
"""Shift that gives every row the first scale."""
SECTION_BYTES = 256
"""Alignment of what lies in a workspace."""


@dataclass(frozen=True)
class QuantizedInputs:
    """Quantized operands of one call.

    Attributes:
        query: [B, H, S_q, terms * D] quantized values; with two terms a row's second half is what its first half lacks.
        key: [B, H_kv, S_k, D] quantized values.
        value: [B, H_kv, S_k, D] quantized values, or the tensor itself where `value_scale` is None.
        query_scale: a scalar, [B, H] or [B, H, blocks of S_q], in FP32.
        key_scale: a scalar, [B, H_kv] or [B, H_kv, blocks of S_k].
        value_scale: a scalar, [B, H_kv] or [B, H_kv, D].
        key_mean: [B, H_kv, D]: what was taken off K.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_scale: torch.Tensor
    key_scale: torch.Tensor
    value_scale: torch.Tensor | None
    key_mean: torch.Tensor | None = None


@dataclass(frozen=True)
class Place:
    """Where an operand lies.

    Attributes:
        tensor: the tensor of the call that holds it, by name.
        strides: in elements.
        offset: bytes from the tensor's start.
    """

    tensor: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int
    offset: int = 0

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Place:
        """All of a tensor."""
        return cls(name, tuple(tensor.shape), tensor.stride(), tensor.element_size())

    @classmethod
    def broadcast(cls, name: str, tensor: torch.Tensor) -> Place:
        """All of a tensor of at most four dimensions, as four; strides are 0 along those of size one."""
        sizes, strides = (1, 1, 1, 1, *tensor.shape)[-4:], (0, 0, 0, 0, *tensor.stride())[-4:]
        used = (stride if size > 1 else 0 for size, stride in zip(sizes, strides, strict=True))
        return cls(name, sizes, tuple(used), tensor.element_size())

    @property
    def byte_strides(self) -> ByteStrides:
        """Of its first three dimensions."""
        return ByteStrides(*(stride * self.element_bytes for stride in self.strides[:3]))


Places = Mapping[str, Place]
"""Where each operand of a kernel lies, by the name that the kernel has for it."""


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, and its parameter without addresses.

    Attributes:
        pointers: (bytes from the parameter's start, tensor, bytes from the tensor's start): where addresses belong.
        tensor_maps: what the kernel's tensor maps describe.
        numbers: (bytes from the parameter's start, SCALE or SCALE_LOG2 of the launcher): numbers that differ from call
            to call; the parameter has those of this one.
    """

    spec: KernelSpec
    grid: Grid
    params: ctypes.Structure
    pointers: tuple[tuple[int, str, int], ...]
    tensor_maps: tuple[launcher.Mapped, ...] = ()
    numbers: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no GPU launches.

        Raises:
            UnsupportedProblem: there are too many CTAs.
        """
        if self.grid[0] > MAX_GRID_X:
            raise UnsupportedProblem(
                f"{self.grid[0]} CTAs of {self.spec.name} exceed the {MAX_GRID_X} of one launch",
                nearest="a smaller batch",
            )

    def filled(self, addresses: Mapping[str, int]) -> ctypes.Structure:
        """The parameter for tensors at these addresses; null where there is no such tensor."""
        params = type(self.params).from_buffer_copy(self.params)
        for at, tensor, offset in self.pointers:
            address = addresses[tensor] + offset if tensor in addresses else 0
            ctypes.c_uint64.from_buffer(params, at).value = address
        return params


def _pointers(params: type[ctypes.Structure], places: Places) -> tuple[tuple[int, str, int], ...]:
    """Operands have pointers of their own name, or that name a struct which begins with one."""
    return tuple((getattr(params, name).offset, place.tensor, place.offset) for name, place in places.items())


def quantized_shapes(
    scheme: QuantizationScheme, query: Sequence[int], key: Sequence[int]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of all that quantizing [B, H, S_q, D] and [B, H_kv, S_k, D] gives."""
    batch, heads, seqlen_q, head_dim = query
    heads_kv, seqlen_k = key[1], key[2]
    format, scale = FORMAT_DTYPE[scheme.format], torch.float32
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "quantized_query": ((batch, heads, seqlen_q, scheme.query_terms * head_dim), format),
        "quantized_key": ((batch, heads_kv, seqlen_k, head_dim), format),
        "query_scale": ((batch, heads, -(-seqlen_q // scheme.block)), scale),
        "key_scale": ((batch, heads_kv, *(() if scheme.head_scale else (-(-seqlen_k // scheme.block),))), scale),
    }
    if scheme.value:
        shapes["quantized_value"] = (batch, heads_kv, seqlen_k, head_dim), FORMAT_DTYPE[scheme.value]
        shapes["value_scale"] = (batch, heads_kv, head_dim), scale
    if scheme.smooth:
        shapes["key_mean"] = (batch, heads_kv, head_dim), scale
    return shapes


def in_one_tensor(
    name_of_all: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> tuple[dict[str, Place], int]:
    """Places of dense arrays in one tensor, and its bytes."""
    places, end = {}, 0
    for name, (shape, dtype) in shapes.items():
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        places[name] = Place(name_of_all, shape, strides, dtype.itemsize, end)
        size = math.prod(shape) * dtype.itemsize
        end += -(-size // SECTION_BYTES) * SECTION_BYTES
    return places, end


def quantizing(scheme: QuantizationScheme, dtype: DType, places: Places, target: str) -> Launch:
    """The launch that quantizes; places of "query", "key" and "value", and of all that code_shapes() names."""
    batch, heads, seqlen_q, head_dim = places["query"].shape
    heads_kv, seqlen_k = places["key"].shape[1:3]
    params = QuantizeParams(
        **{f"{name}_strides": places[name].byte_strides for name in ("query", "key", "value")},
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        tile_rows=tile_rows(scheme, batch * heads, seqlen_q),
        part_rows=part_rows(scheme, batch * heads_kv, seqlen_k, has_clusters(target, batch * heads_kv)),
        sum_rows=sum_rows(seqlen_k),
        root=head_dim**-0.5,
    )
    problem = Problem(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, dtype, target=target)
    grid = fused_grid(scheme, problem)
    return Launch(fused_for(scheme, problem), grid, params, _pointers(QuantizeParams, places))


MASKS = {"attn_mask": "mask", "alibi_slopes": "slopes", "sinks": "sinks"}
"""What a parameter calls the tensors among the masks."""


def attending(spec: KernelSpec, problem: Problem, places: Places, scale: float, masks: Masks = NONE) -> Launch:
    """The launch of an attention kernel; places of its operands, and "lse"; `scale` is the softmax's."""
    names = "query", "key", "value", "out"
    position, lowest, diagonal = masks.bounds(problem.causal, problem.seqlen_q, problem.seqlen_k)
    numbers: tuple[tuple[int, int], ...] = ()
    scales: dict[str, Any] = {
        "query_scale": _row_scales(places["query_scale"], problem.seqlen_q),
        "key_scale": _row_scales(places["key_scale"], problem.seqlen_k),
    }
    if "value_scale" in places:
        scales["value_scale"] = ChannelScales(0, *(*places["value_scale"].strides, 0, 0, 0)[:3])
    sizes: dict[str, Any] = {
        "batch": problem.batch,
        "heads": problem.heads,
        "heads_kv": problem.heads_kv,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "diagonal": diagonal,
        "scale_log2": scale * math.log2(math.e),
    }
    params: ctypes.Structure
    if spec.params in (SCALED_PARAMS, SCALED_MASKED_PARAMS):
        strides = {f"{name}_strides": (ctypes.c_int64 * 3)(*places[name].strides[:3]) for name in names}
        inner = Params(**strides, **sizes)
        scaled: type[ctypes.Structure] = ScaledParams
        of_call = {name: place for name, place in places.items() if name not in (*scales, *MASKS)}
        pointers, at_scale = _pointers(Params, of_call), Params.scale_log2.offset
        if spec.params == SCALED_PARAMS:
            params = ScaledParams(inner, **scales)
        else:
            scaled = ScaledMaskedParams
            masked = MaskedParams(inner)
            more, numbers = _fill_masks(masked, places, masks, (position, lowest))
            params, pointers = ScaledMaskedParams(masked, **scales), pointers + more
        pointers += _pointers(scaled, {name: place for name, place in places.items() if name in scales})
    else:
        byte_strides = {f"{name}_strides": places[name].byte_strides for name in names}
        params, at_scale = EightBitParams(**byte_strides, **scales, **sizes), EightBitParams.scale_log2.offset
        pointers = _pointers(EightBitParams, {name: place for name, place in places.items() if name not in MASKS})
        if problem.mask is not None:
            params = EightBitMasked(params)
            more, numbers = _fill_masks(params, places, masks, (position, lowest))
            pointers += more
    mapped = tuple(places[box.tensor] for box in spec.tensor_maps)
    maps = tuple(launcher.Mapped(p.tensor, p.offset, p.shape, p.strides, p.element_bytes) for p in mapped)
    return Launch(spec, spec.grid(problem), params, pointers, maps, ((at_scale, launcher.SCALE_LOG2), *numbers))


def _fill_masks(
    params: MaskedParams | EightBitMasked, places: Places, masks: Masks, ends: tuple[int, int]
) -> tuple[tuple[tuple[int, str, int], ...], tuple[tuple[int, int], ...]]:
    """Fill in what a parameter has for masks, and give the pointers and numbers of it that differ from call to call.

    `ends` are the position of the first query and the left end of what it sees.
    """
    params.position, params.lowest = ends
    params.softcap_log2 = (masks.softcap or 0.0) * math.log2(math.e)
    if "attn_mask" in places:
        *outer, params.mask_column_stride = places["attn_mask"].strides
        params.mask_strides = (ctypes.c_int64 * 3)(*outer)
    if "alibi_slopes" in places:
        params.slope_batch_stride, params.slope_head_stride = places["alibi_slopes"].strides[2:]
    if "sinks" in places:
        params.sink_head_stride = places["sinks"].strides[3]
    kind, given = type(params), {MASKS[name]: places[name] for name in MASKS if name in places}
    return _pointers(kind, given), ((kind.softcap_log2.offset, launcher.SOFTCAP_LOG2),)


def restoring(problem: Problem, places: Places, scale: float) -> Launch:
    """The launch that gives the LSE back what smoothing took; places of "query", "key_mean" and "lse"."""
    spec = restore_lse(problem.dtype, problem.head_dim)
    rows = problem.batch * problem.heads * problem.seqlen_q
    params = RestoreLseParams(
        query_strides=places["query"].byte_strides,
        batch=problem.batch,
        heads=problem.heads,
        heads_kv=problem.heads_kv,
        seqlen_q=problem.seqlen_q,
        scale=scale,
    )
    numbers = ((RestoreLseParams.scale.offset, launcher.SCALE),)
    grid = (-(-rows // spec.block_m), 1, 1)
    return Launch(spec, grid, params, _pointers(RestoreLseParams, places), numbers=numbers)


def _row_scales(place: Place, seqlen: int) -> RowScales:
    batch, head = (*place.strides, 0, 0)[:2]
    if len(place.shape) < 3:
        return RowScales(0, batch, head, ALL_ROWS, 0)
    block = block_of(seqlen, place.shape[2])
    return RowScales(0, batch, head, block.bit_length() - 1, place.strides[2])


def quantize_query_key_value(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scheme: QuantizationScheme, emulated: bool
) -> QuantizedInputs:
    """Quantize validated FP16 or BF16 tensors in one launch; quantize.py says what the quantized values are."""
    inputs = {"query": query, "key": key, "value": value}
    shapes = quantized_shapes(scheme, query.shape, key.shape)
    numbers, floats_bytes = in_one_tensor("floats", {n: s for n, s in shapes.items() if s[1] == torch.float32})
    floats = torch.empty(floats_bytes // 4, dtype=torch.float32, device=query.device)
    quantized = {
        name: torch.empty(shape, dtype=dtype, device=query.device)
        for name, (shape, dtype) in shapes.items()
        if name not in numbers
    }
    places = {name: Place.of(name, tensor) for name, tensor in {**inputs, **quantized}.items()} | numbers
    target = emulated_target("auto") if emulated else launcher.target_of_device(query.device)
    launch = quantizing(scheme, tensors.DTYPES[query.dtype], places, target)
    run(launch, inputs, quantized | {"floats": floats}, emulated)
    made = quantized | {
        name: floats.as_strided(place.shape, place.strides, place.offset // 4) for name, place in numbers.items()
    }
    return QuantizedInputs(
        query=made["quantized_query"],
        key=made["quantized_key"],
        value=made.get("quantized_value", value),
        query_scale=made["query_scale"],
        key_scale=made["key_scale"],
        value_scale=made.get("value_scale"),
        key_mean=made.get("key_mean"),
    )


def run_attention(
    spec: KernelSpec,
    problem: Problem,
    quantized: QuantizedInputs,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    emulated: bool,
    masks: Masks = NONE,
) -> None:
    """Run an attention kernel on quantized operands; `scale` is the softmax's."""
    inputs = {name: tensor for name, tensor in vars(quantized).items() if tensor is not None and name != "key_mean"}
    outputs = {"out": out} if lse is None else {"out": out, "lse": lse}
    places = {name: Place.of(name, tensor) for name, tensor in {**inputs, **outputs}.items()}
    places |= {name: Place.broadcast(name, tensor) for name, tensor in masks.tensors.items()}
    inputs |= {name: _as_four(tensor) for name, tensor in masks.tensors.items()}
    run(attending(spec, problem, places, scale, masks), inputs, outputs, emulated)


def _as_four(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of at most four dimensions with all four, as tensor maps see it."""
    return tensor[(None,) * (4 - tensor.dim())]


def run_restore_lse(
    problem: Problem,
    query: torch.Tensor,
    key_mean: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    emulated: bool,
) -> None:
    """Give an LSE back what smoothing K took off it."""
    inputs, outputs = {"query": query, "key_mean": key_mean}, {"lse": lse}
    places = {name: Place.of(name, tensor) for name, tensor in {**inputs, **outputs}.items()}
    run(restoring(problem, places, scale), inputs, outputs, emulated)


def run(
    launch: Launch, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor], emulated: bool
) -> None:
    """Run one launch on tensors by name."""
    if emulated:
        from microsdpa.emulate import run as emulator  # not imported with the package: few programs need it

        emulator.one_kernel(launch.spec, launch.grid, launch.filled, inputs, outputs)
        return
    device = next(iter(outputs.values())).device
    addresses = {name: tensor.data_ptr() for name, tensor in {**inputs, **outputs}.items()}
    params = bytes(launch.filled(addresses))
    arrays = [(addresses[mapped.tensor], mapped) for mapped in launch.tensor_maps]
    launcher.launch_one(launch.spec, launcher.target_of_device(device), launch.grid, params, device.index, arrays)


def planned(
    checked: Checked, problem: Problem, spec: KernelSpec, out: torch.Tensor
) -> tuple[list[launcher.PlannedKernel], str, int]:
    """The kernels of a call on CUDA tensors, of which `spec` attends, their target, and bytes of scratch memory."""
    call, scheme = checked.call, checked.scheme
    query, key, value = call.inputs
    names = "query_scale", "key_scale", "value_scale"
    given: dict[str, Any] = {"query": query, "key": key, "value": value, "out": out}
    given |= zip(names, checked.scales, strict=True)
    places = {name: Place.of(name, tensor) for name, tensor in given.items() if tensor is not None}
    places["lse"] = Place("lse", (), (), 4)
    masks = {name: Place.broadcast(name, tensor) for name, tensor in checked.masks.tensors.items()}
    launches, workspace_bytes = [], 0
    if scheme is None:
        launches.append(attending(spec, problem, places | masks, checked.factor, checked.masks))
    else:
        values, workspace_bytes = in_one_tensor("workspace", quantized_shapes(scheme, query.shape, key.shape))
        inputs = {name: places[name] for name in ("query", "key", "value")}
        launches.append(quantizing(scheme, problem.dtype, inputs | values, problem.target))
        operands = {name: values.get(f"quantized_{name}", inputs[name]) for name in inputs}
        operands |= {name: values[name] for name in names if name in values}
        operands |= {name: places[name] for name in ("out", "lse")} | masks
        launches.append(attending(spec, problem, operands, checked.factor, checked.masks))
        if scheme.smooth:
            smoothed = {"query": inputs["query"], "key_mean": values["key_mean"], "lse": places["lse"]}
            launches.append(restoring(problem, smoothed, checked.factor))
    kernels = [
        launcher.PlannedKernel(
            *(launch.spec, launch.grid, bytes(launch.params), launch.pointers, launch.numbers, launch.tensor_maps),
            only_with_lse=index == 2,
        )
        for index, launch in enumerate(launches)
    ]
    return kernels, problem.target, workspace_bytes


def emulate(checked: Checked, problem: Problem, spec: KernelSpec, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Run the kernels of a call in the emulator; `spec` attends."""
    query, key, value = checked.call.inputs
    if checked.scheme is not None:
        quantized = quantize_query_key_value(query, key, value, checked.scheme, emulated=True)
    else:
        quantized = QuantizedInputs(query, key, value, *checked.scales)  # type: ignore[arg-type]
    run_attention(spec, problem, quantized, out, lse, checked.factor, True, checked.masks)
    if lse is not None and quantized.key_mean is not None:
        run_restore_lse(problem, query, quantized.key_mean, lse, checked.factor, True)
