"""Gradients by this library's own kernels, on a GPU or in the emulator."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from microsdpa.call import tensors
from microsdpa.call.call import Inputs
from microsdpa.call.dropout import Random, kept_of
from microsdpa.call.masks import Masks
from microsdpa.call.options import DETERMINISTIC_BIT, DROPOUT_BIT, Options
from microsdpa.errors import UnsupportedProblem
from microsdpa.execution.choice import sizes_of
from microsdpa.execution.quantized import Launch
from microsdpa.kernels import KernelSpec, emulated_target, policy
from microsdpa.kernels.backward import spec as backward_spec
from microsdpa.kernels.backward.spec import Tiling
from microsdpa.kernels.hopper.backward import spec as hopper_spec
from microsdpa.kernels.params import (
    BackwardParams,
    DropoutParams,
    DroppedBackwardParams,
    MaskedParams,
    Params,
    Strides,
)
from microsdpa.kernels.problem import ELEMENT_BYTES, VECTOR_BYTES, Causal, MaskKind, Problem
from microsdpa.kernels.spec import Rejection
from microsdpa.runtime import launcher

if TYPE_CHECKING:
    from microsdpa.emulate.run import Report

MASK_TENSORS = "attn_mask", "alibi_slopes", "sinks"
OF_CALL = "query", "key", "value", "out", "lse", "workspace"
OF_MASKS = {"mask": "attn_mask", "slopes": "alibi_slopes", "sinks": "sinks"}
"""Names of addresses in MaskedParams, and of the tensors."""
GRADIENTS = "grad_out", "grad_lse", "grad_query", "grad_key", "grad_value", "grad_mask", "grad_slopes", "grad_sinks"
"""The same in BackwardParams, with the names of the tensors."""
OF_MASK_TENSORS = {"attn_mask": "grad_mask", "alibi_slopes": "grad_slopes", "sinks": "grad_sinks"}
PLACES: dict[str, int] = {
    **{name: getattr(Params, name).offset for name in OF_CALL},
    **{tensor: getattr(MaskedParams, name).offset for name, tensor in OF_MASKS.items()},
    **{name: getattr(BackwardParams, name).offset for name in GRADIENTS},
    "drawn": DroppedBackwardParams.dropout.offset + DropoutParams.drawn.offset,
}
"""Bytes from the parameter's start to the address of each tensor."""
_SCALE_LOG2, _SOFTCAP_LOG2 = Params.scale_log2.offset, MaskedParams.softcap_log2.offset
_KEPT, _KEPT_SCALE = (
    DroppedBackwardParams.dropout.offset + field.offset for field in (DropoutParams.kept, DropoutParams.scale)
)


@dataclass(frozen=True)
class Gradient:
    """A call whose gradients are asked for.

    Attributes:
        given: tensors that are read, by name: query, key, value, out, lse, grad_out, grad_lse, those of masks, and
            `drawn`, seed and offset of a dropout.
        made: the gradients that are written, by the names of GRADIENTS.
        causal, scale, masks: as of the call; `scale` is the softmax's.
    """

    given: dict[str, torch.Tensor]
    made: dict[str, torch.Tensor]
    causal: Causal | None
    scale: float
    masks: Masks

    @property
    def dropout_p(self) -> float:
        """The probability to drop; 0 for a call without dropout."""
        return 0.0 if self.masks.dropping is None else self.masks.dropping[0]

    def problem(self, target: str) -> Problem:
        """The problem of the call."""
        query, key = self.given["query"], self.given["key"]
        dtype = tensors.DTYPES[query.dtype]
        rows = [t for t in (*self.given.values(), *self.made.values()) if t.dim() == 4 and t.dtype == query.dtype]
        rows = [t for t in rows if t is not self.masks.attn_mask]
        return Problem(
            *sizes_of(query, key),
            dtype=dtype,
            causal=self.causal,
            mask=self.masks.kind_in_memory,
            target=target,
            alignment=VECTOR_BYTES if all(map(tensors.is_aligned, rows)) else ELEMENT_BYTES[dtype],
            bulk=all(map(tensors.is_bulk_addressable, rows)),
            dropout=self.dropout_p > 0.0,
        )


AnyTiling = Tiling | hopper_spec.Tiling
"""Of the kernels of backward/, or of those of hopper/backward/."""


