"""Gradients of attention, from its LSE: by torch's fastest backward that computes a call, or by this library's kernels.

On a CPU they are plain FP32 arithmetic, but for calls in the emulator.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from microsdpa.call.call import Inputs, MaskTensors
from microsdpa.call.masks import UNBOUNDED, Masks, dense
from microsdpa.call.options import Options
from microsdpa.call.tensors import kernel_of
from microsdpa.execution import gradients as kernels
from microsdpa.execution import nodes, torch_cpu
from microsdpa.kernels import policy
from microsdpa.kernels.problem import VECTOR_BYTES, Causal

Pair = tuple[torch.Tensor, torch.Tensor]
"""Output and LSE of a call."""


ALL = kernels.MASK_TENSORS
"""Tensors of masks that may want a gradient, by name."""


def gradients(
    grads: tuple[torch.Tensor, torch.Tensor | None],
    inputs: Inputs,
    result: Pair,
    causal: Causal | None,
    scale: float | None,
    masks: Masks,
    wanted: tuple[str, ...] = ALL,
    impl: str = "auto",
) -> list[torch.Tensor]:
    """Gradients of query, key, value and of attn_mask (numbers), alibi_slopes and sinks, in this order.

    Of the last three it gives those that are there and `wanted`. `result` are the output [B, H, S_q, D] and the LSE
    [B, H, S_q] in FP32, and `grads` their gradients. On a GPU kernels of this library compute what torch's cuDNN or
    flash backward does not, or not as fast.

    Raises:
        UnsupportedProblem: there are too many rows or heads for a launch.
    """
    grad_out, grad_lse = grads
    query, key, _ = inputs
    if query.numel() == 0 or key.numel() == 0 or (query.device.type == "cpu" and not kernel_of(impl)[1]):
        if masks.attn_mask is not None:
            masks = replace(masks, attn_mask=dense(masks.attn_mask, key.shape[2]))
        return _through_math(grads, inputs, causal, scale, masks, wanted)
    # torch's backward passes have no gradient of a mask, which is to be among the results, and other random numbers.
    own = any(name in wanted and t.is_floating_point() for name, t in masks.tensors.items())
    own = own or masks.dropping is not None or grad_lse is not None or not query.is_cuda
    # They have nothing of these either. Asking nodes.operator_for() takes a third of a call's time.
    own = own or masks.softcap is not None or masks.ends != (UNBOUNDED, UNBOUNDED)
    own = own or masks.alibi_slopes is not None or masks.sinks is not None
    if not own and not _beats_torch(inputs, causal, masks):
        options = Options(False, causal, scale, window=masks.ends, softcap=masks.softcap)
        tensors = MaskTensors(masks.attn_mask, masks.alibi_slopes, masks.sinks)
        operator, _ = nodes.operator_for(inputs, tensors, options)
        if operator == nodes.CUDNN:
            return _through_cudnn(grad_out, inputs, result, causal, scale, masks.attn_mask)
        if operator == nodes.FLASH:
            return _through_flash(grad_out, inputs, result, causal, scale)
    return kernels.compute(kernels.described(grads, inputs, result, causal, scale, masks, wanted), kernel_of(impl)[0])


_MOST_REMEMBERED = 4096
_beaten: dict[tuple[object, ...], bool] = {}
"""Of calls without a mask, or with attn_mask alone: whether this library's kernels are to make their gradients."""


def _beats_torch(inputs: Inputs, causal: Causal | None, masks: Masks) -> bool:
    query, key, value = inputs
    aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) % VECTOR_BYTES
    mask = masks.attn_mask
    kind = None if mask is None else (mask.dtype, mask.shape, mask.stride())
    strides = query.stride(), key.stride(), value.stride()
    known = query.shape, key.shape, *strides, query.dtype, query.get_device(), aligned, causal, kind
    found = _beaten.get(known)
    if found is None:
        if len(_beaten) >= _MOST_REMEMBERED:
            _beaten.clear()
        found = policy.beats_torch_backward(kernels.problem_of(inputs, causal, masks.kind_in_memory))
        _beaten[known] = found
    return found


def _through_flash(
    grad_out: torch.Tensor, inputs: Inputs, result: Pair, causal: Causal | None, scale: float | None
) -> list[torch.Tensor]:
    (query, key, value), (out, lse) = inputs, result
    unused = nodes.nothing(query.device)[0]
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(grad_out, query, key, value, out, lse, None, None, query.shape[2], key.shape[2]),
        *(0.0, causal is not None, unused, unused),
        scale=scale,
    )
    return [_like(gradient, tensor) for gradient, tensor in zip(found, (query, key, value), strict=True)]


