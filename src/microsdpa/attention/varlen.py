"""The public call for sequences of many lengths, sdpa_varlen(): packed tensors and paged caches."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from microsdpa.call.cache import scale_tensor
from microsdpa.call.call import Call, mask_tensors, scales_of
from microsdpa.call.options import VARLEN_OPTIONS, Options
from microsdpa.call.sequences import Sequences
from microsdpa.call.tensors import check_grad, new_output
from microsdpa.errors import InvalidArgument
from microsdpa.execution import forward, transforms
from microsdpa.execution.forward import MISSES, other_value_dims
from microsdpa.runtime import launcher

_launch = launcher.launch
_empty_like = torch.empty_like
_is_grad_enabled = torch.is_grad_enabled


def sdpa_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_offsets: torch.Tensor | None = None,
    key_offsets: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    max_queries: int | None = None,
    new_key: torch.Tensor | None = None,
    new_value: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = False,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    impl: str = "auto",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    batch_invariant: bool = False,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences of many lengths, packed or in the pages of a cache, in one launch.

    New keys and values may be written to the cache, and queries and new keys normalized and rotated, in the same call.

    Offsets, lengths and pages stay on the device: nothing is read back and nothing is planned on the host, so one CUDA
    graph serves all lengths. Query i of a sequence stands at its key i + keys - queries: the last query at the last
    key. Forward only.

    Args:
        query: [queries, H, D] with query_offsets, or [B, S_q, H, D]; float16 or bfloat16. Rows of all tensors start on
            16 bytes; D is a multiple of 8 up to 256.
        key: [pages, page, H_kv, D] with page_table, of any strides and any page size; [keys, H_kv, D] with key_offsets;
            else [B, S_k, H_kv, D]. H is a multiple of H_kv: query head h reads key head h // (H / H_kv). A cache of
            another order is passed as a view: cache.transpose(1, 2) of [pages, H_kv, page, D].
            It has the query's type, or is float8_e4m3fn or int8, with k_scale and v_scale; D is then a multiple of 16.
        value: like key. Of 16 bits it may have fewer columns, D_v, a multiple of 8; new_value and the output have as
            many.
        query_offsets: [B + 1], int32: sequence b has queries query_offsets[b] to query_offsets[b + 1].
        key_offsets: [B + 1], int32: the same for packed keys and values.
        lengths: [B], int32: keys of each sequence that are in use; None for all that it has. More than it has count as
            all, less than 0 as none.
        page_table: [B, n], int32: keys of sequence b lie in pages page_table[b, 0], page_table[b, 1] and so on.
            Entries are read only for keys that a query sees. Where such an entry is no page of the cache, nothing is
            read for it, and the outputs of the tile of queries that sees it are NaN.
        max_queries: queries that a packed sequence has at most: a hint for the choice of tiles, never a bound. The mean
            counts without it, and where it is less than the mean.
        new_key: [queries, H_kv, D] or [B, S_q, H_kv, D], as query: written to the cache behind the keys that `lengths`
            says, before attention, which sees them. What has no room in the cache is left out.
        new_value: like new_key.
        rotary_cos: [positions, R / 2], the inputs' type or float32: queries and new keys are rotated (RoPE) in their
            first R columns. Query i of a sequence, and its new key, stand at position lengths + i.
        rotary_sin: like rotary_cos.
        rotary_interleaved: whether pairs that are rotated are neighbours, as in GPT-J; else they are R / 2 apart.
        causal: query at key p sees keys j <= p: FlashAttention's alignment to the lower right.
        scale: factor of Q K^T; 1/sqrt(D) when None.
        return_lse: also return the natural logarithm of the softmax's denominator in FP32, [H, queries] for packed
            queries, else [B, H, S_q].
        out: tensor like query, with the columns of value, to write to. Rows of packed tensors that belong to no
            sequence are not written.
        impl: "auto", "hopper/varlen", "ampere/varlen", or "emulate" for the emulator on CPU tensors.
        window: (left, right): query at key p sees keys p - left to p + right; -1 is no end.
        softcap: scores x become softcap * tanh(x / softcap).
        alibi_slopes: [H] or [B, H], float32: slope * |p - key| is subtracted from the scores.
        sinks: [H], the inputs' type or float32: a logit of each head that takes its share of the softmax.
        batch_invariant: whether the bits of a query's output depend on nothing but the query and the keys that it sees:
            not on the other sequences, its place in the batch, the width of the table, or how many queries of its
            sequence are in the call. Parts of 512 keys are computed apart. On CPU tensors the option has no effect.
        k_scale: of an 8-bit key, which times its scale is the number that it stands for: a number, or float32: a
            scalar, [H_kv], [B, H_kv], or one of every token, of key's shape without D. Packed keys of two dimensions
            that fit both are of tokens. Scales are positive and finite; the device alone reads them.
            Where new keys come, those of tokens are written for them.
        v_scale: the same of value. Where one has a scale of every token, the other one is the same for all sequences.
        q_norm: [D], the inputs' type or float32: queries get an RMS norm over D with these weights, x / sqrt(mean(x^2)
            + norm_eps) * q_norm. It comes ahead of the rotation; both are FP32, and the result is rounded once.
        k_norm: the same of new keys. Keys of the cache are read as they are.
        norm_eps: of both norms.

    Returns:
        The output, or (output, LSE) with return_lse. Queries that see no key give zeros and LSE -inf, or the sink.

    Raises:
        InvalidArgument: an argument that no call could accept.
        UnsupportedProblem: a call that no kernel computes: its reason and the nearest supported problem are named.
        CompileError: the kernel does not compile on this machine.
    """
    if is_dynamo_compiling():
        found = _traced(
            (query, key, value),
            (new_key, new_value),
            *(query_offsets, key_offsets, lengths, page_table, max_queries),
            *(rotary_cos, rotary_sin, rotary_interleaved, causal, scale, return_lse),
            *([-1, -1] if window is None else list(window), softcap, alibi_slopes, sinks, impl),
            batch_invariant,
            *(_traced_scale(scale, key) for scale in (k_scale, v_scale)),
            *(q_norm, k_norm, norm_eps),
        )
        result = found[0] if out is None else out.copy_(found[0])
        return (result, found[1]) if return_lse else result
    if k_scale is not None and not isinstance(k_scale, torch.Tensor):
        k_scale = scale_tensor("k_scale", k_scale, key)  # type: ignore[assignment]
    if v_scale is not None and not isinstance(v_scale, torch.Tensor):
        v_scale = scale_tensor("v_scale", v_scale, value)  # type: ignore[assignment]
    try:
        graded = _is_grad_enabled() and (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (q_norm is not None and q_norm.requires_grad)
            or (k_norm is not None and k_norm.requires_grad)
        )
        if not graded and forward_ad._current_level < 0:
            result = (new_output(query, value) if other_value_dims else _empty_like(query)) if out is None else out
            code = VARLEN_OPTIONS[causal, rotary_interleaved, batch_invariant, impl]
            left, right = (-1, -1) if window is None else window
            # Arguments are not unpacked: making a tuple of them takes longer than these lines.
            if new_key is new_value is rotary_cos is rotary_sin is q_norm is k_norm is None:
                lse = _launch(
                    query,
                    key,
                    value,
                    result,
                    return_lse,
                    code,
                    scale,
                    None,
                    alibi_slopes,
                    sinks,
                    left,
                    right,
                    softcap,
                    None,
                    k_scale,
                    v_scale,
                    query_offsets,
                    key_offsets,
                    lengths,
                    page_table,
                    max_queries,
                )
            else:
                lse = _launch(
                    query,
                    key,
                    value,
                    result,
                    return_lse,
                    code,
                    scale,
                    None,
                    alibi_slopes,
                    sinks,
                    left,
                    right,
                    softcap,
                    None,
                    k_scale,
                    v_scale,
                    query_offsets,
                    key_offsets,
                    lengths,
                    page_table,
                    max_queries,
                    new_key,
                    new_value,
                    rotary_cos,
                    rotary_sin,
                    q_norm,
                    k_norm,
                    norm_eps,
                )
            if lse is not None:
                return (result, lse) if return_lse else result
            del result  # a large output is not to be there twice
    except MISSES:
        pass  # the checks below say which argument is wrong; a launch that failed otherwise fails there again
    check_flags(causal, rotary_interleaved, batch_invariant)
    masks = mask_tensors(None, alibi_slopes, sinks)
    options = Options(False, "lower_right" if causal else None, scale, True, window, softcap, impl)
    sequences = Sequences(
        *(query_offsets, key_offsets, lengths, page_table, max_queries),
        *(new_key, new_value, rotary_cos, rotary_sin, q_norm, k_norm),
        norm_eps=norm_eps,
        rotary_interleaved=rotary_interleaved,
        batch_invariant=batch_invariant,
    )
    scales = scales_of(None, k_scale, v_scale)
    call = Call((query, key, value), masks, scales, options, return_lse, out, sequences)
    transforms.refuse_tangents(query, key, value)
    tensors = {"query": query, "key": key, "value": value, "out": out, "q_norm": q_norm, "k_norm": k_norm}
    check_grad({name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)})
    attended = forward.first_call(call)
    return attended if return_lse else attended[0]  # type: ignore[return-value]