def choose(problem: Problem, deterministic: bool, slopes: bool = False) -> AnyTiling:
    """The kernels of a problem, by policy, and their tiling. Only backward/ has gradients of `slopes`."""
    found = policy.five_products(problem, deterministic)
    return backward_spec.choose(problem) if slopes or isinstance(found, Rejection) else found


def _parameters(of: Gradient, problem: Problem, tiling: AnyTiling) -> BackwardParams:
    """The kernels' parameter, without addresses."""
    masks = of.masks
    position, lowest, diagonal = masks.bounds(problem.causal, problem.seqlen_q, problem.seqlen_k)
    call = Params.of(problem, diagonal, of.scale)
    cap = (masks.softcap or 0.0) * math.log2(math.e)
    forward = MaskedParams(call=call, position=position, lowest=lowest, softcap_log2=cap)
    if isinstance(tiling, Tiling):
        key_heads, query_heads = backward_spec.heads_together(problem)
    else:
        key_heads, query_heads = hopper_spec.heads_together(problem, tiling), 0
    params = BackwardParams(forward=forward, key_heads=key_heads, query_heads=query_heads)
    for name in ("query", "key", "value", "out"):
        strides = of.given[name].stride()[:3]
        setattr(params.forward.call, f"{name}_strides", type(call.query_strides)(*strides))
    params.grad_out_strides = Strides(*of.given["grad_out"].stride()[:3])
    for name in ("query", "key", "value"):
        setattr(params, f"grad_{name}_strides", Strides(*of.made[f"grad_{name}"].stride()[:3]))
    if masks.attn_mask is not None:
        last = 2 if masks.attn_mask.dtype == torch.int32 else problem.seqlen_k
        whole = problem.batch, problem.heads, problem.seqlen_q, last
        *outer, params.forward.mask_column_stride = masks.attn_mask.expand(whole).stride()
        params.forward.mask_strides = type(forward.mask_strides)(*outer)
    if masks.alibi_slopes is not None:
        strides = masks.alibi_slopes.expand(problem.batch, problem.heads).stride()
        params.forward.slope_batch_stride, params.forward.slope_head_stride = strides
        if isinstance(tiling, Tiling):
            params.parts_of_slope = backward_spec.parts_of_slope(problem, tiling)
            params.slope_batch = problem.batch if masks.alibi_slopes.dim() == 2 else 1
    if masks.sinks is not None:
        (params.forward.sink_head_stride,) = masks.sinks.stride()
    if (grad_mask := of.made.get("grad_mask")) is not None:
        whole_mask = grad_mask[(None,) * (4 - grad_mask.dim())]
        params.mask_batch, params.mask_heads, params.mask_rows, params.mask_columns = whole_mask.shape
        *outer, params.grad_mask_column_stride = whole_mask.stride()
        params.grad_mask_strides = Strides(*outer)
    return params


def launches(of: Gradient, problem: Problem, tiling: AnyTiling) -> tuple[list[Launch], int]:
    """The kernels in the order of their launch, and bytes of scratch memory."""
    params = _parameters(of, problem, tiling)
    whole: BackwardParams | DroppedBackwardParams = params
    pointers = tuple((PLACES[name], name, 0) for name in (*of.given, *of.made, "workspace"))
    numbers: tuple[tuple[int, int], ...] = ((_SCALE_LOG2, launcher.SCALE_LOG2),)
    if of.dropout_p:
        kept, factor = kept_of(of.dropout_p)
        whole = DroppedBackwardParams(params, DropoutParams(kept=kept, scale=factor))
        numbers = (*numbers, (_KEPT, launcher.KEPT), (_KEPT_SCALE, launcher.KEPT_SCALE))
    if of.masks.softcap is not None:
        numbers = (*numbers, (_SOFTCAP_LOG2, launcher.SOFTCAP_LOG2))
    if not isinstance(tiling, Tiling):
        tiles = hopper_spec.tiles_grid(problem, tiling)
        stages = [
            (hopper_spec.prepare(problem, tiling), tiles),
            (hopper_spec.gradients(problem, tiling), hopper_spec.gradients_grid(problem, tiling)),
        ]
        if not tiling.whole:
            stages.append((hopper_spec.finish(problem, tiling), tiles))
        if "grad_sinks" in of.made:
            stages.append((backward_spec.sink_gradients(problem, tiling.block_m), (problem.heads, 1, 1)))
        made = [Launch(spec, grid, whole, pointers, _mapped(of, spec), numbers) for spec, grid in stages]
        return made, tiling.workspace_bytes(problem)
    slopes = "grad_slopes" in of.made
    workspace_bytes, parts_at = backward_spec.workspace_bytes(problem, tiling, slopes)
    pointers = (*pointers, (BackwardParams.slope_parts.offset, "workspace", parts_at))
    kernels = [
        (backward_spec.terms(problem), backward_spec.terms_grid(problem)),
        (backward_spec.gradients(problem, tiling, slopes), backward_spec.gradients_grid(problem, tiling)),
    ]
    if slopes:
        kernels.append((backward_spec.slope_gradients(problem), (of.made["grad_slopes"].numel(), 1, 1)))
    if "grad_sinks" in of.made:
        kernels.append((backward_spec.sink_gradients(problem), (problem.heads, 1, 1)))
    if "grad_mask" in of.made:
        shape = params.mask_batch, params.mask_heads, params.mask_rows, params.mask_columns
        kernels.append((backward_spec.mask_gradient(problem), backward_spec.mask_grid(shape)))
    found = [Launch(spec, grid, whole, pointers, _mapped(of, spec), numbers) for spec, grid in kernels]
    return found, workspace_bytes


