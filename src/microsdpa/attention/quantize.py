"""Quantizers: FP16, BF16 or FP32 tensors to values of 8 bits with scales, and back. x = value * scale.

This is the specification; kernels/quantize/fused.cu makes the same values, bit for bit. All arithmetic is FP32, every
operation rounded to nearest even: scale = max|x| / L, with L = 448 or 127 (1 where it is zero), y = x (1 / scale), and
    "e4m3"    y rounded to nearest even in E4M3, saturated at 448; NaN keeps being NaN (0x7f)
    "int8"    y rounded to nearest even, -127 to 127; NaN becomes 0
    "sim_u8"  the linear format of [-448, 448] in 0 to 255 of early FP8 simulations: (y + 448) * 255/896
              rounded to nearest even; NaN becomes 0. It has no zero: 0 comes back as 1.76 * scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from microsdpa.errors import InvalidArgument
from microsdpa.kernels.quantize.spec import CHUNK, PARTS, sum_rows

Format = Literal["e4m3", "int8", "sim_u8"]
Granularity = Literal["tensor", "head", "channel", "block"]

LARGEST: dict[str, float] = {"e4m3": 448.0, "int8": 127.0, "sim_u8": 448.0}
RESIDUAL_STEPS: dict[str, float] = {"e4m3": 1.0, "int8": 256.0}
SIM_U8_STEPS = torch.tensor(255.0 / 896.0, dtype=torch.float32, device="cpu")
MEAN_GROUPS = 32
"""Rows of a part of K's mean are added up in this many sums, as a CTA of the CUDA kernel does."""


@dataclass(frozen=True)
class Quantized:
    """Quantized values of a tensor [B, H, S, D] and what they mean.

    Attributes:
        values: [B, H, S, D] as float8_e4m3fn, int8 or, for "sim_u8", uint8.
        scale: FP32: a scalar for "tensor", [B, H] for "head", [B, H, D] for "channel", and [B, H, ceil(S / block)] for
            "block".
        block: rows of a block.
        mean: [B, H, D] in FP32: what was taken off every row; None without `smooth`.
        hadamard: whether rows were rotated.
    """

    values: torch.Tensor
    scale: torch.Tensor
    format: Format
    granularity: Granularity
    block: int
    mean: torch.Tensor | None = None
    hadamard: bool = False

    def dequantize(self) -> torch.Tensor:
        """The tensor that the quantized values stand for, [B, H, S, D] in FP32: rotated back, and with its mean."""
        scale = expand_scale(self.scale, self.granularity, self.block, self.values.shape)
        x = decode(self.values, self.format) * scale
        if self.hadamard:
            x = rotate(x)  # the matrix is its own inverse
        return x if self.mean is None else x + self.mean[:, :, None]


def quantize(
    x: torch.Tensor,
    format: Format = "e4m3",
    granularity: Granularity = "tensor",
    *,
    block: int = 64,
    smooth: bool = False,
    hadamard: bool = False,
    allow_nonfinite: bool = False,
) -> Quantized:
    """Quantize a tensor to 8 bits.

    Args:
        x: [B, H, S, D] in float16, bfloat16 or float32.
        format: "e4m3", "int8" or "sim_u8".
        granularity: what has a scale of its own: the "tensor", every "head" of a batch entry, every "channel" of a
            head, or every "block" of rows of a head.
        block: rows of a block: a power of two; 1 gives every row its scale.
        smooth: first take the mean over S off every channel. For K this changes no probability: the scores of a query
            all move by the same amount, and only LSE by scale * q . mean.
        hadamard: rotate every row by the normalised Hadamard matrix of size D, a power of two, which spreads outliers
            among the channels. Q K^T does not change when Q and K are both rotated.
        allow_nonfinite: let NaN and infinities pass: infinities saturate, and do not count for a scale. E4M3 has
            a NaN; of "int8" and "sim_u8", which have none, NaN makes the scale NaN that it shares. Without it they
            are an error, for which a CUDA device has to be waited for.

    Raises:
        InvalidArgument: an argument is none of these, or x is not finite.
    """
    _check(x, format, granularity, block, hadamard)
    if not allow_nonfinite and not bool(x.isfinite().all()):
        raise InvalidArgument(
            "x",
            expected="finite values",
            got="NaN or infinity",
            hint="pass allow_nonfinite=True to saturate infinities and keep NaN",
        )
    values, mean = x.float(), None
    if smooth:
        mean = mean_of_rows(values)
        values = values - mean[:, :, None]
    if hadamard:
        values = rotate(values)
    scale = scales(values, format, granularity, block)
    values = encode(divided(values, expand_scale(scale, granularity, block, x.shape)), format)
    return Quantized(values, scale, format, granularity, block, mean, hadamard)


