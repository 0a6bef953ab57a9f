"""torch's scaled_dot_product_attention: its own choice of backend, and each backend by name."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from microsdpa.evidence.inputs import Case, dense_mask
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors, is_plain, misaligned

MAX_SCORE_BYTES = 2**31


class TorchSdpa(Implementation):
    """F.scaled_dot_product_attention as torch chooses."""

    name = "torch"
    configuration = "`F.scaled_dot_product_attention`, the backend that torch chooses; all that hides keys in one mask"
    takes_masks = True

    def refuses(self, case: Case) -> str:
        """Causal masks are aligned to the upper left; of what a mask tensor cannot say there is nothing."""
        if unknown := [name for name in case.masks if name in ("softcap", "sinks")]:
            return f"it has no {unknown[0]}"
        return "" if case.masks else misaligned(case, "upper_left")

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """The call with no argument that it does not need."""
        query, key, value = tensors
        sdpa = F.scaled_dot_product_attention
        if is_plain(case):
            return lambda: sdpa(query, key, value)
        scale, gqa = case.scale, case.kv_heads != case.heads
        if case.masks:
            mask = dense_mask(case, query.device.type)  # which has the causal mask too: torch takes one of both
            return lambda: sdpa(query, key, value, attn_mask=mask, scale=scale, enable_gqa=gqa)
        causal = case.causal is not None
        return lambda: sdpa(query, key, value, is_causal=causal, scale=scale, enable_gqa=gqa)


class _Backend(TorchSdpa):
    backend: SDPBackend

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Only this backend may answer."""
        context: contextlib.AbstractContextManager[object] = sdpa_kernel(self.backend)
        return context


class TorchFlash(_Backend):
    """FlashAttention-2."""

    name = "torch FLASH"
    configuration = "the same under `sdpa_kernel(FLASH_ATTENTION)`: FlashAttention-2"
    backend = SDPBackend.FLASH_ATTENTION


class TorchCudnn(_Backend):
    """cuDNN."""

    name = "torch CUDNN"
    configuration = "the same under `sdpa_kernel(CUDNN_ATTENTION)`"
    backend = SDPBackend.CUDNN_ATTENTION


class TorchEfficient(_Backend):
    """The CUTLASS kernel of xFormers."""

    name = "torch EFFICIENT"
    configuration = "the same under `sdpa_kernel(EFFICIENT_ATTENTION)`: the CUTLASS kernel of xFormers"
    backend = SDPBackend.EFFICIENT_ATTENTION


class TorchMath(_Backend):
    """Plain operations, which hold all scores in memory."""

    name = "torch MATH"
    configuration = "the same under `sdpa_kernel(MATH)`: plain operations; not where the scores exceed 2 GiB"
    backend = SDPBackend.MATH

    def refuses(self, case: Case) -> str:
        """Also cases whose scores would fill the memory."""
        score_bytes = 2 * case.batch * case.heads * case.seqlen_q * case.seqlen_k
        if score_bytes > MAX_SCORE_BYTES:
            return f"its scores would take {score_bytes / 2**30:.0f} GiB"
        return super().refuses(case)
