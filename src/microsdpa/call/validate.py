"""The check of a whole call: the one that every way to call attention goes through."""

from __future__ import annotations

from typing import NamedTuple

import torch

from microsdpa.call import cache as cache_checks
from microsdpa.call import dropout as dropout_checks
from microsdpa.call import masks as mask_checks
from microsdpa.call import previous as previous_checks
from microsdpa.call import prologue as prologue_checks
from microsdpa.call import scales as scale_checks
from microsdpa.call import sequences as sequence_checks
from microsdpa.call import tensors
from microsdpa.call.call import NO_SCALES, NO_TENSORS, Call, Scales
from microsdpa.call.masks import Masks
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.kernels.problem import Causal, Operands
from microsdpa.kernels.quantize.spec import SCHEMES, UNSMOOTHED, QuantizationScheme


class Checked(NamedTuple):
    """A call whose arguments are valid.

    Attributes:
        kernel: "auto", or the name of a kernel.
        emulated: whether it runs in the emulator.
        causal: alignment of the causal mask.
        scale: of the softmax; None for 1/sqrt(D).
        operands: what the kernel reads in 8 bits; None for 16 bits.
        dtype: of the output.
        scales: of 8-bit values, or of an 8-bit cache: FP32 tensors; none where there is nothing to compute.
    """

    call: Call
    kernel: str
    emulated: bool
    causal: Causal | None
    scale: float | None
    masks: Masks
    dtype: torch.dtype = torch.float16
    operands: Operands | None = None
    scales: Scales = NO_SCALES

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        query, key, _ = self.call.inputs
        if (sequences := self.call.sequences) is not None:
            return query.numel() == 0 or key.numel() == 0 or sequences.most_keys(key) == 0
        return query.numel() == 0 or key.shape[2] == 0

    @property
    def scheme(self) -> QuantizationScheme | None:
        """How the call quantizes its inputs; None where it does not."""
        precision, masks = self.call.options.precision, self.masks
        shifted = masks.softcap is None and masks.sinks is None  # scores may move by one amount in all of a row
        return (SCHEMES if shifted else UNSMOOTHED)[precision] if precision else None

    @property
    def factor(self) -> float:
        """Scale of the softmax."""
        return float(self.call.inputs[0].shape[-1] ** -0.5) if self.scale is None else self.scale

    @property
    def value_dim(self) -> int:
        """Columns of value and the output; 0 where query has as many."""
        query, _, value = self.call.inputs
        return 0 if value.shape[-1] == query.shape[-1] else value.shape[-1]

    def output(self) -> torch.Tensor:
        """The tensor to write to: `out`, the output that the call goes on from, or memory in the order of query."""
        query, _, value = self.call.inputs
        if self.call.out is not None:
            return self.call.out
        if self.call.previous is not None:
            return self.call.previous[0]
        if self.operands is not None:
            return torch.empty_like(query, dtype=self.dtype)
        return tensors.new_output(query, value)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """[B, H, S_q], or [H, queries] for packed queries."""
        query, sequences = self.call.inputs[0], self.call.sequences
        if sequences is None:
            return tuple(query.shape[:3])
        if sequences.query_offsets is not None:
            return query.shape[1], query.shape[0]
        return query.shape[0], query.shape[2], query.shape[1]


