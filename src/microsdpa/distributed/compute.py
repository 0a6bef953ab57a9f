"""What one rank computes: attention and gradients of pieces of its queries, into parts of its tensors."""

from __future__ import annotations

import torch

from microsdpa.attention.api import sdpa
from microsdpa.call.masks import Masks
from microsdpa.distributed.agreement import Agreement
from microsdpa.distributed.visible import Piece, arguments
from microsdpa.execution import backward

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Result = tuple[torch.Tensor, "torch.Tensor | None"]
Pair = tuple[torch.Tensor, torch.Tensor]
Grads = tuple[torch.Tensor, "torch.Tensor | None"]


def attend_piece(
    agreed: Agreement,
    piece: Piece,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
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
        **arguments(piece, mask),
        scale=agreed.scale,
        softcap=agreed.softcap,
        enable_gqa=True,
        return_lse=lse is not None,
        out=out[:, :, rows],
    )
    if lse is not None:
        lse[:, :, rows] = found[1]


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
    given = arguments(piece, mask)
    found = backward.gradients(
        (grad_out[:, :, rows], None if grad_lse is None else grad_lse[:, :, rows]),
        (query[:, :, rows], key[:, :, seen], value[:, :, seen]),
        (out[:, :, rows], lse[:, :, rows]),
        given.get("causal"),
        agreed.scale,
        Masks(given.get("attn_mask"), given.get("window"), agreed.softcap),
    )
    for total, gradient, part in zip(sums, found, (rows, seen, seen), strict=True):
        total[:, :, part] += gradient
