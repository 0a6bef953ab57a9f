"""The calls of torch's tests through the enabled function, on the CPU and emulated, and what counts as a failure."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from microsdpa.errors import UnsupportedProblem
from microsdpa.evidence import render, results, verify_torch
from microsdpa.evidence.torch_cases import TorchCase, all_cases, corners, sample
from microsdpa.evidence.verify_torch import EMULATED_WORK, OURS, REFUSED, TORCHS, check
from microsdpa.integrations import dropin

MASKED = TorchCase("masked", 1, 2, 12, 20, 16, mask="bool", mask_shape=(12, 20))
BY_TORCH = {
    *("float32", "float64", "two dimensions", "three dimensions", "five dimensions", "a query of batch 1"),
    *("a head dimension of 257", "strides of 2 along D", "dropout"),
    *("dropout of everything", "jagged lengths", "jagged lengths of 0", "nested tensors"),
}
REFUSED_BY_TORCH = {
    *("one dimension", "a causal bias and is_causal", "a mask of another type", "a mask of another shape"),
    *("grouped heads without enable_gqa", "heads that do not divide", "different types", "jagged lengths of 1"),
    "a nested query and dense keys",
}


def test_the_space_is_that_of_torchs_tests() -> None:
    cases = all_cases()
    assert len(cases) > 29_000
    assert {c.head_dim for c in cases} >= {8, 15, 16, 21, 32, 64, 72, 96, 128, 160, 192, 203, 256}
    assert {(c.seqlen_q, c.seqlen_k) for c in cases} >= {(4, 2048), (2048, 4), (143, 587), (312, 65), (600, 600)}
    assert {(len(c.mask_shape), c.mask) for c in cases} >= {(rank, "float") for rank in (0, 1, 2, 3, 4) if rank}
    assert {c.layout for c in cases} == {"dense", "packed", "bshd", "shared"}
    assert {c.variant for c in cases} == {None, "upper_left", "lower_right"}
    assert len(set(map(str, cases))) == len(cases)


def test_a_sample_is_of_every_family_and_repeats_itself() -> None:
    chosen = sample(200, 3)
    assert len(chosen) == 200
    assert len(set(chosen)) == 200
    assert {case.family for case in chosen} == {case.family for case in all_cases()}
    assert chosen == sample(200, 3) != sample(200, 4)
    assert all(case.work <= 10_000 for case in sample(50, 0, 10_000))


@pytest.mark.parametrize("case", sample(80, 1, 2**20), ids=str)
def test_cpu_tensors(case: TorchCase) -> None:
    outcome = check(str(case), case.call("cpu"))
    assert (outcome.by, outcome.failure) == (OURS, "")


@pytest.mark.parametrize("case", sample(12, 2, EMULATED_WORK // 4), ids=str)
def test_emulated_kernels(case: TorchCase) -> None:
    outcome = check(str(case), case.call("cpu"), "emulate")
    assert (outcome.by, outcome.failure) == (OURS, "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", corners("cpu"))
def test_corners(name: str) -> None:
    outcome = check(name, corners("cpu")[name]())
    assert outcome.failure == ""
    if name != "a mask and is_causal":  # which torch's CPU function computes, and its CUDA function refuses
        assert outcome.by == (TORCHS if name in BY_TORCH else REFUSED if name in REFUSED_BY_TORCH else OURS)


def test_a_lost_mask_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = dropin.api.sdpa
    monkeypatch.setattr(dropin.api, "sdpa", lambda *a, attn_mask=None, **options: sdpa(*a, **options))
    # Emulated: under "auto" torch's own function has CPU tensors, masks and all.
    assert "differs from FP64" in check("lost", MASKED.call("cpu"), "emulate").failure


def test_another_answer_than_torchs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def rerouted(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        strict = dropin._active[-1].strict
        if strict:
            raise UnsupportedProblem("not today", nearest="tomorrow")
        return query

    monkeypatch.setattr(dropin, "scaled_dot_product_attention", rerouted)
    assert "gives another result" in check("float32", corners("cpu")["float32"]()).failure
    assert "torch refuses with" in check("types", corners("cpu")["different types"]()).failure


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [MASKED, dataclasses.replace(MASKED, family="fused", mask="none", mask_shape=())]
    monkeypatch.setattr(verify_torch, "sample", lambda *_: cases)
    monkeypatch.setattr(verify_torch, "corners", lambda _: {})


def test_the_step_writes_a_result_that_is_rendered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small(monkeypatch)
    step = verify_torch.step(output=tmp_path)
    assert step.status == "passed", step.summary
    assert "2 of 2 calls of torch's tests passed in the emulator" in step.summary
    (path,) = tmp_path.rglob("verify_torch.json")
    rows = {row["label"]: row for row in results.read(path)["rows"]}
    assert rows["masked"]["kernel"] == "ampere/mma"
    text = "<!-- microsdpa:table gpu=cpu suite=verify_torch -->\n<!-- microsdpa:end -->\n"
    assert "| masked | ampere/mma | 1 of 1 |" in render.rendered(text, tmp_path, "page")
    assert verify_torch.NOT_RECORDED in render.rendered(text, tmp_path / "none", "page")


def test_a_case_that_is_left_to_torch_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)

    def unwilling(*arguments: Any) -> str:
        return "" if arguments[3] is None else "no mask today"

    monkeypatch.setattr(dropin, "why_not", unwilling)
    step = verify_torch.step()
    assert step.status == "failed"
    assert "left it to torch" in step.summary
