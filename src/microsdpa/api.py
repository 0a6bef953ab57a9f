"""The public call, sdpa(). The hot path is its first lines; the rest runs once per shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from microsdpa import arguments, eight_bit, problems, torch_cpu
from microsdpa import masks as mask_arguments
from microsdpa.errors import InvalidArgument
from microsdpa.masks import Masks
from microsdpa.options import OPTIONS, Further
from microsdpa.problem import Causal
from microsdpa.runtime import launcher
from microsdpa.select import select
from microsdpa.validation import NO_MASKS, GivenMasks, check_cpu_impl, emulated, is_empty, validate_call

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from microsdpa.specs.eight_bit import Operands

_launch = launcher.launch
_launch_masked = launcher.launch_masked
_allocate_lse = launcher.allocate_lse
_is_grad_enabled = torch.is_grad_enabled
_PLAIN = OPTIONS[False, None, False, "auto"]


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
    **further: Unpack[Further],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention: softmax(scale * Q K^T + mask) V, exact.

    Arithmetic and softmax are FP32; inputs and output are FP16 or BF16. Rows that see no key give zeros (LSE -inf).
    Calls are asynchronous on the current stream of the tensors' device and may be captured in a CUDA graph.

    Args:
        query: [B, H, S_q, D], float16 or bfloat16, any strides with a unit stride along D.
        key: [B, H_kv, S_k, D], like query.
        value: [B, H_kv, S_k, D], like query.
        is_causal: query i sees keys j <= i, aligned to the upper left, as in torch.
        causal: the alignment by name: "upper_left", the same as is_causal=True, or "lower_right", where query i sees
            keys j <= i + S_k - S_q, as in the FlashAttention libraries. torch.nn.attention.bias has the same names.
        scale: factor of Q K^T; 1/sqrt(D) when None.
        enable_gqa: let H be a multiple of H_kv; query head h reads key head h // (H / H_kv).
        return_lse: also return the natural logarithm of the softmax's denominator, [B, H, S_q] in FP32.
        out: [B, H, S_q, D] tensor to write to; it must not overlap an input. Else an output is allocated in the
            memory order of query.
        impl: "auto", or the name of one kernel, such as "ladder/01_scalar", which is then never replaced by another.
            "emulate", or "emulate:" and a kernel's name, runs the kernel on CPU tensors in the emulator, slowly and
            with every access checked.
        precision: None, or what the tensors are quantised to first, in one launch: "fp8" (E4M3), "int8_fp8" (Q and K in
            INT8, P and V in E4M3) or "int8_fp16" (Q and K in INT8). docs/numerics.md has the errors of each.
        q_scale: with 8-bit tensors (float8_e4m3fn, or int8 with a value of float8_e4m3fn, float16 or bfloat16): a
            number or an FP32 tensor, a scalar, [B, H], [B, H_kv] or [B, H, blocks of S_q]; value = code * scale. The
            output is then float16, or what `out` is, or of the value's type where that has 16 bits.
        k_scale: the same for key: a scalar, [B, H_kv] or [B, H_kv, blocks of S_k].
        v_scale: for an 8-bit value: a scalar, [B, H_kv] or, for every channel, [B, H_kv, D].
        attn_mask: broadcastable to [B, H, S_q, S_k]: bool, where False hides a key, or numbers in the inputs' type or
            float32 that are added to the scores. With is_causal=True it is an error, as in torch; beside `causal` both
            hold.
        window: (left, right): query i sees keys p - left to p + right, where p is i, or i + S_k - S_q under
            causal="lower_right"; -1 is no end.
        softcap: scores x become softcap * tanh(x / softcap), before slopes and mask.
        alibi_slopes: [H] or [B, H], float32: slope * |p - key| is subtracted from the scores.
        sinks: [H], the inputs' type or float32: a logit of each head that takes its share of the softmax and has no
            value. The LSE counts it.

    Returns:
        The output, or (output, LSE) with return_lse.

    Raises:
        InvalidArgument: an argument that no call could accept.
        UnsupportedProblem: a call that no kernel computes: its reason and the nearest supported problem are named.
        CompileError: the kernel does not compile on this machine.
    """
    if not further and not is_dynamo_compiling():
        try:
            # Most calls have no option: comparing with the defaults takes a quarter of the time of the look-up.
            plain = is_causal is False and causal is None and enable_gqa is False and impl == "auto"
            options = _PLAIN if plain else OPTIONS[is_causal, causal, enable_gqa, impl]
            if not _is_grad_enabled() or not (
                query.requires_grad
                or key.requires_grad
                or value.requires_grad
                or (out is not None and out.requires_grad)
            ):
                lse = _allocate_lse(query) if return_lse else None
                result = _launch(query, key, value, out, lse, options, scale)
                if result is not None:
                    if out is not None:
                        result = out
                    return result if lse is None else (result, lse)
        except (AttributeError, BufferError, KeyError, RuntimeError, TypeError, ValueError):
            pass  # the checks below say which argument is wrong; a launch that failed otherwise fails there again
    if unknown := further.keys() - Further.__annotations__.keys():
        raise TypeError(f"sdpa() got an unexpected keyword argument {min(unknown)!r}")
    common = query, key, value, is_causal, causal, scale, enable_gqa, return_lse, out, impl
    return _further_call(*common, **further) if further else _first_call(*common)


