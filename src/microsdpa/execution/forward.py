"""Attention of one call without a gradient: by the plan that it has, or after validation by a plan made for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from microsdpa.call import tensors
from microsdpa.call.cache import CACHE_TYPES, scale_tensor
from microsdpa.call.call import NO_TENSORS, Call, Inputs, MaskTensors
from microsdpa.call.dropout import Random, kept_of
from microsdpa.call.masks import Masks
from microsdpa.call.options import (
    CONTINUED_BIT,
    LOWER_RIGHT,
    OPTIONS,
    PLAIN,
    PLAIN_CODE,
    TURNED_BIT,
    VARLEN_OPTIONS,
    Options,
)
from microsdpa.call.prologue import Prologue
from microsdpa.call.validate import Checked, check, check_cpu_impl
from microsdpa.call.visibility import KnownMask
from microsdpa.execution import dropout, new_sizes, prologue, quantized, torch_cpu, varlen
from microsdpa.execution.choice import problem_of
from microsdpa.kernels.params import PrologueParams
from microsdpa.kernels.select import chosen, select
from microsdpa.runtime import launcher

_launch = launcher.launch
_launch_or_kind = launcher.launch_or_kind
_launch_known = launcher.launch_known
_empty_like = torch.empty_like
_is_grad_enabled = torch.is_grad_enabled

MISSES = (AttributeError, BufferError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What a launch raises for arguments that the validation refuses in words, or a launch that fails there again."""

other_value_dims: set[int] = set()
"""Columns of value of calls in which query has others: before the first one, nobody has to compare them."""

Result = tuple[torch.Tensor, "torch.Tensor | None"]
"""Output, of query's shape, and LSE in FP32 where it is asked for, [B, H, S_q] or, of packed queries, [H, queries]."""


def attend(
    inputs: Inputs, masks: MaskTensors, options: Options, return_lse: bool, random: Random | None = None
) -> Result:
    """Attention of one call into a new output; `random` is of one that drops probabilities.

    Raises:
        MicrosdpaError: as sdpa.
    """
    found = launch(inputs, masks, options, return_lse, random)
    if found is not None:
        return found
    return first_call(Call(inputs, masks, options=options, return_lse=return_lse, random=random))


def launch(
    inputs: Inputs, masks: MaskTensors, options: Options, return_lse: bool, random: Random | None = None
) -> Result | None:
    """Launch a call that has a plan; None for one that has none."""
    query, key, value = inputs
    try:
        if options.dropout_p:
            return None if random is None else _launch_dropping(inputs, masks, options, return_lse, random)
        code, scale = PLAIN_CODE if options is PLAIN else options.code, options.scale
        result = tensors.new_output(query, value) if other_value_dims else _empty_like(query)
        if masks is NO_TENSORS and options.window is None and options.softcap is None:
            lse = _launch_or_kind(query, key, value, result, return_lse, code, scale)
            if type(lse) is int:
                lse = new_sizes.resized(lse, (query, key, value, result, return_lse, code, scale))
        elif options.is_causal and masks.attn_mask is not None:
            return None
        else:
            given = query, key, value, result, return_lse, code, scale, *masks, *(options.window or (-1, -1))
            lse = _launch_or_kind(*given, options.softcap)
            if type(lse) is int:
                lse = new_sizes.resized(lse, (*given, options.softcap))
    except MISSES:
        return None
    if lse is None:
        return None
    return result, lse if return_lse else None


def _launch_dropping(
    inputs: Inputs, masks: MaskTensors, options: Options, return_lse: bool, random: Random
) -> Result | None:
    if options.is_causal and masks.attn_mask is not None:
        return None
    result = _empty_like(inputs[0])
    left, right = options.window or (-1, -1)
    of_masks = () if masks is NO_TENSORS and options.window is None and options.softcap is None else masks
    ends = (left, right, options.softcap) if of_masks else ()
    given = *inputs, result, return_lse, options.code, options.scale, *of_masks, *ends
    lse = launcher.launch_dropped(*kept_of(options.dropout_p), *random, *given)
    return None if lse is None else (result, lse if return_lse else None)


