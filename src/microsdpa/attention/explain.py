"""explain(): which kernel a call would run, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from microsdpa.attention.varlen import check_flags
from microsdpa.call.blocks import BlockTable
from microsdpa.call.cache import scale_tensor
from microsdpa.call.cached import as_sequences, has_cache
from microsdpa.call.call import Call, mask_tensors, scales_of
from microsdpa.call.documents import Ids
from microsdpa.call.options import Options
from microsdpa.call.prologue import NormOf, Positions, Rotary, prologue_of
from microsdpa.call.sequences import Sequences
from microsdpa.call.validate import Checked, check, check_cpu_impl
from microsdpa.call.visibility import combined, with_causal
from microsdpa.execution import varlen
from microsdpa.execution.choice import problem_of
from microsdpa.jit import is_compiled
from microsdpa.jit.signature import signature
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import Causal, Precision, Problem
from microsdpa.kernels.quantize.spec import fused_for
from microsdpa.kernels.select import select

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class Explanation:
    """What sdpa would run for a call, and why.

    Attributes:
        runs: the kernel's name, or "torch" for torch's own attention.
        reason: why.
        spec: the kernel's configuration; None for torch.
        signature: the compiled kernel's identity; None for torch and in the emulator.
        compiled: whether the kernel is in memory or in the cache; None where there is no signature.
        rejected: (kernel, reason) of every candidate tried before.
        faster: (kernel, what the call would have to be) of the same candidates: those come first because they are
            faster where they run.
        quantizer: the configuration of the kernel that quantizes the tensors before; None where none does.
        prologue: where the norms and the rotary embedding of Q and K are made; empty where there are none.
        appender: the configuration of the kernel that writes new keys to a cache before; None where that of attention
            does, and where there are none.
        note: a call that would be faster, where measurements know of one; empty elsewhere.
    """

    runs: str
    reason: str
    spec: KernelSpec | None = None
    signature: str | None = None
    compiled: bool | None = None
    rejected: tuple[tuple[str, str], ...] = ()
    faster: tuple[tuple[str, str], ...] = ()
    quantizer: KernelSpec | None = None
    prologue: str = ""
    appender: KernelSpec | None = None
    note: str = ""

    def __str__(self) -> str:
        """A few lines for a person."""
        lines = [f"runs       {self.runs}", f"because    {self.reason}"]
        if self.quantizer:
            lines.append(f"quantizes  {self.quantizer.expression}")
        if self.prologue:
            lines.append(f"prologue   {self.prologue}")
        if self.appender:
            lines.append(f"appends    {self.appender.expression}")
        if self.spec:
            lines.append(f"kernel     {self.spec.expression}")
            if self.spec.heads_as_queries:
                lines.append("operands   the query heads of a key head, as the queries of one head")
            elif self.spec.grid_order in ("clusters", "resident"):
                lines.append("operands   sequences of one length, whose query heads of a key head share tiles")
        if self.signature:
            lines.append(f"signature  {self.signature} ({'compiled' if self.compiled else 'not compiled yet'})")
        if self.note:
            lines.append(f"note       {self.note}")
        lines += [f"rejected   {name}: {reason}" for name, reason in self.rejected]
        lines += [f"faster     {name}, for {nearest}" for name, nearest in self.faster]
        return "\n".join(lines)


QUANTIZES_LONGER = (
    "quantizing takes longer than attention on 16 bits does here: leave precision= out, or quantize K and V once"
)
"""Of a problem that hopper/latency_8bit computes: docs/numerics.md has the times."""
NOTHING_TO_COMPUTE = Explanation(
    "torch", "there is nothing to compute: the output is empty, or zeros where there are no keys"
)


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
    document_ids: Ids | None = None,
    block_mask: BlockMask | BlockTable | None = None,
    precision: Precision | None = None,
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    dropout_p: float = 0.0,
    rotary: Rotary | None = None,
    rotary_interleaved: bool = False,
    rotary_positions: Positions | tuple[Positions, Positions | None] | None = None,
    q_norm: NormOf | None = None,
    k_norm: NormOf | None = None,
    norm_eps: float = 1e-6,
    continue_from: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Explanation:
    """What sdpa would run for these arguments, without running or compiling it.

    Arguments and errors are those of sdpa. Every kernel gives the LSE: return_lse changes nothing. `out` does where its
    rows do not start on 16 bytes.
    """
    if document_ids is not None or block_mask is not None:
        is_causal, causal = False, with_causal(is_causal, causal, attn_mask)
        attn_mask = combined((query, key, value), attn_mask, document_ids, block_mask)
    masks, scales = mask_tensors(attn_mask, alibi_slopes, sinks), scales_of(q_scale, k_scale, v_scale)
    options = Options(is_causal, causal, scale, enable_gqa, window, softcap, impl, precision, dropout_p)
    prologue = prologue_of(rotary, rotary_interleaved, rotary_positions, q_norm, k_norm, norm_eps)
    given = (query, key, value), masks, scales, options, return_lse, out
    call = Call(*given, prologue=prologue, previous=continue_from)
    return explanation(check(as_sequences(call) if has_cache(call) else call))


def _place_of_prologue(problem: Problem, spec: KernelSpec) -> str:
    """Which launch makes the norms and the rotary embedding of a problem."""
    if problem.prologue is None:
        return ""
    first = spec.stages[0]
    ahead = "in the launch of attention" if first.changed_rows is None else f"in a launch ahead, {first.expression}"
    return f"{problem.prologue}, {ahead}"


def explain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_offsets: torch.Tensor | None = None,
    key_offsets: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    max_queries: int | None = None,
    new_key: torch.Tensor | None = None,
    new_value: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = False,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    impl: str = "auto",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    batch_invariant: bool = False,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Explanation:
    """What sdpa_varlen would run for these arguments, without running or compiling it.

    Arguments and errors are those of sdpa_varlen. The values of offsets, lengths and pages are not read: they decide
    about no kernel.
    """
    check_flags(causal, rotary_interleaved, batch_invariant)
    sequences = Sequences(
        *(query_offsets, key_offsets, lengths, page_table, max_queries),
        *(new_key, new_value, rotary_cos, rotary_sin, q_norm, k_norm),
        norm_eps=norm_eps,
        rotary_interleaved=rotary_interleaved,
        batch_invariant=batch_invariant,
    )
    options = Options(False, "lower_right" if causal else None, scale, True, window, softcap, impl)
    scales = scales_of(None, scale_tensor("k_scale", k_scale, key), scale_tensor("v_scale", v_scale, value))
    masks = mask_tensors(None, alibi_slopes, sinks)
    return explanation(check(Call((query, key, value), masks, scales, options, return_lse, out, sequences)))


def explanation(checked: Checked) -> Explanation:
    """What runs for a checked call.

    Raises:
        UnsupportedProblem: no kernel computes it.
    """
    if checked.is_empty:
        return NOTHING_TO_COMPUTE
    impl = checked.call.options.impl
    if checked.call.inputs[0].device.type == "cpu" and not checked.emulated:
        check_cpu_impl(impl)
        return Explanation("torch", "the tensors are on the CPU, where impl='auto' uses torch's own attention")
    problem = problem_of(checked)
    selection = select(problem, checked.kernel)
    spec, scheme = selection.spec, checked.scheme
    ahead: tuple[KernelSpec, ...] = ()
    if problem.varlen is not None:
        *ahead, spec = varlen.kernels_of(checked, problem, spec)  # type: ignore[assignment]
    details: dict[str, Any] = {
        "spec": spec,
        "quantizer": fused_for(scheme, problem) if scheme else None,
        "appender": next(iter(ahead), None),
        "rejected": selection.reasons,
        "faster": selection.wishes,
        "prologue": _place_of_prologue(problem, spec),
        "note": QUANTIZES_LONGER if scheme and spec.name == "hopper/latency_8bit" else "",
    }
    if checked.emulated:
        return Explanation(f"emulate:{spec.name}", "impl asks for the emulator, on the CPU", **details)
    return Explanation(
        runs=spec.name,
        reason="impl names it" if impl != "auto" else "it is the first kernel that computes this problem",
        signature=signature(spec, problem.target),
        compiled=all(is_compiled(stage, problem.target) for stage in spec.stages),
        **details,
    )
