"""Plain F.scaled_dot_product_attention through microsdpa, by another function of this name."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch._C import (
    _get_cudnn_sdp_enabled,
    _get_flash_sdp_enabled,
    _get_math_sdp_enabled,
    _get_mem_efficient_sdp_enabled,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
)
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from microsdpa.attention import api
from microsdpa.call import validate
from microsdpa.call.call import Call, mask_tensors
from microsdpa.call.options import OPTIONS, Options
from microsdpa.call.tensors import DTYPES, check_impl, new_output
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.execution import autograd, forward, new_sizes, nodes, torch_cpu
from microsdpa.execution.forward import MISSES
from microsdpa.execution.nodes import PLAIN_TYPES
from microsdpa.kernels.ampere.general.spec import MAX_HEAD_DIM
from microsdpa.kernels.problem import LARGEST_FACTOR, Causal
from microsdpa.runtime import launcher

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

DEVICES = ("cpu", "cuda")
_log = logging.getLogger("microsdpa")
_logged: set[str] = set()
_launch_or_kind = launcher.launch_or_kind
_empty_like = torch.empty_like
_is_grad_enabled = torch.is_grad_enabled


@dataclass(frozen=True, eq=False)
class _Entry:
    """One enable() or enabled() that has not been undone."""

    strict: bool
    impl: str
    thread: int
    of_block: bool


_DISABLED = _Entry(strict=False, impl="auto", thread=0, of_block=False)
"""For a call by whoever took the function before it was disabled."""
_active: tuple[_Entry, ...] = ()
_changing = threading.Lock()


def enable(*, strict: bool = False, impl: str = "auto") -> None:
    """Let torch.nn.functional.scaled_dot_product_attention run microsdpa until disable().

    What microsdpa does not compute goes to torch's own function, with one logged line for each distinct reason; with
    `strict` it raises UnsupportedProblem. Code that took the function's name before ("from ... import") keeps torch's.
    `impl` is that of microsdpa.sdpa.

    It holds for the whole process. A call takes the options of the latest enable() or enabled() of its own thread, or
    else of the latest one of any thread.

    Raises:
        InvalidArgument: there is no such `impl`.
    """
    _add(strict, impl, of_block=False)


def disable() -> None:
    """Undo the latest enable(), of this thread or else of any; the blocks of enabled() stay as they are.

    Raises:
        RuntimeError: it is not enabled.
    """
    with _changing:
        enables = [entry for entry in _active if not entry.of_block]
        if not enables:
            raise RuntimeError("microsdpa.disable: expected microsdpa.enable() before, got none")
        _replace([entry for entry in _active if entry is not _holding(enables)])


@contextmanager
def enabled(*, strict: bool = False, impl: str = "auto") -> Iterator[None]:
    """enable() for a block; what other threads or blocks have enabled stays as it is."""
    entry = _add(strict, impl, of_block=True)
    try:
        yield
    finally:
        with _changing:
            _replace([other for other in _active if other is not entry])


def _add(strict: bool, impl: str, of_block: bool) -> _Entry:
    global _backends_at_first
    entry = _Entry(strict, check_impl(impl), threading.get_ident(), of_block)
    with _changing:
        if not _active:
            _backends_at_first = _backends()
        _replace([*_active, entry])
    return entry


def _replace(entries: Sequence[_Entry]) -> None:
    global _active
    _active = tuple(entries)
    F.scaled_dot_product_attention = scaled_dot_product_attention if entries else torch_cpu.torch_attention


def _holding(entries: Sequence[_Entry]) -> _Entry:
    """That of some entries which holds in this thread; in a graph that is compiled, the latest."""
    if len(entries) > 1 and not is_dynamo_compiling():
        thread = threading.get_ident()
        own = [entry for entry in entries if entry.thread == thread]
        return (own or entries)[-1]
    return entries[-1]


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's function of this name: the same arguments and meaning; rows that see no key give zeros.

    A torch.nn.attention.bias.CausalBias for a mask becomes a causal alignment, and under autocast the inputs are cast
    as torch casts them.

    Raises:
        UnsupportedProblem: microsdpa does not compute the call, and was enabled with strict=True.
    """
    entries = _active  # which another thread may replace meanwhile
    entry = entries[0] if len(entries) == 1 else _holding(entries) if entries else _DISABLED
    given = query, key, value, attn_mask, dropout_p, is_causal
    if _is_unrestricted():
        return attend(given, scale, enable_gqa, strict=entry.strict, impl=entry.impl)
    return _leave_to_torch(RESTRICTED, given, scale, enable_gqa, strict=False)


Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", float, bool]
"""query, key, value, attn_mask, dropout_p and is_causal of torch's function."""


