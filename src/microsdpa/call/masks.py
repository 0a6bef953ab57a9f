"""Masks: what decides about the scores of a call beside a causal mask, and the checks of its arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch

from microsdpa.call.call import Call
from microsdpa.call.dropout import Dropping
from microsdpa.call.summary import is_summed
from microsdpa.call.tensors import TENSOR_MAP_STRIDE_LIMIT
from microsdpa.errors import InvalidArgument
from microsdpa.kernels.problem import LARGEST_FACTOR, SMALLEST_FACTOR, VECTOR_BYTES, Causal, MaskKind, MaskType

MASK_TYPES: dict[torch.dtype, MaskType] = {
    torch.bool: "bool",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.int32: "int32",
    torch.uint8: "uint8",
}
UNBOUNDED = -1
"""End of a window that hides nothing."""


@dataclass(frozen=True, eq=False)
class Masks:
    """Arguments of one call, as sdpa has them; `check` has validated them.

    Attributes:
        attn_mask: broadcastable to [B, H, S_q, S_k]: bool, where False hides, or numbers to be added; or to
            [B, H, S_q, 2]: int32, the first key that a query sees and one past the last.
        window: (left, right) ends; -1 hides nothing on that side.
        softcap: scores x become softcap * tanh(x / softcap).
        alibi_slopes: [H] or [B, H], float32.
        sinks: [H], a logit of each head that takes its share of the softmax and has no value.
        dropping: of a call that drops probabilities; it decides about none of the scores.
    """

    attn_mask: torch.Tensor | None = None
    window: tuple[int, int] | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    dropping: Dropping | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are tensors, by name."""
        found = {"attn_mask": self.attn_mask, "alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def ends(self) -> tuple[int, int]:
        """Ends of the window."""
        return self.window or (UNBOUNDED, UNBOUNDED)

    @property
    def kind(self) -> MaskKind | None:
        """What kernel selection may depend on; None when nothing is masked."""
        if self.window is None and self.softcap is None and not self.tensors:
            return None
        left, right = self.ends
        kind = MaskKind(
            tensor=None if self.attn_mask is None else MASK_TYPES[self.attn_mask.dtype],
            left=left != UNBOUNDED,
            right=right != UNBOUNDED,
            softcap=self.softcap is not None,
            alibi=self.alibi_slopes is not None,
            sinks=None if self.sinks is None else MASK_TYPES[self.sinks.dtype],
        )
        return None if kind == MaskKind() else kind

    @property
    def kind_in_memory(self) -> MaskKind | None:
        """`kind`, with what there is to know of the mask tensor's memory."""
        kind, mask = self.kind, self.attn_mask
        if kind is None or mask is None:
            return kind
        sizes, strides = (1, 1, 1, 1, *mask.shape)[-4:], (0, 0, 0, 0, *mask.stride())[-4:]
        used = [stride if size > 1 else 0 for size, stride in zip(sizes, strides, strict=True)]
        outer = [stride * mask.element_size() for stride in used[:3]]
        aligned = all(place % VECTOR_BYTES == 0 for place in (mask.data_ptr(), *outer))
        dense = kind.tensor not in ("int32", "uint8") and used[3] == 1
        bulk = dense and aligned and max(outer) < TENSOR_MAP_STRIDE_LIMIT
        return replace(
            kind,
            per_batch=used[0] != 0,
            per_head=used[1] != 0,
            per_query=used[2] != 0,
            bulk=bulk,
            unaligned=dense and not bulk and kind.tensor != "bool",
        )

    def bounds(self, causal: Causal | None, seqlen_q: int, seqlen_k: int) -> tuple[int, int, int]:
        """(position, lowest, diagonal): query i stands at key i + position; it sees i + lowest to i + diagonal."""
        left, right = self.ends
        position = seqlen_k - seqlen_q if causal == "lower_right" else 0
        furthest = position if causal is not None else position + right
        # Ends that are out of every key's reach are brought near: sums of them must stay in 32 bits.
        return position, max(position - left, -seqlen_q), min(furthest, seqlen_k)

    def visible(self, causal: Causal | None, seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor | None:
        """Boolean [S_q, S_k]: what the causal mask and the window let each query see; None for everything."""
        left, right = self.ends
        if causal is None and left == right == UNBOUNDED:
            return None
        _, lowest, diagonal = self.bounds(causal, seqlen_q, seqlen_k)
        distance = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device)[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if causal is not None or right != UNBOUNDED:
            seen &= distance <= diagonal
        if left != UNBOUNDED:
            seen &= distance >= lowest
        return seen


NONE = Masks()


def refuse_both(is_causal: bool, attn_mask: object) -> None:
    """Refuse is_causal=True beside a mask.

    Raises:
        InvalidArgument: there are both.
    """
    if is_causal and attn_mask is not None:
        raise InvalidArgument(
            "attn_mask",
            expected="None beside is_causal=True, as torch does",
            got="both",
            hint="pass causal='upper_left' or causal='lower_right' beside attn_mask to have both applied",
        )


def check(call: Call, dtype: torch.dtype) -> Masks:
    """The masks that a call with validated tensors and an output of `dtype` asks for.

    Raises:
        InvalidArgument: one of them cannot belong to the call.
    """
    (query, key, _), options = call.inputs, call.options
    attn_mask, alibi_slopes, sinks = call.masks
    if call.sequences is not None:
        batch, heads = call.sequences.batch(query), query.shape[-2]
    else:
        batch, heads = query.shape[:2]
    refuse_both(options.is_causal, attn_mask)
    if attn_mask is not None:
        check_mask(attn_mask, query, key, dtype)
    if alibi_slopes is not None:
        slopes = _check_tensor("alibi_slopes", alibi_slopes, query, (torch.float32,))
        if tuple(slopes.shape) not in ((heads,), (batch, heads)):
            raise InvalidArgument(
                "alibi_slopes",
                expected=f"shape [H] = [{heads}] or [B, H] = [{batch}, {heads}]",
                got=f"shape {list(slopes.shape)}",
                hint="one slope for each query head",
            )
    if sinks is not None:
        logits = _check_tensor("sinks", sinks, query, (dtype, torch.float32))
        if tuple(logits.shape) != (heads,):
            raise InvalidArgument(
                "sinks",
                expected=f"shape [H] = [{heads}]",
                got=f"shape {list(logits.shape)}",
                hint="one logit for each query head",
            )
    return Masks(attn_mask, _check_window(options.window), _check_softcap(options.softcap), alibi_slopes, sinks)


def check_mask(
    attn_mask: object, query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The mask of a call with query [B, H, S_q, D], key [B, H_kv, S_k, D] and an output of `dtype`, else of query's.

    Raises:
        InvalidArgument: its type, device or shape is wrong.
    """
    if is_summed(attn_mask):
        return attn_mask  # BlockTable.check has seen it
    numbers = dtype or query.dtype
    mask = _check_tensor("attn_mask", attn_mask, query, (torch.bool, numbers, torch.float32, torch.int32))
    batch, heads, seqlen_q, _ = query.shape
    if mask.dtype == torch.int32:
        _check_ranges(mask, (batch, heads, seqlen_q))
    else:
        _check_broadcast("attn_mask", mask, (batch, heads, seqlen_q, key.shape[2]), "[B, H, S_q, S_k]")
    return mask


def _check_tensor(name: str, tensor: object, query: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(
            name, expected="a torch.Tensor or None", got=type(tensor).__name__, hint="convert it with torch.as_tensor"
        )
    if tensor.layout != torch.strided:
        raise InvalidArgument(name, expected="a dense tensor", got=str(tensor.layout), hint="call .to_dense()")
    if tensor.dtype not in dtypes:
        raise InvalidArgument(
            name,
            expected=" or ".join(dict.fromkeys(map(str, dtypes))),
            got=str(tensor.dtype),
            hint=_conversion(tensor.dtype, dtypes),
        )
    if tensor.device != query.device:
        raise InvalidArgument(
            name, expected=f"a tensor on {query.device}, as query is", got=str(tensor.device), hint="move it there"
        )
    return tensor


def _conversion(given: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str:
    """How a tensor of the dtype `given` becomes one of `dtypes` and means the same."""
    if torch.bool not in dtypes:
        return f"convert it, for example with .to({dtypes[0]})"
    if given.is_floating_point:
        return "convert it, for example with .to(torch.float32)"
    return "call .to(torch.bool) if 0 hides a key, or .to(torch.float32) if numbers are added"


def _check_broadcast(name: str, tensor: torch.Tensor, shape: tuple[int, ...], letters: str) -> None:
    given = tuple(tensor.shape)
    fits = len(given) <= len(shape) and all(
        size in (1, whole) for size, whole in zip(reversed(given), reversed(shape), strict=False)
    )
    if not fits:
        raise InvalidArgument(
            name,
            expected=f"a shape that broadcasts to {letters} = {list(shape)}",
            got=f"shape {list(given)}",
            hint="each dimension, counted from the last, must be 1 or the whole; add dimensions with unsqueeze",
        )


def _check_ranges(tensor: torch.Tensor, shape: tuple[int, int, int]) -> None:
    """Refuse int32 that are no ranges, as they are not where 0 and 1 stand for a mask of booleans."""
    if tensor.dim() == 0 or tensor.shape[-1] != 2:
        raise InvalidArgument(
            "attn_mask",
            expected="for int32, which are ranges of keys, a shape that ends in 2",
            got=f"shape {list(tensor.shape)}",
            hint="call .to(torch.bool) if 0 hides a key; ranges are the first key and one past the last",
        )
    _check_broadcast("attn_mask", tensor, (*shape, 2), "[B, H, S_q, 2]")


def dense(mask: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """A mask as it is, or ranges of keys [..., S_q, 2] or a table's memory as bool [..., S_q, S_k]."""
    if mask.dtype == torch.uint8:
        return mask[..., :seqlen_k].view(torch.bool)
    if mask.dtype != torch.int32:
        return mask
    keys = torch.arange(seqlen_k, device=mask.device)
    return (keys >= mask[..., :1]) & (keys < mask[..., 1:])


def _check_window(window: object) -> tuple[int, int] | None:
    if window is None:
        return None
    ends = tuple(window) if isinstance(window, (tuple, list)) else ()
    if len(ends) != 2 or any(isinstance(end, bool) or not isinstance(end, int) or end < UNBOUNDED for end in ends):
        raise InvalidArgument(
            "window",
            expected="None or (left, right), integers of at least -1",
            got=repr(window),
            hint="-1 hides nothing on that side; (127, 0) lets a query see itself and 127 keys before",
        )
    return ends[0], ends[1]


def _check_softcap(softcap: object) -> float | None:
    if softcap is None:
        return None
    number = isinstance(softcap, (int, float)) and not isinstance(softcap, bool)
    if not number or not SMALLEST_FACTOR <= cast(float, softcap) <= LARGEST_FACTOR:
        finite = number and 0 < cast(float, softcap) < math.inf
        raise InvalidArgument(
            "softcap",
            expected="None or a number from 2**-126 to 2**127" if finite else "None or a finite number over 0",
            got=repr(softcap),
            hint="pass None for scores that are not capped",
        )
    return float(cast(float, softcap))
