"""torch's flex_attention, compiled by Inductor into a Triton kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch

from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors, import_failure


def _lower_right(offset: int) -> Any:
    return lambda b, h, i, j: i + offset >= j


@functools.cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


class TorchFlex(Implementation):
    """flex_attention under torch.compile; a causal mask is a block mask, made before timing."""

    name = "torch flex"
    module = "triton"
    package = "triton"
    configuration = "`torch.compile(flex_attention, dynamic=False)`; a causal block mask is made before timing"

    @property
    def version(self) -> str:
        """Of torch, which it comes with."""
        return torch.__version__

    def unavailable(self) -> str:
        """Inductor's CUDA code needs Triton."""
        return import_failure("triton", "triton")

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """The compiled call; the compilation is the first call's."""
        from torch.nn.attention.flex_attention import create_block_mask

        query, key, value = tensors
        mask = None
        if case.causal is not None:
            offset = case.seqlen_k - case.seqlen_q if case.causal == "lower_right" else 0
            mask = create_block_mask(
                _lower_right(offset), None, None, case.seqlen_q, case.seqlen_k, device=query.device.type
            )
        attend, scale, gqa = _compiled(), case.scale, case.kv_heads != case.heads
        return lambda: attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=gqa)
