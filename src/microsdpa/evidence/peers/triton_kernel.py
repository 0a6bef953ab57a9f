"""The Triton kernel of `triton_fused`; imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fused_attention(  # noqa: D103 - a device function
    query,
    key,
    value,
    out,
    scale,  # already times log2(e)
    seqlen_q,
    seqlen_k,
    diagonal,  # query i sees keys j <= i + diagonal
    q_b,
    q_h,
    q_s,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    o_b,
    o_h,
    o_s,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, HEAD_DIM)
    inside = (rows < seqlen_q)[:, None]

    q_tile = tl.load(query + batch * q_b + head * q_h + rows[:, None] * q_s + lanes[None, :], inside, 0.0)
    k_base = key + batch * k_b + (head // GROUP) * k_h
    v_base = value + batch * v_b + (head // GROUP) * v_h

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = seqlen_k
    if CAUSAL:
        end = tl.minimum(seqlen_k, (tl.program_id(0) + 1) * BLOCK_M + diagonal)
    for first in range(0, end, BLOCK_N):
        keys = first + columns
        known = (keys < seqlen_k)[:, None]
        k_tile = tl.load(k_base + keys[:, None] * k_s + lanes[None, :], known, 0.0)
        scores = tl.dot(q_tile, k_tile.T) * scale
        visible = (keys < seqlen_k)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None] + diagonal)
        scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet would subtract infinity from infinity.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        probabilities = tl.exp2(scores - reference[:, None])
        correction = tl.exp2(largest - reference)
        total = total * correction + tl.sum(probabilities, 1)
        v_tile = tl.load(v_base + keys[:, None] * v_s + lanes[None, :], known, 0.0)
        sums = sums * correction[:, None] + tl.dot(probabilities.to(v_tile.dtype), v_tile)
        largest = new_largest
    result = tl.where(total[:, None] > 0, sums / total[:, None], 0.0)
    tl.store(
        out + batch * o_b + head * o_h + rows[:, None] * o_s + lanes[None, :], result.to(out.dtype.element_ty), inside
    )
