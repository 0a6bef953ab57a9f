"""Nested tensors: each door says by name that it wants dense ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import microsdpa

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
DENSE = torch.randn(2, 2, 4, 16).half()


def nested(layout: torch.layout) -> torch.Tensor:
    """[B, S of its own, H, D]."""
    parts = [torch.randn(size, 2, 16).half() for size in (3, 5)]
    return torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("options", [{}, {"impl": "emulate"}, {"impl": "emulate", "precision": "fp8"}], ids=str)
@pytest.mark.parametrize("door", [microsdpa.sdpa, microsdpa.plan, microsdpa.explain])
@pytest.mark.parametrize("name", ["query", "key", "value", "out", "attn_mask", "alibi_slopes", "sinks"])
def test_a_nested_tensor_is_refused_by_name(
    name: str, door: Any, options: dict[str, Any], layout: torch.layout
) -> None:
    if ("precision" in options and name in ("attn_mask", "alibi_slopes", "sinks")) or (
        name == "out" and door is microsdpa.explain
    ):
        pytest.skip("the call has no such argument")
    arguments = {"query": DENSE, "key": DENSE, "value": DENSE, name: nested(layout)}
    with pytest.raises(microsdpa.InvalidArgument, match="expected a dense tensor, got a nested one") as caught:
        door(**arguments, **options)
    assert caught.value.argument == name
    assert "to_padded_tensor" in caught.value.hint


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_with_a_gradient_is_refused(layout: torch.layout) -> None:
    query = nested(layout).detach().requires_grad_()
    with pytest.raises(microsdpa.InvalidArgument, match="query: expected a dense tensor, got a nested one"):
        microsdpa.sdpa(query, query, query)
