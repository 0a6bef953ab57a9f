"""The quantizing kernel makes the quantized values of quantize.py, bit for bit."""

from __future__ import annotations

import pytest
import torch

import microsdpa
from microsdpa.attention.quantize import divided, expand_scale, mean_of_rows, residual, rotate
from microsdpa.emulate.run import Schedule, scheduled
from microsdpa.evidence.verify_eight_bit import specified
from microsdpa.execution.quantized import quantize_query_key_value
from microsdpa.kernels.problem import Precision
from microsdpa.kernels.quantize.spec import SCHEMES, QuantizationScheme

CASES = [
    (SCHEMES["fp8"], (2, 4, 2, 70, 133, 64), torch.float16),
    (SCHEMES["int8_fp8"], (1, 2, 2, 65, 97, 128), torch.bfloat16),
    (SCHEMES["int8_fp16"], (1, 2, 1, 5, 31, 32), torch.float16),
    (
        QuantizationScheme("sim_u8", "int8", block=64, smooth=False, hadamard=False),
        (1, 4, 2, 100, 150, 32),
        torch.float16,
    ),
    (
        QuantizationScheme("e4m3", "sim_u8", block=128, smooth=True, hadamard=False),
        (1, 1, 1, 300, 40, 64),
        torch.bfloat16,
    ),
]


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors have the same bits."""
    assert a is not None
    assert b is not None
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Q, K and V with magnitudes over several binades, a channel of K with a mean, a row and a channel of zeros."""
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim = shape
    g = torch.Generator().manual_seed(0)

    def make(h: int, s: int) -> torch.Tensor:
        x = torch.randn(batch, h, s, head_dim, generator=g) * torch.randn(batch, h, s, head_dim, generator=g).exp()
        x[:, :, s // 2] = 0
        x[..., 3] = 0
        x[..., 5] += 9
        return x.to(dtype)

    return [make(heads, seqlen_q), make(heads_kv, seqlen_k), make(heads_kv, seqlen_k)]


@pytest.mark.parametrize(("scheme", "shape", "dtype"), CASES)
def test_it_agrees_with_the_specification(
    scheme: QuantizationScheme, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    query, key, value = inputs(shape, dtype)
    found = quantize_query_key_value(query, key, value, scheme, emulated=True)
    q = microsdpa.quantize(query, scheme.format, "block", block=scheme.block, hadamard=scheme.hadamard)
    k = microsdpa.quantize(
        key, scheme.format, "block", block=scheme.block, hadamard=scheme.hadamard, smooth=scheme.smooth
    )
    assert same(found.query[..., : shape[5]].contiguous(), q.values)
    assert same(found.query_scale, q.scale)
    assert same(found.key, k.values)
    assert same(found.key_scale, k.scale)
    if scheme.smooth:
        assert same(found.key_mean, k.mean)
    if scheme.query_terms == 2:
        rotated = rotate(query.float())
        y = divided(rotated, expand_scale(q.scale, "block", scheme.block, query.shape))
        assert same(found.query[..., shape[5] :].contiguous(), residual(y, q.values, scheme.format))
    if scheme.value is None:
        assert found.value is value
        assert found.value_scale is None
    else:
        v = microsdpa.quantize(value, scheme.value, "channel")
        assert same(found.value, v.values)
        assert same(found.value_scale, v.scale)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 4, 2, 70, 133, 64), torch.float16),
        ((1, 2, 1, 9, 300, 128), torch.bfloat16),
        ((1, 1, 1, 5, 3, 32), torch.half),
    ],
)
def test_all_keys_of_a_head_share_a_scale(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of "fp8_fast": the same bits as the specification, and no number of a rotated row is beyond the format."""
    scheme = SCHEMES["fp8_fast"]
    given = inputs(shape, dtype)
    given[1][0, 0, 0, 7] = 300.0
    found = quantize_query_key_value(*given, scheme, emulated=True)
    wanted, _ = specified(given, scheme)
    assert wanted.key_scale.shape == (shape[0], shape[2])
    for name, expected in vars(wanted).items():
        assert same(getattr(found, name), expected), name
    rotated = rotate(given[1].float() - mean_of_rows(given[1].float())[:, :, None])
    largest = rotated.abs().amax(dim=(2, 3)) / wanted.key_scale
    assert (largest <= 448.0 * (1 + 1e-6)).all()
    assert (largest[wanted.key_scale != 1.0] >= 448.0 / 40).all()


@pytest.mark.parametrize("size", [1e-37, 1e-25, 3e37])
@pytest.mark.parametrize("precision", ["fp8", "fp8_fast", "int8_fp8"])
def test_very_small_and_very_large_numbers_agree_too(precision: Precision, size: float) -> None:
    """Their scales have inverses that overflow, or sums of a row that do: some rows, beside rows of usual numbers."""
    scheme = SCHEMES[precision]
    given = inputs((1, 1, 1, 140, 70, 64), torch.bfloat16)
    for x in given:
        x[:, :, ::3] = (x[:, :, ::3].float() * size).clamp(-3.3e38, 3.3e38).bfloat16()
    found = quantize_query_key_value(*given, scheme, emulated=True)
    wanted, _ = specified(given, scheme)
    for name, expected in vars(wanted).items():
        assert same(getattr(found, name), expected), name
    usual = (found.query_scale >= 2.0**-60) & (found.query_scale <= 2.0**60)
    assert usual.any()
    assert not usual.all()


@pytest.mark.parametrize("nan", [True, False])
@pytest.mark.parametrize(("format", "value"), [("e4m3", "int8"), ("int8", "sim_u8"), ("sim_u8", "e4m3")])
def test_every_half_has_the_same_value(format: str, value: str, nan: bool) -> None:
    """All 65,536 bit patterns, infinities among them, and NaN, of which some types make the scale NaN."""
    x = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.float16).view(1, 1, 1024, 64)
    x = x if nan else x.masked_fill(x.isnan(), -torch.inf)
    scheme = QuantizationScheme(format, value, smooth=False, hadamard=False)  # type: ignore[arg-type]
    found = quantize_query_key_value(x, x, x, scheme, emulated=True)
    rows = microsdpa.quantize(x, scheme.format, "block", block=1, allow_nonfinite=True)
    channels = microsdpa.quantize(x, scheme.value, "channel", allow_nonfinite=True)  # type: ignore[arg-type]
    assert same(found.query, rows.values)
    assert same(found.key, rows.values)
    assert same(found.key_scale, rows.scale)
    assert same(found.value, channels.values)
    assert same(found.value_scale, channels.scale)


def test_strides_and_another_order_of_threads_change_nothing() -> None:
    query, key, value = inputs((2, 2, 2, 40, 70, 64), torch.float16)
    first = quantize_query_key_value(query, key, value, SCHEMES["fp8"], emulated=True)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    with scheduled(Schedule(seed=7, late=False)):
        second = quantize_query_key_value(*views, SCHEMES["fp8"], emulated=True)
    for name in ("query", "key", "value", "query_scale", "key_scale", "value_scale", "key_mean"):
        assert same(getattr(first, name), getattr(second, name)), name
