"""The quantizers: every value, every FP16 value, every granularity; what is refused."""

from __future__ import annotations

import pytest
import torch

import microsdpa
from microsdpa.attention.quantize import (
    LARGEST,
    RESIDUAL_STEPS,
    Format,
    Granularity,
    decode,
    encode,
    mean_of_rows,
    residual,
    rotate,
)
from microsdpa.call.scales import FORMAT_DTYPE
from microsdpa.errors import InvalidArgument

FORMATS: tuple[Format, ...] = ("e4m3", "int8", "sim_u8")
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "head", "channel", "block")


def all_values(format: Format) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(FORMAT_DTYPE[format])


def every_half() -> torch.Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int16).view(torch.float16)


@pytest.mark.parametrize("format", FORMATS)
def test_all_256_values_come_back(format: Format) -> None:
    quantized = all_values(format)
    back = encode(decode(quantized, format), format)
    expected = quantized.view(torch.uint8).clone()
    if format == "e4m3":
        expected[0xFF] = 0x7F  # NaN has one encoding
    if format == "int8":
        expected[0x80] = 0x81  # -128 is never made, and is read as what it says: it saturates
    assert torch.equal(back.view(torch.uint8), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_every_half_goes_to_its_nearest_value(format: Format) -> None:
    """Against a search of all quantized values: nearest, ties to the even one, saturated at both ends."""
    y = every_half()
    y = y[y.isfinite()].float()
    values = decode(all_values(format), format)
    usable = values.isfinite() & (values.abs() <= LARGEST[format] + 1e-3)
    values, _ = values[usable].sort()
    found = decode(encode(y, format), format)
    nearest = (y.clamp(-LARGEST[format], LARGEST[format])[:, None] - values).abs().amin(dim=1)
    distance = (y.clamp(-LARGEST[format], LARGEST[format]) - found).abs()
    # The linear format's steps are no FP32 numbers: two neighbours may be equally near but for a rounding.
    torch.testing.assert_close(distance, nearest, rtol=0, atol=2e-4 if format == "sim_u8" else 0)
    if format == "int8":
        assert torch.equal(found, y.round().clamp(-127, 127))
    if format == "e4m3":
        assert torch.equal(encode(-y, format).float(), -found)
        ties = torch.tensor([17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 465.0, 1e6])
        assert encode(ties, format).float().tolist() == [16.0, 20.0, 0.0, 2.0**-8, 448.0, 448.0]
    assert found[y.argsort()].diff().min() >= 0


def test_nonfinite_values_when_they_are_allowed() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf], dtype=torch.float16).repeat(8).view(1, 1, 8, 4)
    finite = x.masked_fill(x.isnan(), 0.5)
    for format in FORMATS:
        with pytest.raises(InvalidArgument, match="allow_nonfinite=True"):
            microsdpa.quantize(x, format)  # type: ignore[arg-type]
        found = microsdpa.quantize(finite, format, allow_nonfinite=True)  # type: ignore[arg-type]
        assert found.scale == torch.tensor(1.0) / LARGEST[format]  # infinity does not count
        expected = torch.tensor([1.0, 0.5, 1.0, -1.0])
        torch.testing.assert_close(found.dequantize()[0, 0, 0], expected, rtol=1e-6, atol=4e-3)
        found = microsdpa.quantize(x, format, allow_nonfinite=True)  # type: ignore[arg-type]
        nan = torch.tensor([False, True, False, False])
        if format == "e4m3":
            assert found.scale == torch.tensor(1.0) / LARGEST[format]
            assert torch.equal(found.dequantize()[0, 0, 0].isnan(), nan)
        else:  # which has no NaN
            assert found.scale.isnan()
            assert found.dequantize().isnan().all()


