"""The specification: attention in FP64, and the same in the inputs' own dtype, which tolerances are derived from."""

from __future__ import annotations

import torch

MAX_CHUNK_SCORES = 2**25


def oracle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: str | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in FP64: output [B, H, S_q, D] and LSE [B, H, S_q].

    query is [B, H, S_q, D]; key and value are [B, H_kv, S_k, D] and query head h reads key head h // (H / H_kv).
    causal is None, "upper_left" (query i sees keys j <= i) or "lower_right" (j <= i + S_k - S_q). A row that sees no
    key gives zeros and LSE -inf.
    """
    return _attention(query, key, value, causal, scale, torch.float64)


def eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: str | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in the inputs' dtype: scores, probabilities and output are each rounded to it.

    Its error against `oracle` is what an ordinary implementation costs. LSE is taken in FP32 from the rounded scores.
    """
    return _attention(query, key, value, causal, scale, query.dtype)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: str | None,
    scale: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k = key.shape[2]
    factor = head_dim**-0.5 if scale is None else scale
    device = query.device
    out = torch.zeros(batch * heads, seqlen_q, head_dim, dtype=dtype, device=device)
    lse_dtype = torch.promote_types(dtype, torch.float32)
    lse = torch.full((batch * heads, seqlen_q), -torch.inf, dtype=lse_dtype, device=device)
    hidden = None
    if causal is not None:
        diagonal = seqlen_k - seqlen_q if causal == "lower_right" else 0
        hidden = ~torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(diagonal)
    heads_at_once = max(1, MAX_CHUNK_SCORES // max(1, seqlen_q * seqlen_k))
    for first in range(0, batch * heads, heads_at_once):
        index = torch.arange(first, min(first + heads_at_once, batch * heads), device=device)
        b, h = index // heads, index % heads
        h_kv = h // (heads // key.shape[1])
        scores = query[b, h].to(dtype) @ key[b, h_kv].to(dtype).mT * factor
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        probabilities = scores.softmax(dim=-1)
        if hidden is not None:
            probabilities.masked_fill_(hidden, 0.0)
        out[index] = probabilities @ value[b, h_kv].to(dtype)
        lse[index] = scores.to(lse_dtype).logsumexp(dim=-1)
    return out.view(batch, heads, seqlen_q, head_dim), lse.view(batch, heads, seqlen_q)
