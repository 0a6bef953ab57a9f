"""Attention that records its gradient: one node of autograd, eager or traced."""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch
from torch._C import (
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
    _get_tracing_state,
    _len_torch_dispatch_stack,
)
from torch.compiler import is_compiling

from microsdpa.call import tensors
from microsdpa.call.call import Inputs, MaskTensors, mask_tensors
from microsdpa.call.dropout import Random
from microsdpa.call.masks import Masks, refuse_both
from microsdpa.call.options import Options
from microsdpa.errors import UnsupportedProblem
from microsdpa.execution import backward, dropout, forward, nodes
from microsdpa.execution.nodes import PLAIN_TYPES


def is_eager(inputs: Inputs) -> bool:
    """Whether tensors are what they seem: no tracer, transform or tensor type of its own has to see the call."""
    query, key, value = inputs
    plain = type(query) in PLAIN_TYPES and type(key) in PLAIN_TYPES and type(value) in PLAIN_TYPES
    return plain and not _len_torch_dispatch_stack() and not _are_functorch_transforms_active()


def is_traced(inputs: Inputs) -> bool:
    """Whether somebody else has to see a call with these tensors: torch.compile, a tracer, a transform, a subclass."""
    if is_compiling() or _get_tracing_state() is not None:
        return True
    return all(isinstance(t, torch.Tensor) for t in inputs) and not is_eager(inputs)


def attend(inputs: Inputs, masks: MaskTensors, options: Options, return_lse: bool) -> forward.Result:
    """Output and, on demand, LSE of an eager call of which an input requires grad.

    Raises:
        MicrosdpaError: as sdpa.
    """
    query = inputs[0]
    _refuse_other_value_dim(inputs, options)
    if not return_lse and query.is_cuda and not query.is_nested and not options.dropout_p:
        out = nodes.attend(inputs, masks, options)
        if out is not None:
            return out, None
    return record(inputs, masks, options, True)


def operator(
    inputs: Inputs,
    masks: tuple[Any, ...],
    options: tuple[Any, ...],
    return_lse: bool = True,
    rng_state: torch.Tensor | None = None,
) -> forward.Result:
    """The call as an operator of torch.ops.microsdpa, which checks its arguments when it runs.

    It is attention_output where neither the LSE nor a gradient is asked for. torch.compile reads these lines, and looks
    at each name that they use again before each call of the graph: `masks` and `options` may be plain tuples for it.
    Seed and offset of a dropout are an argument of the operator, which so gives the same for the same arguments:
    `rng_state`, or two numbers that are drawn here.
    """
    query, key, value = inputs
    attn_mask, alibi_slopes, sinks = masks
    is_causal, causal, scale, enable_gqa, window, softcap, impl, _, dropout_p = options
    if query.is_nested or key.is_nested or value.is_nested or (attn_mask is not None and attn_mask.is_nested):
        tensors.check_not_nested(query=query, key=key, value=value, attn_mask=attn_mask)
    if is_causal is not False:
        refuse_both(is_causal, attn_mask)
        causal = tensors.check_causal(is_causal, causal)
    masked = attn_mask is not None or alibi_slopes is not None or sinks is not None
    if masked or causal is not None or scale is not None or enable_gqa or window is not None or softcap is not None:
        ends = [-1, -1] if window is None else list(window)
        rest: tuple[Any, ...] = (attn_mask, alibi_slopes, sinks, causal, scale, enable_gqa, ends, softcap, impl)
    else:
        rest = () if impl == "auto" else (None, None, None, None, None, False, [-1, -1], None, impl)
    if dropout_p:
        rest = rest or (None, None, None, None, None, False, [-1, -1], None, impl)
        rest = *rest, dropout_p, dropout.draw(query.device) if rng_state is None else rng_state
    if return_lse or (torch.is_grad_enabled() and _wants_gradient(query, key, value, attn_mask, alibi_slopes, sinks)):
        return torch.ops.microsdpa.attention(query, key, value, *rest)  # type: ignore[no-any-return]
    return torch.ops.microsdpa.attention_output(query, key, value, *rest), None


