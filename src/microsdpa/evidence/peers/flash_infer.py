"""FlashInfer's prefill for one request."""

from __future__ import annotations

import torch

from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors, misaligned


class FlashInfer(Implementation):
    """single_prefill_with_kv_cache; a batch of more than one is for its other wrappers, with other memory."""

    name = "FlashInfer"
    module = "flashinfer"
    package = "flashinfer-python"
    configuration = '`single_prefill_with_kv_cache(kv_layout="HND")`; batch size 1 only'

    def refuses(self, case: Case) -> str:
        """One request, causal masks aligned to the lower right."""
        return "its single-request prefill takes batch size 1" if case.batch > 1 else misaligned(case, "lower_right")

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """Q as [S, H, D], K and V as [H_kv, S, D]."""
        import flashinfer

        query, key, value = (tensor[0] for tensor in tensors)
        query = query.transpose(0, 1).contiguous()
        attend, causal, scale = flashinfer.single_prefill_with_kv_cache, case.causal is not None, case.scale
        return lambda: attend(query, key, value, causal=causal, kv_layout="HND", sm_scale=scale)

    def decode(self, result: torch.Tensor) -> torch.Tensor:
        """Back to [1, H, S, D]."""
        return result.transpose(0, 1).unsqueeze(0)
