"""CPU tensors: torch's own CPU attention, with this library's semantics for masked rows, alignment and LSE."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from microsdpa.problem import Causal


def visible_keys(seqlen_q: int, seqlen_k: int, causal: Causal) -> torch.Tensor:
    """Boolean [S_q, S_k]: whether query i sees key j."""
    diagonal = seqlen_k - seqlen_q if causal == "lower_right" else 0
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(diagonal)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: Causal | None,
    scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output [B, H, S_q, D] and, on demand, LSE [B, H, S_q] in FP32.

    query is [B, H, S_q, D]; key and value are [B, H_kv, S_k, D].
    """
    mask = visible_keys(query.shape[2], key.shape[2], causal) if causal == "lower_right" else None
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal == "upper_left",
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if mask is not None:
        # Backends differ on rows without a key; here they are zeros.
        out = out.masked_fill(~mask.any(dim=1)[:, None], 0.0)
    return out, _log_sum_exp(query, key, causal, scale) if return_lse else None


def _log_sum_exp(query: torch.Tensor, key: torch.Tensor, causal: Causal | None, scale: float | None) -> torch.Tensor:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    group = query.shape[1] // key.shape[1]
    lse = torch.empty(query.shape[:3], dtype=torch.float32)
    hidden = None if causal is None else ~visible_keys(query.shape[2], key.shape[2], causal)
    for head in range(query.shape[1]):  # one head at a time bounds the memory
        scores = query[:, head].float() @ key[:, head // group].float().mT * factor
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        lse[:, head] = scores.logsumexp(dim=-1)
    return lse
