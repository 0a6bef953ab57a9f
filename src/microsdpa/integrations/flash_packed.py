"""aten::_flash_attention_forward, torch's flash attention of packed sequences and pages, by sdpa_varlen.

torch.nn.attention.varlen.varlen_attn calls it, and varlen_attn_out its form that writes to a given tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from microsdpa.attention.varlen import sdpa_varlen
from microsdpa.errors import UnsupportedProblem

OPERATOR = "_flash_attention_forward"
IN_PLACE = "_flash_attention_forward_no_dropout_inplace"
"""Of torch 2.13 and newer."""
Pair = tuple[torch.Tensor, torch.Tensor]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    is_causal: bool,
    *,
    out: torch.Tensor | None = None,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Pair:
    """(output, LSE) by the operator's arguments: queries and keys are [tokens, H, D], or [B, S, H, D] without offsets.

    With block_table, keys are [pages, page, H_kv, D]. The LSE is [H, tokens], or [B, H, S]. Lengths are on the device,
    so max_q is a hint, and the operator's max_k is not needed. num_splits=1 is torch's promise that a sequence's bits
    do not depend on its batch; more of them change nothing. Gradients are torch's own, by this output and LSE.

    Raises:
        MicrosdpaError: as sdpa_varlen.
    """
    left, right = (-1 if end is None else end for end in (window_size_left, window_size_right))
    lengths = seqused_k
    if block_table is not None and lengths is None and cum_seq_k is not None:
        lengths = cum_seq_k.diff()
    with torch.no_grad():
        found = sdpa_varlen(
            *(query, key, value),
            query_offsets=cum_seq_q,
            key_offsets=cum_seq_k if block_table is None else None,
            lengths=lengths,
            page_table=block_table,
            max_queries=max_q if cum_seq_q is not None and max_q > 0 else None,
            causal=is_causal,
            scale=scale,
            return_lse=True,
            out=out,
            window=None if left == right == -1 else (left, right),
            alibi_slopes=alibi_slopes,
            batch_invariant=num_splits == 1,
        )
    assert isinstance(found, tuple)
    return found


def why_torchs(dropout_p: float, return_debug_mask: bool) -> str:
    """Why a call is torch's own; empty for none."""
    if dropout_p:
        return f"packed sequences with dropout_p={dropout_p}"
    return "return_debug_mask=True" if return_debug_mask else ""


def kernels(torchs: Callable[[str], Any], nothing: Callable[[torch.device], Any]) -> dict[str, Callable[..., Any]]:
    """The operators' kernels by name; `torchs` has torch's own ones, and `nothing` the random state of no dropout."""

    def own(name: str) -> Callable[..., Any]:
        theirs = torchs(name)

        def call(keyset: Any, reason: str, given: tuple[Any, ...], further: dict[str, Any]) -> Any:
            if theirs is None:
                raise UnsupportedProblem(f"{reason}: no kernel here honours it", nearest="a CUDA build of torch")
            return theirs.call_boxed(keyset, *given, **further)

        return call

    torchs_forward = own(OPERATOR)

    def forward(keyset: Any, *given: Any, **further: Any) -> Any:
        query, key, value, offsets_q, offsets_k, max_q, _, dropout_p, is_causal, debug = given
        if reason := why_torchs(dropout_p, debug):
            return torchs_forward(keyset, reason, given, further)
        return *attend(query, key, value, offsets_q, offsets_k, max_q, is_causal, **further), *nothing(query.device)

    found: dict[str, Callable[..., Any]] = {OPERATOR: forward}
    if not hasattr(torch.ops.aten, IN_PLACE):
        return found
    torchs_in_place = own(IN_PLACE)

    def in_place(keyset: Any, *given: Any, **further: Any) -> Any:
        out, query, key, value, offsets_q, offsets_k, max_q, _, dropout_p, is_causal, debug = given
        if reason := why_torchs(dropout_p, debug):
            return torchs_in_place(keyset, reason, given, further)
        return attend(query, key, value, offsets_q, offsets_k, max_q, is_causal, out=out, **further)[1]

    return found | {IN_PLACE: in_place}
