"""Fused attention written in Triton: the algorithm of its tutorial, in this project's words."""

from __future__ import annotations

import functools
from typing import Any

import torch

from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors

LOG2_E = 1.4426950408889634


@functools.cache
def _kernel() -> Any:
    """The kernel. Triton reads its source from this file when it is first launched."""
    from microsdpa.evidence.peers import triton_kernel

    return triton_kernel.fused_attention


class TritonFused(Implementation):
    """One program a tile of queries, online softmax, no autotuning: 64 keys a step, 4 warps."""

    name = "Triton"
    module = "triton"
    package = "triton"
    configuration = "this project's own fused-attention kernel in Triton: tiles of 128 x 64, 4 or 8 warps, 3 stages"

    def refuses(self, case: Case) -> str:
        """Powers of two, which its tiles need."""
        if case.head_dim & (case.head_dim - 1) or case.head_dim < 16:
            return "its tiles need a head dimension that is a power of two"
        return ""

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """The launch, into an output that each call allocates."""
        query, key, value = tensors
        scale = (case.head_dim**-0.5 if case.scale is None else case.scale) * LOG2_E
        diagonal = case.seqlen_k - case.seqlen_q if case.causal == "lower_right" else 0
        block_m = 128 if case.seqlen_q >= 128 else 64
        grid = (-(-case.seqlen_q // block_m), case.batch * case.heads)
        kernel = _kernel()[grid]
        options = {
            "HEADS": case.heads,
            "GROUP": case.heads // case.kv_heads,
            "HEAD_DIM": case.head_dim,
            "BLOCK_M": block_m,
            "BLOCK_N": 64,
            "CAUSAL": case.causal is not None,
            "num_warps": 8 if case.head_dim > 64 and block_m == 128 else 4,
            "num_stages": 3 if case.head_dim <= 128 else 2,
        }
        lengths = case.seqlen_q, case.seqlen_k, diagonal

        def run() -> torch.Tensor:
            result = torch.empty_like(query)
            strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *result.stride()[:3])
            kernel(query, key, value, result, scale, *lengths, *strides, **options)
            return result

        return run