def _is_graded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Whether autograd looks on a call, in whatever mode."""
    return forward_ad._current_level >= 0 or (
        _is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad or (out is not None and out.requires_grad))
    )


def launch_quantizing(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: tuple[object, ...],
    scale: float | None,
    return_lse: bool,
    out: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """Launch a call with precision=, without masks, that has a plan, and give what sdpa does.

    None stands for a call whose arguments have to be looked at. `options` are is_causal, causal, enable_gqa, impl and
    precision, as sdpa has them.
    """
    try:
        # This is _is_graded(), whose call takes longer than its answer.
        if forward_ad._current_level >= 0 or (
            _is_grad_enabled()
            and (
                query.requires_grad
                or key.requires_grad
                or value.requires_grad
                or (out is not None and out.requires_grad)
            )
        ):
            return None
        result = _empty_like(query) if out is None else out
        lse = _launch(query, key, value, result, return_lse, OPTIONS[options], scale)
    except MISSES:
        return None
    if lse is None:
        return None
    return (result, lse) if return_lse else result


def launch_quantizing_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: tuple[object, ...],
    scale: float | None,
    return_lse: bool,
    out: torch.Tensor | None,
    given: tuple[tuple[Any, ...], KnownMask | None],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """The same for calls with masks.

    `given` are attn_mask, alibi_slopes, sinks, window and softcap, and what is known of attn_mask, or None.
    """
    (attn_mask, alibi_slopes, sinks, window, softcap), known = given
    try:
        if options[0] and attn_mask is not None:
            return None
        if _is_graded(query, key, value, out) or (
            _is_grad_enabled()
            and (
                (attn_mask is not None and attn_mask.requires_grad)
                or (alibi_slopes is not None and alibi_slopes.requires_grad)
                or (sinks is not None and sinks.requires_grad)
            )
        ):
            return None
        result = _empty_like(query) if out is None else out
        left, right = (-1, -1) if window is None else window
        call = query, key, value, result, return_lse, OPTIONS[options], scale
        masks = attn_mask, alibi_slopes, sinks, left, right, softcap
        lse = _launch(*call, *masks) if known is None else _launch_known(known[1], known[2], *call, *masks)
    except MISSES:
        return None
    if lse is None:
        return None
    return (result, lse) if return_lse else result


def launch_beside_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: tuple[object, ...],
    rest: tuple[Any, ...],
    return_lse: bool,
    out: torch.Tensor | None,
) -> Result | None:
    """Launch a call of sdpa with an 8-bit cache that has a plan, as sdpa_varlen does; None for any other.

    `options` are those of launch_quantizing(); `rest` scale, alibi_slopes, sinks, window, softcap, k_scale and v_scale.
    """
    scale, slopes, sinks, window, softcap, k_scale, v_scale = rest
    try:
        if key.dtype not in CACHE_TYPES or query.dtype not in tensors.DTYPES:
            return None
        causal = OPTIONS[options] & 3
        aligned = causal or window is not None or slopes is not None
        if aligned and causal != LOWER_RIGHT and query.shape[2] != key.shape[2]:
            return None  # masks beside a cache are aligned to the lower right
        if (options[2] is False and query.shape[1] != key.shape[1]) or _is_graded(query, key, value, out):
            return None
        code = VARLEN_OPTIONS[causal != 0, False, False, options[3]] | TURNED_BIT
        if not isinstance(k_scale, torch.Tensor):
            k_scale = scale_tensor("k_scale", k_scale, key)
        if not isinstance(v_scale, torch.Tensor):
            v_scale = scale_tensor("v_scale", v_scale, key)
        result = _empty_like(query) if out is None else out
        left, right = (-1, -1) if window is None else window
        lse = _launch(
            query,
            key,
            value,
            result,
            return_lse,
            code,
            scale,
            None,
            slopes,
            sinks,
            left,
            right,
            softcap,
            None,
            k_scale,
            v_scale,
        )
    except MISSES:
        return None
    return None if lse is None else (result, lse if return_lse else None)


def launch_prologued(
    inputs: Inputs,
    options: tuple[object, ...],
    given: Prologue,
    rest: tuple[Any, ...],
    return_lse: bool,
    out: torch.Tensor | None,
) -> Result | None:
    """Launch a call with norms or rotary embedding that has a plan; None for one that has none.

    `options` are those of launch_quantizing(); `rest` scale, attn_mask, alibi_slopes, sinks, window and softcap.
    """
    query, key, value = inputs
    scale, mask, slopes, sinks, window, softcap = rest
    try:
        code = OPTIONS[options] | given.code
        if (mask is not None and options[0]) or not given.is_plain or _is_graded(query, key, value, out):
            return None
        shift = key.shape[2] - query.shape[2] if code & 3 == LOWER_RIGHT else 0
        arguments = given.arguments(shift)
        if _is_grad_enabled():
            for tensor in (mask, slopes, sinks, *arguments[: len(PrologueParams.TENSORS)]):
                if tensor is not None and tensor.requires_grad:
                    return None
        result = out
        if result is None:
            result = tensors.new_output(query, value) if other_value_dims else _empty_like(query)
        if mask is slopes is sinks is window is softcap is None:
            lse = _launch(query, key, value, result, return_lse, code, scale, *arguments)
        else:
            left, right = (-1, -1) if window is None else window
            masks = mask, slopes, sinks, left, right, softcap
            lse = _launch(query, key, value, result, return_lse, code, scale, *arguments, *masks)
    except MISSES:
        return None
    return None if lse is None else (result, lse if return_lse else None)


def launch_continued(
    inputs: Inputs,
    options: tuple[object, ...],
    previous: tuple[torch.Tensor, torch.Tensor],
    rest: tuple[Any, ...],
) -> Result | None:
    """Launch a call that goes on from an output and an LSE, and has a plan; None for one that has none.

    `options` and `rest` are those of launch_prologued().
    """
    query, key, value = inputs
    scale, mask, slopes, sinks, window, softcap = rest
    try:
        out, lse = previous
        if (mask is not None and options[0]) or _is_graded(query, key, value, out) or lse.dtype is not torch.float32:
            return None
        if _is_grad_enabled():
            for tensor in (lse, mask, slopes, sinks):
                if tensor is not None and tensor.requires_grad:
                    return None
        code = OPTIONS[options] | CONTINUED_BIT
        if mask is slopes is sinks is window is softcap is None:
            found = _launch(query, key, value, out, lse, code, scale)
        else:
            left, right = (-1, -1) if window is None else window
            found = _launch(query, key, value, out, lse, code, scale, mask, slopes, sinks, left, right, softcap)
    except MISSES:
        return None
    return None if found is None else (out, lse)


def first_call(call: Call) -> Result:
    """Validate a call that has no plan, make the plan, and launch; also all calls that no kernel is needed for.

    Raises:
        MicrosdpaError: as sdpa.
    """
    checked = check(call)
    if checked.is_empty:
        return _nothing(checked)
    if call.options.dropout_p and call.random is None:
        checked = checked._replace(call=call._replace(random=dropout.take(call.inputs[0], False)))
        call = checked.call
    if checked.emulated:
        return _emulate(checked)
    query, key, value = call.inputs
    if query.device.type == "cpu":
        check_cpu_impl(call.options.impl)
        if call.sequences is not None:
            return varlen.attend_on_cpu(checked)
        if call.prologue is not None:
            query, key, value = prologue.composed(call.inputs, call.prologue, call.shift)
        how = checked.causal, checked.scale, _with_dropping(checked), call.return_lse or call.previous is not None
        result, cpu_lse = torch_cpu.attend(query, key, value, *how)
        if call.previous is not None:
            assert cpu_lse is not None
            return torch_cpu.merge(call.previous, result, cpu_lse)
        return result if call.out is None else call.out.copy_(result), cpu_lse
    if checked.value_dim:
        other_value_dims.add(checked.value_dim)
    out = checked.output()
    found = None
    if call.has_values or checked.value_dim or call.previous is not None:
        # A plan may be there: scales can be numbers, or of the key's heads, and an output can be unlike query.
        found = launch_checked(checked, out)
    if found is None:
        prepare(checked, out)
        found = launcher.found(launch_checked(checked, out))
    if call.previous is not None:
        return call.previous
    return out, found if call.return_lse else None


def prepare(checked: Checked, out: torch.Tensor) -> None:
    """Compile the kernels of a call on CUDA tensors and register its plan.

    Raises:
        MicrosdpaError: as sdpa.
    """
    problem = problem_of(checked, out)
    spec = chosen(problem, checked.kernel) or select(problem, checked.kernel).spec
    call = foreign_call(checked, out)
    if problem.varlen is not None:
        launcher.prepare_varlen(problem, varlen.kernels_of(checked, problem, spec), call)
    elif checked.operands is None:
        launcher.prepare(problem, spec, call, new_sizes.others(problem, spec, checked.kernel))
        new_sizes.note_kind(problem, checked.kernel, call)
    else:
        launcher.register(call, *quantized.planned(checked, problem, spec, out))


def foreign_call(checked: Checked, out: torch.Tensor) -> launcher.Call:
    """The launcher's arguments for a call."""
    call, masks = checked.call, checked.masks
    if call.sequences is not None:
        return varlen.foreign_call(checked, out)
    wanted = call.return_lse if call.previous is None else call.previous[1]
    given = *call.inputs, out, wanted, call.code, checked.scale
    if call.prologue is not None:
        given = *given, *call.prologue.arguments(call.shift)
    if masks.kind is None:
        return (*given, *launcher.NO_MASKS, *checked.scales) if call.has_values else given
    masked = *given, masks.attn_mask, masks.alibi_slopes, masks.sinks, *masks.ends, masks.softcap
    return (*masked, *checked.scales) if call.has_values else masked