def attend(given: Given, scale: float | None, enable_gqa: bool, *, strict: bool, impl: str) -> torch.Tensor:
    """A call of torch's function: by microsdpa, or else by torch's own, unless `strict`.

    Raises:
        UnsupportedProblem: microsdpa does not compute the call, and `strict`.
    """
    query, key, value, attn_mask, dropout_p, is_causal = given
    if not is_dynamo_compiling() and (  # nobody but this library has to see the call
        type(query) in PLAIN_TYPES
        and type(key) in PLAIN_TYPES
        and type(value) in PLAIN_TYPES
        and (attn_mask is None or (type(attn_mask) in PLAIN_TYPES and attn_mask.dtype != torch.int32))
        and dropout_p == 0.0
        and forward_ad._current_level < 0
        and not _len_torch_dispatch_stack()
        and _get_tracing_state() is None
        and peek_interpreter_stack() is None
    ):
        if _is_any_autocast_enabled():
            query, key, value, attn_mask = _as_autocast(query, key, value, attn_mask)
        found = _at_once(query, key, value, attn_mask, is_causal, scale, enable_gqa, impl)
        if found is not None:
            return found
    causal: Causal | None = None
    bias = _causal_bias(attn_mask)
    if bias is not None and not is_causal:
        # What torch makes of it: square ones are upper left, whatever the tensors' lengths.
        square = bias.seq_len_q == bias.seq_len_kv
        causal = "upper_left" if square or bias.variant == type(bias.variant).UPPER_LEFT else "lower_right"
        attn_mask = None
    query, key, value, attn_mask = _as_autocast(query, key, value, attn_mask)
    reason = why_not(query, key, value, attn_mask, dropout_p)
    if not reason and query.device.type == "cpu" and impl == "auto" and bias is None:
        # torch computes it whether microsdpa is asked or not: its own call, gradients included, costs nothing more.
        try:
            if strict and not is_dynamo_compiling():
                options = Options(is_causal, None, scale, enable_gqa, impl=impl, dropout_p=dropout_p)
                validate.check(Call((query, key, value), mask_tensors(attn_mask, None, None), options=options))
            return torch_cpu.torch_attention(*given, scale=scale, enable_gqa=enable_gqa)
        except (InvalidArgument, UnsupportedProblem) as error:
            reason = str(error)
    if not reason:
        asked: dict[str, Any] = {"causal": causal} if causal else {"is_causal": is_causal}
        asked |= {"impl": impl, "scale": scale, "enable_gqa": enable_gqa, "dropout_p": dropout_p}
        if is_dynamo_compiling():
            reason = why_not_traced(query, key, value, attn_mask, asked)
    if not reason:
        try:
            return _output(query, key, value, asked if attn_mask is None else asked | {"attn_mask": attn_mask})
        except (InvalidArgument, UnsupportedProblem) as error:
            reason = str(error)
    return _leave_to_torch(reason, given, scale, enable_gqa, strict=strict, bias=bias)


def _leave_to_torch(
    reason: str,
    given: tuple[Any, ...],
    scale: float | None,
    enable_gqa: bool,
    *,
    strict: bool,
    bias: CausalBias | None = None,
) -> torch.Tensor:
    """torch's own function for the arguments `given`, with a logged line, unless `strict`.

    Raises:
        UnsupportedProblem: `strict`.
    """
    if strict:
        raise UnsupportedProblem(reason, nearest="strict=False, which leaves it to torch's own attention")
    note_fallback(reason)
    function: Callable[..., torch.Tensor] = torch_cpu.torch_attention
    if bias is not None:
        # A CausalBias only knows the function that torch.nn.functional has, which is this one.
        function = bias._dispatch
    return function(*given, scale=scale, enable_gqa=enable_gqa)


