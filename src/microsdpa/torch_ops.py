"""torch.ops.microsdpa: the attention as an operator, for torch.compile and autograd. Imported with the package.

attention(query, key, value, attn_mask, alibi_slopes, sinks, causal, scale, enable_gqa, window, softcap, impl) gives
(output, LSE); the arguments are those of sdpa, `window` is [left, right]. Its gradient is attention_backward.
"""

from __future__ import annotations

import torch

from microsdpa import api, torch_cpu
from microsdpa.arguments import is_aligned
from microsdpa.errors import UnsupportedProblem
from microsdpa.masks import Masks
from microsdpa.problem import Causal

Tensors = tuple[torch.Tensor, ...]


@torch.library.custom_op("microsdpa::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    causal: str | None,
    scale: float | None,
    enable_gqa: bool,
    window: list[int],
    softcap: float | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, H, S_q, D], in the memory order of query, and LSE [B, H, S_q]; arguments and errors as in sdpa."""
    with torch.no_grad():
        result = api.sdpa(
            query,
            key,
            value,
            causal=causal,  # type: ignore[arg-type]
            scale=scale,
            enable_gqa=enable_gqa,
            return_lse=True,
            out=torch.empty_like(query),
            impl=impl,
            attn_mask=attn_mask,
            window=None if window == [-1, -1] else (window[0], window[1]),
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
        )
    assert isinstance(result, tuple)
    return result


@attention.register_fake
def _(query: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("microsdpa::attention_backward", mutates_args=())
def attention_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: str | None,
    scale: float | None,
    window: list[int],
    softcap: float | None,
) -> list[torch.Tensor]:
    """Gradients of query, key, value and, where given, of a float attn_mask, alibi_slopes and sinks, in this order.

    torch's flash backward computes those of a call without masks on a GPU, from the LSE; all others are computed in
    FP32 from scores that are made again, one query head at a time.
    """
    masks = Masks(attn_mask, (window[0], window[1]), softcap, alibi_slopes, sinks)
    if grad_lse is None and _flash_computes(query, key, value, causal, scale, masks):
        return _through_flash(grad_out, query, key, value, out, lse, causal, scale)
    return _through_math(grad_out, grad_lse, query, key, value, causal, scale, masks)  # type: ignore[arg-type]


@attention_backward.register_fake
def _(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *_: object,
) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in _differentiable(query, key, value, attn_mask, alibi_slopes, sinks)]


def _differentiable(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None and tensor.is_floating_point()]


def _flash_computes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: str | None,
    scale: float | None,
    masks: Masks,
) -> bool:
    """Whether torch's flash backward has the gradient.

    Its causal mask is aligned lower right, its loads have 16 bytes, and it scales the -inf of what is hidden.
    """
    if not query.is_cuda or masks.kind is not None or not query.numel() or not key.numel():
        return False
    square = query.shape[2] == key.shape[2]
    aligned = causal != "upper_left" or square
    reaches = causal is None or query.shape[2] <= key.shape[2]
    heads = query.shape[1] == key.shape[1]
    loads = query.shape[3] % 8 == 0 and all(map(is_aligned, (query, key, value)))
    return aligned and reaches and heads and loads and (scale is None or scale > 0.0)


def _through_flash(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: str | None,
    scale: float | None,
) -> list[torch.Tensor]:
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the random state of a dropout that there is not
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(grad_out, query, key, value, out, lse, None, None, query.shape[2], key.shape[2]),
        *(0.0, causal is not None, unused, unused),
        scale=scale,
    )
    return [_like(g, t) for g, t in zip(gradients, (query, key, value), strict=True)]


def _through_math(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: Causal | None,
    scale: float | None,
    masks: Masks,
) -> list[torch.Tensor]:
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
        d_p = d_out @ v.mT
        delta = (p[..., :seqlen_k] * d_p).sum(dim=-1, keepdim=True)
        shift = -delta if grad_lse is None else grad_lse[:, h, :, None].float() - delta
        d_logits = p[..., :seqlen_k] * (d_p + shift)
        d_value[:, h // group] += p[..., :seqlen_k].mT @ d_out
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
    return [
        _like(gradient, tensor)
        for gradient, tensor in zip(gradients, tensors, strict=True)
        if gradient is not None and tensor is not None and tensor.is_floating_point()
    ]


def _like(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The gradient in the type and memory order of its tensor."""
    return torch.empty_like(tensor).copy_(gradient)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: Tensors) -> None:
    query, key, value, attn_mask, alibi_slopes, sinks, causal, scale, _, window, softcap, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, attn_mask, alibi_slopes, sinks, *output)  # type: ignore[arg-type]
    ctx.options = causal, scale, window, softcap  # type: ignore[attr-defined]


def _backward(
    ctx: torch.autograd.function.FunctionCtx, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    found = iter(attention_backward(grad_out, grad_lse, *inputs, out, lse, *ctx.options))  # type: ignore[attr-defined]
    gradients = [next(found) if t is not None and t.is_floating_point() else None for t in inputs]
    return (*gradients, *[None] * 6)


def _no_second_order(*_: object) -> None:
    raise UnsupportedProblem(
        "microsdpa has no second-order gradient",
        nearest="torch's own attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
    )


attention.register_autograd(_backward, setup_context=_setup_context)
attention_backward.register_autograd(_no_second_order)