@pytest.mark.parametrize("format", ["int8", "sim_u8"])
@pytest.mark.parametrize(("granularity", "count"), [("block", 2), ("head", 16), ("channel", 8)])
def test_nan_spreads_no_farther_than_its_scale(format: str, granularity: str, count: int) -> None:
    x = torch.ones(1, 2, 8, 2)
    x[0, 1, 3, 0] = torch.nan
    found = microsdpa.quantize(x, format, granularity, block=1, allow_nonfinite=True)  # type: ignore[arg-type]
    nan = found.dequantize().isnan()
    assert nan[0, 1, 3, 0]
    assert int(nan.sum()) == count


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_have_scale_one(format: Format, granularity: Granularity) -> None:
    found = microsdpa.quantize(torch.zeros(2, 3, 70, 32), format, granularity)
    assert (found.scale == 1).all()
    assert found.dequantize().abs().max() <= (448 / 255 if format == "sim_u8" else 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scales_have_their_shapes_and_bound_the_error(granularity: Granularity, dtype: torch.dtype) -> None:
    x = (torch.randn(2, 3, 70, 32, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    shapes = {"tensor": (), "head": (2, 3), "channel": (2, 3, 32), "block": (2, 3, 5)}
    for format in FORMATS:
        found = microsdpa.quantize(x, format, granularity, block=16)
        assert found.scale.shape == shapes[granularity]
        assert found.values.dtype == FORMAT_DTYPE[format]
        error = (found.dequantize() - x.float()).abs()
        step = {
            "e4m3": x.float().abs() * 2**-4 + 1e-4,
            "int8": 0.51 * found.scale.max(),
            "sim_u8": 1.76 * found.scale.max(),
        }
        assert (error <= step[format] * 1.01).all()


def test_a_row_of_its_own_scale() -> None:
    x = torch.randn(1, 2, 5, 32) * torch.tensor([1e-3, 1.0, 1e3, 0.0, 7.0])[:, None]
    found = microsdpa.quantize(x, "int8", "block", block=1)
    assert found.scale.shape == (1, 2, 5)
    assert torch.equal(found.values.abs().amax(dim=-1)[0, 0], torch.tensor([127, 127, 127, 0, 127], dtype=torch.int8))


def test_smoothing_and_rotation_leave_attention_as_it_is() -> None:
    g = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 2, 50, 64, generator=g) + 3 for _ in range(2))
    mean = mean_of_rows(key)
    torch.testing.assert_close(mean, key.mean(dim=2))
    torch.testing.assert_close(rotate(rotate(query)), query)
    scores, changed = query @ key.mT, rotate(query) @ rotate(key - mean[:, :, None]).mT
    torch.testing.assert_close(scores.softmax(-1), changed.softmax(-1), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        scores.logsumexp(-1), changed.logsumexp(-1) + (query @ mean[..., None]).squeeze(-1), rtol=1e-5, atol=1e-4
    )


def test_smoothing_and_rotation_are_undone() -> None:
    x = torch.randn(1, 2, 90, 64, generator=torch.Generator().manual_seed(0)) + 10
    plain = microsdpa.quantize(x, "int8", "block", block=1)
    better = microsdpa.quantize(x, "int8", "block", block=1, smooth=True, hadamard=True)
    assert better.mean is not None
    assert (better.dequantize() - x).square().mean() < 0.2 * (plain.dequantize() - x).square().mean()


@pytest.mark.parametrize(("format", "better"), [("e4m3", 20), ("int8", 200)])
def test_a_residual_term_has_what_the_first_lacks(format: Format, better: float) -> None:
    y = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 30
    first = encode(y, format)
    both = decode(first, format) + decode(residual(y, first, format), format) / RESIDUAL_STEPS[format]
    assert (both - y).norm() < (decode(first, format) - y).norm() / better


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "fp4"}, "format: expected one of 'e4m3'"),
        ({"granularity": "token"}, "granularity: expected one of 'tensor'"),
        ({"block": 48}, "block: expected a power of two, got 48"),
        ({"block": 0}, "block: expected a power of two, got 0"),
        ({"x": torch.zeros(2, 3)}, "x: expected a tensor .B, H, S, D. with elements, got shape"),
        ({"x": torch.zeros(1, 1, 0, 4)}, "with elements"),
        ({"x": torch.zeros(1, 1, 2, 4, dtype=torch.float64)}, "float16, bfloat16 or float32, got torch.float64"),
        ({"x": torch.zeros(1, 1, 2, 48), "hadamard": True}, "D, a power of two, with it, got D = 48"),
        ({"x": [1.0]}, "got list"),
    ],
)
def test_what_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        microsdpa.quantize(**({"x": torch.zeros(1, 1, 2, 32)} | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("seqlen", [128, 100])
def test_strides_change_nothing(granularity: Granularity, seqlen: int) -> None:
    """Views of [B, S, H, D] and [S, B, H, D], and every second row."""
    dense = torch.randn(2, 4, seqlen, 64).half()
    expected = microsdpa.quantize(dense, "e4m3", granularity)
    apart = torch.zeros(2, 4, 2 * seqlen, 64).half()
    apart[:, :, ::2] = dense
    views = (
        dense.transpose(1, 2).contiguous().transpose(1, 2),
        dense.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    )
    for view in (*views, apart[:, :, ::2]):
        found = microsdpa.quantize(view, "e4m3", granularity)
        assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(found.scale, expected.scale)