RESTRICTED = "torch.nn.attention.sdpa_kernel, or torch.backends.cuda, names torch's own backends for it"


def _backends() -> tuple[bool, bool, bool, bool]:
    """Which of torch's own backends may run: flash, cuDNN, memory-efficient, math."""
    return (
        _get_flash_sdp_enabled(),
        _get_cudnn_sdp_enabled(),
        _get_mem_efficient_sdp_enabled(),
        _get_math_sdp_enabled(),
    )


_backends_at_first = _backends()
"""Those that might run when enable() was called: sdpa_kernel() leaves out some of them."""


def _is_unrestricted() -> bool:
    """Whether all of torch's backends may run that might when microsdpa was enabled."""
    then = _backends_at_first
    now = (
        _get_flash_sdp_enabled(),
        _get_cudnn_sdp_enabled(),
        _get_mem_efficient_sdp_enabled(),
        _get_math_sdp_enabled(),
    )
    return now == then or all(a or not b for a, b in zip(now, then, strict=True))


def _causal_bias(mask: torch.Tensor | None) -> CausalBias | None:
    """A mask that is of torch.nn.attention.bias. That module, and torch.compile with it, is loaded then only."""
    if mask is None or type(mask) in PLAIN_TYPES:
        return None
    from torch.nn.attention.bias import CausalBias

    return mask if isinstance(mask, CausalBias) else None


def _at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    impl: str,
) -> torch.Tensor | None:
    """The output of a call that has a plan, or takes gradients on a GPU; None where it has to be looked at closely."""
    graded = _is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    )
    if not graded and attn_mask is None:
        try:
            out = new_output(query, value) if forward.other_value_dims else _empty_like(query)
            code = OPTIONS[is_causal, None, enable_gqa, impl, None]
            found = _launch_or_kind(query, key, value, out, False, code, scale)
            if type(found) is int:
                found = new_sizes.resized(found, (query, key, value, out, False, code, scale))
            if found is not None:
                return out
        except MISSES:
            pass
        return None
    if graded:
        try:
            code = OPTIONS[is_causal, None, enable_gqa, impl, None]
            if attn_mask is None:
                result = nodes.recorded(query, key, value, is_causal, code, scale)
            else:
                result = nodes.recorded_masked(query, key, value, attn_mask, code, scale)
        except MISSES:
            return None
        if result is not None:
            return result
    masks = mask_tensors(attn_mask, None, None)
    options = Options(is_causal, None, scale, enable_gqa, None, None, impl)
    if not graded:
        found = forward.launch((query, key, value), masks, options, False)
        return None if found is None else found[0]
    if not query.is_cuda or query.is_nested or key.is_nested or value.is_nested:
        return None
    try:
        return autograd.attend((query, key, value), masks, options, False)[0]
    except (InvalidArgument, UnsupportedProblem):
        return None  # the reason is found again, where there is somebody to tell it


def _as_autocast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tensors as autocast hands them to torch's function; the same ones where it is not enabled for their device."""
    if query.device.type not in DEVICES or not torch.is_autocast_enabled(query.device.type):
        return query, key, value, attn_mask
    dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = _autocast(query, dtype), _autocast(key, dtype), _autocast(value, dtype)
    return query, key, value, None if attn_mask is None else _autocast(attn_mask, dtype)


def _autocast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor as autocast hands it to torch's function."""
    if tensor.dtype == dtype:
        return tensor
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible else tensor


def note_fallback(reason: str) -> None:
    """Log that a call goes to torch's own attention, once for each reason, whatever the numbers in it."""
    if is_dynamo_compiling():
        return
    kind = _kind(reason)
    if kind not in _logged:
        _logged.add(kind)
        _log.warning("torch's own attention runs a call that microsdpa leaves to it: %s", reason)


_NUMBERS = re.compile(r"-?\b(?:0x[0-9a-f]+|\d+(?:\.\d*)?(?:e[+-]?\d+)?)\b(?:, -?\d+)*")
"""A number, or a list of integers such as a shape; not the digits in a name such as float32."""


