"""The small transformer that is trained by torch's attention and by this library's, for a few steps on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa.evidence import learning, results
from microsdpa.evidence.learning import SMALL, Comparison


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for one another take longer than so small products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_sequences_repeat_themselves_but_for_some_tokens() -> None:
    tokens = learning.sequences(learning.Recipe(), torch.Generator().manual_seed(0))
    assert tokens.shape == (16, 257)
    same = float((tokens[:, learning.LAG :] == tokens[:, : -learning.LAG]).double().mean())
    assert abs(same - (1 - learning.REPLACED) ** 2) < 0.05


def test_what_came_before_is_learned() -> None:
    """The loss falls below that of a guess, which only attention to earlier tokens explains."""
    recipe = replace(SMALL, steps=150, batch=16, rate=1e-2, dropout_p=0.0)
    losses = learning.train(recipe, learning.torch_attention, 0, "cpu")
    assert losses[0] > 0.95 * math.log(recipe.vocabulary)
    assert sum(losses[-10:]) / 10 < 0.8 * math.log(recipe.vocabulary)


def test_a_difference_is_judged_by_the_spread_of_runs() -> None:
    assert Comparison((1.0, 1.1, 0.9), (1.05, 1.15, 0.95)).is_same
    assert not Comparison((1.0, 1.01, 0.99), (1.1, 1.11, 1.09)).is_same
    assert not Comparison((1.0, 1.01, 0.99), (0.9, 0.91, 0.89)).is_same
    assert Comparison((1.0, 1.0), (1.009, 1.009)).is_same
    assert Comparison((1.0, 1.0), (1.5, 1.5)).difference == pytest.approx(0.5)


def test_both_kinds_learn_the_same_and_it_is_recorded(tmp_path: Path) -> None:
    step = learning.step(output=tmp_path)
    assert step.status == "passed", step.table
    rows = results.read(tmp_path / "cpu" / f"{learning.SUITE}.json")["rows"]
    assert len(rows) == 2 * 2 * len(learning.SEEDS)
    assert {row["metrics"]["dropout_p"] for row in rows} == {0.0, 0.1}
    without = [row["metrics"]["loss"] for row in rows if row["metrics"]["dropout_p"] == 0.0]
    assert without[:3] == pytest.approx(without[3:], abs=2e-3)


def test_an_attention_that_learns_otherwise_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sdpa = microsdpa.sdpa

    def acausal(*tensors: Any, is_causal: bool, **options: Any) -> Any:
        return sdpa(*tensors, **options)

    monkeypatch.setattr(microsdpa, "sdpa", acausal)
    monkeypatch.setattr(learning, "SMALL", replace(SMALL, steps=60, batch=16, rate=1e-2, dropout_p=0.0))
    step = learning.step(output=tmp_path)
    assert step.status == "failed"
    wrong = [row for row in step.data["rows"] if row["status"] == "wrong"]
    assert wrong
    assert all(row["impl"] == "microsdpa" and "off by" in row["reason"] for row in wrong)
