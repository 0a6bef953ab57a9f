"""Calls of other sizes than those before: when ranges are looked for, and calls of a kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from microsdpa.execution import new_sizes
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import MaskKind, Problem
from microsdpa.kernels.ranges import SizeRange, range_of
from microsdpa.kernels.select import chosen
from microsdpa.runtime import launcher


def test_a_problem_with_other_keys_is_the_one_that_replace_gives() -> None:
    problem = Problem(1, 32, 8, 1, 512, 128, "float16", causal="lower_right", operands="fp8", target="sm_89")
    other = problem.with_keys(77)
    assert other == replace(problem, seqlen_k=77) != problem
    assert hash(other) == hash(replace(problem, seqlen_k=77))


@pytest.mark.parametrize("before", [None, 511, 512, 600])
def test_sizes_around_a_checked_call_are_looked_for_where_its_length_has_changed(before: int | None) -> None:
    problem = Problem(1, 32, 8, 1, 512, 128, "float16", mask=MaskKind("bool"), target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    new_sizes._decoding.clear()
    if before is not None:
        new_sizes.others(problem.with_keys(before), spec, "auto")
    found = new_sizes.others(problem, spec, "auto")
    assert found == (range_of(problem, spec) if before in (511, 600) else None)


def test_sizes_of_a_kind_are_looked_for_from_the_second_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(20, 8, 8, 256, 256, 128, "float16", target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    looked: list[tuple[int, bool]] = []
    wide = SizeRange(1, 30, 2, 300, True)
    answers = iter([wide, None, wide, None, None])

    def answer(problem: Problem, _: KernelSpec, kernel: str, batch_first: bool) -> SizeRange | None:
        looked.append((problem.batch, batch_first))
        return next(answers)

    monkeypatch.setattr(new_sizes, "range_of", answer)
    kind = new_sizes.Kind(problem.with_sizes(0, 0, 0), "auto")
    found = [kind.others(problem.with_sizes(batch, 256, 256), spec) for batch in (1, 2, 2)]
    assert found == [None, wide, None]
    assert looked == [(2, True), (2, False)]
    pauses = []
    for _ in range(3):  # fruitless searches come further and further apart
        before = len(looked)
        for new in range(200):
            kind.others(problem.with_sizes(100 + new, 256, 256), spec)
            if len(looked) > before:
                pauses.append(new)
                break
    assert pauses == [15, 0, 15]


def test_a_call_of_other_sizes_is_prepared_without_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    like = Problem(2, 4, 4, 16, 24, 64, "float16", target="sm_90a")
    registered: list[Any] = []
    prepared: list[Any] = []
    monkeypatch.setattr(new_sizes, "_kinds", [])
    monkeypatch.setattr(new_sizes, "_numbers", {})
    monkeypatch.setattr(launcher, "register_kind", lambda *call: registered.append(call) or True)
    monkeypatch.setattr(launcher, "prepare_and_launch", lambda *given: prepared.append(given) or given[2])
    query, key = torch.zeros(3, 4, 50, 64).half(), torch.zeros(3, 4, 70, 64).half()
    call = query, key, key, torch.empty_like(query), True, 0, None
    new_sizes.note_kind(like, "auto", call)
    new_sizes.note_kind(like.with_sizes(9, 9, 9), "auto", call)  # of the same kind
    assert [number for number, *_ in registered] == [0, 0]
    del registered[1:]
    assert new_sizes.resized(0, call) == call
    expected = replace(like, batch=3, seqlen_q=50, seqlen_k=70)
    assert prepared == [(expected, chosen(expected), call, None)]
    for other in (replace(like, bulk=False), replace(like, mask=MaskKind("bool")), replace(like, continued=True)):
        new_sizes.note_kind(other, "auto", call)
    assert len(registered) == 1


def test_what_no_kernel_computes_is_left_to_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Problem(0, 4, 4, 0, 0, 513, "float16", target="sm_90a")
    monkeypatch.setattr(new_sizes, "_kinds", [new_sizes.Kind(unknown, "auto")])
    query = torch.zeros(1, 4, 5, 513).half()
    assert new_sizes.resized(0, (query, query, query, torch.empty_like(query), False, 0, None)) is None
