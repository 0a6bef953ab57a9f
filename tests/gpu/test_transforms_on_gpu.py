"""torch.jit.trace, torch.func and forward-mode gradients on a GPU, where a call has a plan that a launch would take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import microsdpa

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore::torch.jit.TracerWarning"),
]


def _tensors(seed: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    return tuple(torch.randn(1, 4, 100, 64, device="cuda").half() for _ in range(3))


@pytest.mark.parametrize("door", ["sdpa", "enable()", "plan"])
def test_a_traced_call_is_in_the_graph(door: str) -> None:
    tensors, others = _tensors(0), _tensors(1)
    plan = microsdpa.plan(*tensors)
    calls = {"sdpa": microsdpa.sdpa, "enable()": lambda *t: F.scaled_dot_product_attention(*t), "plan": plan}
    with microsdpa.enabled(strict=True):
        calls[door](*tensors)  # there is a plan now
        traced = torch.jit.trace(lambda q, k, v: calls[door](q, k, v), tensors)
    assert str(traced.graph).count("microsdpa::attention(") == 1
    assert torch.equal(traced(*others), microsdpa.sdpa(*others))


def test_forward_mode_is_refused_where_there_is_a_plan() -> None:
    query, key, value = _tensors(0)
    microsdpa.sdpa(query, key, value)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, query)
        with pytest.raises(microsdpa.UnsupportedProblem, match="forward-mode"):
            microsdpa.sdpa(dual, key, value)


def test_torch_func_grad_is_near_autograds_gradient() -> None:
    tensors = _tensors(0)
    found = torch.func.grad(lambda *t: microsdpa.sdpa(*t).float().sum(), argnums=(0, 1, 2))(*tensors)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = torch.autograd.grad(microsdpa.sdpa(*leaves).float().sum(), leaves)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    batch = torch.stack([tensors[0], -tensors[0]])
    mapped = torch.vmap(lambda q: microsdpa.sdpa(q, *tensors[1:]))(batch)
    assert torch.equal(mapped, torch.stack([microsdpa.sdpa(q, *tensors[1:]) for q in batch]))
