"""xFormers' memory_efficient_attention with its CUTLASS operator."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator

import torch

from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors


@contextlib.contextmanager
def _without_half_of_flash_attn() -> Iterator[None]:
    """Hide a flash_attn that is FlashAttention-4's alone: xFormers takes that name for version 2 and fails on it."""
    name = "flash_attn"
    spec = importlib.util.find_spec(name)
    if spec is None or importlib.util.find_spec(f"{name}.flash_attn_interface"):
        yield
        return
    found = sys.modules.pop(name, None)
    sys.modules[name] = None  # type: ignore[assignment] # what makes an import fail
    try:
        yield
    finally:
        del sys.modules[name]
        if found is not None:
            sys.modules[name] = found


class Xformers(Implementation):
    """memory_efficient_attention_forward, forced to the CUTLASS operator."""

    name = "xformers"
    module = "xformers.ops.fmha.cutlass"
    package = "xformers"
    configuration = "`memory_efficient_attention_forward(op=cutlass.FwOp)` on [B, S, H, D] views"

    def unavailable(self) -> str:
        """Also where xFormers finds no CUTLASS kernel for this torch."""
        with _without_half_of_flash_attn():
            reason = super().unavailable()
        if reason:
            return reason
        from xformers.ops.fmha import cutlass

        return "" if cutlass.FwOp.is_available() else "this xformers has no CUTLASS kernel for this torch"

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """[B, S, H, D] views; grouped heads as the five-dimensional [B, S, G, H, D] that it documents."""
        from xformers.ops.fmha import attn_bias, cutlass, memory_efficient_attention_forward

        query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
        if case.kv_heads != case.heads:
            group = case.heads // case.kv_heads
            query = query.view(*query.shape[:2], case.kv_heads, group, case.head_dim)
            key, value = (x.unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (key, value))
        masks = {
            None: None,
            "upper_left": attn_bias.LowerTriangularMask(),
            "lower_right": attn_bias.LowerTriangularFromBottomRightMask(),
        }
        bias, scale, operator = masks[case.causal], case.scale, cutlass.FwOp
        attend = memory_efficient_attention_forward
        return lambda: attend(query, key, value, attn_bias=bias, scale=scale, op=operator)

    def decode(self, result: torch.Tensor) -> torch.Tensor:
        """Back to [B, H, S, D]."""
        return (result.flatten(2, 3) if result.dim() == 5 else result).transpose(1, 2)
