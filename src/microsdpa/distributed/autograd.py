"""Attention over a group as one node of autograd, whichever way data travels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from microsdpa.distributed import all_gather, heads, ring
from microsdpa.distributed.agreement import Agreement, Method
from microsdpa.distributed.compute import Result
from microsdpa.errors import UnsupportedProblem

METHODS: dict[Method, ModuleType] = {"all_gather": all_gather, "ring": ring, "heads": heads}
"""Modules with forward() and backward()."""


def attend(
    agreed: Agreement,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    return_lse: bool,
) -> Result:
    """Output and, on demand, LSE of this rank's queries, with their gradient where an input requires it."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        out, lse = _Attention.apply(query, key, value, mask, agreed)  # type: ignore[no-untyped-call]
        return out, lse if return_lse else None
    with torch.no_grad():
        found: Result = METHODS[agreed.method].forward(agreed, query, key, value, mask, return_lse)
    return found


class _Attention(torch.autograd.Function):
    """Attention and its gradient, also through the LSE."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        agreed: Agreement,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, H, S_local, D] and LSE [B, H, S_local]."""
        out, lse = METHODS[agreed.method].forward(agreed, query, key, value, mask, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.agreed = agreed
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of query, key and value."""
        if torch.is_grad_enabled():
            raise UnsupportedProblem("there is no gradient of the gradient", nearest="create_graph=False")
        query, key, value, mask, out, lse = ctx.saved_tensors
        grad_out, grad_lse = grads
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        given = (query, key, value), (out, lse), (grad_out, grad_lse), mask
        return *METHODS[ctx.agreed.method].backward(ctx.agreed, *given), None, None
