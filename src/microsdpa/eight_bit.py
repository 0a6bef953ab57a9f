"""Attention with 8-bit operands: sdpa(precision=), which quantises first, and sdpa of codes with their scales.

A call is one launch, or two where it quantises and three where it also gives an LSE. Its first call makes a plan, by
which all later ones are launched from C++, as those of sdpa are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from microsdpa import arguments, eight_bit_arguments
from microsdpa.eight_bit_launches import (
    Codes,
    Place,
    attending,
    code_shapes,
    in_one_tensor,
    quantising,
    quantize_query_key_value,
    restoring,
    run_attention,
    run_restore_lse,
)
from microsdpa.errors import UnsupportedProblem
from microsdpa.explanation import NOTHING_TO_COMPUTE, Explanation
from microsdpa.forward import MISSES, Inputs, Result
from microsdpa.jit import is_compiled
from microsdpa.jit.signature import signature
from microsdpa.kernels import emulated_target
from microsdpa.kernels.problem import Causal, Problem
from microsdpa.kernels.quantize.spec import RECIPES, Recipe, fused
from microsdpa.options import EIGHT_BIT_OPTIONS
from microsdpa.runtime import launcher
from microsdpa.select import Selection, select

Scales = tuple[object, object, object]
"""q_scale, k_scale and v_scale as they were given, not validated yet."""
NO_SCALES: Scales = (None, None, None)

_launch = launcher.launch_eight_bit


@dataclass(frozen=True)
class Call:
    """A validated call with 8-bit operands.

    Attributes:
        recipe: how it quantises; None for a call with codes.
        scale: of the softmax.
        emulated: whether it runs in the emulator.
    """

    problem: Problem
    recipe: Recipe | None
    selection: Selection
    scale: float
    emulated: bool


def launch(
    inputs: Inputs,
    precision: str | None,
    scales: Scales,
    options: tuple[object, ...],
    scale: float | None,
    return_lse: bool,
    out: torch.Tensor | None,
) -> Result | None:
    """Launch a call that has a plan; None for one that has none, or whose arguments have to be looked at.

    `options` are is_causal, causal, enable_gqa and impl, as sdpa has them.
    """
    query, key, value = inputs
    try:
        key_of_options = (*options, precision)
        code = EIGHT_BIT_OPTIONS[key_of_options]
        if precision is None and not eight_bit_arguments.known_positive(scales):
            return None
        if torch.is_grad_enabled() and (
            query.requires_grad or key.requires_grad or value.requires_grad or (out is not None and out.requires_grad)
        ):
            return None
        result = _new_output(query, value) if out is None else out
        lse = _launch(query, key, value, result, return_lse, code, scale, *scales)
    except MISSES:
        return None  # first_call() says which argument is wrong; a launch that failed otherwise fails there again
    if lse is None:
        return None
    return result, lse if return_lse else None


def first_call(
    inputs: Inputs,
    precision: str | None,
    scales: Scales,
    options: tuple[bool, Causal | None, bool, str],
    scale: float | None,
    return_lse: bool,
    out: torch.Tensor | None,
) -> Result:
    """Validate a call that names a precision or gives scales, make its plan, and launch.

    Raises:
        MicrosdpaError: as sdpa.
    """
    query, key, value = inputs
    is_causal, causal, enable_gqa, impl = options
    call = check(query, key, value, precision, scales, is_causal, causal, scale, enable_gqa, out, impl)
    if call is None:
        dtype = eight_bit_arguments.output_type(query, value, out)
        result = torch.zeros(query.shape, dtype=dtype, device=query.device) if out is None else out.zero_()
        lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
        return result, lse if return_lse else None
    if call.emulated:
        return _emulate(call, query, key, value, scales, return_lse, out)
    checked = NO_SCALES if call.recipe else eight_bit_arguments.check_scales(query, key, value, scales)
    code = EIGHT_BIT_OPTIONS[is_causal, causal, enable_gqa, impl, precision]
    result = _new_output(query, value) if out is None else out
    given = query, key, value, result, return_lse, code, scale, *checked
    found = _launch(*given)  # a plan may be there: scales can be numbers, or of the key's heads
    if found is None:
        register(call, query, key, value, result, code, scale, checked)
        found = launcher.found(_launch(*given))
    return result, found if return_lse else None


def _new_output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Memory for the output: the query's memory order, and its type or that of eight_bit_arguments.output_type."""
    if query.dtype not in eight_bit_arguments.CODE_DTYPES:
        return torch.empty_like(query)
    return torch.empty_like(query, dtype=eight_bit_arguments.output_type(query, value, None))


