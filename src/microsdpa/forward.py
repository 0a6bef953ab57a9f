"""Attention of one call without a gradient: by the plan that it has, or after validation by a plan made for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from microsdpa import problems, torch_cpu
from microsdpa.kernels.problem import Causal
from microsdpa.masks import Masks
from microsdpa.options import OPTIONS
from microsdpa.runtime import launcher
from microsdpa.select import chosen, select
from microsdpa.validation import check_cpu_impl, emulated, is_empty, validate_call

_launch = launcher.launch
_launch_masked = launcher.launch_masked
_empty_like = torch.empty_like

MISSES = (AttributeError, BufferError, KeyError, RuntimeError, TypeError, ValueError)
"""What a launch raises for arguments that the validation refuses in words, or a launch that fails there again."""

Result = tuple[torch.Tensor, "torch.Tensor | None"]
"""Output [B, H, S_q, D], and LSE [B, H, S_q] in FP32 where it is asked for."""


class Options(NamedTuple):
    """What a call asks for beside its tensors: arguments of sdpa, not validated yet."""

    is_causal: bool = False
    causal: Causal | None = None
    scale: float | None = None
    enable_gqa: bool = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    impl: str = "auto"

    @property
    def code(self) -> int:
        """The number of these options in the plans' keys.

        Raises:
            KeyError: one of them is not valid.
        """
        return OPTIONS[self.is_causal, self.causal, self.enable_gqa, self.impl]


PLAIN = Options()
PLAIN_CODE = PLAIN.code


class MaskTensors(NamedTuple):
    """Tensors among the masks of a call, not validated yet."""

    attn_mask: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


NO_TENSORS = MaskTensors()


def mask_tensors(
    attn_mask: torch.Tensor | None, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None
) -> MaskTensors:
    """These, or NO_TENSORS itself if there is none: a launch compares with it."""
    if attn_mask is None and alibi_slopes is None and sinks is None:
        return NO_TENSORS
    return MaskTensors(attn_mask, alibi_slopes, sinks)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""query, key and value."""


def attend(inputs: Inputs, masks: MaskTensors, options: Options, return_lse: bool) -> Result:
    """Attention of one call into a new output.

    Raises:
        MicrosdpaError: as sdpa.
    """
    found = launch(inputs, masks, options, return_lse)
    return first_call(inputs, masks, options, return_lse, None) if found is None else found


def launch(inputs: Inputs, masks: MaskTensors, options: Options, return_lse: bool) -> Result | None:
    """Launch a call that has a plan; None for one that has none."""
    query, key, value = inputs
    try:
        code, scale, result = PLAIN_CODE if options is PLAIN else options.code, options.scale, _empty_like(query)
        if masks is NO_TENSORS and options.window is None and options.softcap is None:
            lse = _launch(query, key, value, result, return_lse, code, scale)
        elif options.is_causal and masks.attn_mask is not None:
            return None
        else:
            left, right = options.window or (-1, -1)
            rest = left, right, options.softcap
            lse = _launch_masked(query, key, value, result, return_lse, code, scale, *masks, *rest)
    except MISSES:
        return None
    if lse is None:
        return None
    return result, lse if return_lse else None


def first_call(
    inputs: Inputs, masks: MaskTensors, options: Options, return_lse: bool, out: torch.Tensor | None
) -> Result:
    """Validate a call that has no plan, make the plan, and launch; also all calls that no kernel is needed for.

    Raises:
        MicrosdpaError: as sdpa.
    """
    query, key, value = inputs
    is_causal, causal, scale, enable_gqa, window, softcap, impl = options
    given = masks.attn_mask, window, softcap, masks.alibi_slopes, masks.sinks
    alignment, scale, valid = validate_call(query, key, value, is_causal, causal, scale, enable_gqa, out, impl, given)
    if is_empty(query, key):
        result = torch.zeros_like(query) if out is None else out.zero_()
        lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
        if valid.sinks is not None:
            lse.copy_(valid.sinks[:, None].expand_as(lse))
        return result, lse if return_lse else None
    if emulated(impl):
        return _emulate(inputs, alignment, scale, valid, return_lse, out, impl)
    if query.device.type == "cpu":
        check_cpu_impl(impl)
        result, cpu_lse = torch_cpu.attend(query, key, value, alignment, scale, valid, return_lse)
        return result if out is None else out.copy_(result), cpu_lse

    result = torch.empty_like(query) if out is None else out
    prepare(inputs, result, alignment, valid, options)
    found = launcher.found(launch_planned(inputs, result, return_lse, scale, valid, options.code))
    return result, found if return_lse else None


def launch_planned(
    inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | bool, scale: float | None, masks: Masks, code: int
) -> Any:
    """Launch a validated call whose plan is registered, and give what launcher.launch does."""
    if masks.kind is None:
        return _launch(*inputs, out, lse, code, scale)
    arrays = masks.attn_mask, masks.alibi_slopes, masks.sinks
    return _launch_masked(*inputs, out, lse, code, scale, *arrays, *masks.ends, masks.softcap)


def prepare(inputs: Inputs, out: torch.Tensor, alignment: Causal | None, masks: Masks, options: Options) -> None:
    """Compile the kernel for validated CUDA tensors and register the plan of the call.

    Raises:
        MicrosdpaError: as sdpa.
    """
    problem = problems.of_cuda(*inputs, out, alignment, masks)
    spec = chosen(problem, options.impl) or select(problem, options.impl).spec
    launcher.prepare(problem, spec, *inputs, out, options.code, masks)


def _emulate(
    inputs: Inputs,
    causal: Causal | None,
    scale: float | None,
    masks: Masks,
    return_lse: bool,
    out: torch.Tensor | None,
    impl: str,
) -> Result:
    """Run a kernel in the emulator."""
    from microsdpa.emulate import run  # not imported with the package: few programs need it

    query, key, value = inputs
    kernel = impl.partition(":")[2] or "auto"
    problem = problems.of_emulated(query, key, value, out, causal, masks, kernel)
    spec = select(problem, kernel).spec
    out = torch.empty_like(query) if out is None else out
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if return_lse else None
    run.attention(spec, problem, query, key, value, out, lse, scale, masks=masks)
    return out, lse