def divided(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP32 values times the rounded inverse of their scales, which broadcast.

    Values and scales are multiplied with 2^100 before where the scale is below 2^-60, and with 2^-60 where it is above
    2^60: no inverse overflows or loses bits.
    """
    factor = torch.where(scale < 2.0**-60, 2.0**100, torch.where(scale > 2.0**60, 2.0**-60, 1.0)).to(torch.float32)
    return (values * factor) * (torch.ones_like(scale) / (scale * factor))


def encode(y: torch.Tensor, format: Format) -> torch.Tensor:
    """Quantized values of FP32 values that have been divided by their scale."""
    if format == "e4m3":
        values = y.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        nan = torch.tensor(0x7F, dtype=torch.uint8, device=y.device)
        return torch.where(y.isnan(), nan, values.view(torch.uint8)).view(torch.float8_e4m3fn)
    if format == "int8":
        return y.nan_to_num(0.0, torch.inf, -torch.inf).round().clamp(-127.0, 127.0).to(torch.int8)
    linear = ((y.clamp(-448.0, 448.0) + 448.0) * SIM_U8_STEPS.to(y.device)).round()
    return linear.nan_to_num(0.0).to(torch.uint8)


def decode(values: torch.Tensor, format: Format) -> torch.Tensor:
    """What quantized values stand for, in FP32, before they are multiplied with their scale."""
    return values.float() / SIM_U8_STEPS.to(values.device) - 448.0 if format == "sim_u8" else values.float()


def residual(y: torch.Tensor, values: torch.Tensor, format: Format) -> torch.Tensor:
    """Quantized values of what `values` lack of the FP32 values y; one of them counts 1 / RESIDUAL_STEPS[format]."""
    return encode((y - decode(values, format)) * RESIDUAL_STEPS[format], format)


def scales(values: torch.Tensor, format: Format, granularity: Granularity, block: int) -> torch.Tensor:
    """FP32 scales of FP32 values [B, H, S, D]."""
    magnitude = values.abs()
    magnitude = magnitude.where(magnitude.isfinite() if format == "e4m3" else ~magnitude.isinf(), 0.0)
    if granularity == "block":
        padded = torch.nn.functional.pad(magnitude, (0, 0, 0, -values.shape[2] % block))
        batch, heads, rows, head_dim = padded.shape
        largest = padded.reshape(batch, heads, rows // block, block * head_dim).amax(dim=3)
    else:
        largest = magnitude.amax(dim={"tensor": (0, 1, 2, 3), "head": (2, 3), "channel": (2,)}[granularity])
    scale = largest / largest.new_full((), LARGEST[format])  # by a number, torch multiplies with its inverse on CUDA
    return scale.where(scale != 0.0, 1.0).masked_fill(scale.isnan(), torch.nan)  # which has one pattern, as there


def bound_of_heads(values: torch.Tensor, mean: torch.Tensor, format: Format) -> torch.Tensor:
    """FP32 scales [B, H] of rows [B, H, S, D] that are yet to lose their mean [B, H, D] and to be rotated.

    No number of a rotated row is larger than the sum of |x| over the row, over sqrt(D). The sums are those of CHUNK
    channels, of which each has its largest over all rows, so that rows need not be looked at as a whole.
    """
    largest = _sums_of_chunks(values)
    largest = largest.where(largest.isfinite() if format == "e4m3" else ~largest.isinf(), 0.0).amax(dim=2)
    chunks = (largest + _sums_of_chunks(mean)).unbind(-1)
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    return scales((total * root(values.shape[3]))[..., None, None], format, "head", 1)


def _sums_of_chunks(x: torch.Tensor) -> torch.Tensor:
    """[..., D / CHUNK] sums of magnitudes, in the order of channels."""
    chunks = x.abs().reshape(*x.shape[:-1], -1, CHUNK)
    total = chunks[..., 0]
    for channel in range(1, CHUNK):
        total = total + chunks[..., channel]
    return total


def expand_scale(scale: torch.Tensor, granularity: Granularity, block: int, shape: torch.Size) -> torch.Tensor:
    """Scales in a shape that multiplies with [B, H, S, D]."""
    if granularity == "tensor":
        return scale
    if granularity == "head":
        return scale[:, :, None, None]
    if granularity == "channel":
        return scale[:, :, None, :]
    return scale.repeat_interleave(block, dim=2)[:, :, : shape[2], None]


def mean_of_rows(values: torch.Tensor) -> torch.Tensor:
    """Mean over S of FP32 [B, H, S, D], in one order of additions.

    The rows of each of PARTS parts are added by their number modulo 32, and then in halves; then the parts, in order.
    """
    seqlen, each = values.shape[2], sum_rows(values.shape[2])
    padded = torch.nn.functional.pad(values, (0, 0, 0, PARTS * each - seqlen))
    padded = padded.view(*padded.shape[:2], PARTS, -1, MEAN_GROUPS, padded.shape[3])
    sums = torch.zeros_like(padded[:, :, :, 0])
    for rows in padded.unbind(3):
        sums = sums + rows
    while sums.shape[3] > 1:
        half = sums.shape[3] // 2
        sums = sums[:, :, :, :half] + sums[:, :, :, half:]
    first, *others = sums[:, :, :, 0].unbind(2)
    for part in others:
        first = first + part
    return first / torch.tensor(float(seqlen), dtype=torch.float32, device=values.device)


def rotate(values: torch.Tensor) -> torch.Tensor:
    """FP32 rows times the normalised Hadamard matrix of their size, a power of two; the neighbours first."""
    size = values.shape[-1]
    x = values
    step = 1
    while step < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * step), 2, step)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        step *= 2
    return x * root(size)


def root(size: int) -> float:
    """1 / sqrt(size) as FP32, which the CUDA kernel is given."""
    return float(torch.tensor(size**-0.5, dtype=torch.float32, device="cpu"))


def _check(x: object, format: object, granularity: object, block: object, hadamard: bool) -> None:
    if not isinstance(x, torch.Tensor) or x.dim() != 4 or x.numel() == 0:
        got = f"shape {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise InvalidArgument("x", expected="a tensor [B, H, S, D] with elements", got=got, hint="reshape it")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise InvalidArgument(
            "x", expected="float16, bfloat16 or float32", got=str(x.dtype), hint="convert it, for example with .float()"
        )
    for name, value, known in (
        ("format", format, get_args(Format)),
        ("granularity", granularity, get_args(Granularity)),
    ):
        if value not in known:
            expected = ", ".join(map(repr, known))
            raise InvalidArgument(name, expected=f"one of {expected}", got=repr(value), hint=f"pass {known[0]!r}")
    if not isinstance(block, int) or block < 1 or block & (block - 1):
        raise InvalidArgument("block", expected="a power of two", got=repr(block), hint="pass 64, or 1 for every row")
    if hadamard and x.shape[3] & (x.shape[3] - 1):
        raise InvalidArgument(
            "hadamard", expected="D, a power of two, with it", got=f"D = {x.shape[3]}", hint="pass hadamard=False"
        )
