"""Attention under the transforms of torch.func: first gradients, vmap and their combinations; what there is none of."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _are_functorch_transforms_active, _AutoDispatchBelowAutograd, _get_tracing_state
from torch.autograd import forward_ad

from microsdpa.call import tensors as tensor_checks
from microsdpa.call.call import Inputs, MaskTensors
from microsdpa.call.masks import refuse_both
from microsdpa.call.options import Options
from microsdpa.errors import UnsupportedProblem
from microsdpa.execution import dropout, forward

TORCHS_OWN = "torch's own attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"


def are_active() -> bool:
    """Whether a call is inside a transform of torch.func."""
    return bool(_are_functorch_transforms_active())


def is_jit_traced() -> bool:
    """Whether torch.jit.trace records this thread's calls."""
    return _get_tracing_state() is not None


def attend(inputs: Inputs, masks: MaskTensors, options: Options) -> forward.Result:
    """Output and LSE of a call inside a transform.

    Raises:
        MicrosdpaError: as sdpa; when the transform comes to it, also for a gradient of a gradient.
    """
    tensor_checks.check_not_nested(**dict(zip(("query", "key", "value"), inputs, strict=True)))
    refuse_both(options.is_causal, masks.attn_mask)
    # Two numbers are drawn for all of a vmap or for each element, as its argument `randomness` says.
    rng_state = dropout.draw(inputs[0].device) if options.dropout_p else None
    return _Attention.apply(*inputs, *masks, rng_state, options)  # type: ignore[no-any-return, no-untyped-call]


def refuse_tangents(*tensors: torch.Tensor | None) -> None:
    """Refuse tensors with a forward-mode gradient, which would be lost.

    Raises:
        UnsupportedProblem: one has.
    """
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            refuse_forward_mode()


def refuse_forward_mode() -> None:
    """Refuse a forward-mode gradient.

    Raises:
        UnsupportedProblem: always.
    """
    raise UnsupportedProblem("microsdpa has no forward-mode gradient", nearest=TORCHS_OWN)


def refuse_eight_bit() -> None:
    """Refuse a call with 8-bit operands that a transform or torch.jit.trace would have to see.

    Raises:
        UnsupportedProblem: there is one.
    """
    if are_active():
        raise UnsupportedProblem(
            "transforms of torch.func do not see calls with 8-bit operands", nearest="precision=None"
        )
    if is_jit_traced():
        raise UnsupportedProblem("torch.jit.trace does not see calls with 8-bit operands", nearest="precision=None")


def refuse_second_order(*_: object) -> None:
    """Refuse a gradient of a gradient.

    Raises:
        UnsupportedProblem: always.
    """
    raise UnsupportedProblem("microsdpa has no second-order gradient", nearest=TORCHS_OWN)


def _rest(options: Options) -> tuple[str | None, float | None, bool, list[int], float | None, str]:
    """What the operators take beside tensors."""
    causal = tensor_checks.check_causal(options.is_causal, options.causal)
    ends = list(options.window or (-1, -1))
    return causal, options.scale, options.enable_gqa, ends, options.softcap, options.impl


class _Attention(torch.autograd.Function):
    """Attention and its gradient, also through the LSE: torch takes it through every transform that is active."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, H, S_q, D] and LSE [B, H, S_q] of query, key, value, masks, random state and Options."""
        *tensors, rng_state, options = given
        # Whatever wants a gradient has been here; what is left is vmap, which calls the operator for each element.
        with _AutoDispatchBelowAutograd():
            rest = *_rest(options), options.dropout_p, rng_state
            return torch.ops.microsdpa.attention(*tensors, *rest)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Keep what the backward pass needs."""
        *tensors, ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def jvp(ctx: Any, *_: torch.Tensor | None) -> Any:
        """Refuse.

        Raises:
            UnsupportedProblem: always.
        """
        refuse_forward_mode()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the tensors; None for a mask of booleans, random state and options."""
        grad_out, grad_lse = grads
        *tensors, rng_state, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        found = iter(_Backward.apply(grad_out, grad_lse, *tensors, out, lse, rng_state, ctx.options))  # type: ignore[no-untyped-call]
        return *(next(found) if t is not None and t.is_floating_point() else None for t in tensors), None, None


class _Backward(torch.autograd.Function):
    """The gradients, which have none themselves."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Any) -> tuple[torch.Tensor, ...]:
        """Gradients as the operator attention_backward gives them."""
        *tensors, rng_state, options = given
        causal, scale, _, ends, softcap, impl = _rest(options)
        rest = causal, scale, ends, softcap, [True, True, True], impl, options.dropout_p, rng_state
        with _AutoDispatchBelowAutograd():
            return tuple(torch.ops.microsdpa.attention_backward(*tensors, *rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Nothing is kept."""

    @staticmethod
    def jvp(ctx: Any, *_: torch.Tensor | None) -> Any:
        """Refuse.

        Raises:
            UnsupportedProblem: always.
        """
        refuse_second_order()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> Any:
        """Refuse.

        Raises:
            UnsupportedProblem: always.
        """
        refuse_second_order()
