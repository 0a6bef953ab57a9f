"""Gradients by own kernels on a GPU: right, the same bits each time, in graphs, and by every way to ask for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import microsdpa
from microsdpa.evidence import training
from microsdpa.evidence.inputs import Case, make
from microsdpa.execution import backward

pytestmark = pytest.mark.gpu

CASES = [
    Case(1, 8, 512, 512, 64),
    Case(4, 8, 1000, 1000, 64, causal="upper_left"),
    Case(2, 32, 1024, 1024, 128, heads_kv=8, causal="upper_left", dtype="bfloat16"),
    Case(1, 4, 700, 1000, 64, heads_kv=2, causal="lower_right"),
    Case(2, 4, 300, 700, 128, heads_kv=1, causal="lower_right", dtype="bfloat16"),
    Case(2, 2, 513, 257, 256, causal="upper_left"),
    Case(1, 2, 600, 700, 192, causal="upper_left"),
    Case(1, 2, 600, 700, 80),
    Case(1, 2, 300, 700, 64, layout="unaligned"),
    Case(1, 2, 300, 700, 36),
    Case(70_000, 1, 2, 3, 64),
    Case(2, 4, 240, 390, 64, heads_kv=2, masks=("bool", "window", "softcap", "alibi", "sinks")),
    Case(2, 4, 240, 390, 128, heads_kv=2, masks=("additive",)),
    Case(1, 2, 600, 600, 96, masks=("documents",)),
    Case(3, 6, 333, 444, 128, heads_kv=2, masks=("softcap",)),
    Case(2, 8, 1000, 900, 64, heads_kv=2, causal="upper_left", masks=("window", "softcap", "alibi", "sinks")),
    Case(2, 4, 2500, 2300, 128, dtype="bfloat16", causal="lower_right", masks=("window",)),
    Case(1, 4, 700, 800, 256, masks=("alibi", "softcap")),
    Case(4, 8, 700, 900, 64, masks=("padding",)),
    Case(3, 4, 500, 700, 192, dtype="bfloat16", masks=("padding", "sinks")),
    Case(2, 4, 1100, 1100, 128, heads_kv=1, causal="upper_left", masks=("documents",)),
    Case(2, 4, 900, 120, 64, masks=("documents", "softcap")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("deterministic", [True, False], ids=("fixed order", "any order"))
def test_own_kernels_are_right_and_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, case: Case, deterministic: bool
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    tensors = make(case, "cuda")
    weight = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(5)).to(tensors[0])
    exact, plain = training.expected(case, tensors, weight)
    calls = training.OwnKernels().calls(case, tensors, weight)
    found = calls["both"]()
    assert training.check(found, exact, plain)[1] == ""
    again = calls["backward"]()
    assert training.check(again, exact, plain)[1] == ""
    if deterministic:
        assert all(map(torch.equal, found, again))


def test_checkpoints_transforms_and_compiled_functions_have_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("_through_math", "_through_flash", "_through_cudnn"):
        monkeypatch.delattr(backward, other)
    leaves = [t.requires_grad_() for t in make(Case(2, 4, 300, 300, 64), "cuda")]

    def attend(*inputs: torch.Tensor) -> Any:
        return microsdpa.sdpa(*inputs, softcap=5.0, causal="upper_left")

    found = torch.autograd.grad(attend(*leaves).sum(), leaves)
    again = torch.autograd.grad(checkpoint(attend, *leaves, use_reentrant=False).sum(), leaves)
    compiled = torch.autograd.grad(torch.compile(attend, fullgraph=True)(*leaves).sum(), leaves)
    rest = [t.detach() for t in leaves[1:]]
    of_query = torch.func.grad(lambda query: attend(query, *rest).sum())(leaves[0].detach())
    assert all(map(torch.equal, found, again))
    assert all(map(torch.equal, found, compiled))
    assert torch.equal(of_query, found[0])


def test_deterministic_algorithms_are_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(backward, "_through_flash")
    monkeypatch.delattr(backward, "_through_cudnn")
    leaves = [t.requires_grad_() for t in make(Case(2, 4, 1000, 1000, 128), "cuda")]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    found, again = (torch.autograd.grad(microsdpa.sdpa(*leaves).sum(), leaves) for _ in range(2))
    assert all(map(torch.equal, found, again))


def test_a_backward_pass_is_captured_in_a_graph() -> None:
    case = Case(1, 4, 200, 300, 64, masks=("softcap",))
    tensors = make(case, "cuda")
    weight = torch.randn_like(tensors[0])
    both = training.OwnKernels().calls(case, tensors, weight)["both"]
    expected = [grad.clone() for grad in both()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    graph.replay()
    assert all(map(torch.equal, found, expected))
