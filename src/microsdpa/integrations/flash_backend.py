"""microsdpa among torch's flash attention backends: torch chooses its backend as ever, and its flash one is this."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from microsdpa.call.call import NO_TENSORS
from microsdpa.call.options import Options
from microsdpa.errors import UnsupportedProblem
from microsdpa.execution import forward, nodes
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
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, whose causal mask is aligned lower right; its backward stays torch's.

    Raises:
        UnsupportedProblem: a call that no kernel computes.
    """
    causal: Causal | None = "lower_right" if is_causal else None
    options = Options(False, causal, scale, query.shape[1] != key.shape[1])
    with torch.no_grad():
        result, lse = forward.attend((query, key, value), NO_TENSORS, options, True)
    state, scalar, debug = nodes.nothing(query.device)
    return result, lse, None, None, query.shape[2], key.shape[2], state, scalar, debug


OPERATOR = "_scaled_dot_product_flash_attention"


def _kernel() -> Callable[..., Any]:
    """The kernel of torch's operator: flash_forward, but torch's own flash attention where there is dropout."""
    has_cuda = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    torchs = torch.library.get_kernel(f"aten::{OPERATOR}", "CUDA") if has_cuda else None

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
        if dropout_p != 0.0 or return_debug_mask:
            if torchs is None:
                raise UnsupportedProblem("microsdpa has no dropout", nearest="dropout_p=0.0, or a CUDA build of torch")
            given = query, key, value, dropout_p, is_causal, return_debug_mask
            return torchs.call_boxed(keyset, *given, scale=scale)
        return flash_forward(query, key, value, is_causal, scale=scale)

    return kernel


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

    def activate() -> _Handle:
        library = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
            library.impl(OPERATOR, _kernel(), "CUDA", with_keyset=True)  # type: ignore[no-untyped-call]
        return _Handle(library)

    attention.register_flash_attention_impl(IMPL, register_fn=activate)