def check_flags(causal: object, rotary_interleaved: object, batch_invariant: object) -> None:
    """Refuse flags that are no booleans.

    Raises:
        InvalidArgument: one is not.
    """
    hints = {
        "causal": (causal, "True aligns to the lower right"),
        "rotary_interleaved": (rotary_interleaved, "True for neighbouring pairs"),
        "batch_invariant": (batch_invariant, "True for bits that never change"),
    }
    for name, (flag, hint) in hints.items():
        if not isinstance(flag, bool):
            raise InvalidArgument(name, expected="a bool", got=repr(flag), hint=hint)


def _traced_scale(scale: torch.Tensor | float | None, key: torch.Tensor) -> torch.Tensor | None:
    """A scale of a graph: a number is a tensor that the graph makes."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale
    return torch.full((), float(scale), dtype=torch.float32, device=key.device)


def _traced(
    inputs: tuple[torch.Tensor, ...], new: tuple[torch.Tensor | None, torch.Tensor | None], *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The call as an operator of integrations/varlen_ops.py, which checks its arguments when it runs."""
    new_key, new_value = new
    if new_key is None and new_value is None:
        return torch.ops.microsdpa.attention_varlen(*inputs, *rest)  # type: ignore[no-any-return]
    if new_key is None or new_value is None:
        raise InvalidArgument("new_key, new_value", expected="both or none", got="one", hint="pass both")
    return torch.ops.microsdpa.attention_varlen_append(*inputs, new_key, new_value, *rest)  # type: ignore[no-any-return]