def check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    precision: str | None,
    scales: Scales,
    is_causal: bool,
    causal: Causal | None,
    scale: float | None,
    enable_gqa: bool,
    out: torch.Tensor | None,
    impl: str,
) -> Call | None:
    """Check all arguments but the scales' values, and choose the kernel; None where there is nothing to compute.

    Raises:
        InvalidArgument: an argument that no call could accept.
        UnsupportedProblem: no kernel computes the call.
    """
    alignment = arguments.check_causal(is_causal, causal)
    scale = arguments.check_scale(scale)
    arguments.check_not_nested(query=query, key=key, value=value, out=out)
    kernel, emulated = eight_bit_arguments.check_impl(impl)
    recipe = None
    if precision is not None:
        operands = eight_bit_arguments.check_precision(precision, scales)
        arguments.check_tensors(query, key, value, enable_gqa)
        recipe = RECIPES[operands]
        key_block = recipe.block
    else:
        operands = eight_bit_arguments.check_codes(query, key, value, enable_gqa)
        key_block = eight_bit_arguments.key_block(key, scales[1])
    dtype = eight_bit_arguments.output_type(query, value, out)
    arguments.check_grad({"query": query, "key": key, "value": value})
    eight_bit_arguments.check_place(query, emulated)
    tensors = {"query": query, "key": key, "value": value}
    if out is not None:
        inputs = (*tensors.values(), *(s for s in scales if isinstance(s, torch.Tensor)))
        meets = isinstance(out, torch.Tensor) and any(arguments.memory_ranges_meet(out, t) for t in inputs)
        arguments.check_out(out, torch.empty(query.shape, dtype=dtype, device=query.device), meets)
        tensors["out"] = out
    if query.numel() == 0 or key.shape[2] == 0:
        return None
    eight_bit_arguments.check_aligned(tensors)
    problem = Problem(
        batch=query.shape[0],
        heads=query.shape[1],
        heads_kv=key.shape[1],
        seqlen_q=query.shape[2],
        seqlen_k=key.shape[2],
        head_dim=query.shape[3],
        dtype=arguments.DTYPES[dtype],
        causal=alignment,
        target=_target(query, emulated, kernel),
        operands=operands,
        query_terms=recipe.query_terms if recipe else 1,
        key_block=key_block,
    )
    factor = 1 / math.sqrt(problem.head_dim) if scale is None else scale
    return Call(problem, recipe, select(problem, kernel), factor, emulated)


