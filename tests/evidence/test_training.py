"""Suite backward: what its rows are held against, without a GPU."""

from __future__ import annotations

import pytest
import torch

from microsdpa.errors import InvalidArgument
from microsdpa.evidence import repro, suites, training
from microsdpa.evidence.inputs import Case, make


def test_the_suite_has_the_shapes_that_papers_measure_and_small_ones() -> None:
    cases = suites.load(training.SUITE).cases
    assert {case.head_dim for case in cases if case.batch * case.seqlen_q == 16384} == {64, 128, 256}
    assert {Case(1, 8, 512, 512, 64), Case(4, 32, 2048, 2048, 128, heads_kv=8, causal="upper_left")} < set(cases)
    assert {masks for case in cases for masks in case.masks} == {
        *("padding", "softcap", "additive", "documents", "alibi", "window 1024")
    }


@pytest.mark.parametrize(
    "case", [Case(2, 4, 40, 70, 32, heads_kv=2), Case(2, 4, 40, 70, 32, masks=("additive", "alibi", "sinks"))], ids=str
)
def test_own_kernels_are_right_and_a_wrong_gradient_is_told(case: Case) -> None:
    tensors = make(case)
    weight = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(5)).to(tensors[0])
    exact, plain = training.expected(case, tensors, weight)
    calls = training.OwnKernels().calls(case, tensors, weight)
    assert set(calls) == set(training.DIRECTIONS)
    found = calls["both"]()
    assert all(map(torch.equal, found, calls["backward"]()))
    assert training.check(found, exact, plain)[1] == ""
    assert "gradient of key" in training.check((found[0], found[1] * 1.1, found[2]), exact, plain)[1]


def test_gradients_of_some_heads_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2, 4, 20, 30, 32, heads_kv=2, masks=("additive",))
    tensors = make(case)
    weight = torch.randn(tensors[0].shape).to(tensors[0])
    whole, _ = training.expected(case, tensors, weight)
    monkeypatch.setattr(training, "JUDGED_SCORES", 2 * 20 * 30)
    some, _ = training.expected(case, tensors, weight)
    assert [grad.shape[1] for grad in some] == [2, 1, 1]
    for part, all_heads in zip(some, whole, strict=True):
        torch.testing.assert_close(part, all_heads[:, : part.shape[1]])


def test_operations_are_quoted_as_in_the_papers() -> None:
    case = Case(2, 16, 4096, 4096, 128)
    assert training.flops(case, "backward") == 10 * 2 * 16 * 4096**2 * 128
    assert training.flops(case, "both") == 14 * 2 * 16 * 4096**2 * 128
    assert 2 * training.flops(Case(2, 16, 4096, 4096, 128, causal="upper_left"), "both") == training.flops(case, "both")


def test_only_graphs_are_timed() -> None:
    with pytest.raises(InvalidArgument, match="modes: expected graph for suite backward"):
        repro.bench_step(suite="backward", modes=["host"])


def test_no_case_begins_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 20.0, 30.0])
    monkeypatch.setattr(training.time, "time", lambda: next(clock))
    monkeypatch.setattr(training, "_measure", lambda case, implementations: [{"shape": str(case)}])
    cases = [Case(1, 1, length, length, 64) for length in (64, 128, 256)]
    kept: list[int] = []
    rows = training.run(cases, "none", keep=lambda found: kept.append(len(found)), until=25.0)
    assert [row["shape"] for row in rows] == [str(case) for case in cases[:2]]
    assert kept == [1, 2]
