"""torch's flex_attention, compiled by Inductor into a Triton kernel, or through FlashAttention-4."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from microsdpa.call.masks import Masks
from microsdpa.evidence.inputs import BLOCK, BLOCK_SHARES, Case, block_table, documents, make_masks, masks_of
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors, import_failure

MANY = 10_000
"""Cases that a process may compile for: beyond torch's limit of eight, flex_attention would run uncompiled."""


@functools.cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def mask_function(case: Case, device: str) -> Any:
    """The mask_mod of a case, for what hides keys; None where nothing does."""
    given, parts = make_masks(case, device), list[Any]()
    if case.causal is not None or given.get("window"):
        _, lowest, diagonal = Masks(window=given.get("window")).bounds(case.causal, case.seqlen_q, case.seqlen_k)
        bounded = given.get("window", (-1, -1))[0] != -1
        parts.append(_between(lowest if bounded else -case.seqlen_q, diagonal))
    tables = [name for name in case.masks if name in BLOCK_SHARES]
    if "documents" in case.masks:
        parts.append(_same_document(*(ids.to(device) for ids in documents(case))))
    elif tables:
        parts.append(_in_table(block_table(case, BLOCK_SHARES[tables[0]])[0, 0].to(device)))
    elif (mask := given.get("attn_mask")) is not None and mask.dtype == torch.bool:
        parts.append(_shown(mask.expand(case.batch, case.heads, case.seqlen_q, case.seqlen_k)))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else lambda b, h, i, j: parts[0](b, h, i, j) & parts[1](b, h, i, j)


def _between(lowest: int, diagonal: int) -> Any:
    return lambda b, h, i, j: (j <= i + diagonal) & (j >= i + lowest)


def _same_document(of_query: torch.Tensor, of_key: torch.Tensor) -> Any:
    return lambda b, h, i, j: of_query[b, i] == of_key[b, j]


def _in_table(table: torch.Tensor) -> Any:
    return lambda b, h, i, j: table[i // BLOCK, j // BLOCK]


def _shown(mask: torch.Tensor) -> Any:
    return lambda b, h, i, j: mask[b, h, i, j]


def score_function(case: Case, device: str) -> Any:
    """The score_mod of a case; None where scores stay as they are."""
    given, steps = make_masks(case, device), list[Any]()
    if (cap := given.get("softcap")) is not None:
        steps.append(lambda score, b, h, i, j: cap * torch.tanh(score / cap))
    if (slopes := given.get("alibi_slopes")) is not None:
        of_batch = slopes.expand(case.batch, case.heads)
        position = Masks().bounds(case.causal, case.seqlen_q, case.seqlen_k)[0]
        steps.append(lambda score, b, h, i, j: score - of_batch[b, h] * (i + position - j).abs())
    mask = given.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        bias = mask.expand(case.batch, case.heads, case.seqlen_q, case.seqlen_k)
        steps.append(lambda score, b, h, i, j: score + bias[b, h, i, j])
    if not steps:
        return None

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for step in steps:
            score = step(score, b, h, i, j)
        return score

    return score_mod


class TorchFlex(Implementation):
    """flex_attention under torch.compile; what hides keys is a block mask, made before timing."""

    name = "torch flex"
    module = "triton"
    package = "triton"
    configuration = "`torch.compile(flex_attention, dynamic=False)`; its block mask is made before timing"
    takes_masks = True
    backend = ""

    @property
    def version(self) -> str:
        """Of torch, which it comes with."""
        return torch.__version__

    def unavailable(self) -> str:
        """Inductor's CUDA code needs Triton."""
        return import_failure("triton", "triton")

    def refuses(self, case: Case) -> str:
        """A sink would be a step of its own after the call."""
        return "it has no sinks" if "sinks" in case.masks else ""

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Every case is compiled for, however many there are."""
        import torch._dynamo

        limits = {"recompile_limit": MANY, "accumulated_recompile_limit": MANY}
        patched: contextlib.AbstractContextManager[object] = torch._dynamo.config.patch(limits)
        return patched

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """The compiled call; the compilation is the first call's."""
        query, key, value = tensors
        options: dict[str, Any] = {"scale": case.scale, "enable_gqa": case.kv_heads != case.heads}
        if (made := block_mask(case, query.device.type)) is not None:
            options["block_mask"] = made
        if (score_mod := score_function(case, query.device.type)) is not None:
            options["score_mod"] = score_mod
        if self.backend:
            options["kernel_options"] = {"BACKEND": self.backend}
        attend = _compiled()
        return lambda: attend(query, key, value, **options)


def block_mask(case: Case, device: str) -> Any:
    """The BlockMask of a case, with dimensions of one where it broadcasts; None where no key is hidden."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask_mod = mask_function(case, device)
    if mask_mod is None:
        return None
    mask = masks_of(case, device).attn_mask
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape) if mask is not None else (1, 1, 1, 1)
    batch, heads = (None if size == 1 else size for size in sizes[:2])
    return create_block_mask(mask_mod, batch, heads, case.seqlen_q, case.seqlen_k, device=device, BLOCK_SIZE=BLOCK)


class TorchFlexFlash(TorchFlex):
    """The same with FlashAttention-4's kernel, which is given the functions in its own language by Inductor."""

    name = "torch flex FLASH"
    module = "flash_attn.cute"
    package = "flash-attn-4"
    configuration = '`torch flex` with `kernel_options={"BACKEND": "FLASH"}`: FlashAttention-4'
    backend = "FLASH"

    def unavailable(self) -> str:
        """It needs Inductor, and FlashAttention-4."""
        return super().unavailable() or import_failure(self.module, self.package)
