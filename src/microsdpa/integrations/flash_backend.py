"""microsdpa among torch's flash attention backends: torch chooses its backend as ever, and its flash one is this."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from microsdpa.call.call import NO_TENSORS, Inputs
from microsdpa.call.dropout import Dropping
from microsdpa.call.masks import Masks
from microsdpa.call.options import Options
from microsdpa.errors import UnsupportedProblem
from microsdpa.execution import backward, dropout, forward, nodes
from microsdpa.integrations import flash_packed
from microsdpa.kernels.problem import Causal

IMPL = "microsdpa"


class _Handle:
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
    is_causal: bool = False,
    dropout_p: float = 0.0,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, whose causal mask is aligned lower right.

    The backward pass is torch's own where there is no dropout. Random states of this library are int64, and torch's
    are uint64: so flash_backward knows its own.

    Raises:
        UnsupportedProblem: a call that no kernel computes.
    """
    causal: Causal | None = "lower_right" if is_causal else None
    options = Options(False, causal, scale, query.shape[1] != key.shape[1], dropout_p=dropout_p)
    state, scalar, debug = nodes.nothing(query.device)
    random = dropout.begin(query, dropout_p) if dropout_p else None
    with torch.no_grad():
        result, lse = forward.attend((query, key, value), NO_TENSORS, options, True, random)
    if random is not None and random.in_memory is not None:
        state = random.in_memory
    return result, lse, None, None, query.shape[2], key.shape[2], state, scalar, debug


def flash_backward(
    grad_out: torch.Tensor, inputs: Inputs, result: backward.Pair, is_causal: bool, scale: float | None, of: Dropping
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value for a call of flash_forward with dropout; `result` is its output and LSE.

    Raises:
        UnsupportedProblem: there are too many rows or heads for a launch.
    """
    causal: Causal | None = "lower_right" if is_causal else None
    return tuple(backward.gradients((grad_out, None), inputs, result, causal, scale, Masks(dropping=of)))


OPERATOR = "_scaled_dot_product_flash_attention"
BACKWARD = f"{OPERATOR}_backward"


def _torchs(name: str) -> Any:
    """torch's own kernel of an operator; None where torch is built without CUDA."""
    has_cuda = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return torch.library.get_kernel(f"aten::{name}", "CUDA") if has_cuda else None


def _kernel() -> Callable[..., Any]:
    """The kernel of torch's operator: flash_forward, but torch's own flash attention for its debug mask."""
    torchs = _torchs(OPERATOR)

    def kernel(
        keyset: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        if return_debug_mask:
            if torchs is None:
                raise UnsupportedProblem(
                    "microsdpa has no debug mask", nearest="return_debug_mask=False, or a CUDA build of torch"
                )
            given = query, key, value, dropout_p, is_causal, return_debug_mask
            return torchs.call_boxed(keyset, *given, scale=scale)
        return flash_forward(query, key, value, is_causal, dropout_p, scale=scale)

    return kernel


def _backward_kernel() -> Callable[..., Any]:
    """The kernel of the operator's backward pass: flash_backward for its own random states, else torch's."""
    torchs = _torchs(BACKWARD)

    def kernel(keyset: Any, *given: Any, scale: float | None = None) -> Any:
        grad_out, query, key, value, out, lse, *_, dropout_p, is_causal, state, _ = given
        if dropout_p == 0.0 or state.dtype != torch.int64:
            return torchs.call_boxed(keyset, *given, scale=scale)
        return flash_backward(grad_out, (query, key, value), (out, lse), is_causal, scale, (dropout_p, state))

    return kernel


def register() -> None:
    """Make torch.nn.attention.activate_flash_attention_impl("microsdpa") work; nothing else changes until then.

    torch.nn.attention.varlen.varlen_attn runs on sdpa_varlen then. torch.nn.attention.restore_flash_attention_impl()
    undoes the activation.

    Raises:
        RuntimeError: this torch has no registry of flash attention implementations; 2.11 and newer have.
    """
    attention = torch.nn.attention
    if not hasattr(attention, "register_flash_attention_impl"):
        raise RuntimeError(
            f"microsdpa.register: expected torch 2.11 or newer, got {torch.__version__}; microsdpa.enable() works here"
        )

    def activate() -> _Handle:
        library = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
            own = {OPERATOR: _kernel(), BACKWARD: _backward_kernel()}
            for name, kernel in (own | flash_packed.kernels(_torchs, nodes.nothing)).items():
                library.impl(name, kernel, "CUDA", with_keyset=True)  # type: ignore[no-untyped-call]
        return _Handle(library)

    attention.register_flash_attention_impl(IMPL, register_fn=activate)
