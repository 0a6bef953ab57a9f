"""CPU tensors: torch's own CPU attention, with this library's semantics for masked rows, alignment, masks and LSE."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from microsdpa import reference
from microsdpa.call.dropout import Dropping
from microsdpa.call.masks import Masks, dense
from microsdpa.call.tensors import new_output
from microsdpa.kernels.problem import Causal

torch_attention = F.scaled_dot_product_attention
"""torch's own function: the name that it has there may come to mean microsdpa's."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: Causal | None,
    scale: float | None,
    masks: Masks,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output [B, H, S_q, D_v] and, on demand, LSE [B, H, S_q] in FP32.

    query is [B, H, S_q, D], key [B, H_kv, S_k, D] and value [B, H_kv, S_k, D_v]. What torch's attention has no argument
    for is computed in FP32, a head at a time.
    """
    plain = masks.softcap is None and masks.alibi_slopes is None and masks.sinks is None and masks.dropping is None
    if plain:
        out = _through_torch(query, key, value, causal, scale, masks)
        if not return_lse:
            return out, None
    else:
        out = new_output(query, value)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    group = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        logits = scores(query[:, head], key[:, head // group], head, causal, scale, masks)
        lse[:, head] = logits.logsumexp(dim=-1)
        if not plain:
            weights = probabilities(logits)[..., : key.shape[2]]
            if masks.dropping is not None:
                weights = weights * factors(masks.dropping, query.shape, head, key.shape[2])
            out[:, head] = (weights @ value[:, head // group].float()).to(query.dtype)
    return out, lse if return_lse else None


def merge(
    previous: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make `previous`, an output [B, H, S_q, D_v] and its LSE [B, H, S_q], that of the keys of `out` and `lse` too.

    Both are written to and given back. A row that has seen no key has an LSE of -inf, and its output does not count.
    """
    before, sums = previous
    both = torch.logaddexp(sums, lse)
    shares = (torch.where(one == -torch.inf, 0.0, (one - both).exp())[..., None] for one in (sums, lse))
    parts = [
        torch.where(share == 0.0, 0.0, part.float() * share) for part, share in zip((before, out), shares, strict=True)
    ]
    before.copy_(parts[0] + parts[1])
    sums.copy_(both)
    return previous


def scores(
    query: torch.Tensor, key: torch.Tensor, head: int, causal: Causal | None, scale: float | None, masks: Masks
) -> torch.Tensor:
    """Logits of one head in FP32, [B, S_q, S_k], and a last column more for the sink; hidden ones are -inf.

    query is [B, S_q, D], key is [B, S_k, D].
    """
    (batch, seqlen_q, _), seqlen_k = query.shape, key.shape[1]
    logits = products(query, key, scale, masks)
    if masks.alibi_slopes is not None:
        away = distance(seqlen_q, seqlen_k, masks.bounds(causal, seqlen_q, seqlen_k)[0], query.device)
        logits = logits - masks.alibi_slopes[..., head].expand(batch)[:, None, None] * away
    if masks.attn_mask is not None:
        mask = _of_head(dense(masks.attn_mask, seqlen_k), head)
        if mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask, -torch.inf)
        else:
            logits = (logits + mask.float()).masked_fill(mask == -torch.inf, -torch.inf)
    visible = masks.visible(causal, seqlen_q, seqlen_k, query.device)
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    if masks.sinks is not None:
        logits = torch.cat([logits, masks.sinks[head].float().expand(batch, seqlen_q, 1)], dim=-1)
    return logits


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Softmax of logits along their last dimension; those of -inf give 0, also in a row that has nothing else.

    The exponential of a logit less the LSE would not do: next to a logit of -1e9 the LSE rounds its logarithm away.
    """
    hidden = logits == -torch.inf
    return logits.masked_fill(hidden.all(dim=-1, keepdim=True), 0.0).softmax(dim=-1).masked_fill(hidden, 0.0)


def factors(dropping: Dropping, shape: tuple[int, ...], head: int, seqlen_k: int) -> torch.Tensor:
    """What dropout multiplies a head's probabilities by, [B, S_q, S_k]; query has `shape`."""
    dropout_p, rng_state = dropping
    batch, heads, seqlen_q, _ = shape
    index = torch.arange(batch, device=rng_state.device) * heads + head
    kept = reference.kept(dropout_p, rng_state, index, seqlen_q, seqlen_k)
    return kept * reference.kept_of(dropout_p)[1]


def products(query: torch.Tensor, key: torch.Tensor, scale: float | None, masks: Masks) -> torch.Tensor:
    """Scaled products of one head in FP32, [B, S_q, S_k], soft-capped where the call asks for it."""
    logits = query.float() @ key.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return logits if masks.softcap is None else masks.softcap * (logits / masks.softcap).tanh()


def distance(seqlen_q: int, seqlen_k: int, position: int, device: torch.device) -> torch.Tensor:
    """|i + position - j| of each query i and key j."""
    away = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device)[:, None] - position
    return away.abs()


def _of_head(mask: torch.Tensor, head: int) -> torch.Tensor:
    """The part of a mask that broadcasts to [B, H, S_q, S_k] which is one head's."""
    mask = mask[(None,) * (4 - mask.dim())]
    return mask[:, head if mask.shape[1] > 1 else 0]


def _through_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: Causal | None,
    scale: float | None,
    masks: Masks,
) -> torch.Tensor:
    # torch scales the -inf of a causal mask of its own: a scale of 0 or less makes NaN of it.
    upper_left = causal == "upper_left" and masks.kind is None and (scale is None or scale > 0.0)
    mask = None if masks.attn_mask is None else dense(masks.attn_mask, key.shape[2])
    if not upper_left:
        visible = masks.visible(causal, query.shape[2], key.shape[2], query.device)
        if visible is not None and mask is None:
            mask = visible
        elif visible is not None and mask is not None:
            mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    return torch_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=upper_left,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