def _emulate(
    call: Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scales: Scales,
    return_lse: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a call in the emulator."""
    dtype = eight_bit_arguments.output_type(query, value, out)
    out = torch.empty_like(query, dtype=dtype) if out is None else out
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if return_lse else None
    if call.recipe is not None:
        codes = quantize_query_key_value(query, key, value, call.recipe, emulated=True)
    else:
        codes = Codes(query, key, value, *eight_bit_arguments.check_scales(query, key, value, scales))
    run_attention(call.selection.spec, call.problem, codes, out, lse, call.scale, True)
    if lse is not None and codes.key_mean is not None:
        run_restore_lse(call.problem, query, codes.key_mean, lse, call.scale, True)
    return out, lse


def register(
    call: Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    options: int,
    scale: float | None,
    scales: Scales,
) -> None:
    """Compile the kernels of a validated call on CUDA tensors and register its plan; `scale` is as it was given."""
    tensors = {"query": query, "key": key, "value": value, "out": out}
    names = "query_scale", "key_scale", "value_scale"
    tensors |= {name: s for name, s in zip(names, scales, strict=True) if isinstance(s, torch.Tensor)}
    places = {name: Place.of(name, tensor) for name, tensor in tensors.items()}
    places["lse"] = Place("lse", (), (), 4)
    launches, workspace_bytes = [], 0
    if call.recipe is None:
        launches.append(attending(call.selection.spec, call.problem, places, call.scale))
    else:
        codes, workspace_bytes = in_one_tensor("workspace", code_shapes(call.recipe, query.shape, key.shape))
        inputs = {name: places[name] for name in ("query", "key", "value")}
        launches.append(quantising(call.recipe, call.problem.dtype, inputs | codes))
        operands = {name: codes.get(f"{name}_codes", inputs[name]) for name in inputs}
        operands |= {name: codes[name] for name in names if name in codes}
        operands |= {name: places[name] for name in ("out", "lse")}
        launches.append(attending(call.selection.spec, call.problem, operands, call.scale))
        if call.recipe.smooth:
            smoothed = {"query": inputs["query"], "key_mean": codes["key_mean"], "lse": places["lse"]}
            launches.append(restoring(call.problem, smoothed, call.scale))
    kernels = [
        launcher.FilledKernel(
            launch.spec, launch.grid, bytes(launch.params), launch.pointers, launch.tensor_maps, index == 2
        )
        for index, launch in enumerate(launches)
    ]
    given = query, key, value, out, options, scale, *scales
    launcher.prepare_eight_bit(given, kernels, call.problem.target, workspace_bytes)


def prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    precision: str,
    is_causal: bool,
    causal: Causal | None,
    scale: float | None,
    enable_gqa: bool,
    impl: str,
) -> tuple[Callable[..., Any] | None, Explanation]:
    """The launch of a plan for calls that quantise, and what it runs; None where nothing runs on a GPU."""
    call = check(query, key, value, precision, NO_SCALES, is_causal, causal, scale, enable_gqa, out, impl)
    if call is None or call.emulated:
        return None, explanation(call, impl)
    options = EIGHT_BIT_OPTIONS[is_causal, causal, enable_gqa, impl, precision]
    out = torch.empty_like(query) if out is None else out
    register(call, query, key, value, out, options, scale, NO_SCALES)
    return launcher.prepared_eight_bit_call(query, key, value, out, options, scale), explanation(call, impl)


def explain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, precision: str | None, scales: Scales, *rest: Any
) -> Explanation:
    """What attend() would run; `rest` as check() takes them."""
    call = check(query, key, value, precision, scales, *rest)
    if precision is None:
        eight_bit_arguments.check_scales(query, key, value, scales)
    return explanation(call, rest[-1])


def explanation(call: Call | None, impl: str) -> Explanation:
    """What runs for a validated call."""
    if call is None:
        return NOTHING_TO_COMPUTE
    spec, problem = call.selection.spec, call.problem
    quantiser = fused(call.recipe, problem.dtype, problem.head_dim) if call.recipe else None
    details: dict[str, Any] = {
        "spec": spec,
        "quantizer": quantiser,
        "rejected": call.selection.reasons,
        "faster": call.selection.wishes,
    }
    if call.emulated:
        return Explanation(f"emulate:{spec.name}", "impl asks for the emulator, on the CPU", **details)
    return Explanation(
        runs=spec.name,
        reason="impl names it" if impl != "auto" else "it is the first kernel that computes this problem",
        signature=signature(spec, problem.target),
        compiled=is_compiled(spec, problem.target),
        **details,
    )


def _target(query: torch.Tensor, emulated: bool, kernel: str) -> str:
    if emulated:
        return emulated_target(kernel)
    if reason := launcher.device_error():
        raise UnsupportedProblem(reason, nearest="CPU tensors with impl='emulate'")
    return launcher.target_of_device(query.device)
