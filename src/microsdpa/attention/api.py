"""The public call, sdpa(). Its first lines are the hot path: one foreign call for a call that has a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from microsdpa.attention.varlen import sdpa_varlen
from microsdpa.call.blocks import BlockTable
from microsdpa.call.cached import as_sequences, has_cache
from microsdpa.call.call import Call, Inputs, MaskTensors, mask_tensors, scales_of
from microsdpa.call.documents import Ids
from microsdpa.call.dropout import check as check_dropout
from microsdpa.call.masks import dense, refuse_both
from microsdpa.call.options import OPTIONS, PLAIN_CODE, Options
from microsdpa.call.prologue import NormOf, Positions, Prologue, Rotary, prologue_of
from microsdpa.call.prologue import check as check_prologue
from microsdpa.call.scales import changes as _changes
from microsdpa.call.scales import known_positive
from microsdpa.call.tensors import check_causal, check_grad, new_output
from microsdpa.call.unknown import unknown_argument
from microsdpa.call.validate import check
from microsdpa.call.visibility import combined, known_mask, with_causal
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.execution import autograd, dropout, forward, new_sizes, nodes, transforms
from microsdpa.execution.forward import MISSES, other_value_dims
from microsdpa.execution.nodes import PLAIN_TYPES
from microsdpa.execution.prologue import composed
from microsdpa.kernels.problem import Causal, Precision
from microsdpa.runtime import launcher

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from typing_extensions import Never

_launch_or_kind = launcher.launch_or_kind
_launch_known = launcher.launch_known
_launch_scaled = launcher.launch_scaled
_launch = launcher.launch
_HALF, _E4M3 = torch.float16, torch.float8_e4m3fn
_empty_like = torch.empty_like
_is_grad_enabled = torch.is_grad_enabled


@overload
def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    causal: Causal | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    out: torch.Tensor | None = None,
    impl: str = "auto",
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    document_ids: Ids | None = None,
    block_mask: BlockMask | BlockTable | None = None,
    precision: Precision | None = None,
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    dropout_p: float = 0.0,
    rotary: Rotary | None = None,
    rotary_interleaved: bool = False,
    rotary_positions: Positions | tuple[Positions, Positions | None] | None = None,
    q_norm: NormOf | None = None,
    k_norm: NormOf | None = None,
    norm_eps: float = 1e-6,
    continue_from: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor: ...


@overload
def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    causal: Causal | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[True],
    out: torch.Tensor | None = None,
    impl: str = "auto",
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    document_ids: Ids | None = None,
    block_mask: BlockMask | BlockTable | None = None,
    precision: Precision | None = None,
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    dropout_p: float = 0.0,
    rotary: Rotary | None = None,
    rotary_interleaved: bool = False,
    rotary_positions: Positions | tuple[Positions, Positions | None] | None = None,
    q_norm: NormOf | None = None,
    k_norm: NormOf | None = None,
    norm_eps: float = 1e-6,
    continue_from: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    causal: Causal | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool,
    out: torch.Tensor | None = None,
    impl: str = "auto",
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    document_ids: Ids | None = None,
    block_mask: BlockMask | BlockTable | None = None,
    precision: Precision | None = None,
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    dropout_p: float = 0.0,
    rotary: Rotary | None = None,
    rotary_interleaved: bool = False,
    rotary_positions: Positions | tuple[Positions, Positions | None] | None = None,
    q_norm: NormOf | None = None,
    k_norm: NormOf | None = None,
    norm_eps: float = 1e-6,
    continue_from: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    causal: Causal | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    impl: str = "auto",
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    document_ids: Ids | None = None,
    block_mask: BlockMask | BlockTable | None = None,
    precision: Precision | None = None,
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    dropout_p: float = 0.0,
    rotary: Rotary | None = None,
    rotary_interleaved: bool = False,
    rotary_positions: Positions | tuple[Positions, Positions | None] | None = None,
    q_norm: NormOf | None = None,
    k_norm: NormOf | None = None,
    norm_eps: float = 1e-6,
    continue_from: tuple[torch.Tensor, torch.Tensor] | None = None,
    **unknown: Never,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention: softmax(scale * Q K^T + mask) V, exact.

    Arithmetic and softmax are FP32; inputs and output are FP16 or BF16. Rows that see no key give zeros (LSE -inf).
    Calls are asynchronous on the current stream of the tensors' device and may be captured in a CUDA graph.

    Args:
        query: [B, H, S_q, D], float16 or bfloat16, any strides with a unit stride along D.
        key: [B, H_kv, S_k, D], like query.
        value: [B, H_kv, S_k, D_v], like query. D_v is D, or less on a GPU of compute capability 9.0 without gradients,
            norms, rotary embedding and dropout: UnsupportedProblem is raised elsewhere.
        is_causal: query i sees keys j <= i, aligned to the upper left, as in torch.
        causal: the alignment by name: "upper_left", the same as is_causal=True, or "lower_right", where query i sees
            keys j <= i + S_k - S_q, as in the FlashAttention libraries. torch.nn.attention.bias has the same names.
        scale: factor of Q K^T, at most 2**127 in magnitude; 1/sqrt(D) when None.
        enable_gqa: let H be a multiple of H_kv; query head h reads key head h // (H / H_kv).
        return_lse: also return the natural logarithm of the softmax's denominator, [B, H, S_q] in FP32.
        out: [B, H, S_q, D_v] tensor to write to; it must not overlap an input. Else an output is allocated in the
            memory order of query.
        impl: "auto", or the name of one kernel, such as "ladder/01_scalar", which is then never replaced by another.
            "emulate", or "emulate:" and a kernel's name, runs the kernel on CPU tensors in the emulator, slowly and
            with every access checked.
        precision: None, or what the tensors are quantized to first, in one launch: "fp8" (E4M3, a query as the sum of
            two terms), "fp8_fast" (E4M3, one term), "int8_fp8" (Q and K in INT8, P and V in E4M3) or "int8_fp16" (Q
            and K in INT8). docs/numerics.md has the errors of each, and which is the fastest when.
        q_scale: with 8-bit tensors (float8_e4m3fn, or int8 with a value of float8_e4m3fn, float16 or bfloat16): a
            number or an FP32 tensor, a scalar, [B, H], [B, H_kv] or [B, H, blocks of S_q]; x = value * scale. The
            output is then float16, or what `out` is, or of the value's type where that has 16 bits. Numbers of an
            attn_mask and sinks are of the output's type or float32.
        k_scale: the same for key: a scalar, [B, H_kv] or [B, H_kv, blocks of S_k].
        v_scale: for an 8-bit value: a scalar, [B, H_kv] or, for every channel, [B, H_kv, D].
            Beside a float16 or bfloat16 query, key and value of float8_e4m3fn or int8 are a cache: there is no q_scale,
            and the two scales are a scalar, [H_kv], [B, H_kv] or, of every token, [B, H_kv, S_k]. Their values stay on
            the device. D is a multiple of 16 up to 256; masks are those of sdpa_varlen, aligned to the lower right.
        attn_mask: broadcastable to [B, H, S_q, S_k]: bool, where False hides a key, or numbers in the inputs' type or
            float32 that are added to the scores. With is_causal=True it is an error, as in torch; beside `causal` both
            hold.
            Numbers of int32, [B, H, S_q, 2] or what broadcasts to it, are ranges: the first key that a query sees and
            one past the last. Kernels read these two, and load no key that no query of a tile sees.
        document_ids: integers [S] or [B, S] of self-attention, or a pair of them, of the queries and of the keys: a
            token sees those of its own document alone. Where the keys of every document lie side by side they become
            ranges, and else a mask of S_q times S_k booleans. Which it is, is found once for a tensor that is not
            changed, and the device is waited for; see microsdpa.document_ranges for CUDA graphs.
        block_mask: a BlockMask of torch.nn.attention.flex_attention, or a microsdpa.BlockTable. A BlockMask is looked
            at once as long as it lives, for which the device is waited for, and becomes a BlockTable. Documents,
            blocks, attn_mask, window and causal mask hide together, also with is_causal=True.
        window: (left, right): query i sees keys p - left to p + right, where p is i, or i + S_k - S_q under
            causal="lower_right"; -1 is no end.
        softcap: scores x become softcap * tanh(x / softcap), before slopes and mask; from 2**-126 to 2**127.
        alibi_slopes: [H] or [B, H], float32: slope * |p - key| is subtracted from the scores.
        sinks: [H], the inputs' type or float32: a logit of each head that takes its share of the softmax and has no
            value. The LSE counts it.
        dropout_p: the probability with which a weight of the softmax is dropped, and the others are multiplied by
            1 / (1 - dropout_p), as in torch; it is rounded to a multiple of 2**-16. Random numbers are those of torch's
            generator of the device. The LSE stays as it is. There is no dropout beside 8-bit operands.
        rotary: (cos, sin), [positions, R / 2] each, the inputs' type or float32: query and key are rotated (RoPE) in
            their first R columns, in the launch of attention or in one ahead of it, which explain() says. R is a
            multiple of 16, D one of 8, and rows start on 16 bytes. All is FP32; Q and K are rounded once, to their own
            type, before the product.
        rotary_interleaved: whether pairs that are rotated are neighbours, as in GPT-J; else they are R / 2 apart.
        rotary_positions: rows of the tables: None for those counted from 0, where query i stands as masks have it (at
            i, or i + S_k - S_q under causal="lower_right"); a number to count from; integers [S] or [B, S] for queries
            and keys; or a pair of numbers or integers, of queries and keys. None in the second place stands for keys
            that have been rotated. What memory says is brought within the tables.
        q_norm: [D], the inputs' type or float32: weight of an RMS norm of query over D, ahead of the rotation. A pair
            (weight, bias or None) stands for LayerNorm.
        k_norm: the same of key; both are of one kind.
        norm_eps: what is added to the mean square or the variance.
        continue_from: partial attention: (output, LSE) of the same queries on other keys, as return_lse=True gives
            them. The result is that of those keys and these in one softmax; the launch writes it to both tensors, and
            they are what it returns. The output is [B, H, S_q, D] in query's dtype, the LSE [B, H, S_q] in FP32,
            contiguous; a row's LSE of -inf says that it has seen no key. Masks speak of this call's keys; a sink is to
            be given once. There is no gradient, `out`, precision, dropout, norm or rotary embedding beside it, and no
            torch.compile.

    Returns:
        The output, or (output, LSE) with return_lse.

    Raises:
        InvalidArgument: an argument that no call could accept; for a name that is none of sdpa's, UnknownArgument.
        UnsupportedProblem: a call that no kernel computes: its reason and the nearest supported problem are named.
        CompileError: the kernel does not compile on this machine.
    """
    if unknown:
        raise unknown_argument("sdpa", unknown, sdpa)
    if continue_from is not None:
        if document_ids is not None or block_mask is not None:
            is_causal, causal = False, with_causal(is_causal, causal, attn_mask)
            attn_mask = combined((query, key, value), attn_mask, document_ids, block_mask)
        sixteen_bits = precision is None and q_scale is None and k_scale is None and v_scale is None
        unchanged = rotary is q_norm is k_norm is rotary_positions is None
        if sixteen_bits and unchanged and out is None and dropout_p == 0.0 and not is_dynamo_compiling():
            of_masks = scale, attn_mask, alibi_slopes, sinks, window, softcap
            fixed = is_causal, causal, enable_gqa, impl, None
            gone_on = forward.launch_continued((query, key, value), fixed, continue_from, of_masks)
            if gone_on is not None:
                return gone_on if return_lse else gone_on[0]  # type: ignore[return-value]
        options = Options(is_causal, causal, scale, enable_gqa, window, softcap, impl, precision, dropout_p)
        masks, scales = mask_tensors(attn_mask, alibi_slopes, sinks), scales_of(q_scale, k_scale, v_scale)
        prologue = prologue_of(rotary, rotary_interleaved, rotary_positions, q_norm, k_norm, norm_eps)
        call = Call((query, key, value), masks, scales, options, return_lse, out, None, None, prologue, continue_from)
        continued = _continued(call)
        return continued if return_lse else continued[0]  # type: ignore[return-value]
    if not (rotary is q_norm is k_norm is rotary_positions is None):
        prologue = prologue_of(rotary, rotary_interleaved, rotary_positions, q_norm, k_norm, norm_eps)
        assert prologue is not None
        sixteen_bits = precision is None and q_scale is None and k_scale is None and v_scale is None
        plain = sixteen_bits and document_ids is None and block_mask is None and dropout_p == 0.0
        if plain and not is_dynamo_compiling():
            of_masks = scale, attn_mask, alibi_slopes, sinks, window, softcap
            fixed = is_causal, causal, enable_gqa, impl, None
            launched = forward.launch_prologued((query, key, value), fixed, prologue, of_masks, return_lse, out)
            if launched is not None:
                return launched if return_lse else launched[0]  # type: ignore[return-value]
        if document_ids is not None or block_mask is not None:
            is_causal, causal = False, with_causal(is_causal, causal, attn_mask)
            attn_mask = combined((query, key, value), attn_mask, document_ids, block_mask)
        options = Options(is_causal, causal, scale, enable_gqa, window, softcap, impl, precision, dropout_p)
        masks, scales = mask_tensors(attn_mask, alibi_slopes, sinks), scales_of(q_scale, k_scale, v_scale)
        call = Call((query, key, value), masks, scales, options, return_lse, out, prologue=prologue)
        changed = _with_prologue(call, prologue)
        return changed if return_lse else changed[0]  # type: ignore[return-value]
    known = None
    if document_ids is not None or block_mask is not None:
        if is_causal is not False or causal is not None:
            is_causal, causal = False, with_causal(is_causal, causal, attn_mask)
        if attn_mask is None and not is_dynamo_compiling():
            known = known_mask(document_ids, block_mask)
        inputs = query, key, value
        attn_mask = combined(inputs, attn_mask, document_ids, block_mask) if known is None else known[0]
    if dropout_p != 0.0:
        if known is not None:
            attn_mask = combined((query, key, value), None, document_ids, block_mask)
        options = Options(is_causal, causal, scale, enable_gqa, window, softcap, impl, precision, dropout_p)
        call = Call((query, key, value), MaskTensors(attn_mask, alibi_slopes, sinks), options=options)
        dropped = _with_dropout(call._replace(scales=scales_of(q_scale, k_scale, v_scale), out=out), return_lse)
        return dropped if return_lse else dropped[0]  # type: ignore[return-value]
    if precision is not None or q_scale is not None or k_scale is not None or v_scale is not None:
        tracing = is_dynamo_compiling()
        at_once: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None
        unmasked = attn_mask is None and window is None and softcap is None and alibi_slopes is None and sinks is None
        if precision is None and q_scale is not None and not tracing:
            # The hot path of 8-bit values. Their scales, gradients and the output's type are looked at here: calls of
            # known_positive() and others take longer than their answers. A scale that nobody checked is a KeyError.
            try:
                try:
                    is_known = (
                        _changes[id(q_scale)] == q_scale._version  # type: ignore[union-attr]
                        and _changes[id(k_scale)] == k_scale._version  # type: ignore[union-attr]
                        and (v_scale is None or _changes[id(v_scale)] == v_scale._version)  # type: ignore[union-attr]
                    )
                except RuntimeError:  # of a tensor that was made in inference mode, whose changes torch does not count
                    is_known = known_positive((q_scale, k_scale, v_scale))
                if (
                    is_known
                    and forward_ad._current_level < 0
                    and not (
                        _is_grad_enabled()
                        and (
                            query.requires_grad
                            or key.requires_grad
                            or value.requires_grad
                            or (out is not None and out.requires_grad)
                        )
                    )
                ):
                    result = out
                    if result is None:
                        dtype = value.dtype  # E4M3, where there is a plan, or of 16 bits
                        result = _empty_like(query, dtype=_HALF if dtype is _E4M3 else dtype)
                    plain = is_causal is False and causal is None and enable_gqa is False and impl == "auto"
                    code = PLAIN_CODE if plain else OPTIONS[is_causal, causal, enable_gqa, impl, None]
                    if unmasked:
                        lse = _launch_scaled(
                            query, key, value, result, return_lse, code, scale, q_scale, k_scale, v_scale
                        )
                    elif (is_causal and attn_mask is not None) or (
                        _is_grad_enabled()
                        and (
                            (attn_mask is not None and attn_mask.requires_grad)
                            or (alibi_slopes is not None and alibi_slopes.requires_grad)
                            or (sinks is not None and sinks.requires_grad)
                        )
                    ):
                        lse = None
                    elif known is None:
                        left, right = (-1, -1) if window is None else window
                        lse = _launch(
                            query,
                            key,
                            value,
                            result,
                            return_lse,
                            code,
                            scale,
                            attn_mask,
                            alibi_slopes,
                            sinks,
                            left,
                            right,
                            softcap,
                            q_scale,
                            k_scale,
                            v_scale,
                        )
                    else:
                        left, right = (-1, -1) if window is None else window
                        lse = _launch_known(
                            known[1],
                            known[2],
                            query,
                            key,
                            value,
                            result,
                            return_lse,
                            code,
                            scale,
                            attn_mask,
                            alibi_slopes,
                            sinks,
                            left,
                            right,
                            softcap,
                            q_scale,
                            k_scale,
                            v_scale,
                        )
                    if lse is not None:
                        return (result, lse) if return_lse else result
            except MISSES:
                pass
        named = is_causal, causal, enable_gqa, impl, precision
        if tracing:
            pass
        elif precision is None:
            if q_scale is None and attn_mask is None:
                rest = scale, alibi_slopes, sinks, window, softcap, k_scale, v_scale
                beside = forward.launch_beside_cache(query, key, value, named, rest, return_lse, out)
                if beside is not None:
                    return beside if return_lse else beside[0]  # type: ignore[return-value]
        elif q_scale is k_scale is v_scale is None:  # scales beside a precision are refused below
            if unmasked:
                at_once = forward.launch_quantizing(query, key, value, named, scale, return_lse, out)
            else:
                given = (attn_mask, alibi_slopes, sinks, window, softcap), known
                at_once = forward.launch_quantizing_masked(query, key, value, named, scale, return_lse, out, given)
        if at_once is not None:
            return at_once
        if known is not None:
            attn_mask = combined((query, key, value), None, document_ids, block_mask)
        masks, scales = mask_tensors(attn_mask, alibi_slopes, sinks), scales_of(q_scale, k_scale, v_scale)
        options = Options(is_causal, causal, scale, enable_gqa, window, softcap, impl, precision)
        call = Call((query, key, value), masks, scales, options, return_lse, out)
        if has_cache(call):
            return _beside_cache(call)
        if tracing:
            found = _traced_eight_bit(call)
        else:
            transforms.refuse_eight_bit()
            transforms.refuse_tangents(query, key, value)
            found = forward.first_call(call)
        return found if return_lse else found[0]  # type: ignore[return-value]
    if known is None and is_dynamo_compiling():
        traced = (is_causal, causal, scale, enable_gqa, window, softcap, impl, None, 0.0)
        result, lse = autograd.operator((query, key, value), (attn_mask, alibi_slopes, sinks), traced, return_lse)
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result  # type: ignore[return-value]
    graded = False
    try:
        graded = _is_grad_enabled() and (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (attn_mask is not None and attn_mask.requires_grad)
            or (alibi_slopes is not None and alibi_slopes.requires_grad)
            or (sinks is not None and sinks.requires_grad)
            or (out is not None and out.requires_grad)
            or forward_ad._current_level >= 0
        )
        unmasked = attn_mask is None and window is None and softcap is None and alibi_slopes is None and sinks is None
        if not graded:
            # Most calls have no option: comparing with the defaults takes a quarter of the time of the look-up.
            plain = is_causal is False and causal is None and enable_gqa is False and impl == "auto"
            code = PLAIN_CODE if plain else OPTIONS[is_causal, causal, enable_gqa, impl, None]
            result = (new_output(query, value) if other_value_dims else _empty_like(query)) if out is None else out
            if unmasked:
                lse = _launch_or_kind(query, key, value, result, return_lse, code, scale)
                if type(lse) is int:
                    sized = query, key, value, result, return_lse, code, scale
                    lse = new_sizes.resized(lse, sized) if out is None else None
            elif is_causal and attn_mask is not None:
                lse = None
            elif known is not None:
                _, seqlen_k, captured = known
                left, right = (-1, -1) if window is None else window
                lse = _launch_known(
                    seqlen_k,
                    captured,
                    query,
                    key,
                    value,
                    result,
                    return_lse,
                    code,
                    scale,
                    attn_mask,
                    alibi_slopes,
                    sinks,
                    left,
                    right,
                    softcap,
                )
            else:
                left, right = (-1, -1) if window is None else window
                lse = _launch_or_kind(
                    query,
                    key,
                    value,
                    result,
                    return_lse,
                    code,
                    scale,
                    attn_mask,
                    alibi_slopes,
                    sinks,
                    left,
                    right,
                    softcap,
                )
                if type(lse) is int:  # of a kind of calls without tensors of masks
                    hidden = None, None, None, left, right, softcap
                    masked = query, key, value, result, return_lse, code, scale, *hidden
                    lse = new_sizes.resized(lse, masked) if out is None else None
            if lse is not None:
                return (result, lse) if return_lse else result
            del result  # a large output is not to be there twice
        elif (
            alibi_slopes is None
            and sinks is None
            and window is None
            and softcap is None
            and not return_lse
            and out is None
            and type(query) in PLAIN_TYPES
            and type(key) in PLAIN_TYPES
            and type(value) in PLAIN_TYPES
            and (attn_mask is None or type(attn_mask) in PLAIN_TYPES)
            and forward_ad._current_level < 0
            and not _len_torch_dispatch_stack()
            and not _are_functorch_transforms_active()
        ):
            code = OPTIONS[is_causal, causal, enable_gqa, impl, None]
            if attn_mask is None:
                recorded = nodes.recorded(query, key, value, is_causal or causal is not None, code, scale)
            else:
                recorded = nodes.recorded_masked(query, key, value, attn_mask, code, scale)
            if recorded is not None:
                return recorded
    except MISSES:
        pass  # the checks below say which argument is wrong; a launch that failed otherwise fails there again
    inputs = query, key, value
    if known is not None:
        attn_mask = combined(inputs, None, document_ids, block_mask)
    masks = mask_tensors(attn_mask, alibi_slopes, sinks)
    options = Options(is_causal, causal, scale, enable_gqa, window, softcap, impl)
    transforms.refuse_tangents(*inputs, *masks)
    if graded or autograd.is_traced(inputs):
        found = _through_autograd(inputs, masks, options, return_lse, out)
    else:
        found = forward.first_call(Call(inputs, masks, options=options, return_lse=return_lse, out=out))
    return found if return_lse else found[0]  # type: ignore[return-value]


