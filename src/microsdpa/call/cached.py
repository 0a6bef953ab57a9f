"""Calls of sdpa with 8-bit keys and values beside 16-bit queries, as calls of sdpa_varlen: one kernel has both."""

from __future__ import annotations

import torch

from microsdpa.call import tensors
from microsdpa.call.cache import CACHE_TYPES, is_cached
from microsdpa.call.call import Call, Scales, mask_tensors
from microsdpa.call.sequences import Sequences
from microsdpa.errors import InvalidArgument, UnsupportedProblem


def has_cache(call: Call) -> bool:
    """Whether a call of sdpa has 8-bit keys beside 16-bit queries."""
    if call.options.precision is not None or call.sequences is not None:
        return False
    query, key, _ = call.inputs
    return isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and is_cached(query, key)


def as_sequences(call: Call) -> Call:
    """The call of sdpa_varlen that is the same, with [B, S, H, D] views of all tensors.

    Raises:
        InvalidArgument: an argument that no call could accept.
        UnsupportedProblem: no kernel computes a call of that kind.
    """
    options, (query, key, value) = call.options, call.inputs
    tensors.check_not_nested(query=query, key=key, value=value, out=call.out)
    if not isinstance(value, torch.Tensor) or value.dtype != key.dtype:
        got = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
        known = " and ".join(map(str, CACHE_TYPES))
        raise InvalidArgument(
            "value", expected=f"{key.dtype}, as key has", got=got, hint=f"keys and values have one type of {known}"
        )
    tensors.check_layouts(query, key, value, options.enable_gqa)
    causal = tensors.check_causal(options.is_causal, options.causal)
    mask = call.masks.attn_mask
    if mask is not None:
        raise UnsupportedProblem(
            f"attn_mask: none is read beside a {key.dtype} key", nearest="causal, window, softcap, slopes and sinks"
        )
    aligned = causal == "upper_left" or options.window is not None or call.masks.alibi_slopes is not None
    if aligned and causal != "lower_right" and query.shape[2] != key.shape[2]:
        raise UnsupportedProblem(
            f"causal: beside a {key.dtype} key, masks of {query.shape[2]} queries and {key.shape[2]} keys are aligned "
            "to the lower right",
            nearest="causal='lower_right'",
        )
    if call.scales.q_scale is not None:
        raise InvalidArgument(
            "q_scale", expected=f"None beside a {query.dtype} query", got="a scale", hint="leave it out"
        )
    k_scale, v_scale = call.scales.k_scale, call.scales.v_scale
    scales = Scales(None, _turned("k_scale", k_scale, key), _turned("v_scale", v_scale, key))
    out = None if call.out is None else call.out.transpose(1, 2) if call.out.dim() == 4 else call.out
    return Call(
        (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)),
        mask_tensors(*call.masks),
        scales,
        options._replace(is_causal=False, causal="lower_right" if causal else None, enable_gqa=True),
        call.return_lse,
        out,
        Sequences(),
    )


def _turned(name: str, scale: object, key: torch.Tensor) -> object:
    """Scales of every token, [B, H_kv, S_k], as [B, S_k, H_kv]; others as they are."""
    if not isinstance(scale, torch.Tensor):
        return scale
    batch, heads, seqlen, _ = key.shape
    known = ((), (1,), (heads,), (batch, heads), (batch, heads, seqlen))
    if tuple(scale.shape) not in known:
        raise InvalidArgument(
            name,
            expected=f"a scalar, [{heads}], [{batch}, {heads}] or, of every token, [{batch}, {heads}, {seqlen}]",
            got=f"shape {list(scale.shape)}",
            hint="scales of the call, of key heads, of these in each batch entry, or of every token",
        )
    return scale.transpose(1, 2) if scale.dim() == 3 else scale
