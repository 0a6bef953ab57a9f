"""The sums that wgmma makes of E4M3 products, by hand."""

from __future__ import annotations

import pytest
import torch

from microsdpa.evidence.short_sums import allowed_of_values, lost_of_products, lost_of_scores


def quantized(*values: float, length: int = 64) -> torch.Tensor:
    """[1, 1, 1, length], zeros behind the values."""
    row = torch.zeros(length)
    row[: len(values)] = torch.tensor(values)
    return row.to(torch.float8_e4m3fn)[None, None, None]


@pytest.mark.parametrize(
    ("query", "key", "lost"),
    [
        ((1.0, 2.0**-6), (1.0, 2.0**-7), 0.0),  # 2^-13 of the largest is kept
        ((1.0, 2.0**-6), (1.0, 2.0**-8), -(2.0**-14)),
        ((1.0, -(2.0**-6)), (1.0, 2.0**-8), 2.0**-14),  # towards zero
        ((1.5, 2.0**-6), (1.5, 2.0**-8), -(2.0**-14)),  # 2.25 counts as 1.5 x 1.5 does, whose exponent is 0
        ((2.0, 2.0**-6), (1.0, 2.0**-7), -(2.0**-13)),
        ((1.0, 1.0, 2.0**-6), (1.0, 1.0, 2.0**-7), -(2.0**-13)),  # the sum, 2, has 13 bits of its own
        ((1.0, *(2.0**-6,) * 31), (1.0, *(2.0**-8,) * 31), -31 * 2.0**-14),  # every term is cut by itself
        ((2.0**-6, *(0.0,) * 31, 1.0), (2.0**-8, *(0.0,) * 31, 1.0), -(2.0**-14)),  # so is the sum of those before
    ],
)
def test_terms_and_sums_are_cut(query: tuple[float, ...], key: tuple[float, ...], lost: float) -> None:
    assert lost_of_products(quantized(*query), quantized(*key)).item() == lost


def test_a_residual_term_is_summed_behind_the_first() -> None:
    query = torch.cat((quantized(2.0**-6), quantized(1.0)), dim=-1)
    assert lost_of_products(query, quantized(2.0**-8)).item() == 0.0
    query = torch.cat((quantized(2.0**-6, 0.0), quantized(0.0, 1.0)), dim=-1)
    assert lost_of_products(query, quantized(2.0**-8, 1.0)).item() == -(2.0**-14)


def test_scores_have_the_scales_of_quantized_values() -> None:
    query = quantized(1.0, 2.0**-6).expand(1, 4, 3, 64)
    key = quantized(1.0, 2.0**-8).expand(1, 2, 2, 64)
    scales = torch.tensor(2.0), torch.tensor([4.0, 8.0])[None, :, None, None]
    found = lost_of_scores((query, key), scales, 3.0)
    assert found.shape == (1, 4, 3, 2)
    assert found[:, :2].eq(-24 * 2.0**-14).all()
    assert found[:, 2:].eq(-48 * 2.0**-14).all()


@pytest.mark.parametrize("sign", ["both", "one"])
@pytest.mark.parametrize("keys", [64, 1024])
def test_sums_in_place_stay_within_their_bound_and_use_it(keys: int, sign: str) -> None:
    generator = torch.Generator().manual_seed(keys)
    scores, value = torch.randn(2, keys, generator=generator), torch.randn(16, keys, generator=generator)
    if sign == "one":
        value = value.abs()
    quantized_value = (value * 64).to(torch.float8_e4m3fn)
    exponentials = (scores - scores[:, :32].amax(dim=1, keepdim=True)).exp().double()
    query = (16 * exponentials.float()).to(torch.float8_e4m3fn)
    rounded, exact_value = query.double() / 16, quantized_value.double()
    lost = lost_of_products(query[None, None], quantized_value[None, None])[0, 0] / 16
    total = exponentials.sum(dim=1, keepdim=True)
    found, exact = (rounded @ exact_value.T + lost) / total, exponentials @ exact_value.T / total
    share = (found - exact).abs() / allowed_of_values(exponentials / total, exact_value.T, 16, keys)
    assert share.max() <= 1
    assert share.max() >= 0.02