def _continued(call: Call) -> forward.Result:
    """A call that goes on from an output and an LSE of other keys, and has no plan."""
    if is_dynamo_compiling() or autograd.is_traced(call.inputs):
        raise UnsupportedProblem(
            "torch.compile and transforms do not see calls with continue_from, which write to its tensors",
            nearest="torch.compiler.disable around the call",
        )
    transforms.refuse_tangents(*call.inputs, *call.masks)
    return forward.first_call(call)


def _with_prologue(call: Call, prologue: Prologue) -> forward.Result:
    """A call with norms or rotary embedding by own kernels, or torch's operators ahead where autograd looks on."""
    inputs, masks, options = call.inputs, call.masks, call.options
    try:
        given = *inputs, *masks, *prologue.tensors.values(), call.out
    except (TypeError, ValueError):
        return forward.first_call(call)  # says which argument is wrong
    if call.is_eight_bit or not all(isinstance(t, torch.Tensor) for t in inputs):
        return forward.first_call(call)
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    tracing = is_dynamo_compiling() or autograd.is_traced(inputs)
    graded = _is_grad_enabled() and any([t.requires_grad for t in tensors])
    if not (tracing or graded or options.dropout_p):
        transforms.refuse_tangents(*tensors)
        return forward.first_call(call)
    check_prologue(prologue, inputs[0], inputs[1], call.shift)
    if is_dynamo_compiling() and not graded and not options.dropout_p:
        return _traced(call, prologue)
    rest = options._asdict() | masks._asdict() | {"return_lse": call.return_lse, "out": call.out}
    attended = sdpa(*composed(inputs, prologue, call.shift), **rest)
    return attended if call.return_lse else (attended, None)  # type: ignore[return-value]


