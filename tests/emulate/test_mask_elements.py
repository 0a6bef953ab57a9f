"""What the elements of a mask may be: NaN, and bytes of a bool mask that are neither 0 nor 1."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import microsdpa

KERNELS = {"ampere/general": 20, "ampere/mma": 4, "hopper/latency": 70}
"""Kernels that read masks, by the queries of a call that suits them."""


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask_type", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_in_a_mask_is_nan_in_its_row(kernel: str, mask_type: torch.dtype) -> None:
    seqlen_q, dtype = KERNELS[kernel], torch.float16 if mask_type == torch.float32 else mask_type
    query, key, value = (torch.randn(1, 2, rows, 64).to(dtype) for rows in (seqlen_q, 200, 200))
    mask = torch.randn(seqlen_q, 200).to(mask_type)
    mask[1, 0], mask[2, 150], mask[3, :] = torch.nan, torch.nan, torch.nan
    out, lse = microsdpa.sdpa(query, key, value, attn_mask=mask, return_lse=True, impl=f"emulate:{kernel}")
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    nan = torch.isin(torch.arange(seqlen_q), torch.tensor([1, 2, 3]))
    assert torch.equal(expected.isnan().any(dim=-1), nan.expand(1, 2, -1))  # torch's
    assert torch.equal(out.isnan().all(dim=-1), nan.expand(1, 2, -1))
    assert torch.equal(lse.isnan(), nan.expand(1, 2, -1))
    torch.testing.assert_close(out[:, :, ~nan], expected[:, :, ~nan], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", ["rows", "columns", "unaligned"])
def test_every_byte_of_a_bool_mask_that_is_not_zero_is_true(kernel: str, layout: str) -> None:
    seqlen_q = KERNELS[kernel]
    query, key, value = (torch.randn(1, 2, rows, 64).half() for rows in (seqlen_q, 200, 200))
    truth = torch.rand(seqlen_q, 200) < 0.5
    bytes_ = torch.where(truth, torch.randint(1, 256, truth.shape), 0).to(torch.uint8)
    bytes_[0, :8] = torch.tensor([0, 1, 2, 4, 128, 129, 255, 0], dtype=torch.uint8)
    truth[0, :8] = torch.tensor([0, 1, 1, 1, 1, 1, 1, 0]).bool()
    if layout == "columns":
        bytes_ = bytes_.T.contiguous().T
    elif layout == "unaligned":
        bytes_ = torch.cat([bytes_, bytes_[:, :7]], dim=1)[:, :200]
    mask = bytes_.view(torch.bool)
    found = microsdpa.sdpa(query, key, value, attn_mask=mask, impl=f"emulate:{kernel}")
    assert mask.view(torch.uint8).max() > 1
    assert torch.equal(found, microsdpa.sdpa(query, key, value, attn_mask=truth, impl=f"emulate:{kernel}"))


def test_every_byte_of_a_bool_mask_that_is_not_zero_is_true_on_the_cpu() -> None:
    query, key, value = (torch.randn(1, 2, 20, 64).half() for _ in range(3))
    bytes_ = torch.randint(0, 3, (20, 20), dtype=torch.uint8) * 127
    for more in ({}, {"softcap": 20.0}, {"causal": "upper_left"}, {"return_lse": True}):
        mask, truth = bytes_.view(torch.bool), bytes_ != 0
        found = microsdpa.sdpa(query, key, value, attn_mask=mask, **more)  # type: ignore[arg-type]
        expected = microsdpa.sdpa(query, key, value, attn_mask=truth, **more)  # type: ignore[arg-type]
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
