"""The FlashAttention libraries: version 2, version 3 (16-bit and E4M3) and version 4 (CuTe DSL)."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors, misaligned
from microsdpa.evidence.peers.quantized import per_head_e4m3


class _FlashAttention(Implementation):
    def refuses(self, case: Case) -> str:
        """Causal masks are aligned to the lower right."""
        return misaligned(case, "lower_right")

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """[B, S, H, D] views; grouped heads are what the function takes."""
        query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
        attend = importlib.import_module(self.module).flash_attn_func
        if case.causal is None and case.scale is None:
            return lambda: attend(query, key, value)
        scale, causal = case.scale, case.causal is not None
        return lambda: attend(query, key, value, softmax_scale=scale, causal=causal)

    def decode(self, result: Any) -> torch.Tensor:
        """Back to [B, H, S, D]; some versions give (output, LSE)."""
        out = result[0] if isinstance(result, tuple) else result
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2)


class FlashAttention2(_FlashAttention):
    """flash-attn 2."""

    name = "flash-attn 2"
    module = "flash_attn"
    package = "flash-attn"
    configuration = "`flash_attn.flash_attn_func` on [B, S, H, D] views"

    def unavailable(self) -> str:
        """FlashAttention-4 is installed below the same name, without this function."""
        if reason := super().unavailable():
            return reason
        found = hasattr(importlib.import_module(self.module), "flash_attn_func")
        return "" if found else "flash_attn has no flash_attn_func: pip install flash-attn"


class FlashAttention3(_FlashAttention):
    """FlashAttention-3."""

    name = "flash-attn 3"
    module = "flash_attn_interface"
    package = "flash_attn_3"
    configuration = "`flash_attn_interface.flash_attn_func` on [B, S, H, D] views"


class FlashAttention4(_FlashAttention):
    """FlashAttention-4, in the CuTe DSL."""

    name = "flash-attn 4"
    module = "flash_attn.cute"
    package = "flash-attn-4"
    configuration = "`flash_attn.cute.flash_attn_func` on [B, S, H, D] views; its CUDA 13 libraries"


class FlashAttention3Fp8(FlashAttention3):
    """FlashAttention-3 on E4M3 inputs, with one scale a head."""

    name = "flash-attn 3 FP8"
    arithmetic = "e4m3"
    configuration = "`flash_attn_interface.flash_attn_func` on E4M3 inputs, quantized before timing, a scale a head"

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """Quantized before timing; a query's scale is that of its group of heads, as the library takes it."""
        attend = importlib.import_module(self.module).flash_attn_func
        (query, q_scale), (key, k_scale), (value, v_scale) = (per_head_e4m3(t, case.kv_heads) for t in tensors)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        scale, causal = case.scale, case.causal is not None
        return lambda: attend(
            query,
            key,
            value,
            softmax_scale=scale,
            causal=causal,
            q_descale=q_scale,
            k_descale=k_scale,
            v_descale=v_scale,
        )
