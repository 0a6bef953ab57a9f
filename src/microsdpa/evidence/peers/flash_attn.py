"""The FlashAttention libraries: version 2, version 3 (16-bit and E4M3) and version 4 (CuTe DSL)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from microsdpa.evidence.inputs import Case, documents, make_masks
from microsdpa.evidence.peers import fa3_library
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors, misaligned
from microsdpa.evidence.peers.quantized import per_head_e4m3

DOCUMENTS = "documents"
OPTIONS = ("window", "window 1024", "window 4096", "softcap")
"""Masks that it has an argument for."""


class _FlashAttention(Implementation):
    takes_masks = True
    no_end: int | None = -1
    """What it calls an end of a window that hides nothing."""

    def refuses(self, case: Case) -> str:
        """Causal masks and windows are aligned to the lower right; there are no mask tensors."""
        unknown = [name for name in case.masks if name not in OPTIONS]
        if unknown and case.masks != (DOCUMENTS,):
            return f"it has no argument for {', '.join(unknown)}"
        if case.masks == (DOCUMENTS,) and (case.batch > 1 or case.seqlen_q != case.seqlen_k):
            return "documents are packed sequences to it, which are not of several batch entries"
        if any(name.startswith("window") for name in case.masks) and case.seqlen_q != case.seqlen_k:
            return "it aligns windows by lower_right"
        return misaligned(case, "lower_right")

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """[B, S, H, D] views; grouped heads are what the function takes. Documents are packed sequences."""
        query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
        attend = self.attend()
        options: dict[str, Any] = {}
        if case.causal is not None or case.scale is not None:
            options = {"softmax_scale": case.scale, "causal": case.causal is not None}
        if case.masks == (DOCUMENTS,):
            query, key, value = query[0], key[0], value[0]
            attend = importlib.import_module(self.module).flash_attn_varlen_func
            options |= _lengths(case, query.device)
        elif case.masks:
            given = make_masks(case)
            left, right = given.get("window", (-1, -1))
            ends = {"window_size": tuple(self.no_end if end == -1 else end for end in (left, right))}
            options |= (ends if "window" in given else {}) | {k: v for k, v in given.items() if k == "softcap"}
        return lambda: attend(query, key, value, **options)

    def attend(self) -> Callable[..., Any]:
        """The function for dense tensors."""
        function: Callable[..., Any] = importlib.import_module(self.module).flash_attn_func
        return function

    def decode(self, result: Any) -> torch.Tensor:
        """Back to [B, H, S, D]; some versions give (output, LSE)."""
        out = result[0] if isinstance(result, tuple) else result
        assert isinstance(out, torch.Tensor)
        return (out if out.dim() == 4 else out[None]).transpose(1, 2)


def _lengths(case: Case, device: torch.device) -> dict[str, Any]:
    """What flash_attn_varlen_func is told of documents that share a sequence."""
    lengths = torch.unique_consecutive(documents(case)[1][0], return_counts=True)[1]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(dim=0)]).int().to(device)
    longest = int(lengths.max())
    return {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


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
    """FlashAttention-3: its package, or the library of benchmarks/peers/fa3 that MICROSDPA_FA3_LIBRARY names."""

    name = "flash-attn 3"
    module = "flash_attn_interface"
    package = "flash_attn_3"
    configuration = "`flash_attn_interface.flash_attn_func`, or that of `benchmarks/peers/fa3`, on [B, S, H, D] views"

    @property
    def version(self) -> str:
        """Version of the package, or the commit that the library was built from."""
        return super().version or ("" if self.unavailable() else fa3_library.version())

    def unavailable(self) -> str:
        """Neither the package nor the library."""
        if not os.environ.get(fa3_library.LIBRARY):
            return super().unavailable()
        try:
            fa3_library.library()
        except OSError as error:
            return f"{fa3_library.LIBRARY} names no library: {error}"
        return ""

    def refuses(self, case: Case) -> str:
        """The library has dense calls of three head dimensions, without masks but the causal one."""
        if self.attend() is fa3_library.flash_attn_func:
            if case.masks:
                return "the library of benchmarks/peers/fa3 has no masks but the causal one"
            if case.head_dim not in fa3_library.HEAD_DIMS:
                return f"the library of benchmarks/peers/fa3 has no head dimension {case.head_dim}"
        return super().refuses(case)

    def attend(self) -> Callable[..., Any]:
        """The function for dense tensors."""
        if os.environ.get(fa3_library.LIBRARY):
            return fa3_library.flash_attn_func
        return super().attend()


class FlashAttention4(_FlashAttention):
    """FlashAttention-4, in the CuTe DSL."""

    name = "flash-attn 4"
    module = "flash_attn.cute"
    package = "flash-attn-4"
    configuration = "`flash_attn.cute.flash_attn_func` on [B, S, H, D] views; its CUDA 13 libraries"
    no_end = None


class FlashAttention3Fp8(FlashAttention3):
    """FlashAttention-3 on E4M3 inputs, with one scale a head."""

    name = "flash-attn 3 FP8"
    arithmetic = "e4m3"
    takes_masks = False
    configuration = "`flash_attn_interface.flash_attn_func` on E4M3 inputs, quantized before timing, a scale a head"

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """Quantized before timing; a query's scale is that of its group of heads, as the library takes it."""
        attend = self.attend()
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
