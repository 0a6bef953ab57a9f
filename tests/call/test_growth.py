"""Lengths of K for which a decoding call's kernel is chosen at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from microsdpa.call.masks import Masks
from microsdpa.execution import forward
from microsdpa.kernels.problem import MaskKind, MaskType, Problem
from microsdpa.kernels.select import chosen
from microsdpa.runtime import launcher


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
    problem = Problem(1, 32, 8, 256, 512, 128, "float16", target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    forward._decoding.clear()
    if before is not None:
        forward._growth(problem.with_keys(before), spec, "auto")
    assert forward._growth(problem, spec, "auto") == (512, 512)


@pytest.mark.parametrize("tensor", ["bool", "int32"])
def test_a_plan_with_lists_of_tiles_is_of_its_length_alone(tensor: MaskType) -> None:
    problem = Problem(1, 8, 8, 4096, 6140, 128, "float16", mask=MaskKind(tensor, per_query=True), target="sm_90a")
    spec, longer = chosen(problem), problem.with_keys(6155)
    assert spec is not None
    assert spec is chosen(longer)
    assert spec.workspace_bytes(problem) < spec.workspace_bytes(longer)
    forward._decoding.clear()
    forward._growth(problem.with_keys(6139), spec, "auto")
    assert forward._growth(problem, spec, "auto") == (6140, 6140)


def test_keys_that_are_the_queries_own_are_no_cache_that_grows() -> None:
    problem = Problem(1, 32, 8, 512, 512, 128, "float16", target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    forward._decoding.clear()
    forward._growth(problem.with_keys(511), spec, "auto")
    assert forward._growth(problem, spec, "auto") == (512, 512)
    assert forward._growth(problem.with_keys(513), spec, "auto")[1] > 513


def test_a_call_of_other_sizes_is_prepared_without_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    like = Problem(2, 4, 4, 16, 24, 64, "float16", target="sm_90a")
    registered: list[Any] = []
    prepared: list[Any] = []
    monkeypatch.setattr(forward, "_kinds", [])
    monkeypatch.setattr(forward, "_numbers", {})
    monkeypatch.setattr(launcher, "register_kind", lambda *call: registered.append(call) or True)
    monkeypatch.setattr(launcher, "prepare_and_launch", lambda *given: prepared.append(given) or given[2])
    query, key = torch.zeros(3, 4, 50, 64).half(), torch.zeros(3, 4, 70, 64).half()
    call = query, key, key, torch.empty_like(query), True, 0, None
    forward._note_kind(like, "auto", call)
    forward._note_kind(like.with_sizes(9, 9, 9), "auto", call)  # of the same kind
    assert [number for number, *_ in registered] == [0, 0]
    del registered[1:]
    assert forward.resized(0, *call) == call
    expected = replace(like, batch=3, seqlen_q=50, seqlen_k=70)
    assert prepared == [(expected, chosen(expected), call, (70, 70))]
    for other in (replace(like, bulk=False), replace(like, mask=Masks(window=(1, 1)).kind)):
        forward._note_kind(other, "auto", call)
    assert len(registered) == 1


def test_what_no_kernel_computes_is_left_to_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Problem(0, 4, 4, 0, 0, 513, "float16", target="sm_90a")
    monkeypatch.setattr(forward, "_kinds", [(unknown, "auto")])
    query = torch.zeros(1, 4, 5, 513).half()
    assert forward.resized(0, query, query, query, torch.empty_like(query), False, 0, None) is None