def _traced_alignment(call: Call) -> tuple[Causal | None, list[int]]:
    """The causal alignment by name, and the ends of the window, as operators have them."""
    options, causal = call.options, call.options.causal
    if options.is_causal is not False:
        refuse_both(options.is_causal, call.masks.attn_mask)
        causal = check_causal(options.is_causal, causal)
    return causal, [-1, -1] if options.window is None else list(options.window)


def _traced(call: Call, prologue: Prologue) -> forward.Result:
    """The call as the operator of integrations/block_ops.py, which torch.compile leaves in one piece."""
    options, (causal, ends) = call.options, _traced_alignment(call)
    rest = *call.masks, causal, options.scale, options.enable_gqa, ends, options.softcap, options.impl, call.return_lse
    flags = prologue.interleaved, prologue.is_layer_norm, prologue.rotates_key
    given = *call.inputs, *rest, *prologue.arguments(call.shift), *flags
    result, lse = torch.ops.microsdpa.attention_prologued(*given)
    return result if call.out is None else call.out.copy_(result), lse if call.return_lse else None


def _traced_eight_bit(call: Call) -> forward.Result:
    """The call as the operator of integrations/eight_bit_ops.py, which torch.compile leaves in one piece."""
    options, masks = call.options, call.masks
    named = {"query": call.inputs[0], "key": call.inputs[1], "value": call.inputs[2]} | masks._asdict()
    check_grad({name: tensor for name, tensor in named.items() if tensor is not None})
    causal, ends = _traced_alignment(call)
    tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in call.scales]
    numbers = [None if isinstance(scale, torch.Tensor) else scale for scale in call.scales]
    rest = causal, options.scale, options.enable_gqa, ends, options.softcap, options.impl, options.precision
    is_bfloat16 = call.out is not None and call.out.dtype == torch.bfloat16
    given = *call.inputs, *tensors, *numbers, *masks, *rest, call.return_lse, is_bfloat16
    result, lse = torch.ops.microsdpa.attention_eight_bit(*given)
    return result if call.out is None else call.out.copy_(result), lse if call.return_lse else None


