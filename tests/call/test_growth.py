"""Lengths of K for which a decoding call's kernel is chosen at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from microsdpa.execution import forward
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import chosen


@pytest.mark.parametrize("seqlen_k", [1, 100, 305, 511, 1000, 2040, 4095])
@pytest.mark.parametrize("heads_kv", [2, 8])
def test_the_choice_is_the_same_for_all_of_them_and_for_no_further_one(seqlen_k: int, heads_kv: int) -> None:
    problem = Problem(1, 32, heads_kv, 1, seqlen_k, 128, "float16", causal="lower_right", target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    before = problem.with_keys(seqlen_k - 1)
    forward._growth(before, spec, "auto")
    first, last = forward._growth(problem, spec, "auto")
    assert first == seqlen_k <= last <= seqlen_k + forward.LENGTHS_AHEAD
    assert all(chosen(replace(problem, seqlen_k=length)) == spec for length in range(first, last + 1))
    if last < seqlen_k + forward.LENGTHS_AHEAD:
        assert chosen(replace(problem, seqlen_k=last + 1)) != spec


def test_a_problem_with_other_keys_is_the_one_that_replace_gives() -> None:
    problem = Problem(1, 32, 8, 1, 512, 128, "float16", causal="lower_right", operands="fp8", target="sm_89")
    other = problem.with_keys(77)
    assert other == replace(problem, seqlen_k=77) != problem
    assert hash(other) == hash(replace(problem, seqlen_k=77))


@pytest.mark.parametrize("before", [None, 512, 512 - forward.LENGTHS_AHEAD - 2, 600])
def test_a_length_that_has_not_just_grown_looks_no_further(before: int | None) -> None:
    problem = Problem(1, 32, 8, 512, 512, 128, "float16", target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    forward._decoding.clear()
    if before is not None:
        forward._growth(problem.with_keys(before), spec, "auto")
    assert forward._growth(problem, spec, "auto") == (512, 512)
