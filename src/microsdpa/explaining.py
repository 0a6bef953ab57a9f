"""explain(): which kernel a call would run, and why."""

from __future__ import annotations

import torch

from microsdpa import eight_bit, problems
from microsdpa import masks as mask_arguments
from microsdpa.explanation import NOTHING_TO_COMPUTE, Explanation
from microsdpa.jit import is_compiled
from microsdpa.jit.signature import signature
from microsdpa.kernels.problem import Causal, Operands
from microsdpa.masks import Masks
from microsdpa.select import select
from microsdpa.validation import check_cpu_impl, emulated, is_empty, validate_call


def explain(
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
    precision: Operands | None = None,
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
) -> Explanation:
    """What sdpa would run for these arguments, without running or compiling it.

    Arguments and errors are those of sdpa. Every kernel gives the LSE: return_lse changes nothing. `out` does where its
    rows do not start on 16 bytes.
    """
    given = attn_mask, window, softcap, alibi_slopes, sinks
    scales = q_scale, k_scale, v_scale
    if precision is not None or any(scale is not None for scale in scales):
        mask_arguments.refuse(*given)
        common = is_causal, causal, scale, enable_gqa, out, impl
        return eight_bit.explain(query, key, value, precision, scales, *common)
    call = is_causal, causal, scale, enable_gqa, out, impl, given
    alignment, _, masks = validate_call(query, key, value, *call)
    return explanation(query, key, value, out, alignment, masks, impl)


def explanation(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    alignment: Causal | None,
    masks: Masks,
    impl: str,
) -> Explanation:
    """What runs for validated arguments."""
    if is_empty(query, key):
        return NOTHING_TO_COMPUTE
    if emulated(impl):
        kernel = impl.partition(":")[2] or "auto"
        problem = problems.of_emulated(query, key, value, out, alignment, masks, kernel)
        selection = select(problem, kernel)
        return Explanation(
            f"emulate:{selection.spec.name}",
            "impl asks for the emulator, on the CPU",
            selection.spec,
            rejected=selection.reasons,
            faster=selection.wishes,
        )
    if query.device.type == "cpu":
        check_cpu_impl(impl)
        return Explanation("torch", "the tensors are on the CPU, where impl='auto' uses torch's own attention")
    problem = problems.of_cuda(query, key, value, out, alignment, masks)
    selection = select(problem, impl)
    return Explanation(
        runs=selection.spec.name,
        reason="impl names it" if impl != "auto" else "it is the first kernel that computes this problem",
        spec=selection.spec,
        signature=signature(selection.spec, problem.target),
        compiled=all(is_compiled(stage, problem.target) for stage in selection.spec.stages),
        rejected=selection.reasons,
        faster=selection.wishes,
    )
