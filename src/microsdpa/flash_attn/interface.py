"""The functions of FlashAttention 3 (flash_attn_interface) by their names and signatures.

The keywords after `*` are those of vLLM's function of the same name. num_splits, pack_gqa, sm_margin,
scheduler_metadata and fa_version are hints about FlashAttention's schedule, and change nothing here.
"""

from __future__ import annotations

import torch

from microsdpa.flash_attn.core import Masks, Results, attend_cache, attend_dense, attend_packed, refuse


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """Attention of q [B, S_q, H, D] to k and v [B, S_k, H_kv, D].

    With return_attn_probs it gives (out, LSE [B, H, S_q]).
    k and v may be float8_e4m3fn or int8 beside a 16-bit q, with k_descale and v_descale [B, H_kv], or 1 for None.

    Raises:
        MicrosdpaError: as sdpa and sdpa_varlen.
    """
    refuse(qv=(qv, None), attention_chunk=(attention_chunk, 0))
    refuse(q_descale=(q_descale, None))
    masks = Masks(softmax_scale, causal, window_size, softcap)
    return attend_dense((q, k, v), masks, return_attn_probs, deterministic, (k_descale, v_descale))


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    fa_version: int = 3,
    s_aux: torch.Tensor | None = None,
) -> Results:
    """Attention of packed sequences, forward only; s_aux are the sinks [H].

    q is [tokens, H, D]; k and v are [tokens, H_kv, D], or with block_table [pages, page, H_kv, D]; 8-bit ones have
    k_descale and v_descale [B, H_kv]. With return_attn_probs or return_softmax_lse it gives (out, LSE [H, tokens]).

    Raises:
        MicrosdpaError: as sdpa_varlen.
    """
    refuse(qv=(qv, None), attention_chunk=(attention_chunk, 0), seqused_q=(seqused_q, None), dropout_p=(dropout_p, 0.0))
    refuse(q_descale=(q_descale, None))
    masks = Masks(softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    where = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    where["block_table"] = block_table
    lse = return_attn_probs or return_softmax_lse
    descales = k_descale, v_descale
    return attend_packed((q, k, v), masks, lse, where, max_queries=max_seqlen_q, out=out, descales=descales)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: torch.Tensor | None = None,
) -> Results:
    """Attention to a cache, to which k and v are appended before.

    q is [B, S_q, H, D], or [tokens, H, D] with cu_seqlens_q, and k and v are alike; caches are [B, S_k, H_kv, D], or
    with page_table (or block_table) [pages, page, H_kv, D], of q's type or, with k_descale and v_descale [B, H_kv], of
    8 bits. With return_softmax_lse it gives (out, LSE).

    Raises:
        MicrosdpaError: as sdpa_varlen.
    """
    refuse(qv=(qv, None), attention_chunk=(attention_chunk, 0), rotary_seqlens=(rotary_seqlens, None))
    refuse(q_descale=(q_descale, None))
    refuse(cache_leftpad=(cache_leftpad, None))
    if cu_seqlens_k_new is not None and cu_seqlens_k_new is not cu_seqlens_q:
        refuse(cu_seqlens_k_new=(cu_seqlens_k_new, cu_seqlens_q))
    masks = Masks(softmax_scale, causal, window_size, softcap)
    where = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx, "cu_seqlens_q": cu_seqlens_q}
    where |= {"page_table": block_table if page_table is None else page_table, "max_seqlen_q": max_seqlen_q}
    new = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "interleaved": rotary_interleaved}
    return attend_cache((q, k_cache, v_cache), masks, return_softmax_lse, where, new, (k_descale, v_descale))
