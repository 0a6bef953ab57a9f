"""The checks of a whole call that every way to make one shares: sdpa(), plan(), explain() and the operators."""

from __future__ import annotations

import torch

from microsdpa import arguments
from microsdpa import masks as mask_arguments
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.kernels.problem import Causal
from microsdpa.masks import Masks

GivenMasks = tuple[object, object, object, object, object]
"""attn_mask, window, softcap, alibi_slopes and sinks, not validated yet."""
NO_MASKS: GivenMasks = (None, None, None, None, None)


def validate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    causal: Causal | None,
    scale: float | None,
    enable_gqa: bool,
    impl: str,
    given: GivenMasks,
) -> tuple[Causal | None, Masks]:
    """Check what the call and its explanation share; gives the causal alignment and the masks."""
    arguments.check_impl(impl)
    alignment = arguments.check_causal(is_causal, causal)
    arguments.check_scale(scale)
    attn_mask, _, _, alibi_slopes, sinks = given
    arguments.check_not_nested(query=query, key=key, value=value)
    arguments.check_not_nested(attn_mask=attn_mask, alibi_slopes=alibi_slopes, sinks=sinks)
    arguments.check_tensors(query, key, value, enable_gqa)
    if query.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            "query",
            expected="a tensor on a CUDA device or the CPU",
            got=str(query.device),
            hint="move it to CUDA",
        )
    return alignment, mask_arguments.check(query, key, is_causal, *given)


def validate_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    causal: Causal | None,
    scale: float | None,
    enable_gqa: bool,
    out: torch.Tensor | None,
    impl: str,
    given: GivenMasks = NO_MASKS,
) -> tuple[Causal | None, float | None, Masks]:
    """Check all arguments; gives the causal alignment, the scale and the masks."""
    alignment, masks = validate(query, key, value, is_causal, causal, scale, enable_gqa, impl, given)
    if out is not None:
        arguments.check_not_nested(out=out)
        inputs = (query, key, value, *masks.tensors.values())
        meets = isinstance(out, torch.Tensor) and any(arguments.memory_ranges_meet(out, t) for t in inputs)
        arguments.check_out(out, query, meets)
    return alignment, arguments.check_scale(scale), masks


def is_empty(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether there is nothing to compute."""
    return query.numel() == 0 or key.shape[2] == 0


def check_cpu_impl(impl: str) -> None:
    """Refuse to replace a kernel that was asked for by name."""
    if not runs_on_cpu(impl):
        raise UnsupportedProblem(
            f"impl {impl!r} runs on CUDA tensors and query is on the CPU",
            nearest=f"CUDA tensors; on the CPU impl='auto', which is torch's own, or impl='emulate:{impl}'",
        )


def runs_on_cpu(impl: str) -> bool:
    """Whether CPU tensors can be computed with `impl`."""
    return impl == "auto" or emulated(impl)


def emulated(impl: str) -> bool:
    """Whether `impl` asks for the emulator."""
    return impl.split(":")[0] == "emulate"
