"""plan(): a call prepared once for tensors of one description, the shortest way from Python to the launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch.autograd import forward_ad

from microsdpa.attention import api
from microsdpa.attention.explain import Explanation, explanation
from microsdpa.call import tensors
from microsdpa.call.blocks import BlockTable
from microsdpa.call.call import NO_SCALES, Call, Scales, mask_tensors, scales_of
from microsdpa.call.documents import Ids
from microsdpa.call.options import Options
from microsdpa.call.prologue import NormOf, Positions, Prologue, Rotary, prologue_of
from microsdpa.call.scales import known_positive
from microsdpa.call.validate import check
from microsdpa.call.visibility import combined, with_causal
from microsdpa.errors import InvalidArgument
from microsdpa.execution import forward
from microsdpa.kernels.problem import VECTOR_BYTES, Causal, Precision
from microsdpa.runtime import launcher

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MASK_TENSORS = ("attn_mask", "alibi_slopes", "sinks")
"""Those of the masks that every call of a plan is given anew."""
SCALES = ("q_scale", "k_scale", "v_scale")

NOT_PICKLED = "a plan: it belongs to its process; pickle what plan() was given, and call plan() there"
"""The qualified name of plans: pickle's error quotes it."""


@dataclass(frozen=True)
class Layout:
    """What a plan fixes of one tensor. The stride of a dimension of size one says nothing and is kept as 0."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a tensor."""
        shape = tuple(tensor.shape)
        strides = (stride if size > 1 else 0 for size, stride in zip(shape, tensor.stride(), strict=True))
        return cls(shape, tuple(strides), tensor.dtype, tensor.device)


