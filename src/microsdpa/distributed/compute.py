"""What one rank computes: attention and gradients of pieces of its queries, into parts of its tensors."""

from __future__ import annotations

import torch

from microsdpa.attention.api import sdpa
from microsdpa.call.masks import Masks
from microsdpa.call.options import Options
from microsdpa.distributed.agreement import Agreement
from microsdpa.distributed.visible import UNBOUNDED, Piece
from microsdpa.execution import backward, torch_cpu
from microsdpa.kernels.problem import Causal
from microsdpa.runtime import launcher

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Result = tuple[torch.Tensor, "torch.Tensor | None"]
Pair = tuple[torch.Tensor, torch.Tensor]
Grads = tuple[torch.Tensor, "torch.Tensor | None"]


def attend_piece(
    agreed: Agreement,
    piece: Piece,
    inputs: Inputs,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attention of one piece into `out` [B, H, S_local, D] and `lse` [B, H, S_local].

    `inputs` are the queries of this rank, and all keys and values.
    """
    query, key, value = inputs
    rows = slice(piece.at, piece.at + piece.length)
    if piece.start == piece.stop:
        out[:, :, rows] = 0
        if lse is not None:
            lse[:, :, rows] = -torch.inf
        return
    seen = slice(piece.start, piece.stop)
    found = sdpa(
        *(query[:, :, rows], key[:, :, seen], value[:, :, seen]),
        **agreed.arguments(piece, mask),
        scale=agreed.scale,
        softcap=agreed.softcap,
        enable_gqa=True,
        return_lse=lse is not None,
        out=out[:, :, rows],
    )
    if lse is not None:
        lse[:, :, rows] = found[1]


def foreign_call(
    agreed: Agreement,
    piece: Piece,
    inputs: Inputs,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> launcher.Call | None:
    """The launcher's arguments for attend_piece(); None where that does more than launch."""
    query, key, value = inputs
    rows, seen = slice(piece.at, piece.at + piece.length), slice(piece.start, piece.stop)
    sums = None if lse is None else lse[:, :, rows]
    if piece.start == piece.stop or not (sums is None or sums.is_contiguous()):
        return None
    given = agreed.arguments(piece, mask)
    ends = given.get("window") or (UNBOUNDED, UNBOUNDED)
    code = Options(causal=given.get("causal"), enable_gqa=True).code
    tensors = query[:, :, rows], key[:, :, seen], value[:, :, seen], out[:, :, rows], sums
    return *tensors, code, agreed.scale, given.get("attn_mask"), None, None, *ends, agreed.softcap


def continue_piece(
    agreed: Agreement,
    piece: Piece,
    inputs: Inputs,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attention of one piece, which has keys, merged in its launch into what its queries have seen before.

    `out` is [B, H, S_local, D], `lse` [B, H, piece.length].
    """
    query, key, value = inputs
    rows, seen = slice(piece.at, piece.at + piece.length), slice(piece.start, piece.stop)
    sdpa(
        *(query[:, :, rows], key[:, :, seen], value[:, :, seen]),
        **agreed.arguments(piece, mask),
        scale=agreed.scale,
        softcap=agreed.softcap,
        enable_gqa=True,
        continue_from=(out[:, :, rows], lse),
    )


def differentiate_piece(
    agreed: Agreement,
    piece: Piece,
    inputs: Inputs,
    result: Pair,
    grads: Grads,
    mask: torch.Tensor | None,
    sums: Inputs,
) -> None:
    """Add the gradients of one piece to `sums`, FP32, of the shapes of `inputs`.

    `result` and `grads` are of the whole softmax of this rank's queries: output and LSE, and their gradients.
    """
    (query, key, value), (out, lse), (grad_out, grad_lse) = inputs, result, grads
    if piece.start == piece.stop:
        return
    rows, seen = slice(piece.at, piece.at + piece.length), slice(piece.start, piece.stop)
    given = agreed.arguments(piece, mask)
    compute = backward.gradients if query.is_cuda else gradients_on_cpu
    found = compute(
        (grad_out[:, :, rows], None if grad_lse is None else grad_lse[:, :, rows]),
        (query[:, :, rows], key[:, :, seen], value[:, :, seen]),
        (out[:, :, rows], lse[:, :, rows]),
        given.get("causal"),
        agreed.scale,
        Masks(given.get("attn_mask"), given.get("window"), agreed.softcap),
    )
    for total, gradient, part in zip(sums, found, (rows, seen, seen), strict=True):
        total[:, :, part] += gradient


def gradients_on_cpu(
    grads: Grads, inputs: Inputs, result: Pair, causal: Causal | None, scale: float | None, masks: Masks
) -> list[torch.Tensor]:
    """Gradients in plain FP32, of keys that may be a part of those that `result` was computed from."""
    (grad_out, grad_lse), (query, key, value), (out, lse) = grads, inputs, result
    found = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in inputs]
    d_query, d_key, d_value = found
    shared, factor = query.shape[1] // key.shape[1], query.shape[3] ** -0.5 if scale is None else scale
    for head in range(query.shape[1]):
        q, k, v, d_out = query[:, head], key[:, head // shared], value[:, head // shared], grad_out[:, head].float()
        logits = torch_cpu.scores(q, k, head, causal, scale, masks)
        rows = lse[:, head, :, None]
        p = torch.where(rows == -torch.inf, 0.0, (logits - rows).exp())
        shift = -(out[:, head].float() * d_out).sum(dim=-1, keepdim=True)
        if grad_lse is not None:
            shift = shift + grad_lse[:, head, :, None]
        d_logits = p * (d_out @ v.float().mT + shift)
        if masks.softcap is not None:
            d_logits = d_logits * (1.0 - (torch_cpu.products(q, k, scale, masks) / masks.softcap).square())
        d_query[:, head] = d_logits @ k.float() * factor
        d_key[:, head // shared] += d_logits.mT @ q.float() * factor
        d_value[:, head // shared] += p.mT @ d_out
    return found