def _with_dropping(checked: Checked) -> Masks:
    """The masks of a call on CPU tensors, with its dropout."""
    call = checked.call
    if call.random is None or call.random.drawn is None:
        return checked.masks
    return replace(checked.masks, dropping=(call.options.dropout_p, call.random.drawn))


def launch_checked(checked: Checked, out: torch.Tensor) -> Any:
    """Launch a call by its plan, and give what launcher.launch does."""
    call = checked.call
    if call.options.dropout_p:
        assert call.random is not None
        given = *kept_of(call.options.dropout_p), *call.random
        return launcher.launch_dropped(*given, *foreign_call(checked, out))
    return _launch(*foreign_call(checked, out))


def prepared(checked: Checked, out: torch.Tensor) -> Callable[..., Any]:
    """The launch of a call's plan alone: a function of its tensors, with `lse` after `out`."""
    return launcher.prepared_call(foreign_call(checked, out))


def _nothing(checked: Checked) -> Result:
    """The result of a call that has nothing to compute."""
    call, query = checked.call, checked.call.inputs[0]
    if call.previous is not None:
        return _still(checked)
    out = checked.output().zero_()
    if not call.return_lse:
        return out, None
    lse = torch.full(checked.lse_shape, -torch.inf, dtype=torch.float32, device=query.device)
    if checked.masks.sinks is not None:
        lse.copy_(checked.masks.sinks[:, None].expand_as(lse))
    return out, lse


