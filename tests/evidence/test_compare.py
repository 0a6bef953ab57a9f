from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from microsdpa.evidence import compare


def test_measures_of_a_known_difference() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    actual = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    errors = compare.measure(actual, expected)
    assert errors.max_abs == 1.0
    assert errors.worst == (1, 1)
    assert errors.rmse == 0.5
    assert errors.rel_l1 == pytest.approx(1 / 7)
    assert errors.cosine == pytest.approx(25 / math.sqrt(26 * 25))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_misplaced_non_finite_value_is_named_first_and_never_admitted(bad: float) -> None:
    expected = torch.ones(2, 3)
    actual = expected.clone()
    actual[0, 0] = 100.0
    actual[1, 2] = bad
    errors = compare.measure(actual, expected)
    assert errors.worst == (1, 2)
    assert not compare.Tolerance(math.inf, math.inf, math.inf).admits(errors)
    hidden = compare.measure(expected, actual)  # a finite value where the oracle has none
    assert hidden.worst == (1, 2)
    assert not compare.Tolerance(math.inf, math.inf, math.inf).admits(hidden)


def test_matching_infinities_are_no_error() -> None:
    lse = torch.tensor([-math.inf, 1.0])
    errors = compare.measure(lse, lse.double())
    assert (errors.max_abs, errors.rmse) == (0.0, 0.0)


def test_infinities_of_other_sign_are_an_error() -> None:
    assert compare.measure(torch.tensor([math.inf]), torch.tensor([-math.inf])).max_abs == math.inf


def test_an_error_where_the_oracle_is_zero_is_not_lost() -> None:
    assert compare.measure(torch.tensor([0.1, 0.0]), torch.zeros(2)).rel_l1 == math.inf


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected shape \[2\]"):
        compare.measure(torch.zeros(3), torch.zeros(2))


def test_tolerance_is_twice_the_reference_plus_one_rounding() -> None:
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64)
    allowed = compare.tolerance(torch.tensor([1.0, 2.25]), expected, torch.float16)
    assert allowed.max_abs == 2 * 0.25 + 2.0**-11 * 2.0
    assert allowed.rel_l1 == pytest.approx(2 * 0.25 / 3 + 2.0**-11)


def test_a_reference_that_is_not_finite_bounds_nothing() -> None:
    with pytest.raises(ValueError, match="not finite at"):
        compare.tolerance(torch.tensor([math.nan]), torch.zeros(1), torch.float16)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_rounding_to_the_dtype_is_always_admitted_and_more_than_that_is_not(values: list[float], shift: float) -> None:
    exact = torch.tensor(values, dtype=torch.float64) + 1e-4
    rounded = exact.half()
    allowed = compare.tolerance(rounded, exact, torch.float16)
    assert allowed.admits(compare.measure(rounded, exact))
    off = exact.clone()
    off[0] += 4 * allowed.max_abs + shift
    assert not allowed.admits(compare.measure(off, exact))


def test_a_record_holds_no_nan() -> None:
    errors = compare.measure(torch.tensor([math.nan]), torch.zeros(1))
    record = compare.as_record(errors, compare.Tolerance(1.0, 1.0, 1.0))
    assert record["max_abs"] is None
    assert record["worst"] == [0]
