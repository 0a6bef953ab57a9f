"""8-bit keys and values beside queries of 16 bits, as caches have them: their scales, and the checks of these."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from microsdpa.call import tensors
from microsdpa.errors import InvalidArgument
from microsdpa.kernels.problem import CacheKind, CacheType

if TYPE_CHECKING:
    from microsdpa.call.call import Scales
    from microsdpa.call.sequences import Sequences

CACHE_TYPES: dict[torch.dtype, CacheType] = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}
"""Types of keys and values that kernels widen."""


LARGEST: dict[CacheType, float] = {"e4m3": 448.0, "int8": 127.0}
"""The largest value of each."""


def is_cached(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether keys have 8 bits beside queries of 16."""
    return key.dtype in CACHE_TYPES and query.dtype in tensors.DTYPES


def kind_of(key: torch.Tensor, scales: Scales) -> CacheKind | None:
    """What a kernel has to know of a cache whose scales are checked; None for one of 16 bits."""
    dtype = CACHE_TYPES.get(key.dtype)
    if dtype is None:
        return None
    given = scales.k_scale, scales.v_scale
    return CacheKind(dtype, any(has_each_token(key, scale) for scale in given if isinstance(scale, torch.Tensor)))


def has_each_token(key: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether a scale is one of every token and head: of the shape of keys, without D."""
    return scale.shape == key.shape[:-1]


def kernel_strides(key: torch.Tensor, scale: torch.Tensor) -> tuple[int, int, int]:
    """Of a checked scale: from batch entry or page to the next, head to head, and row to row; parse_scale() of varlen.h
    says the same."""
    if has_each_token(key, scale):
        *batch, row, head = scale.stride()
        return batch[0] if batch else 0, head, row
    if scale.numel() == 1 and scale.dim() < 2:
        return 0, 0, 0
    return (scale.stride(0) if scale.dim() == 2 and scale.shape[0] > 1 else 0), scale.stride(-1), 0


def check_scales(query: torch.Tensor, key: torch.Tensor, scales: Scales, sequences: Sequences) -> Scales:
    """The scales of a call of sdpa_varlen, as tensors; those that there are not are None.

    Their values stay on the device: nobody looks at them.

    Raises:
        InvalidArgument: one of them cannot belong to the call.
    """
    if scales.q_scale is not None:
        raise InvalidArgument(
            "q_scale", expected=f"None beside a {query.dtype} query", got="a scale", hint="leave it out"
        )
    if not is_cached(query, key):
        for name, scale in (("k_scale", scales.k_scale), ("v_scale", scales.v_scale)):
            if scale is not None:
                raise InvalidArgument(
                    name,
                    expected=f"None beside a {key.dtype} key",
                    got="a scale",
                    hint="scales are for float8_e4m3fn and int8 keys and values",
                )
        return scales
    k_scale = _check_scale("k_scale", scales.k_scale, query, key, sequences)
    v_scale = _check_scale("v_scale", scales.v_scale, query, key, sequences)
    of_keys, of_values = has_each_token(key, k_scale), has_each_token(key, v_scale)
    if of_keys != of_values:
        name, other = ("v_scale", v_scale) if of_keys else ("k_scale", k_scale)
        if other.dim() == 2 and other.shape[0] > 1:
            raise InvalidArgument(
                name,
                expected=f"a scalar, [H_kv] or {list(key.shape[:-1])}, beside scales of every token",
                got=f"shape {list(other.shape)}",
                hint="one scale for all sequences, or one for every token",
            )
    if sequences.new_key is not None and (of_keys or of_values):
        _check_written({"k_scale": k_scale, "v_scale": v_scale}, key, sequences)
    return scales._replace(k_scale=k_scale, v_scale=v_scale)


def _check_written(scales: dict[str, torch.Tensor], key: torch.Tensor, sequences: Sequences) -> None:
    """Check scales of every token that new keys and values get theirs in."""
    for name, scale in scales.items():
        if not has_each_token(key, scale) or tensors.overlaps_itself(scale):
            raise InvalidArgument(
                name,
                expected=f"{list(key.shape[:-1])} beside new keys, whose own scales are written, in memory of its own",
                got=f"shape {list(scale.shape)} with strides {scale.stride()}",
                hint="scales of every token for both, or of heads for both",
            )
        new = [tensor for tensor in (sequences.new_key, sequences.new_value) if tensor is not None]
        if any(tensors.memory_ranges_meet(scale, tensor) for tensor in (key, *new)):
            raise InvalidArgument(
                name,
                expected="memory that neither keys nor new ones use, since scales of new keys are written to it",
                got="a scale that overlaps them",
                hint="clone it",
            )


def _check_scale(
    name: str, scale: object, query: torch.Tensor, key: torch.Tensor, sequences: Sequences
) -> torch.Tensor:
    if scale is None:
        raise InvalidArgument(
            name,
            expected=f"a scale beside a {key.dtype} key",
            got="None",
            hint="1.0 where the 8-bit values are the numbers themselves",
        )
    scale = scale_tensor(name, scale, key)
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32 or scale.device != key.device:
        got = f"{scale.dtype} on {scale.device}" if isinstance(scale, torch.Tensor) else type(scale).__name__
        raise InvalidArgument(
            name, expected=f"a number, or a float32 tensor on {key.device}", got=got, hint="convert or move it"
        )
    heads, batch = key.shape[-2], sequences.batch(query)
    if tuple(scale.shape) not in ((), (1,), (heads,), (batch, heads), tuple(key.shape[:-1])):
        raise InvalidArgument(
            name,
            expected=f"a scalar, [{heads}], [{batch}, {heads}] or, of every token, {list(key.shape[:-1])}",
            got=f"shape {list(scale.shape)}",
            hint="scales of the call, of key heads, of these in each sequence, or of every token in the order of key",
        )
    return scale


def narrowed(rows: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., D] as 8-bit values, and their scales, [...]: those given, or that of each row's largest magnitude.

    The same bits as append.cu of ampere/varlen.
    """
    numbers, largest = rows.float(), LARGEST[CACHE_TYPES[dtype]]
    if scale is None:
        magnitudes = numbers.abs()
        scale = magnitudes.where(magnitudes < torch.inf, 0.0).amax(-1) / largest
        scale = scale.where(scale != 0.0, 1.0)
    quotient = (numbers / scale[..., None]).clamp(-largest, largest)
    return (quotient.nan_to_num(0.0).round() if dtype == torch.int8 else quotient).to(dtype), scale


def scale_tensor(name: str, scale: object, key: object) -> object:
    """A scale that is a number as a tensor, which is made once for a device; anything else as it is.

    A graph that is captured has a tensor of its own.

    Raises:
        InvalidArgument: the number is no scale.
    """
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not isinstance(key, torch.Tensor):
        return scale
    if not tensors.is_positive_factor(scale):
        raise InvalidArgument(
            name, expected="scales from 2**-126 to 2**127", got=str(scale), hint="use the scale that values have"
        )
    if key.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.full((), float(scale), dtype=torch.float32, device=key.device)
    return _number(float(scale), key.device)


@functools.lru_cache(maxsize=256)
def _number(value: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.full((), value, dtype=torch.float32, device=device)
