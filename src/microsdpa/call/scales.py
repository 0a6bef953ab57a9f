"""Checks of calls with 8-bit operands: precision, 8-bit values and their scales."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from microsdpa.call import tensors
from microsdpa.call.call import Call, Scales
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.kernels.problem import PRECISIONS, Operands, Precision

FORMAT_DTYPE: dict[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "sim_u8": torch.uint8}
"""Types of quantized values."""
VALUE_DTYPES = (torch.float8_e4m3fn, torch.int8)
"""Those that kernels read."""
_OPERANDS: dict[tuple[torch.dtype, ...], Operands] = {
    (torch.float8_e4m3fn,) * 3: "fp8",
    (torch.int8, torch.int8, torch.float8_e4m3fn): "int8_fp8",
    (torch.int8, torch.int8, torch.float16): "int8_fp16",
    (torch.int8, torch.int8, torch.bfloat16): "int8_fp16",
}
_KNOWN = "three float8_e4m3fn tensors, or int8 query and key with a float8_e4m3fn, float16 or bfloat16 value"


def check_precision(call: Call) -> Precision:
    """The precision that a call asks for."""
    precision = call.options.precision
    if precision not in PRECISIONS:
        known = ", ".join(map(repr, PRECISIONS))
        raise InvalidArgument(
            "precision", expected=f"None or one of {known}", got=repr(precision), hint="None keeps the tensors' type"
        )
    if call.has_values:
        raise InvalidArgument(
            "precision",
            expected="no scales beside it: it quantizes float16 or bfloat16 tensors itself",
            got="q_scale, k_scale or v_scale",
            hint="pass quantized values with scales, or tensors with a precision",
        )
    return precision


def check_values(query: object, key: object, value: object, enable_gqa: object) -> Operands:
    """Operands of a call with 8-bit values."""
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(
                name,
                expected="a torch.Tensor",
                got=type(tensor).__name__,
                hint="pass quantized values, as quantize() gives",
            )
    assert isinstance(query, torch.Tensor)
    assert isinstance(key, torch.Tensor)
    assert isinstance(value, torch.Tensor)
    dtypes = query.dtype, key.dtype, value.dtype
    if dtypes not in _OPERANDS:
        raise InvalidArgument(
            "query, key, value",
            expected=f"with scales: {_KNOWN}",
            got=", ".join(map(str, dtypes)),
            hint="quantize() all of them to one type, or pass precision= instead of scales",
        )
    tensors.check_layouts(query, key, value, enable_gqa)
    return _OPERANDS[dtypes]


def output_type(query: torch.Tensor, value: torch.Tensor, out: object) -> torch.dtype:
    """Type of the output: the tensors', or for quantized values a 16-bit value's, `out`'s, or else float16."""
    dtype = query.dtype
    if dtype not in VALUE_DTYPES:
        return dtype
    dtype = value.dtype
    if dtype not in VALUE_DTYPES:
        return dtype
    return out.dtype if isinstance(out, torch.Tensor) and out.dtype in tensors.DTYPES else torch.float16


def check_place(query: torch.Tensor, emulated: bool) -> None:
    """Refuse devices that no 8-bit kernel runs on."""
    if emulated and query.device.type != "cpu":
        raise UnsupportedProblem(
            f"impl 'emulate' runs on CPU tensors and query is on {query.device}", nearest="query.cpu(), or impl='auto'"
        )
    if not emulated and query.device.type != "cuda":
        raise UnsupportedProblem(
            f"8-bit attention runs on CUDA tensors and query is on {query.device}",
            nearest="CUDA tensors, or impl='emulate' for CPU tensors",
        )


def check_aligned(named: dict[str, torch.Tensor]) -> None:
    """Refuse rows that do not start on 16 bytes."""
    for name, tensor in named.items():
        if not tensors.is_aligned(tensor):
            raise UnsupportedProblem(
                f"rows of {name} do not start on 16 bytes, as 8-bit attention needs", nearest=f"{name}.contiguous()"
            )