def _wants_gradient(*given: torch.Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in given)


def record(
    inputs: Inputs, masks: MaskTensors, options: Options, eager: bool, rng_state: torch.Tensor | None = None
) -> forward.Result:
    """Output and LSE of a call, with a node in autograd's graph; `eager` is is_eager()'s answer.

    `rng_state` has seed and offset of a dropout; without one, an eager call takes those of torch's generator.
    """
    _refuse_other_value_dim(inputs, options)
    # What torch.autograd.Function.apply does besides is for transforms, of which there is none in an eager call.
    apply = _apply if eager else _Attention.apply
    return apply(*inputs, *masks, rng_state, options, eager)  # type: ignore[no-any-return, no-untyped-call]


def _refuse_other_value_dim(inputs: Inputs, options: Options) -> None:
    """Refuse a gradient by kernels, which have one head dimension.

    Raises:
        UnsupportedProblem: value has other columns than query.
    """
    query, _, value = inputs
    if query.is_nested or value.is_nested or query.dim() != 4 or value.dim() != 4 or query.shape[3] == value.shape[3]:
        return
    if query.is_cuda or tensors.kernel_of(options.impl)[1]:
        raise UnsupportedProblem(
            f"there is no gradient with {query.shape[3]} columns of query and {value.shape[3]} of value",
            nearest="a value padded with torch.nn.functional.pad, or torch.no_grad()",
        )


class _Attention(torch.autograd.Function):
    """Attention and its gradient, also through the LSE."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        rng_state: torch.Tensor | None,
        options: Options,
        eager: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, H, S_q, D] and LSE [B, H, S_q]."""
        inputs = query, key, value
        masks = mask_tensors(attn_mask, alibi_slopes, sinks)
        if eager:
            random = None
            if options.dropout_p:
                random = Random(rng_state) if rng_state is not None else dropout.begin(query, options.dropout_p)
            out, lse = forward.attend(inputs, masks, options, True, random)
            rng_state = None if random is None else random.in_memory
        else:
            with _AutoDispatchBelowAutograd():
                out, lse = operator(inputs, masks, options, rng_state=rng_state)
        assert lse is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, attn_mask, alibi_slopes, sinks, out, lse, rng_state)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the tensors; None for the rest, and for a mask of booleans."""
        grad_out, grad_lse = grads
        *given, out, lse, rng_state = ctx.saved_tensors
        options: Options = ctx.options
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        query, key, value, attn_mask, alibi_slopes, sinks = given
        causal = "upper_left" if options.is_causal else options.causal
        graded = ctx.needs_input_grad[: len(given)]
        wanted = tuple(compress(backward.ALL, graded[3:]))
        # With grad enabled, a gradient of the gradient is wanted: the operator refuses it.
        if is_eager((query, key, grad_out)) and not torch.is_grad_enabled():
            dropping = None if rng_state is None else (options.dropout_p, rng_state)
            masks = Masks(attn_mask, options.window, options.softcap, alibi_slopes, sinks, dropping)
            inputs = query, key, value
            of = (grad_out, grad_lse), inputs, (out, lse)
            found = backward.gradients(*of, causal, options.scale, masks, wanted, options.impl)
        else:
            ends = list(options.window or (-1, -1))
            rest = causal, options.scale, ends, options.softcap, list(graded[3:]), options.impl
            of_dropout = options.dropout_p, rng_state
            found = torch.ops.microsdpa.attention_backward(grad_out, grad_lse, *given, out, lse, *rest, *of_dropout)
        waiting, made = iter(found), zip(given, (True, True, True, *graded[3:]), strict=True)
        there = (t is not None and one and t.is_floating_point() for t, one in made)
        return *(next(waiting) if one else None for one in there), None, None, None


_apply = super(torch.autograd.Function, _Attention).apply
