"""What a call says in several ways about the keys that each query sees, as one attn_mask."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from microsdpa.call import masks, tensors
from microsdpa.call.blocks import table_of
from microsdpa.call.call import Inputs
from microsdpa.call.documents import is_traced, mask_of_documents
from microsdpa.call.documents import known_mask as known_mask_of_documents
from microsdpa.call.scales import VALUE_DTYPES
from microsdpa.kernels.problem import Causal


def combined(inputs: Inputs, attn_mask: object, document_ids: object, block_mask: object) -> torch.Tensor:
    """One attn_mask that hides what any of the three hides; the numbers of `attn_mask` are still added.

    It is int32 ranges of keys where documents alone are given and allow it, and else bool or numbers.

    Raises:
        InvalidArgument: one of them cannot belong to the call.
    """
    query, key, value = inputs
    for tensor in (query, key):
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.dim() != 4:
            tensors.check_not_nested(query=query, key=key, value=value)
            tensors.check_tensors(query, key, value, True, one_head_dim=False)
    found = None if document_ids is None else mask_of_documents(document_ids, query, key)
    if block_mask is not None:
        table = table_of(block_mask)
        table.check(query, key)
        if found is None and attn_mask is None and _is_plain(inputs):
            return table.memory
        found = table.mask if found is None else table.mask & masks.dense(found, key.shape[2])
    assert found is not None
    if attn_mask is None:
        return found
    of_output = attn_mask.dtype if isinstance(attn_mask, torch.Tensor) and query.dtype in VALUE_DTYPES else None
    if of_output not in tensors.DTYPES:  # beside 8-bit values numbers are of the output's type, which is checked later
        of_output = None
    given, shown = masks.check_mask(attn_mask, query, key, of_output), masks.dense(found, key.shape[2])
    if given.is_floating_point():
        return torch.where(shown, given, -torch.inf)
    return masks.dense(given, key.shape[2]) & shown


KnownMask = tuple[torch.Tensor, int, bool]
"""What combined() gave for documents or blocks alone, the S_k that it is for, and whether a CUDA graph may hold it."""


def known_mask(document_ids: object, block_mask: object) -> KnownMask | None:
    """What is known of documents or blocks alone, without a check; None where there is more to look at.

    It is for a launch that nobody else has to see. A mask that does not belong to the call finds no plan: combined()
    then says what is wrong. The rest is no part of a plan's key: launcher.launch_known() looks at it.
    """
    try:
        if block_mask is None:
            return known_mask_of_documents(document_ids)
        if document_ids is None:
            table = table_of(block_mask)
            seqlen_q, seqlen_k = table.seqlens
            if seqlen_q > 1:
                return table.memory, seqlen_k, True
    except (AttributeError, IndexError, RuntimeError, TypeError):
        pass  # combined() says what is wrong with a tensor
    return None


def _is_plain(inputs: Inputs) -> bool:
    """Whether kernels alone will read the mask: no tracer, transform or backward pass, which take booleans."""
    query, key, value = inputs
    if is_dynamo_compiling() or is_traced(query):
        return False
    return not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))


def with_causal(is_causal: bool, causal: Causal | None, attn_mask: object) -> Causal | None:
    """The causal alignment of a call whose documents or blocks become a mask, beside which there is no is_causal.

    Raises:
        InvalidArgument: is_causal=True is given beside an attn_mask of its own, or beside another alignment.
    """
    if is_causal is False and causal is None:
        return None
    masks.refuse_both(is_causal, attn_mask)
    return tensors.check_causal(is_causal, causal)
