"""Suite steps: what its models compute is right by every way, and a wrong one is told."""

from __future__ import annotations

import pytest
import torch

from microsdpa.evidence import block, results, steps, timing
from microsdpa.evidence.block import Block, Cell
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers import Call
from microsdpa.evidence.steps import MODELS, WAYS, Model, Way, measure

SMALL = {
    "memory": Model(Cell("policy", Case(1, 2, 3, 20, 16), rotary=False), 2, True),
    "own keys": Model(Cell("encoder", Case(1, 2, 12, 12, 16), rotary=False, norm="layer"), 2, False),
    "a token": Model(
        Cell("decoder", Case(1, 4, 1, 20, 16, heads_kv=2, causal="lower_right"), rotates_key=False, norm="none"),
        2,
        True,
    ),
}
EAGER = [way for way in WAYS if not way.compiles]


def shifted(cell: Cell, own: Block) -> torch.Tensor:
    return steps.attend_torch(cell, own) + 0.5


class Counted(timing.Runner):
    """Runs a call a turn, in a microsecond."""

    turns = 5

    def __init__(self, calls: list[Call]) -> None:
        self.call = calls[0]

    def turn(self) -> list[float]:
        self.call()
        return [1.0]


@pytest.mark.parametrize("name", SMALL)
def test_every_way_is_held_against_fp64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "prepare", lambda mode, calls: Counted(calls))
    bad = Way("bad", shifted, False)
    with torch.no_grad():
        rows = measure(SMALL[name], ["host"], "cpu", [*EAGER, bad])
    assert {(row["impl"], row["status"]) for row in rows} == {("microsdpa", "ok"), ("torch", "ok"), ("bad", "wrong")}
    for row in rows:
        assert row["reason"].startswith("off by") == (row["impl"] == "bad")
        assert bool(row["samples_us"]) == (row["impl"] != "bad")
    results.validate(results.make(steps.SUITE, "test", rows), "made here")


def test_a_way_that_raises_is_a_row() -> None:
    def broken(cell: Cell, own: Block) -> torch.Tensor:
        raise ValueError("no such attention")

    with torch.no_grad():
        (row,) = measure(SMALL["memory"], ["host"], "cpu", [Way("broken", broken, False)])
    assert (row["status"], row["reason"]) == ("wrong", "ValueError: no such attention")


def test_models_have_attention_of_every_kind() -> None:
    assert {model.cell.norm for model in MODELS} == {"none", "rms", "layer"}
    assert any(model.cell.rotary for model in MODELS)
    assert {model.memory for model in MODELS} == {True, False}
    for model in MODELS:
        assert block.problem_of(model.cell, "sm_90a").prologue is not None
