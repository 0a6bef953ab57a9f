"""The examples of one process, on the CPU: each computes what torch does."""

from __future__ import annotations

from pathlib import Path

import pytest
from loading import EXAMPLES, load


@pytest.mark.parametrize("name", ["transformers_model", "diffusers_pipeline"])
def test_models_give_the_same(name: str) -> None:
    pytest.importorskip(name.split("_")[0], reason="it is of the extra integrations")
    assert load(name).main() < 1e-2


def test_the_policy_head_gives_actions() -> None:
    actions = load("policy_head").main()
    assert actions.shape == (1, 16, 7)
    assert 0 < float(actions.abs().max()) <= 1


def test_an_8_bit_cache_costs_little() -> None:
    assert 0.01 < load("eight_bit_cache").main() < 0.08


def test_training_learns_as_with_torch() -> None:
    ours, theirs = load("train_transformer").main(60)
    assert ours < 2.7
    assert abs(ours - theirs) < 0.15


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short_and_say_how_to_run_them(path: Path) -> None:
    text = path.read_text()
    assert f"examples/{path.name}" in text
    assert len(text.splitlines()) < 100