def check(call: Call) -> Checked:
    """Check all arguments.

    Raises:
        InvalidArgument: an argument that no call could accept.
        UnsupportedProblem: no kernel computes a call of that kind.
    """
    options, (query, key, value), eight_bit = call.options, call.inputs, call.is_eight_bit
    if call.previous is not None:
        previous_checks.refuse_beside(call)
    if eight_bit:
        if options.dropout_p:
            raise UnsupportedProblem(
                "the kernels for 8-bit operands drop no probabilities", nearest="dropout_p=0.0, or precision=None"
            )
        if call.prologue is not None:
            raise UnsupportedProblem(
                "there are no norms and no rotary embedding beside 8-bit operands",
                nearest="precision=None and 16-bit tensors for rotary, q_norm and k_norm",
            )
    varlen = call.sequences is not None
    kernel, emulated = tensors.kernel_of(tensors.check_impl(options.impl, eight_bit, varlen))
    causal = tensors.check_causal(options.is_causal, options.causal)
    scale = tensors.check_scale(options.scale)
    dropout_checks.check(options.dropout_p)
    tensors.check_not_nested(query=query, key=key, value=value)
    if call.masks is not NO_TENSORS:
        tensors.check_not_nested(**call.masks._asdict())
    if eight_bit:
        return _check_eight_bit(Checked(call, kernel, emulated, causal, scale, mask_checks.NONE))
    if call.sequences is not None:
        sequence_checks.check(query, key, value, call.sequences)
    else:
        tensors.check_tensors(query, key, value, options.enable_gqa, one_head_dim=False)
    if query.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            "query",
            expected="a tensor on a CUDA device or the CPU",
            got=str(query.device),
            hint="move it to CUDA",
        )
    if call.prologue is not None:
        prologue_checks.check(call.prologue, query, key, call.shift)
        prologue_checks.check_addresses(call.prologue)
    masks, scales = mask_checks.check(call, query.dtype), NO_SCALES
    if call.sequences is not None:
        scales = cache_checks.check_scales(query, key, call.scales, call.sequences)
    if call.out is not None:
        others = *masks.tensors.values(), *(scale for scale in scales if isinstance(scale, torch.Tensor))
        if call.sequences is not None:
            others = *others, *call.sequences.tensors.values(), *call.sequences.appended.values()
        if call.prologue is not None:
            others = *others, *call.prologue.tensors.values()
        tensors.check_out(call.out, query, query.dtype, (*call.inputs, *others), value.shape[-1])
    if call.previous is not None:
        previous_checks.check(call, masks)
    return Checked(call, kernel, emulated, causal, scale, masks, query.dtype, scales=scales)


def _check_eight_bit(checked: Checked) -> Checked:
    """check() of what calls with 8-bit operands have more or otherwise."""
    call, (query, key, value) = checked.call, checked.call.inputs
    tensors.check_not_nested(out=call.out)
    if call.options.precision is not None:
        operands = SCHEMES[scale_checks.check_precision(call)].operands
        tensors.check_tensors(query, key, value, call.options.enable_gqa)
    else:
        operands = scale_checks.check_values(query, key, value, call.options.enable_gqa)
    dtype = scale_checks.output_type(query, value, call.out)
    masks = mask_checks.check(call, dtype)
    named = {"query": query, "key": key, "value": value}
    tensors.check_grad(named | masks.tensors)
    scale_checks.check_place(query, checked.emulated)
    if call.out is not None:
        given = (scale for scale in call.scales if isinstance(scale, torch.Tensor))
        tensors.check_out(call.out, query, dtype, (*call.inputs, *masks.tensors.values(), *given))
        named["out"] = call.out
    checked = checked._replace(dtype=dtype, operands=operands, masks=masks)
    if checked.is_empty:
        return checked
    scale_checks.check_aligned(named)
    if call.has_values:
        checked = checked._replace(scales=scale_checks.check_scales(*call.inputs, call.scales))
    return checked


def check_cpu_impl(impl: str) -> None:
    """Refuse to replace a kernel that was asked for by name."""
    if not runs_on_cpu(impl):
        raise UnsupportedProblem(
            f"impl {impl!r} runs on CUDA tensors and query is on the CPU",
            nearest=f"CUDA tensors; on the CPU impl='auto', which is torch's own, or impl='emulate:{impl}'",
        )


def runs_on_cpu(impl: str) -> bool:
    """Whether CPU tensors can be computed with `impl`."""
    return impl == "auto" or tensors.kernel_of(impl)[1]