def _beside_cache(call: Call) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A call with 8-bit keys and values beside a 16-bit query."""
    turned, options = as_sequences(call), call.options
    found = sdpa_varlen(
        *turned.inputs,
        causal=turned.options.causal is not None,
        scale=options.scale,
        return_lse=call.return_lse,
        out=turned.out,
        impl=options.impl,
        window=options.window,
        softcap=options.softcap,
        alibi_slopes=call.masks.alibi_slopes,
        sinks=call.masks.sinks,
        k_scale=turned.scales.k_scale,  # type: ignore[arg-type]
        v_scale=turned.scales.v_scale,  # type: ignore[arg-type]
    )
    if not isinstance(found, tuple):
        return found.transpose(1, 2) if call.out is None else call.out
    return found[0].transpose(1, 2) if call.out is None else call.out, found[1]


def _with_dropout(call: Call, return_lse: bool) -> forward.Result:
    """A call that drops probabilities."""
    inputs, options, out = call.inputs, call.options, call.out
    check_dropout(options.dropout_p)
    call = call._replace(masks=mask_tensors(*call.masks), return_lse=return_lse)
    given = *inputs, *call.masks, out
    if call.is_eight_bit or not all(isinstance(t, torch.Tensor) for t in inputs):
        return forward.first_call(call)
    if is_dynamo_compiling():
        result, lse = autograd.operator(inputs, call.masks, options, return_lse)
        return result if out is None else out.copy_(result), lse
    transforms.refuse_tangents(*given)
    graded = _is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in given)
    if graded or autograd.is_traced(inputs):
        return _through_autograd(inputs, call.masks, options, return_lse, out)
    call = call._replace(random=dropout.take(inputs[0], False))
    found = forward.launch(inputs, call.masks, options, return_lse, call.random) if out is None else None
    return forward.first_call(call) if found is None else found


def _through_autograd(
    inputs: Inputs, masks: MaskTensors, options: Options, return_lse: bool, out: torch.Tensor | None
) -> forward.Result:
    """A call that a gradient may be asked of, or that is traced into a graph."""
    if masks.attn_mask is not None and masks.attn_mask.dtype == torch.uint8:  # a table's memory
        masks = masks._replace(attn_mask=dense(masks.attn_mask, inputs[1].shape[2]))
    if autograd.is_traced(inputs):
        if transforms.are_active():
            result, lse = transforms.attend(inputs, masks, options)
        else:
            # A graph of torch.jit.trace may be run with other tensors, which require grad: it has the one that can.
            result, lse = autograd.operator(inputs, masks, options, return_lse or transforms.is_jit_traced())
        return result if out is None else out.copy_(result), lse
    if out is not None:
        check(Call(inputs, masks, options=options, out=out))
        raise InvalidArgument(
            "out", expected="None where an input requires grad", got="a tensor", hint="autograd needs a new output"
        )
    return autograd.attend(inputs, masks, options, return_lse)