@runtime_checkable
class Plan(Protocol):
    """An attention call that is prepared for tensors of one description; plan() makes it.

    Calling it with (query, key, value, out=None) is sdpa with the options of the plan, without the work that depends on
    shapes and options alone. A plan that was made with attn_mask, document_ids, block_mask, alibi_slopes or sinks is
    given one in every call too, by name; its window and soft cap are fixed. A plan for quantized values keeps its
    scales, and takes others in the place of all of them, by name. The tensors must have the shapes, strides, dtypes and
    device that the plan was made for, and be as aligned; their memory may be any other. Without `out` an output is
    allocated, as sdpa does. A plan may be called by several threads, on any stream, and within a capture.

    Attributes:
        explanation: which kernel runs, and why.
    """

    explanation: Explanation

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        **masks: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of these tensors: the output, or (output, LSE) for a plan with return_lse.

        Raises:
            InvalidArgument: a tensor is not what the plan was made for.
            UnsupportedProblem: an input requires grad, or has a forward-mode gradient.
        """


@dataclass(frozen=True)
class Expected:
    """What the calls of a plan must be given, and the options of sdpa that they stand for.

    Attributes:
        layouts: of query, key, value and out, and of the tensors among the masks.
        aligned: whether the kernel needs rows of query, key, value and out that start on 16 bytes.
        options: keyword arguments of sdpa, `out` apart.
        dtype: of an output that is allocated; None for that of query.
        becomes_mask: which of attn_mask, document_ids and block_mask become the mask together; empty where an attn_mask
            is given as it is, or none.
    """

    layouts: dict[str, Layout]
    aligned: bool
    options: dict[str, Any]
    dtype: torch.dtype | None = None
    becomes_mask: tuple[str, ...] = ()

    def check_becomes_mask(self, **given: object) -> None:
        """Refuse other ones of attn_mask, document_ids and block_mask than the plan was made with.

        Raises:
            InvalidArgument: there is one more, or one less.
        """
        for name, one in given.items():
            if (one is not None) != (name in self.becomes_mask):
                expected = "one, as the plan has" if one is None else "None, as the plan has"
                hint = "pass what the plan was made with, or make another plan"
                raise InvalidArgument(name, expected=expected, got=type(one).__name__, hint=hint)

    def check(self, name: str, tensor: object) -> None:
        """Refuse a tensor that is not what the plan was made for.

        Raises:
            InvalidArgument: it is not.
        """
        hint = "pass tensors like those that the plan was made with, or make another plan"
        if name not in self.layouts:
            if tensor is not None:
                raise InvalidArgument(name, expected="None, as the plan has", got=type(tensor).__name__, hint=hint)
            return
        expected = self.layouts[name]
        if name == "out" and tensor is None:
            if expected != _output_layout(self.layouts["query"], self.layouts["value"], self.dtype):
                given = f"a tensor with strides {expected.strides}, as the plan was made with"
                raise InvalidArgument(name, expected=given, got="None", hint=hint)
            return
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(name, expected="a torch.Tensor", got=type(tensor).__name__, hint=hint)
        if tensor.layout != torch.strided:
            raise InvalidArgument(name, expected="a dense tensor", got=str(tensor.layout), hint=hint)
        found = Layout.of(tensor)
        for what in ("shape", "dtype", "device", "strides"):
            want, got = getattr(expected, what), getattr(found, what)
            if want != got:
                raise InvalidArgument(name, expected=f"{what} {want}, as the plan has", got=str(got), hint=hint)
        if self.aligned and name not in (*MASK_TENSORS, *SCALES) and not tensors.is_aligned(tensor):
            want = f"an address that is a multiple of {VECTOR_BYTES} bytes, as the plan has"
            raise InvalidArgument(name, expected=want, got=hex(tensor.data_ptr()), hint=hint)


def make_plan(launch: Callable[..., Any], expected: Expected, explanation: Explanation) -> Plan:
    """The function that a plan is: Python calls it a quarter of a microsecond faster than an object with __call__."""
    return_lse = expected.options["return_lse"]
    is_grad_enabled, allocated = torch.is_grad_enabled, _allocation(expected)

    def prepared(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        try:
            if forward_ad._current_level < 0 and not (
                is_grad_enabled()
                and (
                    query.requires_grad
                    or key.requires_grad
                    or value.requires_grad
                    or (out is not None and out.requires_grad)
                )
            ):
                result = allocated(query) if out is None else out
                lse = launch(query, key, value, result, return_lse)
                if lse is not None:
                    return (result, lse) if return_lse else result
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
            pass  # the checks below say which argument is wrong; a launch that failed otherwise fails in sdpa again
        for name, tensor in (("query", query), ("key", key), ("value", value), ("out", out)):
            expected.check(name, tensor)
        tensors.check_grad({"query": query, "key": key, "value": value})
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
        found = api.sdpa(query, key, value, out=out, **expected.options)
        return found

    prepared.__doc__, prepared.__qualname__ = Plan.__call__.__doc__, NOT_PICKLED
    plan = cast(Plan, prepared)
    plan.explanation = explanation
    return plan


def make_masked_plan(launch: Callable[..., Any], expected: Expected, explanation: Explanation) -> Plan:
    """make_plan for a call with masks, whose tensors are given by name."""
    return_lse = expected.options["return_lse"]
    is_grad_enabled, allocated = torch.is_grad_enabled, _allocation(expected)

    def prepared(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        document_ids: Ids | None = None,
        block_mask: BlockMask | BlockTable | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        made = expected.becomes_mask
        if made or document_ids is not None or block_mask is not None:
            expected.check_becomes_mask(attn_mask=attn_mask, document_ids=document_ids, block_mask=block_mask)
            attn_mask = combined((query, key, value), attn_mask, document_ids, block_mask)
        masks = attn_mask, alibi_slopes, sinks
        try:
            given = query, key, value, out, *masks
            if forward_ad._current_level < 0 and not (
                is_grad_enabled() and any(tensor.requires_grad for tensor in given if tensor is not None)
            ):
                result = allocated(query) if out is None else out
                lse = launch(query, key, value, result, return_lse, *masks)
                if lse is not None:
                    return (result, lse) if return_lse else result
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
            pass  # as above
        named: dict[str, Any] = dict(zip(MASK_TENSORS, masks, strict=True))
        inputs = {"query": query, "key": key, "value": value, **named}
        for name, tensor in {**inputs, "out": out}.items():
            if not made or name != "attn_mask":  # other documents may become another kind of mask
                expected.check(name, tensor)
        tensors.check_grad({name: tensor for name, tensor in inputs.items() if tensor is not None})
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
        found = api.sdpa(query, key, value, out=out, **named, **expected.options)
        return found

    prepared.__doc__, prepared.__qualname__ = Plan.__call__.__doc__, NOT_PICKLED
    plan = cast(Plan, prepared)
    plan.explanation = explanation
    return plan


def make_scaled_plan(
    launch: Callable[..., Any], expected: Expected, explanation: Explanation, kept: tuple[Scales, Scales]
) -> Plan:
    """make_masked_plan for quantized values.

    `kept` are the scales as the plan was given them, and as tensors of the shapes that the kernel reads.
    """
    return_lse, dtype, (given, checked) = expected.options["return_lse"], expected.dtype, kept
    empty_like = torch.empty_like

    def prepared(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        document_ids: Ids | None = None,
        block_mask: BlockMask | BlockTable | None = None,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        made = expected.becomes_mask
        if made or document_ids is not None or block_mask is not None:
            expected.check_becomes_mask(attn_mask=attn_mask, document_ids=document_ids, block_mask=block_mask)
            attn_mask = combined((query, key, value), attn_mask, document_ids, block_mask)
        masks = attn_mask, alibi_slopes, sinks
        is_own = q_scale is None and k_scale is None and v_scale is None
        scales: tuple[Any, ...] = checked if is_own else (q_scale, k_scale, v_scale)
        result = out
        try:
            if result is None:
                result = empty_like(query, dtype=dtype)
            known = known_positive(scales) and not tensors.require_grad(*masks, out)
            if known and forward_ad._current_level < 0:
                lse = launch(query, key, value, result, return_lse, *masks, *scales)
                if lse is not None:
                    return (result, lse) if return_lse else result
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
            pass  # as above
        named: dict[str, Any] = dict(zip(MASK_TENSORS, masks, strict=True))
        for name, tensor in {"query": query, "key": key, "value": value, **named, "out": out}.items():
            if not made or name != "attn_mask":
                expected.check(name, tensor)
        if not is_own:
            for name, scale in zip(SCALES, scales, strict=True):
                expected.check(name, scale)
        named |= zip(SCALES, given if is_own else scales, strict=True)
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
        found = api.sdpa(query, key, value, out=result, **named, **expected.options)
        return found

    prepared.__doc__, prepared.__qualname__ = Plan.__call__.__doc__, NOT_PICKLED
    plan = cast(Plan, prepared)
    plan.explanation = explanation
    return plan


def _layouts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype
) -> dict[str, Layout]:
    """Layouts of a plan's tensors, `out` as it is or as it will be allocated, of that type."""
    found = {name: Layout.of(tensor) for name, tensor in (("query", query), ("key", key), ("value", value))}
    return found | {"out": _output_layout(found["query"], found["value"], dtype) if out is None else Layout.of(out)}