def _through_cudnn(
    grad_out: torch.Tensor,
    inputs: Inputs,
    result: Pair,
    causal: Causal | None,
    scale: float | None,
    mask: torch.Tensor | None,
) -> list[torch.Tensor]:
    (query, key, value), (out, lse) = inputs, result
    bias = None if mask is None else nodes.as_bias(mask, query, key)
    lse = lse if mask is None else nodes.of_seen_rows(lse)
    scalar = nodes.nothing(query.device)[1]
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(grad_out, query, key, value, out, lse.unsqueeze(3), scalar, scalar, bias, None, None),
        *(query.shape[2], key.shape[2], 0.0, causal is not None),
        scale=scale,
    )
    return list(found)


def _through_math(
    grads: tuple[torch.Tensor, torch.Tensor | None],
    inputs: Inputs,
    causal: Causal | None,
    scale: float | None,
    masks: Masks,
    wanted: tuple[str, ...] = ALL,
) -> list[torch.Tensor]:
    """gradients() in FP32 on any device, one query head at a time, from scores that are made again."""
    (grad_out, grad_lse), (query, key, value) = grads, inputs
    (_, heads, seqlen_q, head_dim), seqlen_k = query.shape, key.shape[2]
    group, factor = heads // key.shape[1], head_dim**-0.5 if scale is None else scale
    tensors = query, key, value, masks.attn_mask, masks.alibi_slopes, masks.sinks
    d_query, d_key, d_value, d_mask, d_slopes, d_sinks = (
        None if t is None else torch.zeros(t.shape, dtype=torch.float32, device=query.device) for t in tensors
    )
    assert d_query is not None
    assert d_key is not None
    assert d_value is not None
    for h in range(heads):
        q, k, v = query[:, h].float(), key[:, h // group].float(), value[:, h // group].float()
        d_out = grad_out[:, h].float()
        logits = torch_cpu.scores(q, k, h, causal, scale, masks)
        p = torch_cpu.probabilities(logits)
        d_p, kept = d_out @ v.mT, p[..., :seqlen_k]
        if masks.dropping is not None:
            factors = torch_cpu.factors(masks.dropping, query.shape, h, seqlen_k)
            d_p, kept = d_p * factors, kept * factors
        delta = (p[..., :seqlen_k] * d_p).sum(dim=-1, keepdim=True)
        shift = -delta if grad_lse is None else grad_lse[:, h, :, None].float() - delta
        d_logits = p[..., :seqlen_k] * (d_p + shift)
        d_value[:, h // group] += kept.mT @ d_out
        if d_sinks is not None:
            d_sinks[h] = (p[..., seqlen_k] * shift[..., 0]).sum()
        if d_mask is not None and masks.attn_mask is not None and masks.attn_mask.is_floating_point():
            whole = d_mask.view((1,) * (4 - d_mask.dim()) + d_mask.shape)
            part = whole[:, h if whole.shape[1] > 1 else 0]
            part += d_logits.sum_to_size(part.shape)
        if d_slopes is not None:
            position = masks.bounds(causal, seqlen_q, seqlen_k)[0]
            away = torch_cpu.distance(seqlen_q, seqlen_k, position, query.device)
            per_batch = (d_logits * away).sum(dim=(1, 2))
            d_slopes[..., h] -= per_batch if d_slopes.dim() == 2 else per_batch.sum()
        if masks.softcap is not None:
            d_logits = d_logits * (1.0 - (torch_cpu.products(q, k, scale, masks) / masks.softcap).square())
        d_query[:, h] = d_logits @ k * factor
        d_key[:, h // group] += d_logits.mT @ q * factor
    gradients = (d_query, d_key, d_value, d_mask, d_slopes, d_sinks)
    chosen = True, True, True, *(name in wanted for name in ALL)
    return [
        _like(gradient, tensor)
        for gradient, tensor, one in zip(gradients, tensors, chosen, strict=True)
        if one and gradient is not None and tensor is not None and tensor.is_floating_point()
    ]


def _like(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The gradient in the type and memory order of its tensor."""
    return torch.empty_like(tensor).copy_(gradient)
