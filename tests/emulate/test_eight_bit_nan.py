"""NaN in, NaN out, in every mode and kernel of 8-bit attention: INT8 has no NaN of its own."""

from __future__ import annotations

import pytest
import torch

import microsdpa
from microsdpa.evidence.inputs import Case, make
from microsdpa.kernels import EIGHT_BIT_FAMILIES, Family, KernelSpec
from microsdpa.kernels.problem import Causal, Precision, Problem
from microsdpa.kernels.quantize.spec import SCHEMES

CASE = Case(1, 2, 70, 133, 64)


def _computes(precision: Precision, family: Family) -> bool:
    problem = Problem(
        *(1, 2, 2, 70, 133, 64, "float16"),
        target=family.emulated_target,
        operands=SCHEMES[precision].operands,
        query_terms=SCHEMES[precision].query_terms,
    )
    return isinstance(family.specify(problem), KernelSpec)


CALLS = [(p, family.name) for p in SCHEMES for family in EIGHT_BIT_FAMILIES if _computes(p, family)]


def attend(
    tensors: tuple[torch.Tensor, ...], precision: Precision, kernel: str, causal: Causal | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"precision": precision, "causal": causal, "impl": f"emulate:{kernel}"}
    found = microsdpa.sdpa(*tensors, return_lse=True, **options)  # type: ignore[arg-type]
    assert isinstance(found, tuple)
    return found


def test_every_mode_has_kernels() -> None:
    assert {precision for precision, _ in CALLS} == set(SCHEMES)
    assert len(CALLS) >= 9


@pytest.mark.parametrize(("precision", "kernel"), CALLS)
def test_a_query_of_nan_is_nan_and_no_other(precision: Precision, kernel: str) -> None:
    query, key, value = make(CASE)
    clean, clean_lse = attend((query, key, value), precision, kernel)
    query[0, 0, 3, 5] = torch.nan
    query[0, 1, 64] = torch.nan
    out, lse = attend((query, key, value), precision, kernel)
    expected = torch.zeros(1, 2, 70, dtype=torch.bool)
    expected[0, 0, 3] = expected[0, 1, 64] = True
    assert torch.equal(out.isnan().all(dim=-1), expected)
    assert torch.equal(lse.isnan(), expected)
    torch.testing.assert_close(lse[~expected], clean_lse[~expected], rtol=0, atol=1e-3)
    # Rows of a warp may take their stabilizers later or earlier for a neighbour's NaN: their probabilities then round
    # differently, and no less well.
    neighbours = torch.zeros_like(expected)
    neighbours[0, 0, :16] = neighbours[0, 1, 64:] = True
    torch.testing.assert_close(out[~neighbours], clean[~neighbours], rtol=0, atol=2e-3)
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in make(CASE)))
    worst = (clean - exact).abs().max()
    assert (out - exact)[~expected].abs().max() < 1.1 * worst


@pytest.mark.parametrize("causal", [None, "lower_right"])
@pytest.mark.parametrize(("precision", "kernel"), CALLS)
def test_a_key_of_nan_is_nan_in_all_that_see_it(precision: Precision, kernel: str, causal: Causal | None) -> None:
    query, key, value = make(CASE)
    key[0, 0, 1, 5] = torch.nan
    out, lse = attend((query, key, value), precision, kernel, causal)
    assert out[:, 0].isnan().all()
    assert lse[:, 0].isnan().all()
    assert out[:, 1].isfinite().all()


@pytest.mark.parametrize(("precision", "kernel"), CALLS)
def test_a_value_of_nan_is_nan_in_its_channel(precision: Precision, kernel: str) -> None:
    query, key, value = make(CASE)
    value[0, 0, 100, 5] = torch.nan
    out, _ = attend((query, key, value), precision, kernel)
    expected = torch.zeros(64, dtype=torch.bool)
    expected[5] = True
    assert torch.equal(out.isnan()[0, 0], expected.expand(70, 64))
    assert out[:, 1].isfinite().all()
