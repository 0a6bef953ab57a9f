"""Plain F.scaled_dot_product_attention through microsdpa: by patching it, or under torch's flash backend."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from microsdpa import api, torch_cpu
from microsdpa.arguments import DTYPES, check_impl
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.problem import Causal
from microsdpa.specs.general import MAX_HEAD_DIM
from microsdpa.validation import validate_call

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

FLASH_IMPL = "microsdpa"
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
DEVICES = ("cpu", "cuda")
_log = logging.getLogger("microsdpa")
_logged: set[str] = set()


@dataclass(frozen=True, eq=False)
class _Entry:
    """One enable() or enabled() that has not been undone."""

    strict: bool
    impl: str
    thread: int
    of_block: bool


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
    entry = _Entry(strict, check_impl(impl), threading.get_ident(), of_block)
    with _changing:
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
    strict, impl = False, "auto"
    if entries:
        holding = _holding(entries)
        strict, impl = holding.strict, holding.impl
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
    if query.device.type in DEVICES and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (_autocast(t, dtype) for t in (query, key, value))
        attn_mask = None if attn_mask is None else _autocast(attn_mask, dtype)
    reason = why_not(query, key, value, attn_mask, dropout_p)
    if not reason and query.device.type == "cpu" and impl == "auto" and bias is None:
        # torch computes it whether microsdpa is asked or not: its own call, gradients included, costs nothing more.
        try:
            if strict and not is_dynamo_compiling():
                masks = (attn_mask, None, None, None, None)
                validate_call(query, key, value, is_causal, None, scale, enable_gqa, None, impl, masks)
            return torch_cpu.torch_attention(*given, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        except (InvalidArgument, UnsupportedProblem) as error:
            reason = str(error)
    if not reason:
        options: dict[str, Any] = {"causal": causal} if causal else {"is_causal": is_causal}
        options["impl"] = impl
        if attn_mask is not None:
            options["attn_mask"] = attn_mask
        if is_dynamo_compiling():
            return _output(query, key, value, scale, enable_gqa, options)
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
    if query.device.type not in DEVICES:
        return f"the tensors are on {query.device}"
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
