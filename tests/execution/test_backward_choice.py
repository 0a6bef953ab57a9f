"""Who makes a gradient: torch's backward pass or this library's kernels, and how often that is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from microsdpa.call.masks import Masks
from microsdpa.execution import backward, gradients
from microsdpa.kernels import policy
from microsdpa.kernels.problem import Problem
from microsdpa.runtime import launcher


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Problems for which the policy is asked, as if the tensors lay on a Hopper."""
    found: list[Problem] = []
    real = policy.beats_torch_backward
    monkeypatch.setattr(launcher, "target_of_device", lambda _: "sm_90a")
    monkeypatch.setattr(policy, "beats_torch_backward", lambda problem: found.append(problem) or real(problem))
    monkeypatch.setattr(backward, "_beaten", {})
    return found


def inputs(seqlen: int = 512, head_dim: int = 64, at: int = 0) -> tuple[torch.Tensor, ...]:
    memory = torch.zeros(3, 8 * seqlen * head_dim + 8).half()
    return tuple(row[at : at + 8 * seqlen * head_dim].view(1, 8, seqlen, head_dim) for row in memory)


def test_the_policy_is_asked_once_for_calls_of_a_kind(asked: list[Problem]) -> None:
    mask = Masks(attn_mask=torch.ones(512, 512, dtype=torch.bool))
    kinds: list[tuple[Any, ...]] = [
        (inputs(), None, Masks()),
        (inputs(), "upper_left", Masks()),
        (inputs(), None, mask),
        (inputs(at=1), None, Masks()),
        (inputs(2048, 128), None, Masks()),
        (inputs(2048, 128, at=1), None, Masks()),
    ]
    first = [backward._beats_torch(*kind) for kind in kinds]
    assert len(asked) == len(kinds)
    assert first == [policy.beats_torch_backward(gradients.problem_of(*kind[:2], kind[2].kind)) for kind in kinds]
    assert set(first) == {False, True}
    del asked[:]
    assert [backward._beats_torch(*kind) for kind in kinds] == first
    assert asked == []
