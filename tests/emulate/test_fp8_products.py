"""The FP8 GEMM and FP8 Q K^T against FP64 products of the dequantized values."""

from __future__ import annotations

import pytest
import torch

from microsdpa.errors import InvalidArgument
from microsdpa.evidence import fp8_products
from microsdpa.jit import compile_kernel
from microsdpa.jit.inspect import count_instructions, tensor_instructions

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def quantized(*shape: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(torch.float8_e4m3fn)


def bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One rounding to FP16, and of each tile's sum the bits that a GPU may drop: 13 of the summed magnitudes stay."""
    return 2**-11 * (a @ b).abs() + 2**-13 * (a.abs() @ b.abs()) + 2**-25


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (16, 8, 32), (64, 64, 64), (65, 63, 33), (7, 130, 200), (100, 31, 129), (128, 192, 320)]
)
def test_gemm_of_any_size(shape: tuple[int, int, int], device: str) -> None:
    m, n, k = shape
    a, b = quantized(m, k), quantized(k, n, seed=1)
    found = fp8_products.gemm(a.to(device), b.to(device), a_scale=0.5, b_scale=0.125).cpu().double()
    x, y = a.double() * 0.5, b.double() * 0.125
    assert ((found - x @ y).abs() <= bound(x, y)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 512, 512, 64), (3, 37, 70, 32), (2, 65, 129, 128), (2, 5, 9, 48)])
def test_scores_of_real_sizes(shape: tuple[int, ...], device: str) -> None:
    heads, seqlen_q, seqlen_k, head_dim = shape
    query, key = quantized(heads, seqlen_q, head_dim), quantized(heads, seqlen_k, head_dim, seed=1)
    scale = head_dim**-0.5
    found = fp8_products.scores(query.to(device), key.to(device), scale).cpu().double()
    x, y = query.double() * scale, key.double().mT
    assert ((found - x @ y).abs() <= bound(x, y)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_scores_of_the_small_case(device: str) -> None:
    """4 x 8 x 64: at most .008 as it is, .001 scaled by 1/8."""
    query, key = quantized(1, 4, 64), quantized(1, 8, 64, seed=1)
    for scale, most in ((1.0, 0.008), (0.125, 0.001)):
        found = fp8_products.scores(query.to(device), key.to(device), scale).cpu().double()
        assert (found - query.double() @ key.double().mT * scale).abs().max() <= most


@pytest.mark.parametrize("scores", [False, True])
def test_8_bit_tensor_cores_on_ada(scores: bool) -> None:
    kernel = compile_kernel(fp8_products.specification(scores), "sm_89")
    assert set(tensor_instructions(count_instructions(kernel.cubin))) == {"QMMA"}
    assert kernel.resources.spill_store_bytes == kernel.resources.stack_bytes == 0


def test_what_is_refused() -> None:
    a = quantized(4, 32)
    with pytest.raises(InvalidArgument, match="b: expected K = 32 rows"):
        fp8_products.gemm(a, quantized(31, 4))
    with pytest.raises(InvalidArgument, match="a: expected contiguous float8_e4m3fn values of 2 dimensions, got"):
        fp8_products.gemm(a.float(), a)
    with pytest.raises(InvalidArgument, match=r"key: expected .1, S_k, 64."):
        fp8_products.scores(quantized(1, 4, 64), quantized(1, 4, 32))
