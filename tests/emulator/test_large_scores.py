"""Scores that FP32 cannot tell from their neighbours: where a fused exponent's rounding would overflow or vanish."""

from __future__ import annotations

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.emulate import run
from microsdpa.evidence.torch_cases import corners
from microsdpa.evidence.verify_torch import check
from microsdpa.kernels import FAMILIES
from microsdpa.kernels.ampere.mma import tiles as ampere_tiles
from microsdpa.kernels.ampere.mma.spec import specification
from microsdpa.kernels.ampere.mma.tiles import Tiling
from microsdpa.kernels.problem import Causal, Problem

FUSED = "ladder/07_tuned"
"""Its page is about the scale in the exponent: README has the limit."""
KERNELS = [family.name for family in FAMILIES if family.name != FUSED]
SCALES = [2.0**20, -(2.0**24), 2.0**30, -(2.0**40), 2.0**100]
Masking = Causal | None


def inputs(seqlen_q: int, seqlen_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 2, seqlen_q, 64), (1, 2, seqlen_k, 64), (1, 2, seqlen_k, 64)
    query, key, value = (torch.randn(shape, generator=generator).half() for shape in shapes)
    return query, key, value


def expect(out: torch.Tensor, lse: torch.Tensor, exact: tuple[torch.Tensor, torch.Tensor]) -> None:
    """One key has all the weight: its value, and LSE is its score, which FP32 sums to 20 bits at least."""
    assert (out.double() - exact[0]).abs().max() <= 2.0**-10 * exact[0].abs().max()
    assert ((lse.double() - exact[1]).abs() <= 2.0**-20 * exact[1].abs()).all()


@pytest.mark.parametrize("causal", [None, "lower_right"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_goes_to_its_largest_score(kernel: str, scale: float, causal: Masking) -> None:
    tensors = inputs(70, 200)
    options = {"causal": causal, "scale": scale}
    out, lse = microsdpa.sdpa(*tensors, **options, return_lse=True, impl=f"emulate:{kernel}")  # type: ignore[arg-type]
    expect(out, lse, reference.oracle(*tensors, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("tiling", [ampere_tiles.STREAM, ampere_tiles.STREAM_DEEP, Tiling(64, 1, 1)], ids=str)
def test_so_it_does_in_the_tilings_of_long_sequences(tiling: Tiling, scale: float) -> None:
    query, key, value = inputs(140, 330)
    problem = Problem(1, 2, 2, 140, 330, 64, "float16", target="sm_80")
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:3], torch.nan)
    run.attention(specification(problem, tiling), problem, (query, key, value, out, lse), scale)
    expect(out, lse, reference.oracle(query, key, value, scale=scale))


@pytest.mark.parametrize("kernel", KERNELS)
def test_products_of_inputs_as_large_as_bf16_squares(kernel: str) -> None:
    name = "numbers as large as BF16 squares"
    assert check(name, corners("cpu")[name](), f"emulate:{kernel}").failure == ""


@pytest.mark.parametrize("kernel", KERNELS)
def test_equal_scores_share_a_row(kernel: str) -> None:
    query, value = torch.full((1, 1, 9, 64), 1000.0).half(), torch.randn(1, 1, 300, 64).half()
    key = torch.full_like(value, -1000.0)
    key[:, :, 100:250] *= -1  # 6.4e7 each, times the scale
    out = microsdpa.sdpa(query, key, value, scale=64.0, impl=f"emulate:{kernel}")
    assert isinstance(out, torch.Tensor)
    assert (out - value[:, :, 100:250].double().mean(dim=2, keepdim=True)).abs().max() < 2e-3
