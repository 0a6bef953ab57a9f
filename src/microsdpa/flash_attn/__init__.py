"""The functions of FlashAttention 2 by their names and signatures; `interface` has those of FlashAttention 3.

    from microsdpa.flash_attn import flash_attn_varlen_func

install() puts both where `import flash_attn` and `import flash_attn_interface` look. An argument that no kernel here
honours is refused by its name. Tensors are [B, S, H, D] or packed [tokens, H, D], as there.
"""

from __future__ import annotations

import torch

from microsdpa.flash_attn import interface
from microsdpa.flash_attn.core import Masks, Results, attend_cache, attend_dense, attend_packed, refuse
from microsdpa.flash_attn.installation import install, uninstall

__version__ = "2.8.3"
"""FlashAttention's version whose signatures these are."""

__all__ = [
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "install",
    "interface",
    "uninstall",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Attention of q [B, S_q, H, D] to k and v [B, S_k, H_kv, D]: flash_attn_func of FlashAttention 2.

    Gradients are computed where S_q is S_k, or without window and slopes. With return_attn_probs it gives
    (out, LSE [B, H, S_q], None).

    Raises:
        MicrosdpaError: as sdpa and sdpa_varlen.
    """
    refuse(dropout_p=(dropout_p, 0.0))
    masks = Masks(softmax_scale, causal, window_size, softcap, alibi_slopes)
    found = attend_dense((q, k, v), masks, return_attn_probs, deterministic)
    return (*found, None) if isinstance(found, tuple) else found


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Results:
    """Attention of packed sequences: flash_attn_varlen_func of FlashAttention 2, forward only.

    q is [tokens, H, D]; k and v are [tokens, H_kv, D], or with block_table [pages, page, H_kv, D]. With
    return_attn_probs it gives (out, LSE [H, tokens], None).

    Raises:
        MicrosdpaError: as sdpa_varlen.
    """
    refuse(dropout_p=(dropout_p, 0.0))
    masks = Masks(softmax_scale, causal, window_size, softcap, alibi_slopes)
    where = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "block_table": block_table}
    found = attend_packed((q, k, v), masks, return_attn_probs, where, max_queries=max_seqlen_q)
    return (*found, None) if isinstance(found, tuple) else found


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Results:
    """Attention to a cache, to which k and v are appended before: flash_attn_with_kvcache of FlashAttention 2.

    q is [B, S_q, H, D]; caches are [B, S_k, H_kv, D], or with block_table [pages, page, H_kv, D]; k and v are
    [B, S_q, H_kv, D]. num_splits is a hint about FlashAttention's schedule, and changes nothing here. With
    return_softmax_lse it gives (out, LSE [B, H, S_q]).

    Raises:
        MicrosdpaError: as sdpa_varlen.
    """
    refuse(cache_leftpad=(cache_leftpad, None))
    masks = Masks(softmax_scale, causal, window_size, softcap, alibi_slopes)
    where = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx, "page_table": block_table}
    new = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "interleaved": rotary_interleaved}
    return attend_cache((q, k_cache, v_cache), masks, return_softmax_lse, where, new)