def summing(problem: Problem, tiling: AnyTiling) -> KernelSpec:
    """The kernel that sums the gradients of query, key and value."""
    if isinstance(tiling, Tiling):
        return backward_spec.gradients(problem, tiling)
    return hopper_spec.gradients(problem, tiling)


def _mapped(of: Gradient, spec: KernelSpec) -> tuple[launcher.Mapped, ...]:
    """What a kernel's tensor maps describe: whole tensors."""
    tensors_of = of.given | of.made
    found = [(box.tensor, tensors_of[box.tensor]) for box in spec.tensor_maps]
    return tuple(launcher.Mapped(name, 0, tuple(t.shape), t.stride(), t.element_size()) for name, t in found)


_PRODUCTS = {"query", "key", "value", "grad_out", "attn_mask", "alibi_slopes", "drawn"}
_SUMS = {"grad_query", "grad_key", "grad_value"}
_READ = {
    "prepare": {"out", "lse", "grad_out", "grad_lse", "attn_mask"},
    "row_terms": {"query", "key", "out", "lse", "grad_out", "grad_lse", *MASK_TENSORS},
    "gradients": _PRODUCTS,
    "gradients_bulk": _PRODUCTS,
    "gradients_wide": _PRODUCTS,
    "mask_gradient": _PRODUCTS,
    "sink_gradients": {"sinks"},
    "slope_gradients": set(),
    "finish": set(),
}
_WRITTEN = {
    "gradients": _SUMS,
    "gradients_bulk": _SUMS,
    "gradients_wide": _SUMS,
    "mask_gradient": {"grad_mask"},
    "sink_gradients": {"grad_sinks"},
    "slope_gradients": {"grad_slopes"},
    "finish": {"grad_query"},
}
"""Tensors that each kernel may touch, beside the workspace: in the emulator any other access is an error."""


def emulate(of: Gradient, tiling: AnyTiling | None = None, target: str = "", **options: Any) -> list[Report]:
    """Compute gradients of CPU tensors in the emulator; `options` are those of its one_kernel()."""
    from microsdpa.emulate import run  # not imported with the package: few programs need it

    problem = of.problem(target or emulated_target("auto"))
    found, workspace_bytes = launches(of, problem, tiling or backward_spec.choose(problem))
    # All bits set are NaN in every type: what is read before it is written shows in the gradients.
    workspace = torch.full((workspace_bytes,), 0xFF, dtype=torch.uint8, device="cpu")
    reports = []
    for launch in found:
        kernel = launch.spec.template.rsplit("::", 1)[1]
        inputs = {name: tensor for name, tensor in of.given.items() if name in _READ[kernel]}
        outputs = {name: tensor for name, tensor in of.made.items() if name in _WRITTEN.get(kernel, ())}
        outputs["workspace"] = workspace
        reports.append(run.one_kernel(launch.spec, launch.grid, launch.filled, inputs, outputs, **options))
    return reports


@functools.cache
def _code(causal: Causal | None, drops: bool, deterministic: bool) -> int:
    """The number of a gradient's options."""
    return Options(False, causal, enable_gqa=True).code | DROPOUT_BIT * drops | DETERMINISTIC_BIT * deterministic