def _output_layout(query: Layout, value: Layout, dtype: torch.dtype | None) -> Layout:
    """Layout of the output that is allocated for a query; of query's type where `dtype` is None."""
    shape = (*query.shape[:-1], value.shape[-1])
    strides = tensors.allocated_strides(shape, query.strides)
    kept = (stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))
    return Layout(shape, tuple(kept), dtype or query.dtype, query.device)


def _allocation(expected: Expected) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives a plan's calls their output, from query."""
    query, value = (expected.layouts.get(name) for name in ("query", "value"))
    if query is None or value is None or query.shape[-1] == value.shape[-1]:
        return torch.empty_like
    like = torch.empty(()).expand(value.shape)  # whose shape alone is looked at
    return lambda query: tensors.new_output(query, like)


def _no_launch(*_: object) -> None:
    """The launch of a plan that runs nothing on a GPU: always a miss."""


def _with_prologue(launch: Callable[..., Any], prologue: Prologue) -> Callable[..., Any]:
    """The launch of a plan with norms or rotary embedding, which keeps their tensors."""
    *kept, _, _, _ = prologue.arguments(0)
    no_masks, no_scales = (None,) * len(MASK_TENSORS), (None,) * 4  # and no gradient of the output

    def launched(query: Any, key: Any, value: Any, out: Any, lse: Any, *masks: Any) -> Any:
        return launch(query, key, value, out, lse, *(masks or no_masks), *no_scales, *kept)

    return launched


