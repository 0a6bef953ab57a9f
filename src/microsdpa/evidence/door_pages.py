"""Doors of suite doors to a cache in pages: one new token of each sequence, beside torch's call on a dense cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import microsdpa
from microsdpa import flash_attn
from microsdpa.evidence.doors import Door, Side, against_oracle
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers import Call, Tensors

CASE = Case(8, 32, 1, 1024, 128, heads_kv=8, dtype="bfloat16", causal="lower_right")
PAGE = 16
NAMES = ("sdpa_varlen(page_table)", "flash_attn_with_kvcache")


class Paged(NamedTuple):
    """Query [B, 1, H, D], a cache [pages, PAGE, H_kv, D] in random order, its table [B, n], and lengths [B]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, tensors: Tensors, page: int = PAGE) -> Paged:
        """The keys and values of dense tensors [B, H_kv, S, D], of which S is a multiple of a page."""
        query, key, value = tensors
        batch, _, seqlen, _ = key.shape
        order = torch.randperm(batch * seqlen // page, generator=torch.Generator().manual_seed(0)).to(key.device)

        def paged(dense: torch.Tensor) -> torch.Tensor:
            rows = dense.transpose(1, 2).reshape(-1, page, dense.shape[1], dense.shape[3])
            return torch.empty_like(rows).index_copy_(0, order, rows)

        lengths = torch.full((batch,), seqlen, dtype=torch.int32, device=key.device)
        return cls(query.transpose(1, 2).contiguous(), paged(key), paged(value), order.int().view(batch, -1), lengths)


def _last_rows(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """The last key and value of each sequence, [B, 1, H_kv, D]."""
    return tuple(tensor[:, :, -1:].transpose(1, 2).contiguous() for tensor in tensors[1:])  # type: ignore[return-value]


def varlen(tensors: Tensors, appends: bool = False) -> Call:
    """sdpa_varlen on pages; `appends`: the last key and value of each sequence are given as new ones."""
    paged = Paged.of(tensors)
    inputs, given = paged[:3], {"lengths": paged.lengths, "page_table": paged.page_table, "causal": True}
    if appends:
        new_key, new_value = _last_rows(tensors)
        given |= {"lengths": paged.lengths - 1, "new_key": new_key, "new_value": new_value}
    return lambda: microsdpa.sdpa_varlen(*inputs, **given)  # type: ignore[arg-type]


def with_kvcache(tensors: Tensors, appends: bool = False) -> Call:
    """The same through FlashAttention's function."""
    paged = Paged.of(tensors)
    given: dict[str, Any] = {"cache_seqlens": paged.lengths, "block_table": paged.page_table, "causal": True}
    if appends:
        new_key, new_value = _last_rows(tensors)
        given |= {"cache_seqlens": paged.lengths - 1, "k": new_key, "v": new_value}
    return lambda: flash_attn.flash_attn_with_kvcache(*paged[:3], **given)


def _dense(tensors: Tensors) -> Call:
    return lambda: F.scaled_dot_product_attention(*tensors, enable_gqa=True)


def _output(tensors: Tensors, found: torch.Tensor) -> tuple[dict[str, object], str]:
    return against_oracle(CASE, tensors, found.transpose(1, 2))


def doors() -> Iterator[Door]:
    """One token of eight sequences, whose cache lies in pages, through each function, with and without appending."""
    for name, call in zip(NAMES, (varlen, with_kvcache), strict=True):
        for text, appends in (("", False), ("new keys", True)):
            ours = Side(functools.partial(call, appends=appends), check=_output)
            yield Door(name, ours, Side(_dense), CASE, text, granularity=PAGE)
