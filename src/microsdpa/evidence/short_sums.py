"""What wgmma loses of the sums of E4M3 products, exactly: its arithmetic, as docs/numerics.md describes it."""

from __future__ import annotations

import torch

BITS = 13
"""Bits that a term keeps below the largest term's leading one, and a sum below its own."""
CHANNELS = 32
"""Products of one instruction, which is added to the sum of those before."""
ROWS = 32
"""Queries at a time: what a core's cache holds."""


def lost_of_products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What is to be added to the exact products of quantized values to get those of wgmma: [B, H, S_q, S_k] in FP64.

    query: [B, H, S_q, terms * D] quantized values, in the order in which they are summed.
    key: [B, H_kv, S_k, D] quantized values, which every term is multiplied with.
    """
    batch, heads, seqlen_q, columns = query.shape
    _, heads_kv, seqlen_k, head_dim = key.shape
    lost = torch.empty(batch, heads, seqlen_q, seqlen_k, dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            q = query[b, head].cpu().float()
            k = key[b, head // (heads // heads_kv)].cpu().float().repeat(1, columns // head_dim)
            for first in range(0, seqlen_q, ROWS):
                rows = q[first : first + ROWS]
                lost[b, head, first : first + ROWS] = _summed(rows, k).double() - rows.double() @ k.double().T
    return lost


def _summed(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Sums of products of [S_q, C] and [S_k, C] as wgmma makes them; every step is exact in FP32."""
    total = torch.zeros(len(query), len(key))
    for first in range(0, query.shape[1], CHANNELS):
        q, k = query[:, None, first : first + CHANNELS], key[None, :, first : first + CHANNELS]
        largest = torch.maximum((_exponent(q) + _exponent(k)).amax(dim=-1), _exponent(total))
        unit = torch.exp2(largest - BITS)
        terms = (q * k / unit[..., None]).trunc_().sum(dim=-1) + (total / unit).trunc()
        spare = torch.exp2((_exponent(terms) - BITS).clamp(min=0.0))
        total = (terms / spare).trunc() * spare * unit
    return total


def _exponent(x: torch.Tensor) -> torch.Tensor:
    """Of the leading bit; of zero below all others."""
    return torch.frexp(x)[1].float().masked_fill(x == 0, -60.0) - 1


def lost_of_scores(
    quantized: tuple[torch.Tensor, torch.Tensor], scales: tuple[torch.Tensor, torch.Tensor], scale: float
) -> torch.Tensor:
    """What is to be added to exact scores to get those of wgmma, [B, H, S_q, S_k]: an attn_mask for the oracle.

    quantized: values of Q and K, as lost_of_products() takes them.
    scales: theirs, such that they broadcast to [B, H, S, 1].
    scale: of softmax.
    """
    (batch, heads, seqlen_q, _), (_, heads_kv, seqlen_k, _) = quantized[0].shape, quantized[1].shape
    of_query = scales[0].cpu().double().expand(batch, heads, seqlen_q, 1)
    of_key = scales[1].cpu().double().expand(batch, heads_kv, seqlen_k, 1).repeat_interleave(heads // heads_kv, dim=1)
    return lost_of_products(*quantized) * of_query * of_key.mT * scale


def allowed_of_values(probability: torch.Tensor, value: torch.Tensor, largest: int, promoted: int) -> torch.Tensor:
    """What P V can be off by where P is E4M3 and wgmma sums it in place, element by element: [S_q, D] in FP64.

    A probability is off by 2^-4 of itself, or by 2^-10 of a code of 1 where it is subnormal: 2^-10 / `largest` of the
    row's largest one at most, since that has a code of `largest` or more. A term of a sum loses less than 2^-13 of what
    is largest of the sum so far and the instruction's products, and not more than itself; the sum loses as much again.

    probability: [S_q, S_k], exact; value: [S_k, D], the dequantized values.
    promoted: keys after which all but 2^-8 of the sum is moved away.
    """
    value = value.double()
    most = probability.amax(dim=1, keepdim=True)
    off = torch.maximum(probability * 2**-4, torch.minimum(probability, most * 2**-10 / largest))
    total = torch.zeros(len(probability), value.shape[1], dtype=torch.float64)
    sums, slack, allowed = total.clone(), total.clone(), total.clone()
    for first in range(0, len(value), CHANNELS):
        if first > 0 and first % promoted == 0:
            sums, slack = torch.zeros_like(sums), 2**-8 * (total.abs() + allowed)
        p, v = probability[:, first : first + CHANNELS], value[first : first + CHANNELS]
        rounding = off[:, first : first + CHANNELS] @ v.abs()
        terms = (p + off[:, first : first + CHANNELS])[..., None] * v.abs()
        unit = torch.maximum(sums.abs() + slack, terms.amax(dim=1)) * 2**-BITS
        sums, total = sums + p @ v, total + p @ v
        slack = slack + rounding
        lost = torch.minimum(terms, unit[:, None]).sum(dim=1) + unit + (sums.abs() + slack) * 2**-BITS
        slack, allowed = slack + lost, allowed + rounding + lost
    return allowed
