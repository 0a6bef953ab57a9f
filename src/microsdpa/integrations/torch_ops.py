"""torch.ops.microsdpa: the attention as an operator, for torch.compile and autograd. Imported with the package.

attention(query, key, value, attn_mask, alibi_slopes, sinks, causal, scale, enable_gqa, window, softcap, impl,
dropout_p, rng_state) gives (output, LSE); the arguments are those of sdpa, `window` is [left, right]. A dropout has its
seed and offset in rng_state, two int64 on the tensors' device. The gradient is attention_backward.
attention_output gives the output alone, and has no gradient.
"""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch
from torch.autograd import forward_ad

from microsdpa.call.call import NO_TENSORS, Inputs, MaskTensors, mask_tensors
from microsdpa.call.dropout import Random, check_state
from microsdpa.call.masks import Masks
from microsdpa.call.options import PLAIN, Options
from microsdpa.call.tensors import new_output
from microsdpa.errors import UnsupportedProblem
from microsdpa.execution import autograd, backward, forward, transforms

_UNBOUNDED = (-1, -1)
_is_grad_enabled = torch.is_grad_enabled
_library = torch.library.Library("microsdpa", "FRAGMENT")  # type: ignore[no-untyped-call]
# A call pays for every argument that it gives: what has its default is left out on the way to the functions below.
_ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "str? causal=None, float? scale=None, bool enable_gqa=False, SymInt[2] window=[-1, -1], float? softcap=None, "
    'str impl="auto", float dropout_p=0., Tensor? rng_state=None)'
)
for _name, _result in (("attention", "(Tensor, Tensor)"), ("attention_output", "Tensor")):
    _library.define(f"{_name}{_ARGUMENTS} -> {_result}", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    causal: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: Any = _UNBOUNDED,
    softcap: float | None = None,
    impl: str = "auto",
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> tuple[Inputs, MaskTensors, Options, Random | None]:
    """The operator's arguments as the rest of the library has them.

    Raises:
        InvalidArgument: there is a dropout and no sound rng_state.
    """
    ends = None if window is _UNBOUNDED or tuple(window) == _UNBOUNDED else (window[0], window[1])
    masks = mask_tensors(attn_mask, alibi_slopes, sinks)
    options = Options(False, causal, scale, enable_gqa, ends, softcap, impl, None, dropout_p)
    random = Random(check_state(rng_state, query)) if dropout_p else None
    return (query, key, value), masks, options, random


def _forward(*arguments: Any) -> forward.Result:
    """Output [B, H, S_q, D], in the memory order of query, and LSE [B, H, S_q]; arguments and errors as in sdpa."""
    inputs, masks, options, random = _call(*arguments)
    return forward.attend(inputs, masks, options, True, random)


def _output(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The output [B, H, S_q, D] alone.

    Raises:
        UnsupportedProblem: an input requires grad, which this operator has none of.
    """
    inputs, masks, options, random = _call(query, key, value, *rest) if rest else _plain(query, key, value)
    if forward_ad._current_level >= 0:
        transforms.refuse_tangents(*inputs, *masks)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *masks) if t is not None):
        raise UnsupportedProblem("attention_output has no gradient", nearest="torch.ops.microsdpa.attention")
    return forward.attend(inputs, masks, options, False, random)[0]


def _plain(*inputs: torch.Tensor) -> tuple[Inputs, MaskTensors, Options, Random | None]:
    return inputs, NO_TENSORS, PLAIN, None  # type: ignore[return-value]


def _differentiable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> forward.Result:
    """The operator where autograd looks at it: with a gradient when an input wants one."""
    inputs, masks, options, random = _call(query, key, value, *rest) if rest else _plain(query, key, value)
    if forward_ad._current_level >= 0:
        transforms.refuse_tangents(*inputs, *masks)
    eager = autograd.is_eager(inputs)
    if torch.is_grad_enabled():
        graded = query.requires_grad or key.requires_grad or value.requires_grad
        if graded or any(t is not None and t.requires_grad for t in masks):
            if transforms.are_active():
                raise UnsupportedProblem("the operator has no gradient under torch.func", nearest="microsdpa.sdpa")
            return autograd.record(inputs, masks, options, eager, None if random is None else random.drawn)
    if eager:
        return forward.attend(inputs, masks, options, True, random)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.microsdpa.attention.default(query, key, value, *rest)  # type: ignore[no-any-return]


def _call_directly(operator: Any, return_lse: bool) -> None:
    """Launch a call of an operator, or of its overload, at once where it has a plan.

    One that somebody else has to see goes through torch's dispatcher. Graphs of torch.compile call the overload.
    """
    kind = type(operator)

    class Direct(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *given: Any, **named: Any) -> Any:
            """The operator's result."""
            try:
                plain = len(given) == 3 and not named
                inputs, masks, options, random = _plain(*given) if plain else _call(*given, **named)
                if autograd.is_eager(inputs) and not _is_differentiated(inputs, masks):
                    found = forward.launch(inputs, masks, options, return_lse, random)
                    if found is not None:
                        return found if return_lse else found[0]
            except (AttributeError, TypeError):
                pass  # the dispatcher says which argument is wrong
            return super().__call__(*given, **named)

    operator.__class__ = Direct


def _is_differentiated(inputs: Inputs, masks: MaskTensors) -> bool:
    """Whether autograd has to see a call: an input requires grad, or may have a tangent."""
    if forward_ad._current_level >= 0:
        return True
    if not _is_grad_enabled():
        return False
    query, key, value = inputs
    return (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (masks is not NO_TENSORS and any(t is not None and t.requires_grad for t in masks))
    )


_library.impl("attention", _forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("attention_output", _output, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("attention", _differentiable, "Autograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("microsdpa::attention", lib=_library)  # type: ignore[untyped-decorator]
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return new_output(query, value), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.register_fake("microsdpa::attention_output", lib=_library)  # type: ignore[untyped-decorator]
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return new_output(query, value)


for _operator, _has_lse in ((torch.ops.microsdpa.attention, True), (torch.ops.microsdpa.attention_output, False)):
    _call_directly(_operator.default, _has_lse)
    _call_directly(_operator, _has_lse)


@torch.library.custom_op("microsdpa::attention_backward", mutates_args=())
def attention_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: str | None,
    scale: float | None,
    window: list[int],
    softcap: float | None,
    wanted: list[bool],
    impl: str,
    dropout_p: float,
    rng_state: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Gradients of query, key, value and of a float attn_mask, alibi_slopes and sinks, in this order.

    Of the last three it gives those that are there and, by one bool for each, `wanted`.
    """
    dropping = (dropout_p, check_state(rng_state, query)) if dropout_p else None
    masks = Masks(attn_mask, (window[0], window[1]), softcap, alibi_slopes, sinks, dropping)
    inputs, result = (query, key, value), (out, lse)
    rest = causal, scale, masks, tuple(compress(backward.ALL, wanted)), impl
    return backward.gradients((grad_out, grad_lse), inputs, result, *rest)  # type: ignore[arg-type]


@attention_backward.register_fake
def _(grad_out: torch.Tensor, grad_lse: torch.Tensor | None, *given: Any) -> list[torch.Tensor]:
    tensors = *given[:3], *compress(given[3:6], given[-4])  # the inputs, and the masks' that are wanted
    return [torch.empty_like(tensor) for tensor in tensors if tensor is not None and tensor.is_floating_point()]


attention_backward.register_autograd(transforms.refuse_second_order)


@attention_backward.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[list[torch.Tensor], list[int]]:
    """One call for each element of a batch of torch.vmap, as jacobians have."""
    found = []
    for i in range(info.batch_size):
        one = (a.select(dim, i) if isinstance(dim, int) else a for a, dim in zip(arguments, in_dims, strict=True))
        found.append(attention_backward(*one))
    stacked = [torch.stack(gradients) for gradients in zip(*found, strict=True)]
    return stacked, [0] * len(stacked)
