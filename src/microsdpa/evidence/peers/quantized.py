"""Quantization for peers that take 8-bit inputs, and the 8-bit eager reference that their tolerance is derived from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from microsdpa import reference

E4M3_MAX = 448.0
QUANTIZED = "quantized, "
"""Before the type that P is rounded to, in the name of an arithmetic whose Q, K and V are quantized values already."""
SCORES_AT_ONCE = 2**27


def per_tensor_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 values, scale): x is about values * scale, and the largest magnitude becomes 448."""
    scale = (x.abs().amax().float() / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return _quantized(x, scale), scale


def per_head_e4m3(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for [B, H, S, D] with one scale for each of `groups` groups of heads: scales are [B, groups]."""
    grouped = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    scale = (grouped.abs().amax(dim=(2, 3, 4)).float() / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return _quantized(grouped, scale[:, :, None, None, None]).flatten(1, 2), scale


def _quantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _rounded_e4m3(x: torch.Tensor) -> torch.Tensor:
    quantized, scale = per_tensor_e4m3(x)
    return quantized.float() * scale


def _rounded_int8(x: torch.Tensor) -> torch.Tensor:
    scale = (x.abs().amax().float() / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scale).round() * scale


def eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: str | None,
    scale: float | None,
    arithmetic: str,
    masks: Mapping[str, Any] = MappingProxyType({}),
) -> torch.Tensor:
    """Attention by plain operations with 8-bit operands of both products and an 8-bit output: what 8 bits cost.

    query is [B, H, S_q, D], key and value [B, H_kv, S_k, D]. "e4m3" rounds Q, K, V, P and O to E4M3 with one scale a
    tensor; "int8" rounds Q and K to 8-bit integers with one scale a tensor, and P, V and O to FP16; "int8_fp16" is the
    same, and "int8_fp8" rounds P and V to E4M3. "quantized, e4m3" and "quantized, float16" take Q, K and V as they are
    for: P alone is rounded, and O to FP16. `masks` are further arguments of reference.oracle.
    """
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k, group = key.shape[2], heads // key.shape[1]
    is_quantized, e4m3_probabilities = arithmetic.startswith(QUANTIZED), arithmetic.endswith(("e4m3", "fp8"))
    round_qk = torch.Tensor.float if is_quantized else _rounded_e4m3 if arithmetic == "e4m3" else _rounded_int8
    q, k = round_qk(query), round_qk(key)
    v = _rounded_e4m3(value) if e4m3_probabilities and not is_quantized else value.float()
    if masks:
        out = _masked(q, k, v, e4m3_probabilities, {"causal": causal, "scale": scale, **masks})
        return _rounded_e4m3(out) if arithmetic == "e4m3" else out.half()
    factor = head_dim**-0.5 if scale is None else scale
    diagonal = seqlen_k - seqlen_q if causal == "lower_right" else 0
    out = torch.empty(batch, heads, seqlen_q, head_dim, device=query.device)
    rows = max(1, SCORES_AT_ONCE // seqlen_k)
    columns = torch.arange(seqlen_k, device=query.device)
    for b in range(batch):
        for h in range(heads):
            for first in range(0, seqlen_q, rows):
                last = min(first + rows, seqlen_q)
                scores = q[b, h, first:last] @ k[b, h // group].T * factor
                if causal is not None:
                    limit = torch.arange(first, last, device=query.device)[:, None] + diagonal
                    scores.masked_fill_(columns > limit, -torch.inf)
                # The unnormalised exponentials are what the second product multiplies.
                exponentials = (scores - scores.amax(dim=1, keepdim=True).clamp(min=-1e30)).exp()
                total = exponentials.sum(dim=1, keepdim=True)
                rounded = _rounded_exponentials(exponentials, e4m3_probabilities)
                out[b, h, first:last] = (rounded @ v[b, h // group] / total).nan_to_num(0.0)
    return _rounded_e4m3(out) if arithmetic == "e4m3" else out.half()


def _rounded_exponentials(exponentials: torch.Tensor, to_e4m3: bool) -> torch.Tensor:
    """Numbers from 0 to 1 as E4M3, of which 448 stands for 1, or as FP16."""
    if to_e4m3:
        return (exponentials * E4M3_MAX).to(torch.float8_e4m3fn).float() / E4M3_MAX
    return exponentials.half().float()


def _masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, to_e4m3: bool, options: Mapping[str, Any]
) -> torch.Tensor:
    """Attention with masks: the oracle's probabilities, which it gives for a V of unit vectors, rounded beside each
    row's largest, times V."""
    batch, heads = query.shape[:2]
    heads_kv, seqlen_k = key.shape[1:3]
    units = torch.eye(seqlen_k, device=query.device).expand(batch, heads_kv, -1, -1)
    probabilities = reference.oracle(query, key, units, **options)[0]
    largest = probabilities.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    rounded = _rounded_exponentials((probabilities / largest).float(), to_e4m3) * largest.float()
    return rounded @ value.repeat_interleave(heads // heads_kv, dim=1)
