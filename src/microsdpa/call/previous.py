"""The output and the LSE of other keys that a call goes on from: partial attention."""

from __future__ import annotations

import torch

from microsdpa.call import tensors
from microsdpa.call.call import Call
from microsdpa.call.masks import Masks
from microsdpa.errors import InvalidArgument, UnsupportedProblem

NAME = "continue_from"
HINT = "pass what sdpa(..., return_lse=True) gave for the same queries and other keys"


def refuse_beside(call: Call) -> None:
    """Refuse options that no kernel has beside an output of other keys.

    Raises:
        UnsupportedProblem: there is one.
    """
    named = (
        ("8-bit operands", "precision=None and 16-bit tensors", call.is_eight_bit),
        ("dropout", "dropout_p=0.0", call.options.dropout_p != 0.0),
        ("norms and rotary embedding", "rotary, q_norm and k_norm None", call.prologue is not None),
    )
    for what, nearest, there in named:
        if there:
            raise UnsupportedProblem(f"there is no {NAME} beside {what}", nearest=nearest)


def check(call: Call, masks: Masks) -> None:
    """Types, shapes, strides and memory of the two tensors.

    Raises:
        InvalidArgument: they are not an output and an LSE of the call's queries, or `out` is there too.
        UnsupportedProblem: a gradient would be expected.
    """
    (query, key, value), given = call.inputs, call.previous
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise InvalidArgument(NAME, expected="(output, LSE)", got=type(given).__name__, hint=HINT)
    output, lse = given
    if call.out is not None:
        raise InvalidArgument(
            "out", expected=f"None beside {NAME}, whose output is written to", got="a tensor", hint="leave it out"
        )
    others = tuple(masks.tensors.values())
    tensors.check_out(output, query, query.dtype, (*call.inputs, *others), value.shape[-1], name=NAME)
    if not isinstance(lse, torch.Tensor):
        raise InvalidArgument(NAME, expected="an LSE in the second place", got=type(lse).__name__, hint=HINT)
    shape = query.shape[:3]
    for what, want, got in (
        ("shape", list(shape), list(lse.shape)),
        ("dtype", torch.float32, lse.dtype),
        ("device", query.device, lse.device),
    ):
        if want != got:
            raise InvalidArgument(NAME, expected=f"an LSE of {what} {want}", got=str(got), hint=HINT)
    if not lse.is_contiguous():
        raise InvalidArgument(
            NAME, expected="an LSE that is contiguous", got=f"strides {lse.stride()}", hint="call .contiguous()"
        )
    if any(tensors.memory_ranges_meet(lse, tensor) for tensor in (*call.inputs, *others, output)):
        raise InvalidArgument(
            NAME, expected="an LSE in memory of its own", got="a tensor that overlaps another", hint="clone it"
        )
    tensors.check_grad({"query": query, "key": key, "value": value, f"{NAME}'s LSE": lse} | masks.tensors)