def check_scales(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scales: tuple[object, object, object]
) -> Scales:
    """The three scales as FP32 tensors on query's device, of checked shape and value."""
    q_scale, k_scale, v_scale = scales
    heads, heads_kv = query.shape[1], key.shape[1]
    checked_q = _rows("q_scale", q_scale, query)
    if checked_q.dim() == 2 and checked_q.shape[1] == heads_kv != heads:
        checked_q = checked_q.repeat_interleave(heads // heads_kv, dim=1)
    elif checked_q.dim() >= 2 and checked_q.shape[1] != heads:
        _refuse_shape("q_scale", checked_q, query, ("blocks of S_q",))
    checked_k = _rows("k_scale", k_scale, key)
    if value.dtype not in VALUE_DTYPES:
        if v_scale is not None:
            raise InvalidArgument(
                "v_scale", expected=f"None beside a {value.dtype} value", got="a scale", hint="leave it out"
            )
        return Scales(checked_q, checked_k)
    checked_v = _tensor("v_scale", v_scale, value)
    shapes = ((), tuple(value.shape[:2]), (*value.shape[:2], value.shape[3]))
    if tuple(checked_v.shape) not in shapes:
        _refuse_shape("v_scale", checked_v, value, ("D",))
    return Scales(checked_q, checked_k, checked_v)


def block_of(seqlen: int, blocks: int) -> int:
    """Rows of a block, a power of two, when `seqlen` rows make `blocks` of them; 0 when none does."""
    block = 1
    while -(-seqlen // block) > blocks:
        block *= 2
    return block if -(-seqlen // block) == blocks else 0


def key_block(key: torch.Tensor, scale: object) -> int:
    """Keys of a head that share one of K's checked scales; 0 when all do."""
    return block_of(key.shape[2], scale.shape[2]) if isinstance(scale, torch.Tensor) and scale.dim() == 3 else 0


def _rows(name: str, scale: object, tensor: torch.Tensor) -> torch.Tensor:
    checked = _tensor(name, scale, tensor)
    shape, batch, seqlen = tuple(checked.shape), tensor.shape[0], tensor.shape[2]
    if shape == ():
        return checked
    heads_fit = shape[1:2] == (tensor.shape[1],) or name == "q_scale"  # whose heads are looked at by the caller
    if (
        len(shape) not in (2, 3)
        or shape[0] != batch
        or not heads_fit
        or (len(shape) == 3 and not block_of(seqlen, shape[2]))
    ):
        _refuse_shape(name, checked, tensor, ("blocks of S",))
    return checked


def _refuse_shape(name: str, scale: torch.Tensor, tensor: torch.Tensor, last: tuple[str, ...]) -> None:
    batch, heads = tensor.shape[:2]
    raise InvalidArgument(
        name,
        expected=f"a scalar, [{batch}, {heads}] or [{batch}, {heads}, {last[0]}], where blocks are powers of two",
        got=f"shape {list(scale.shape)}",
        hint="use the scale that quantize() gives with the quantized values",
    )


_positive: dict[int, int] = {}
"""By the id of a scale that has been checked and is alive: how many changes of it there had been."""
_alive: dict[int, weakref.ref[torch.Tensor]] = {}
"""By the id of such a scale: what takes both entries away when it dies, ahead of another tensor of that id."""

changes: Mapping[int, int] = _positive
"""The changes that there had been of a scale that has been checked and is alive, by its id."""

UNCOUNTED = -1
"""Changes of a tensor that was made in inference mode: torch does not count them."""


def _tensor(name: str, scale: object, quantized: torch.Tensor) -> torch.Tensor:
    if scale is None:
        raise InvalidArgument(
            name, expected="a scale for 8-bit values", got="None", hint="pass the scale that quantize() gives with them"
        )
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        if not tensors.is_positive_factor(scale):
            _refuse_value(name, scale)
        return torch.full((), float(scale), dtype=torch.float32, device=quantized.device)
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32 or scale.device != quantized.device:
        got = f"{scale.dtype} on {scale.device}" if isinstance(scale, torch.Tensor) else type(scale).__name__
        raise InvalidArgument(
            name, expected=f"a number, or a float32 tensor on {quantized.device}", got=got, hint="convert or move it"
        )
    _check_positive(name, scale)
    return scale


def _changes(scale: torch.Tensor) -> int:
    return UNCOUNTED if scale.is_inference() else scale._version


def _is_captured(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device is being captured, whichever device is current."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _check_positive(name: str, scale: torch.Tensor) -> None:
    """Refuse scales that are not positive and finite. A CUDA device is waited for once for every tensor and change of
    it, and never while a graph is captured. A tensor that was made in inference mode is checked once: its changes are
    not seen."""
    if _is_known(scale) or (scale.is_cuda and _is_captured(scale.device)):
        return
    good = (scale > 0) & scale.isfinite()
    if not bool(good.all()):
        _refuse_value(name, scale[~good].flatten()[0].item())
    place = id(scale)
    _alive[place] = weakref.ref(scale, lambda _: _forget(place))
    _positive[place] = _changes(scale)


def _forget(place: int) -> None:
    _positive.pop(place, None)
    _alive.pop(place, None)


def _refuse_value(name: str, value: float) -> None:
    finite = 0.0 < value < torch.inf
    raise InvalidArgument(
        name,
        expected="scales from 2**-126 to 2**127" if finite else "positive finite scales",
        got=str(value),
        hint="use the scale that quantize() gives",
    )


def _is_known(scale: torch.Tensor) -> bool:
    """Whether the values of a scale have been checked, and it has not changed since."""
    return known_positive((scale,))


def known_positive(scales: tuple[object, ...]) -> bool:
    """Whether the values of all tensors among the scales have been checked, and none has changed; numbers have not."""
    try:
        for scale in scales:
            if scale is not None and _positive[id(scale)] != scale._version:  # type: ignore[attr-defined]
                return False
    except KeyError:
        return False
    except RuntimeError:  # of a tensor that was made in inference mode
        return all(scale is None or _positive.get(id(scale)) == _changes(scale) for scale in scales)  # type: ignore[arg-type]
    return True
