"""Arguments that a function does not have: what other libraries call them, and what they are called here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from microsdpa.errors import UnknownArgument

ELSEWHERE = {
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "window_size": "window",
    "sliding_window": "window",
    "attention_mask": "attn_mask",
    "attn_bias": "attn_mask",
    "mask": "attn_mask",
    "bias": "attn_mask",
    "logits_soft_cap": "softcap",
    "logit_cap": "softcap",
    "dropout": "dropout_p",
    "p": "dropout_p",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
    "learnable_sink": "sinks",
    "s_aux": "sinks",
    "q": "query",
    "k": "key",
    "v": "value",
}
"""What FlashAttention, xFormers, FlashInfer, SageAttention and transformers call an argument: its name here."""
REMARKS = {
    "score_mod": "no function is applied to scores; see softcap, alibi_slopes and attn_mask",
    "tensor_layout": "tensors are [B, H, S, D] with any strides; transpose(1, 2) makes them of [B, S, H, D]",
    "cu_seqlens_q": "packed sequences are computed by microsdpa.sdpa_varlen",
    "cu_seqlens_k": "packed sequences are computed by microsdpa.sdpa_varlen",
    "deterministic": "use torch.use_deterministic_algorithms(True)",
}
"""Arguments of other libraries that have no counterpart: what to do instead."""


def unknown_argument(function: str, given: Mapping[str, object], signature: Callable[..., Any]) -> UnknownArgument:
    """The error for arguments that `function` does not have; it names the nearest one that it has."""
    name = next(iter(given))
    known = [one.name for one in inspect.signature(signature).parameters.values() if one.kind is not one.VAR_KEYWORD]
    if name in REMARKS:
        hint = REMARKS[name]
    elif ELSEWHERE.get(name) in known:
        hint = f"did you mean {ELSEWHERE[name]}=?"
    elif near := difflib.get_close_matches(name, known, n=1):
        hint = f"did you mean {near[0]}=?"
    else:
        hint = f"it has {', '.join(known)}"
    return UnknownArgument(name, expected=f"an argument of {function}", got="a name that is none", hint=hint)