def _launch(of: Gradient) -> None:
    """Compute gradients of CUDA tensors: by the plan that the call has, or by one that is made for it.

    Raises:
        UnsupportedProblem: there are too many rows or heads.
    """
    given, made, masks = of.given, of.made, of.masks
    deterministic = torch.are_deterministic_algorithms_enabled()
    left, right = masks.ends
    call: launcher.GradientCall = (
        *(given["query"], given["key"], given["value"], given["out"], given["lse"]),
        *(
            _code(of.causal, of.dropout_p > 0.0, deterministic),
            of.scale,
            masks.attn_mask,
            masks.alibi_slopes,
            masks.sinks,
        ),
        *(left, right, masks.softcap, given["grad_out"], given.get("grad_lse")),
        *(made["grad_query"], made["grad_key"], made["grad_value"]),
        *(made.get("grad_mask"), made.get("grad_slopes"), made.get("grad_sinks")),
    )
    launch: Callable[..., bool] = launcher.gradients
    if of.dropout_p:
        launch = functools.partial(launcher.gradients_dropped, *kept_of(of.dropout_p), *Random(of.given["drawn"]))
    if launch(*call):
        return
    problem = of.problem(launcher.target_of_device(of.given["query"].device))
    tiling = choose(problem, deterministic, "grad_slopes" in made)
    if isinstance(tiling, Tiling) and (refusal := backward_spec.refusal(problem, tiling)):
        raise UnsupportedProblem(refusal.reason, nearest=refusal.nearest)
    found, workspace_bytes = launches(of, problem, tiling)
    kernels = [
        launcher.PlannedKernel(one.spec, one.grid, bytes(one.params), one.pointers, one.numbers, one.tensor_maps)
        for one in found
    ]
    launcher.register(call, kernels, problem.target, workspace_bytes)
    if not launch(*call):
        launcher.found(None)


def described(
    grads: tuple[torch.Tensor, torch.Tensor | None],
    inputs: Inputs,
    result: tuple[torch.Tensor, torch.Tensor],
    causal: Causal | None,
    scale: float | None,
    masks: Masks,
    wanted: tuple[str, ...] = MASK_TENSORS,
) -> Gradient:
    """A call of backward.gradients(), with memory for the gradients: of query, key, value and what is `wanted`."""
    (grad_out, grad_lse), (query, key, value), (out, lse) = grads, inputs, result
    if grad_out.stride(3) != 1 and grad_out.shape[3] > 1:
        grad_out = grad_out.contiguous()
    made = {"grad_query": torch.empty_like(query), "grad_key": torch.empty_like(key)}
    made["grad_value"] = torch.empty_like(value)
    for name, tensor in masks.tensors.items():
        if name in wanted and tensor.is_floating_point():
            dense = torch.empty_like(tensor)
            made[OF_MASK_TENSORS[name]] = dense if name == "attn_mask" else dense.contiguous()
    given = {"query": query, "key": key, "value": value, "out": out, "lse": lse.contiguous(), "grad_out": grad_out}
    if grad_lse is not None:
        given["grad_lse"] = grad_lse.float().contiguous()
    factor = query.shape[3] ** -0.5 if scale is None else scale
    if masks.dropping is not None:
        given["drawn"] = masks.dropping[1]
    return Gradient(given | masks.tensors, made, causal, factor, masks)


def problem_of(inputs: Inputs, causal: Causal | None, mask: MaskKind | None) -> Problem:
    """The problem of a call on a GPU, as far as its inputs tell."""
    query, key, _ = inputs
    sizes = query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2], query.shape[3]
    return Problem(
        *sizes,
        tensors.DTYPES[query.dtype],
        causal=causal,
        mask=mask,
        target=launcher.target_of_device(query.device),
        alignment=VECTOR_BYTES if all(map(tensors.is_aligned, inputs)) else ELEMENT_BYTES["float16"],
        bulk=all(map(tensors.is_bulk_addressable, inputs)),
    )


def compute(of: Gradient, kernel: str = "auto") -> list[torch.Tensor]:
    """The gradients of a call, in the order of Gradient.made.

    In the emulator they are for the GPU that it takes for `kernel`, which the call is made by.

    Raises:
        UnsupportedProblem: there are too many rows or heads.
    """
    if of.given["query"].device.type == "cpu":
        target = emulated_target(kernel)
        deterministic = torch.are_deterministic_algorithms_enabled()
        emulate(of, choose(of.problem(target), deterministic, "grad_slopes" in of.made), target)
    else:
        _launch(of)
    return list(of.made.values())