def _further_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    causal: Causal | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    out: torch.Tensor | None,
    impl: str,
    *,
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    precision: Operands | None = None,
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A call with arguments that a plain one leaves out."""
    given = attn_mask, window, softcap, alibi_slopes, sinks
    if precision is not None or q_scale is not None or k_scale is not None or v_scale is not None:
        mask_arguments.refuse(*given)
        return eight_bit.attend(
            query,
            key,
            value,
            precision=precision,
            scales=(q_scale, k_scale, v_scale),
            is_causal=is_causal,
            causal=causal,
            scale=scale,
            enable_gqa=enable_gqa,
            return_lse=return_lse,
            out=out,
            impl=impl,
        )
    common = query, key, value, is_causal, causal, scale, enable_gqa, return_lse, out, impl
    outcome = None if is_dynamo_compiling() else _masked_call(*common, attn_mask, alibi_slopes, sinks, window, softcap)
    return _first_call(*common, given) if outcome is None else outcome


def _masked_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    causal: Causal | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    out: torch.Tensor | None,
    impl: str,
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    window: tuple[int, int] | None,
    softcap: float | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """Launch a call with masks that has a plan; None where the checks have to be made first."""
    if is_causal and attn_mask is not None:
        return None
    try:
        if torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (query, key, value, out, attn_mask, sinks) if tensor is not None
        ):
            return None
        options = OPTIONS[is_causal, causal, enable_gqa, impl]
        left, right = window or (-1, -1)
        lse = _allocate_lse(query) if return_lse else None
        arrays = attn_mask, alibi_slopes, sinks
        result = _launch_masked(query, key, value, out, lse, options, scale, *arrays, left, right, softcap)
    except (AttributeError, BufferError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    if result is None:
        return None
    result = result if out is None else out
    return result if lse is None else (result, lse)


def _traced(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    causal: Causal | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    out: torch.Tensor | None,
    impl: str,
    given: GivenMasks,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The call as an operator in a graph; the operator checks its arguments when the graph runs."""
    attn_mask, window, softcap, alibi_slopes, sinks = given
    mask_arguments.refuse_both(is_causal, attn_mask)
    alignment = arguments.check_causal(is_causal, causal)
    ends = list(cast("tuple[int, int]", window or (-1, -1)))
    operands = query, key, value, attn_mask, alibi_slopes, sinks
    result, lse = torch.ops.microsdpa.attention(*operands, alignment, scale, enable_gqa, ends, softcap, impl)
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _first_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    causal: Causal | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    out: torch.Tensor | None,
    impl: str,
    given: GivenMasks = NO_MASKS,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Validate a call that has no plan, make the plan, and launch; also all calls that no kernel is needed for."""
    if is_compiling():
        return _traced(query, key, value, is_causal, causal, scale, enable_gqa, return_lse, out, impl, given)
    alignment, scale, masks = validate_call(query, key, value, is_causal, causal, scale, enable_gqa, out, impl, given)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, *masks.tensors.values())):
        if out is not None:
            raise InvalidArgument(
                "out", expected="None where an input requires grad", got="a tensor", hint="autograd needs a new output"
            )
        return _traced(query, key, value, is_causal, causal, scale, enable_gqa, return_lse, None, impl, given)
    if is_empty(query, key):
        result = torch.zeros_like(query) if out is None else out.zero_()
        lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
        if masks.sinks is not None:
            lse.copy_(masks.sinks[:, None].expand_as(lse))
        return (result, lse) if return_lse else result

    if emulated(impl):
        result, emulated_lse = _emulate(query, key, value, alignment, scale, masks, return_lse, out, impl)
        return result if emulated_lse is None else (result, emulated_lse)
    if query.device.type == "cpu":
        check_cpu_impl(impl)
        result, cpu_lse = torch_cpu.attend(query, key, value, alignment, scale, masks, return_lse)
        result = result if out is None else out.copy_(result)
        return result if cpu_lse is None else (result, cpu_lse)

    code = OPTIONS[is_causal, causal, enable_gqa, impl]
    register(query, key, value, out, alignment, masks, impl, code)
    gpu_lse = _allocate_lse(query) if return_lse else None
    if masks.kind is None:
        result = launcher.prepared_call(query, key, value, out, code, scale)(query, key, value, out, gpu_lse)
    else:
        result = launcher.masked_call(query, key, value, out, gpu_lse, code, scale, masks)
    result = result if out is None else out
    return result if gpu_lse is None else (result, gpu_lse)


def register(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    alignment: Causal | None,
    masks: Masks,
    impl: str,
    options: int,
) -> None:
    """Compile the kernel for validated CUDA tensors and register the plan of the call."""
    problem = problems.of_cuda(query, key, value, out, alignment, masks)
    launcher.prepare(problem, select(problem, impl).spec, query, key, value, out, options, masks)


def _emulate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: Causal | None,
    scale: float | None,
    masks: Masks,
    return_lse: bool,
    out: torch.Tensor | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a kernel in the emulator."""
    from microsdpa.emulate import run  # not imported with the package: few programs need it

    kernel = impl.partition(":")[2] or "auto"
    problem = problems.of_emulated(query, key, value, out, causal, masks, kernel)
    spec = select(problem, kernel).spec
    out = torch.empty_like(query) if out is None else out
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if return_lse else None
    run.attention(spec, problem, query, key, value, out, lse, scale, masks=masks)
    return out, lse