def plan(
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
    precision: Precision | None = None,
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    document_ids: Ids | None = None,
    block_mask: BlockMask | BlockTable | None = None,
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    rotary: Rotary | None = None,
    rotary_interleaved: bool = False,
    rotary_positions: Positions | tuple[Positions, Positions | None] | None = None,
    q_norm: NormOf | None = None,
    k_norm: NormOf | None = None,
    norm_eps: float = 1e-6,
) -> Plan:
    """Prepare attention for tensors like these: choose, compile and load the kernel, but compute nothing.

    Arguments and errors are those of sdpa. There is no plan for a cache of 8 bits beside a 16-bit query. The contents
    of the tensors do not matter, and are not kept, but for scales. With `out`, the plan's calls must be given an output
    of its layout; without, they may be given one of the layout that sdpa allocates, as torch.empty_like(query) has for
    a dense query. With `precision` the calls quantize, as those of sdpa. With attn_mask, alibi_slopes or sinks, every
    call is given its own of the same layout; with document_ids or block_mask, its own of the same lengths. The tensors
    of rotary, rotary_positions, q_norm and k_norm are kept, and are those of every call.
    """
    becomes_mask: tuple[str, ...] = ()
    if document_ids is not None or block_mask is not None:
        parts = {"attn_mask": attn_mask, "document_ids": document_ids, "block_mask": block_mask}
        becomes_mask = tuple(name for name, part in parts.items() if part is not None)
        is_causal, causal = False, with_causal(is_causal, causal, attn_mask)
        attn_mask = combined((query, key, value), attn_mask, document_ids, block_mask)
    masks = mask_tensors(attn_mask, alibi_slopes, sinks)
    scales = scales_of(q_scale, k_scale, v_scale)
    given = Options(is_causal, causal, scale, enable_gqa, window, softcap, impl, precision)
    prologue = prologue_of(rotary, rotary_interleaved, rotary_positions, q_norm, k_norm, norm_eps)
    inputs = query, key, value
    checked = check(Call(inputs, masks, scales, given, return_lse, out, prologue=prologue))
    graded = {"query": query, "key": key, "value": value, **checked.masks.tensors}
    tensors.check_grad(graded if prologue is None else graded | prologue.tensors)
    launch: Callable[..., Any] = _no_launch
    aligned = False
    if query.device.type == "cuda" and not (checked.is_empty or checked.emulated):
        like_out = checked.output()
        forward.prepare(checked, like_out)
        launch = forward.prepared(checked, like_out)
        if prologue is not None:
            launch = _with_prologue(launch, prologue)
        aligned = launcher.alignment(query, key, value, like_out) == VECTOR_BYTES
    layouts = _layouts(query, key, value, out, checked.dtype)
    options = given._asdict() | {"scale": checked.scale, "return_lse": return_lse}
    if prologue is not None:
        options |= {"rotary": rotary, "rotary_interleaved": rotary_interleaved, "rotary_positions": rotary_positions}
        options |= {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": norm_eps}
    if checked.masks.kind is None and scales is NO_SCALES:
        return make_plan(launch, Expected(layouts, aligned, options), explanation(checked))
    layouts |= {name: Layout.of(tensor) for name, tensor in checked.masks.tensors.items()}
    if scales is NO_SCALES:
        expected = Expected(layouts, aligned, options, becomes_mask=becomes_mask)
        return make_masked_plan(launch, expected, explanation(checked))
    named = zip(SCALES, scales, checked.scales, strict=True)
    of_scales = {name: one if isinstance(one, torch.Tensor) else made for name, one, made in named}
    layouts |= {name: Layout.of(one) for name, one in of_scales.items() if isinstance(one, torch.Tensor)}
    expected = Expected(layouts, aligned, options, checked.dtype, becomes_mask)
    return make_scaled_plan(launch, expected, explanation(checked), (scales, checked.scales))
