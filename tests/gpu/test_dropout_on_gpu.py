"""Dropout on a GPU: torch's generator, the masks of both passes, graphs, checkpoints and compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import microsdpa
from microsdpa import reference
from microsdpa.evidence import learning
from microsdpa.evidence.inputs import Case, make

pytestmark = pytest.mark.gpu
P = 0.3
CASES = (
    Case(2, 4, 200, 300, 64, heads_kv=2),
    Case(1, 2, 200, 300, 128, dtype="bfloat16", causal="lower_right"),
    Case(1, 2, 150, 170, 256, causal="upper_left"),
    Case(1, 2, 150, 170, 40, layout="unaligned"),
    # Those of hopper/throughput and hopper/backward, on a Hopper.
    Case(2, 16, 600, 500, 64, heads_kv=8),
    Case(2, 16, 400, 600, 128, dtype="bfloat16", causal="upper_left"),
    Case(2, 16, 400, 400, 256),
    Case(12, 12, 130, 100, 64),
)


def leaves(case: Case) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for tensor in make(case, "cuda")]


def attend(case: Case, *tensors: torch.Tensor) -> torch.Tensor:
    found = microsdpa.sdpa(*tensors, causal=case.causal, enable_gqa=True, dropout_p=P)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_passes_have_the_mask_of_torchs_generator(case: Case) -> None:
    tensors = leaves(case)
    torch.manual_seed(7)
    generator = torch.cuda.default_generators[0]
    state = torch.tensor([generator.initial_seed(), generator.get_offset()])
    out = attend(case, *tensors)
    assert generator.get_offset() == int(state[1]) + 4
    weight = torch.randn(out.shape).to(out)
    found = out, *torch.autograd.grad(out, tensors, weight)

    def through(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        own = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        of, _ = function(*own, causal=case.causal, dropout_p=P, rng_state=state)
        return [of.detach(), *torch.autograd.grad(of, own, weight.to(dtype))]

    exact, plain = through(reference.oracle, torch.float64), through(reference.eager, out.dtype)
    for got, want, rough in zip(found, exact, plain, strict=True):
        allowed = 4 * (rough.double() - want).abs().max() + 1e-3 * want.abs().max()
        assert float((got - want).abs().max()) <= float(allowed)


def test_replays_of_a_graph_differ_and_a_seed_makes_them_again() -> None:
    case = CASES[0]
    tensors = leaves(case)
    weight = torch.randn_like(tensors[0])

    def step() -> list[torch.Tensor]:
        with torch.enable_grad():
            out = attend(case, *tensors)
        return [out.detach(), *torch.autograd.grad(out, tensors, weight)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        made = step()

    def replays() -> list[list[torch.Tensor]]:
        torch.manual_seed(3)
        found = []
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            found.append([tensor.clone() for tensor in made])
        return found

    (first, second), again = replays(), replays()
    assert not torch.equal(first[0], second[0])
    for one, other in zip((first, second), again, strict=True):
        assert all(map(torch.equal, one, other))
    # The output is linear in V: both passes have one mask.
    for out, _, _, grad_value in (first, second):
        of_output, of_gradient = (out.double() * weight).sum(), (tensors[2].double() * grad_value).sum()
        assert abs(float(of_output - of_gradient)) < 1e-3 * float((out.double() * weight).abs().sum())


def test_checkpoints_and_compiled_code_repeat_themselves() -> None:
    case = CASES[1]
    tensors = leaves(case)
    torch.manual_seed(9)
    out = attend(case, *tensors)
    torch.manual_seed(9)
    again: Any = checkpoint(attend, case, *tensors, use_reentrant=False)
    assert torch.equal(out, again)
    pairs = zip(*(torch.autograd.grad(one.float().square().sum(), tensors) for one in (out, again)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    compiled = torch.compile(lambda *given: attend(case, *given), fullgraph=True, backend="aot_eager")
    found = []
    for _ in range(2):
        torch.manual_seed(9)
        found.append(compiled(*tensors))
    assert torch.equal(*found)
    assert not torch.equal(found[0], compiled(*tensors))


def test_a_transformer_learns_as_with_torch() -> None:
    found = learning.compare(learning.Recipe(), (0, 1), "cuda")
    assert found.is_same, found
    assert max(found.ours) < 1.5