@lru_cache(maxsize=256)
def _kind(reason: str) -> str:
    """A reason without the numbers of the call: as many as there are shapes would fill the log and the memory."""
    return _NUMBERS.sub("N", reason)


def _output(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    result = api.sdpa(query, key, value, **options)
    assert isinstance(result, torch.Tensor)
    return result


def why_not(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float
) -> str:
    """What of a call of torch's function microsdpa does not compute; empty for nothing that can be told at a glance."""
    if not 0.0 <= dropout_p <= 1.0:
        return "dropout_p is no probability"
    if not is_dynamo_compiling() and (peek_interpreter_stack() is not None or forward_ad._current_level >= 0):
        return "the call is inside a torch.func transform or takes forward-mode gradients"
    for tensor in (query, key, value):
        if type(tensor) not in PLAIN_TYPES:
            return "an input is of a tensor type of its own, which torch dispatches"
        if tensor.is_nested or tensor.layout != torch.strided:
            return "an input is nested or sparse"
        if tensor.dim() != 4:
            return f"query has {query.dim()} dimensions, key {key.dim()} and value {value.dim()}, and not 4"
        if tensor.stride(3) != 1 and tensor.size(3) > 1:
            return "an input has no unit stride along its last dimension"
    if query.device.type not in DEVICES:
        return f"the tensors are on {query.device}"
    if query.dtype not in DTYPES:
        return f"the inputs are of {query.dtype}"
    head_dim = query.size(3)
    if value.size(3) != head_dim and is_dynamo_compiling():
        return "value has another head dimension than query, in a graph"
    if head_dim > MAX_HEAD_DIM:
        return f"the head dimension is over {MAX_HEAD_DIM}"
    if attn_mask is None:
        return ""
    if type(attn_mask) not in PLAIN_TYPES:
        return "the mask is of a tensor type of its own, which torch dispatches"
    return "" if attn_mask.dtype in (torch.bool, query.dtype, torch.float32) else f"the mask is of {attn_mask.dtype}"


def why_not_traced(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, options: dict[str, Any]
) -> str:
    """Why sdpa refuses a call that torch.compile traces; empty if it does not. `options` are sdpa's.

    Without a graph, sdpa raises and the caller sees it. In a graph that is too late: the operator runs with the graph.
    """
    (batch, heads, seqlen_q, head_dim), (heads_kv, seqlen_k) = query.shape, key.shape[1:3]
    if any(t.dtype != query.dtype or t.device != query.device for t in (key, value)):
        return "query, key and value differ in type or device"
    if key.shape[0] != batch or value.shape[0] != batch:
        return "query, key and value differ in their batch size"
    if key.shape[3] != head_dim or head_dim == 0:
        return "query and key differ in their head dimension, or have none"
    if value.shape[1] != heads_kv or value.shape[2] != seqlen_k:
        return "key and value differ in their heads or lengths"
    if heads != heads_kv and not (options.get("enable_gqa") and heads_kv != 0 and heads % heads_kv == 0):
        return "key has another number of heads than query, and the call does not ask to share them"
    scale = options.get("scale")
    if scale is not None and not isinstance(scale, (int, float)):
        return "scale is no number"
    if scale is not None and not abs(scale) <= LARGEST_FACTOR:
        return "scale is over 2**127 in magnitude, or no number"
    if query.device.type == "cpu" and not validate.runs_on_cpu(options["impl"]):
        return f"impl {options['impl']!r} runs on CUDA tensors"
    if attn_mask is None:
        return ""
    if options.get("is_causal"):
        return "there is a mask beside is_causal=True"
    if attn_mask.device != query.device:
        return "the mask is on another device than query"
    whole = (batch, heads, seqlen_q, seqlen_k)[-attn_mask.dim() :] if 0 < attn_mask.dim() <= 4 else ()
    if len(whole) != attn_mask.dim() or any(
        got not in (1, size) for got, size in zip(attn_mask.shape, whole, strict=True)
    ):
        return "the mask does not broadcast to [B, H, S_q, S_k]"
    return ""
