"""Calls whose gradient is a node of torch's own; on the CPU, with plain arithmetic in place of torch's backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa.call.call import NO_TENSORS, MaskTensors
from microsdpa.call.masks import NONE, Masks
from microsdpa.call.options import Options
from microsdpa.evidence.inputs import Case, make, make_masks
from microsdpa.execution import autograd, backward, nodes


@pytest.fixture
def _backward_on_cpu() -> Iterator[None]:
    """torch's two backward operators, for CPU tensors, from the scores that are made again."""

    def cudnn(
        grad: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        seed: Any,
        offset: Any,
        bias: Any,
        *rest: Any,
        scale: Any = None,
    ) -> Any:
        assert lse.shape == (*q.shape[:3], 1)
        masks = NONE if bias is None else Masks(bias)
        found = backward._through_math((grad, None), (q, k, v), "upper_left" if rest[-1] else None, scale, masks)
        return tuple(found[:3])  # not that of the mask

    def flash(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, scale: Any = None) -> Any:
        assert lse.shape == q.shape[:3]
        causal = "lower_right" if rest[5] else None
        return tuple(backward._through_math((grad, None), (q, k, v), causal, scale, NONE))

    library = torch.library.Library("aten", "IMPL")
    library.impl(f"{nodes.CUDNN}_backward", cudnn, "CPU")
    library.impl(f"{nodes.FLASH}_backward", flash, "CPU")
    yield
    library._destroy()


CASES = {
    "cuDNN": (nodes.CUDNN, Case(2, 4, 20, 20, 16, heads_kv=2), Options(enable_gqa=True)),
    "cuDNN, causal, scale": (nodes.CUDNN, Case(2, 4, 20, 33, 16), Options(is_causal=True, scale=0.3)),
    "cuDNN, mask of booleans": (nodes.CUDNN, Case(2, 4, 20, 33, 16, masks=("bool",)), Options()),
    "cuDNN, mask of numbers": (nodes.CUDNN, Case(2, 4, 20, 33, 16, masks=("additive",)), Options()),
    "flash": (nodes.FLASH, Case(2, 4, 20, 33, 16), Options()),
    "flash, causal": (nodes.FLASH, Case(2, 4, 20, 33, 16), Options(causal="lower_right")),
}


@pytest.mark.usefixtures("_backward_on_cpu")
@pytest.mark.parametrize("name", CASES)
def test_the_node_is_torchs_and_the_gradient_that_of_plain_arithmetic(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, case, options = CASES[name]
    monkeypatch.setattr(nodes, "operator_for", lambda *_: operator)
    tensors = make(case)
    masks = MaskTensors(make_masks(case).get("attn_mask"))
    weight = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(3)).half()
    found = []
    for attend in (nodes.attend, lambda *call: autograd.record(*call, True)[0]):
        leaves = tuple(t.detach().clone().requires_grad_() for t in tensors)
        out = attend(leaves, masks, options)
        assert out is not None
        found.append((out.detach(), *torch.autograd.grad(out, leaves, weight)))
        kind = type(out.grad_fn).__name__
        assert kind.startswith("ScaledDotProduct" if attend is nodes.attend else "_Attention")
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_refusal_comes_through_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "operator_for", lambda *_: nodes.CUDNN)
    query, key, value = (t.requires_grad_() for t in make(Case(1, 2, 8, 8, 16)))
    with pytest.raises(microsdpa.InvalidArgument, match="softcap"):
        nodes.attend((query, key, value), NO_TENSORS, Options(softcap=-1.0))


def test_torchs_own_calls_do_not_reach_the_kernels() -> None:
    nodes._calls()
    for name in (nodes.CUDNN, nodes.FLASH):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", nodes.BACKEND)
        for key in ("CUDA", "CPU", "AutogradCUDA", "ZeroTensor"):
            table = torch._C._dispatch_dump_table(f"aten::{name}")
            line = next((line for line in table.splitlines() if line.startswith(f"{key}:")), "")
            assert "microsdpa" not in line


def test_an_operator_of_another_form_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SCHEMAS", {**nodes.SCHEMAS, nodes.CUDNN: "(Tensor query) -> Tensor"})
    monkeypatch.setattr(nodes._library, "impl", lambda *_: None)
    assert list(nodes._calls.__wrapped__()) == [nodes.FLASH]
