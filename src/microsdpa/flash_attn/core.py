"""From the arguments of FlashAttention's functions to those of sdpa and sdpa_varlen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from microsdpa.attention.api import sdpa
from microsdpa.attention.varlen import sdpa_varlen
from microsdpa.errors import InvalidArgument, UnsupportedProblem

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Results = torch.Tensor | tuple[torch.Tensor | None, ...]


class Masks(NamedTuple):
    """What decides about scores, as FlashAttention has it."""

    softmax_scale: float | None
    causal: bool
    window_size: tuple[int | None, int | None] | None
    softcap: float
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def window(self) -> tuple[int, int] | None:
        """Ends of the window; None for none. FlashAttention 4 has None for an open end."""
        left, right = (-1 if end is None else end for end in self.window_size or (-1, -1))
        return None if left == right == -1 else (left, right)

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of sdpa_varlen."""
        return {
            "causal": self.causal,
            "scale": self.softmax_scale,
            "window": self.window,
            "softcap": self.softcap or None,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }


def refuse(**arguments: tuple[object, object]) -> None:
    """Refuse arguments, given with what they must be.

    Raises:
        UnsupportedProblem: one of them is something else.
    """
    for name, (given, wanted) in arguments.items():
        if given is not wanted and not (isinstance(given, (int, float)) and given == wanted):
            got = f"a tensor of shape {list(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
            wish = f"{name}={wanted!r}" if not isinstance(wanted, torch.Tensor) else f"{name} as for the queries"
            raise UnsupportedProblem(f"{name}: no kernel here honours it, and it is {got}", nearest=wish)


Descales = tuple[torch.Tensor | None, torch.Tensor | None]
"""k_descale and v_descale: scales of 8-bit keys and values, [B, H_kv]."""
NO_DESCALES: Descales = None, None


def _scales(inputs: Inputs, descales: Descales) -> dict[str, Any]:
    """Arguments of sdpa_varlen: for keys of another type, which are 8-bit ones, 1 where there is no descale."""
    query, key, _ = inputs
    if key.dtype == query.dtype:
        refuse(k_descale=(descales[0], None), v_descale=(descales[1], None))
        return {}
    k_scale, v_scale = (1.0 if descale is None else descale for descale in descales)
    return {"k_scale": k_scale, "v_scale": v_scale}


def attend_dense(
    inputs: Inputs, masks: Masks, return_lse: bool, deterministic: bool, descales: Descales = NO_DESCALES
) -> Results:
    """flash_attn_func: windows and slopes of sequences of two lengths are aligned to the lower right."""
    if scales := _scales(inputs, descales):
        query, key, value = inputs
        return sdpa_varlen(query, key, value, return_lse=return_lse, **masks.arguments, **scales)
    queries, keys = (tensor.shape[1] if tensor.dim() == 4 else 0 for tensor in inputs[:2])
    aligned = masks.window is not None or masks.alibi_slopes is not None
    if aligned and queries != keys and not masks.causal:
        return sdpa_varlen(*inputs, return_lse=return_lse, **masks.arguments)
    if deterministic and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        refuse(deterministic=(deterministic, False))
    arguments = masks.arguments | {"causal": "lower_right" if masks.causal else None}
    turned = (tensor.transpose(1, 2) if tensor.dim() == 4 else tensor for tensor in inputs)
    found = sdpa(*turned, enable_gqa=True, return_lse=return_lse, **arguments)
    return (found[0].transpose(1, 2), found[1]) if isinstance(found, tuple) else found.transpose(1, 2)


def attend_packed(
    inputs: Inputs,
    masks: Masks,
    return_lse: bool,
    where: Mapping[str, torch.Tensor | None],
    *,
    max_queries: int | None,
    out: torch.Tensor | None = None,
    descales: Descales = NO_DESCALES,
) -> Results:
    """flash_attn_varlen_func: `where` has cu_seqlens_q, cu_seqlens_k, seqused_k and block_table, as far as given."""
    table, key_offsets, lengths = where.get("block_table"), where.get("cu_seqlens_k"), where.get("seqused_k")
    if table is None and key_offsets is None:
        raise InvalidArgument(
            "cu_seqlens_k", expected="offsets of packed keys", got="None", hint="or pass block_table and seqused_k"
        )
    if table is not None and lengths is None:
        if key_offsets is None:
            raise InvalidArgument(
                "seqused_k", expected="lengths beside block_table", got="None", hint="or pass cu_seqlens_k"
            )
        lengths = key_offsets.diff()
    return sdpa_varlen(
        *inputs,
        query_offsets=where["cu_seqlens_q"],
        key_offsets=None if table is not None else key_offsets,
        lengths=lengths,
        page_table=table,
        max_queries=max_queries,
        return_lse=return_lse,
        out=out,
        **(masks.arguments | _scales(inputs, descales)),
    )


def attend_cache(
    inputs: Inputs,
    masks: Masks,
    return_lse: bool,
    where: Mapping[str, Any],
    new: Mapping[str, Any],
    descales: Descales = NO_DESCALES,
) -> Results:
    """flash_attn_with_kvcache: `where` says where keys lie, `new` what is appended and how it is rotated."""
    query = inputs[0]
    offsets, table, lengths = where.get("cu_seqlens_q"), where.get("page_table"), where.get("cache_seqlens")
    batch = query.shape[0] if offsets is None else offsets.shape[0] - 1
    if isinstance(lengths, int):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=query.device)
    if (rows := where.get("cache_batch_idx")) is not None:
        if table is not None:
            raise InvalidArgument(
                "cache_batch_idx", expected="None beside a page table", got="both", hint="choose rows of the table"
            )
        table = rows.to(torch.int32)[:, None]  # a row of the cache is a page
    if new["k"] is not None and lengths is None:
        raise InvalidArgument(
            "cache_seqlens", expected="the lengths before k is appended", got="None", hint="zeros for an empty cache"
        )
    if new["k"] is not None and new["k"].shape[:-2] != query.shape[:-2]:
        raise UnsupportedProblem(
            f"k: {list(new['k'].shape)} are not as many new keys as there are queries, {list(query.shape)}",
            nearest="a new key for each query",
        )
    rotates = new["rotary_cos"] is not None
    several = offsets is not None or query.shape[1] > 1
    if rotates and several and not masks.causal and masks.window is None:
        raise UnsupportedProblem(
            "rotary_cos: without a causal mask FlashAttention rotates all queries to one position",
            nearest="causal=True, or queries that are rotated before",
        )
    return sdpa_varlen(
        *inputs,
        query_offsets=offsets,
        lengths=lengths,
        page_table=table,
        max_queries=where.get("max_seqlen_q"),
        new_key=new["k"],
        new_value=new["v"],
        rotary_cos=new["rotary_cos"],
        rotary_sin=new["rotary_sin"],
        rotary_interleaved=bool(new["interleaved"]) if rotates else False,
        return_lse=return_lse,
        **(masks.arguments | _scales(inputs, descales)),
    )