def _still(checked: Checked) -> Result:
    """The result of a call without keys that goes on from an output: that, of which sinks take a share."""
    out, lse = checked.call.previous or (checked.output(), torch.empty(0))
    if checked.masks.sinks is None or not out.numel():
        return out, lse
    sinks = checked.masks.sinks.float()[:, None].expand_as(lse)
    return torch_cpu.merge((out, lse), torch.zeros_like(out), sinks)


def _emulate(checked: Checked) -> Result:
    """Run the kernels of a call in the emulator."""
    call, problem = checked.call, problem_of(checked)
    spec, query = select(problem, checked.kernel).spec, call.inputs[0]
    out = checked.output()
    if call.previous is not None:
        lse: torch.Tensor | None = call.previous[1]
    else:
        lse = torch.empty(checked.lse_shape, dtype=torch.float32, device=query.device) if call.return_lse else None
    if problem.varlen is not None:
        varlen.emulate(checked, problem, spec, out, lse)
        return out, lse
    if checked.operands is not None:
        quantized.emulate(checked, problem, spec, out, lse)
        return out, lse
    from microsdpa.emulate import run  # not imported with the package: few programs need it

    changed = None if call.prologue is None else (call.prologue, call.shift)
    operands = run.Operands(*call.inputs, out, lse, changed)
    run.attention(spec, problem, operands, checked.scale, masks=_with_dropping(checked))
    return out, lse
