"""SageAttention: INT8 Q K^T, with K smoothed; it quantizes its 16-bit inputs itself."""

from __future__ import annotations

import torch

from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors, misaligned


class SageAttention(Implementation):
    """sageattention.sageattn: Triton kernels in version 1, CUDA kernels chosen by GPU in version 2."""

    name = "SageAttention"
    op = "quantize+sdpa"
    arithmetic = "int8"
    module = "sageattention"
    package = "sageattention"
    configuration = '`sageattn(tensor_layout="HND")`; the call quantizes its 16-bit inputs itself'

    def refuses(self, case: Case) -> str:
        """Causal masks are aligned to the upper left."""
        return misaligned(case, "upper_left")

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """K is a copy: version 1 subtracts K's mean in place, which would change the other implementations' input."""
        from sageattention import sageattn

        query, key, value = tensors
        key = key.clone()
        causal, scale = case.causal is not None, case.scale
        return lambda: sageattn(query, key, value, tensor_layout="HND", is_causal=causal, sm_scale=scale)
