"""Plain F.scaled_dot_product_attention through microsdpa: by patching it, or under torch's flash backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from microsdpa import api, torch_cpu, validation
from microsdpa.arguments import DTYPES, check_impl
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.problem import Causal
from microsdpa.specs.general import MAX_HEAD_DIM

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

FLASH_IMPL = "microsdpa"
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_log = logging.getLogger("microsdpa")
_logged: set[str] = set()
_active: list[tuple[bool, str]] = []  # (strict, impl) of every enable() that has not been disabled; the last one holds


def enable(*, strict: bool = False, impl: str = "auto") -> None:
    """Let torch.nn.functional.scaled_dot_product_attention run microsdpa until disable().

    What microsdpa does not compute goes to torch's own function, with one logged line for each distinct reason; with
    `strict` it raises UnsupportedProblem. Code that took the function's name before ("from ... import") keeps torch's.
    `impl` is that of microsdpa.sdpa.

    Raises:
        InvalidArgument: there is no such `impl`.
    """
    _active.append((strict, check_impl(impl)))
    F.scaled_dot_product_attention = scaled_dot_product_attention


def disable() -> None:
    """Undo the latest enable().

    Raises:
        RuntimeError: it is not enabled.
    """
    if not _active:
        raise RuntimeError("microsdpa.disable: expected microsdpa.enable() before, got none")
    _active.pop()
    if not _active:
        F.scaled_dot_product_attention = torch_cpu.torch_attention


@contextmanager
def enabled(*, strict: bool = False, impl: str = "auto") -> Iterator[None]:
    """enable() for a block."""
    enable(strict=strict, impl=impl)
    try:
        yield
    finally:
        disable()


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
    strict, impl = _active[-1] if _active else (False, "auto")
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, strict=strict, impl=impl)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *,
    strict: bool,
    impl: str,
) -> torch.Tensor:
    """A call of torch's function: by microsdpa, or else by torch's own, unless `strict`.

    Raises:
        UnsupportedProblem: microsdpa does not compute the call, and `strict`.
    """
    given = query, key, value, attn_mask
    causal: Causal | None = None
    bias = _causal_bias(attn_mask)
    if bias is not None and not is_causal:
        # What torch makes of it: square ones are upper left, whatever the tensors' lengths.
        square = bias.seq_len_q == bias.seq_len_kv
        causal = "upper_left" if square or bias.variant == type(bias.variant).UPPER_LEFT else "lower_right"
        attn_mask = None
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (_autocast(t, dtype) for t in (query, key, value))
        attn_mask = None if attn_mask is None else _autocast(attn_mask, dtype)
    reason = why_not(query, key, value, attn_mask, dropout_p)
    if not reason:
        options: dict[str, Any] = {"causal": causal} if causal else {"is_causal": is_causal}
        options["impl"] = impl
        if attn_mask is not None:
            options["attn_mask"] = attn_mask
        if is_dynamo_compiling():
            reason = why_not_traced(query, key, value, attn_mask, options | {"scale": scale, "enable_gqa": enable_gqa})
    if not reason:
        try:
            return _output(query, key, value, scale, enable_gqa, options)
        except (InvalidArgument, UnsupportedProblem) as error:
            reason = str(error)
    if strict:
        raise UnsupportedProblem(reason, nearest="strict=False, which leaves it to torch's own attention")
    note_fallback(reason)
    function: Callable[..., torch.Tensor] = torch_cpu.torch_attention
    if bias is not None:
        # A CausalBias only knows the function that torch.nn.functional has, which is this one.
        function = bias._dispatch
    return function(*given, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _causal_bias(mask: torch.Tensor | None) -> CausalBias | None:
    """A mask that is of torch.nn.attention.bias. That module, and torch.compile with it, is loaded then only."""
    if mask is None or type(mask) in PLAIN_TYPES:
        return None
    from torch.nn.attention.bias import CausalBias

    return mask if isinstance(mask, CausalBias) else None


def _autocast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor as autocast hands it to torch's function."""
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible else tensor


def note_fallback(reason: str) -> None:
    """Log that a call goes to torch's own attention, once for each reason."""
    if not is_dynamo_compiling() and reason not in _logged:
        _logged.add(reason)
        _log.warning("torch's own attention runs a call that microsdpa leaves to it: %s", reason)


def _output(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    enable_gqa: bool,
    options: dict[str, Any],
) -> torch.Tensor:
    result = api.sdpa(query, key, value, scale=scale, enable_gqa=enable_gqa, **options)
    assert isinstance(result, torch.Tensor)
    return result


def why_not(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float
) -> str:
    """What of a call of torch's function microsdpa does not compute; empty for nothing that can be told at a glance."""
    if dropout_p > 0.0:
        return "dropout_p is over 0"
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
    if query.dtype not in DTYPES:
        return f"the inputs are of {query.dtype}"
    head_dim = query.size(3)
    if value.size(3) != head_dim:
        return "value has another head dimension than query"
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
    if query.device.type == "cpu" and not validation.runs_on_cpu(options["impl"]):
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


class _FlashHandle:
    """Keeps the operators' overrides alive; torch calls remove() to restore its own."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        """Give the operator back to torch."""
        self._library = None


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, whose causal mask is aligned lower right; its backward stays torch's.

    Raises:
        UnsupportedProblem: dropout, or a call that no kernel computes.
    """
    if dropout_p > 0.0 or return_debug_mask:
        raise UnsupportedProblem("microsdpa has no dropout", nearest="dropout_p=0.0, or restore_flash_attention_impl()")
    with torch.no_grad():
        result, lse = api.sdpa(
            query,
            key,
            value,
            causal="lower_right" if is_causal else None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_lse=True,
        )
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of the dropout that there is not
    nothing = torch.zeros((), dtype=torch.uint64, device=query.device)
    debug = torch.empty(0, dtype=query.dtype, device=query.device)
    return result, lse, None, None, query.shape[2], key.shape[2], state, nothing, debug


def register() -> None:
    """Make torch.nn.attention.activate_flash_attention_impl("microsdpa") work; nothing else changes until then.

    torch.nn.attention.restore_flash_attention_impl() undoes the activation.

    Raises:
        RuntimeError: this torch has no registry of flash attention implementations; 2.11 and newer have.
    """
    attention = torch.nn.attention
    if not hasattr(attention, "register_flash_attention_impl"):
        raise RuntimeError(
            f"microsdpa.register: expected torch 2.11 or newer, got {torch.__version__}; microsdpa.enable() works here"
        )

    def activate() -> _FlashHandle:
        library = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
        library.impl("_scaled_dot_product_flash_attention", flash_forward, "CUDA")  # type: ignore[no-untyped-call]
        return _FlashHandle(library)

    attention.register_flash_attention_impl(FLASH_IMPL, register_fn=activate)
