"""Calls whose gradient is a node of torch's own; on the CPU, with plain arithmetic in place of torch's backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import microsdpa
from microsdpa.call.call import NO_TENSORS, MaskTensors, mask_tensors
from microsdpa.call.masks import NONE, Masks
from microsdpa.call.options import PLAIN, Options
from microsdpa.evidence.inputs import Case, make, make_masks
from microsdpa.execution import autograd, backward, forward, gradients, nodes


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


@pytest.fixture
def _kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the launcher's kernels give, by forward.attend, for CPU tensors."""
    told: list[tuple[Any, Any]] = []
    known = {
        Options(c, a, None, g).code: (c, a, g)
        for c in (False, True)
        for a in (None, "lower_right")
        for g in (False, True)
        if not (c and a)
    }

    def attend(query: Any, key: Any, value: Any, causal: bool, scale: Any) -> Any:
        code, mask = told.pop() if told else (Options(causal).code, None)
        is_causal, alignment, gqa = known[code]
        options = Options(is_causal, alignment, scale, gqa)
        assert causal == (is_causal or alignment is not None)
        return forward.attend((query, key, value), mask_tensors(mask, None, None), options, True)

    def cudnn(
        q: Any, k: Any, v: Any, bias: Any, lse: bool, p: float = 0.0, causal: bool = False, scale: Any = None
    ) -> Any:
        out, sums = attend(q, k, v, causal, scale)
        sums = sums if bias is None else nodes.of_seen_rows(sums)
        scalar, debug = nodes.nothing(q.device)[1:]
        return out, sums.unsqueeze(3), None, None, q.shape[2], k.shape[2], scalar, scalar, debug

    def flash(q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, scale: Any = None) -> Any:
        return *attend(q, k, v, causal, scale), None, None, q.shape[2], k.shape[2], *nodes.nothing(q.device)

    library = torch.library.Library("aten", "IMPL")
    library.impl(nodes.CUDNN, cudnn, nodes.BACKEND)
    library.impl(nodes.FLASH, flash, nodes.BACKEND)
    monkeypatch.setattr(nodes.launcher, "expect_node", lambda *call: told.append(call[:2]))
    yield
    assert not told
    library._destroy()


CASES = {
    "cuDNN": (nodes.CUDNN, Case(2, 4, 20, 20, 16, heads_kv=2), Options(enable_gqa=True)),
    "cuDNN, causal, scale": (nodes.CUDNN, Case(2, 4, 20, 33, 16), Options(is_causal=True, scale=0.3)),
    "cuDNN, mask of booleans": (nodes.CUDNN, Case(2, 4, 20, 33, 16, masks=("bool",)), Options()),
    "cuDNN, mask of numbers": (nodes.CUDNN, Case(2, 4, 20, 33, 16, masks=("additive",)), Options()),
    "flash": (nodes.FLASH, Case(2, 4, 20, 33, 16), Options()),
    "flash, causal": (nodes.FLASH, Case(2, 4, 20, 33, 16), Options(causal="lower_right")),
}


@pytest.mark.usefixtures("_backward_on_cpu", "_kernels_on_cpu")
@pytest.mark.parametrize("name", CASES)
def test_the_node_is_torchs_and_the_gradient_that_of_plain_arithmetic(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, case, options = CASES[name]
    tensors = make(case)
    masks = MaskTensors(make_masks(case).get("attn_mask"))
    told = masks.attn_mask is not None or options.code != Options(options.is_causal).code
    monkeypatch.setattr(nodes, "operator_for", lambda *_: (operator, told))
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


@pytest.fixture
def own_gradients_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[gradients.Gradient]]:
    """This library's gradients behind cuDNN's node, by plain arithmetic, for CPU tensors: those that were asked for."""
    asked: list[gradients.Gradient] = []
    told: list[int] = []

    def attend(
        q: Any, k: Any, v: Any, bias: Any, lse: bool, p: float = 0.0, causal: bool = False, scale: Any = None
    ) -> Any:
        code = told.pop() if told else Options(causal).code
        options = Options(causal=nodes._CAUSAL[code], scale=scale, enable_gqa=True)
        out, sums = forward.attend((q, k, v), NO_TENSORS, options, True)
        rest = nodes.sparse(q.device)[0], *nodes.nothing(q.device)[1:]
        return out, sums.unsqueeze(3), None, None, code, k.shape[2], *rest

    def compute(of: gradients.Gradient) -> list[torch.Tensor]:
        asked.append(of)
        inputs = of.given["query"], of.given["key"], of.given["value"]
        return backward._through_math((of.given["grad_out"], None), inputs, of.causal, of.scale, of.masks)

    library = torch.library.Library("aten", "IMPL")
    library.impl(nodes.CUDNN, attend, nodes.BACKEND)
    own = nodes.register_backward("SparseCPU")
    monkeypatch.setattr(nodes.kernels, "compute", compute)
    monkeypatch.setattr(nodes, "operator_for", lambda _, __, options: (nodes.OWN, options.causal is not None))
    monkeypatch.setattr(nodes.launcher, "expect_node", lambda code, *_: told.append(code))
    yield asked
    own._destroy()
    nodes.register_backward.cache_clear()
    library._destroy()


OWN_CASES = {
    "no mask": (Case(2, 4, 20, 20, 16, heads_kv=2), Options(enable_gqa=True)),
    "causal": (Case(2, 4, 20, 33, 16, dtype="bfloat16"), Options(is_causal=True, scale=0.3)),
    "lower right": (Case(2, 4, 20, 33, 16, layout="bshd"), Options(causal="lower_right")),
}


@pytest.mark.parametrize("name", OWN_CASES)
def test_gradients_of_this_library_are_behind_a_node_of_torchs(
    name: str, own_gradients_on_cpu: list[gradients.Gradient]
) -> None:
    case, options = OWN_CASES[name]
    tensors = make(case)
    weight = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(3)).to(tensors[0])
    found = []
    for attend in (nodes.attend, lambda *call: autograd.record(*call, True)[0]):
        leaves = tuple(t.detach().clone().requires_grad_() for t in tensors)
        out = attend(leaves, NO_TENSORS, options)
        assert out is not None
        found.append((out.detach(), *torch.autograd.grad(out, leaves, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    is_causal = options.is_causal or options.causal is not None
    warm = nodes.recorded(*leaves, is_causal, options.code, options.scale)
    assert warm is not None, "a warm call takes the long way"
    assert torch.equal(warm.detach(), out.detach())
    assert all(map(torch.equal, torch.autograd.grad(warm, leaves, weight), found[0][1:]))
    (of, _) = own_gradients_on_cpu
    assert of.causal == ("upper_left" if options.is_causal else options.causal)
    assert of.given["lse"].shape == tensors[0].shape[:3]


def test_hooks_on_saved_tensors_see_no_sparse_ones(own_gradients_on_cpu: list[gradients.Gradient]) -> None:
    """Where somebody looks at what a node saves, it is a node in Python; gradients of gradients there are none of."""
    leaves = tuple(t.requires_grad_() for t in make(Case(1, 2, 20, 20, 16)))
    plain = torch.autograd.grad(nodes.attend(leaves, NO_TENSORS, PLAIN).sum(), leaves)  # type: ignore[union-attr]
    seen: list[torch.Tensor] = []

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        assert nodes.attend(inputs, NO_TENSORS, PLAIN) is None  # type: ignore[arg-type]
        return autograd.attend(inputs, NO_TENSORS, PLAIN, False)[0]  # type: ignore[arg-type]

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        out = attend(*leaves)
    assert seen
    assert not any(tensor.is_sparse for tensor in seen)
    hooked = torch.autograd.grad(out.sum(), leaves)
    again = torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=False)
    recomputed = torch.autograd.grad(again.sum(), leaves)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, hooked, recomputed, strict=True))
    assert len(own_gradients_on_cpu) == 1
    with torch.autograd.graph.save_on_cpu():
        inputs = tuple(t.detach().half().requires_grad_() for t in leaves)
        assert nodes.recorded(*inputs, False, PLAIN.code, None) is None
    out = nodes.attend(leaves, NO_TENSORS, PLAIN)
    (first, *_) = torch.autograd.grad(out.sum(), leaves, create_graph=True)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="not implemented"):
        first.sum().backward()


def test_a_backward_operator_of_another_form_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "BACKWARD_SCHEMA", "(Tensor query) -> Tensor")
    assert nodes.OWN not in nodes.calls.__wrapped__()


NOTHING = (None,) * 4 + (0, 0) + (None,) * 3
"""What the kernels give where there is no plan."""


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_call_has_no_plan_for_is_made_or_refused(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation says what is wrong, and what it admits is called again."""
    calls: list[str] = []

    def no_plan(*_: Any, **__: Any) -> Any:
        calls.append("operator")
        if fails and len(calls) == 1:
            raise RuntimeError("out of memory")
        return NOTHING

    monkeypatch.setattr(nodes, "operator_for", lambda *_: (nodes.CUDNN, False))
    monkeypatch.setattr(nodes, "calls", lambda: {nodes.CUDNN: (no_plan, None)})
    query, key, value = (t.requires_grad_() for t in make(Case(1, 2, 8, 8, 16)))
    with pytest.raises(microsdpa.InvalidArgument, match="softcap"):
        nodes.attend((query, key, value), NO_TENSORS, Options(softcap=-1.0))
    assert calls == ["operator"]
    monkeypatch.setattr(forward, "first_call", lambda *_: calls.append("plan"))
    with pytest.raises(RuntimeError, match="report this as a bug"):
        nodes.attend((query, key, value), NO_TENSORS, PLAIN)
    assert calls[1:] == ["operator", "plan", "operator"]


def test_an_operator_is_allowed_a_plan_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is made only to have a plan, and the next call is warm."""
    allowed: list[Any] = []
    calls: list[str] = []
    query, key, value = (t.requires_grad_() for t in make(Case(1, 2, 8, 8, 16)))

    def kernel(_: Any, q: Any, *__: Any, **___: Any) -> Any:
        calls.append("operator")
        return (q.clone(), *NOTHING[1:]) if allowed else NOTHING

    def allow(number: int, *call: Any) -> bool:
        allowed.append((number, call[5]))
        return True

    monkeypatch.setattr(nodes, "_usual", None)
    monkeypatch.setattr(nodes, "operator_for", lambda *_: (nodes.CUDNN, False))
    monkeypatch.setattr(nodes, "calls", lambda: {nodes.CUDNN: (kernel, None)})
    monkeypatch.setattr(nodes.launcher, "allow_node", allow)
    inputs = query, key, value
    assert nodes.recorded(*inputs, False, PLAIN.code, None) is None
    assert not calls
    assert nodes.attend(inputs, NO_TENSORS, PLAIN) is not None
    assert (calls, allowed) == (["operator"] * 2, [(1, PLAIN.code)])
    assert nodes.recorded(*inputs, False, PLAIN.code, None) is not None
    assert nodes.recorded(*inputs, False, PLAIN.code, 0.5) is not None
    assert calls == ["operator"] * 4
    # torch's backward passes want a positive scale, and give other bits each time.
    assert nodes.recorded(*inputs, False, PLAIN.code, -0.5) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert nodes.recorded(*inputs, False, PLAIN.code, None) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert microsdpa.sdpa(query, key, value, impl="auto").grad_fn is not None
    before = len(calls)
    subclass = query.as_subclass(type("Own", (torch.Tensor,), {}))
    microsdpa.sdpa(subclass, key, value)
    assert len(calls) == before, "a tensor type of its own has to see the call"
    assert calls == ["operator"] * 5


def test_a_warm_call_under_a_mask_asks_nothing_but_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator is allowed the plan of a call under a mask, too, which says all that was looked at before."""
    allowed: list[Any] = []
    said: list[Any] = []
    biases: list[Any] = []

    def kernel(_: Any, q: Any, k: Any, v: Any, bias: Any, *__: Any, **___: Any) -> Any:
        biases.append(bias)
        return (q.clone(), *NOTHING[1:]) if allowed else NOTHING

    def allow(number: int, *call: Any) -> bool:
        allowed.append((number, call[5], call[7]))
        return True

    monkeypatch.setattr(nodes, "_masked", {})
    monkeypatch.setattr(nodes, "operator_for", lambda *_: (nodes.CUDNN, True))
    monkeypatch.setattr(nodes, "calls", lambda: {nodes.CUDNN: (kernel, None)})
    monkeypatch.setattr(nodes.launcher, "allow_node", allow)
    monkeypatch.setattr(nodes.launcher, "expect_node", lambda *call: said.append(call))
    query, key, value = (t.requires_grad_() for t in make(Case(1, 2, 8, 12, 16)))
    mask = torch.arange(12) < 9
    warm = query, key, value, mask, PLAIN.code
    assert nodes.recorded_masked(*warm, None) is None
    assert not biases
    assert nodes.attend((query, key, value), MaskTensors(mask), PLAIN) is not None
    assert allowed == [(1, PLAIN.code, mask)]
    monkeypatch.delattr(nodes, "operator_for")
    assert nodes.recorded_masked(*warm, 0.5) is not None
    assert microsdpa.sdpa(query, key, value, attn_mask=mask).grad_fn is not None
    assert len(biases) == 4
    assert biases[2].shape == (1, 2, 8, 12)
    assert said[2:] == [(PLAIN.code, mask, 1)] * 2
    # What the plan does not know: another scale, a gradient of the mask, bits that must be the same each time.
    assert nodes.recorded_masked(*warm, -0.5) is None
    assert nodes.recorded_masked(*warm[:3], torch.zeros(12).half().requires_grad_(), PLAIN.code, None) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert nodes.recorded_masked(*warm, None) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(biases) == 4


def test_a_call_under_a_mask_says_whose_gradient_its_bias_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of one shape may have gradients of both libraries: torch's wants numbers, this one's the mask itself."""
    said: list[Any] = []
    biases: list[Any] = []

    def kernel(_: Any, q: Any, k: Any, v: Any, bias: Any, *__: Any, **___: Any) -> Any:
        biases.append(bias)
        return (q.clone(), *NOTHING[1:])

    monkeypatch.setattr(nodes, "_masked", {})
    monkeypatch.setattr(nodes, "calls", lambda: dict.fromkeys((nodes.CUDNN, nodes.OWN), (kernel, None)))
    monkeypatch.setattr(nodes.launcher, "expect_node", lambda *call: said.append(call))
    inputs = tuple(t.requires_grad_() for t in make(Case(1, 2, 8, 12, 16)))
    hidden = torch.arange(12) < 9
    for mask, operator in ((hidden, nodes.OWN), (hidden.half(), nodes.CUDNN)):
        monkeypatch.setattr(nodes, "operator_for", lambda *_, operator=operator: (operator, True))
        assert nodes.attend(inputs, MaskTensors(mask), PLAIN) is not None  # type: ignore[arg-type]
        assert nodes.recorded_masked(*inputs, mask, PLAIN.code, None) is not None  # type: ignore[call-arg]
    assert [call[2] for call in said] == [3, 3, 1, 1]
    assert biases[0] is biases[1] is hidden
    assert biases[2].shape == biases[3].shape == (1, 2, 8, 12)


def test_a_warm_call_says_what_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def kernel(*given: Any, **_: Any) -> Any:
        said.append(("called", given[4:]))
        if len(said) > 2:
            raise RuntimeError("out of memory")
        return NOTHING

    monkeypatch.setattr(nodes, "_usual", (nodes.FLASH, kernel, None))
    monkeypatch.setattr(nodes.launcher, "expect_node", lambda *told: said.append(told))
    monkeypatch.setattr(nodes.launcher, "expect_no_node", lambda: said.append("taken back"))
    inputs = make(Case(1, 2, 8, 8, 16))
    code = Options(causal="lower_right").code
    for _ in range(2):
        assert nodes.recorded(*inputs, True, code, None) is None
    once = [(code, None, 2), ("called", (0.0, True))]
    assert said == [*once, *once, "taken back"]


def test_what_was_said_of_a_call_is_taken_back_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    monkeypatch.setattr(nodes, "operator_for", lambda *_: (nodes.FLASH, True))
    monkeypatch.setattr(nodes, "calls", lambda: {nodes.FLASH: (lambda *_, **__: NOTHING, None)})
    monkeypatch.setattr(nodes.launcher, "expect_node", lambda *_: said.append("told"))
    monkeypatch.setattr(nodes.launcher, "expect_no_node", lambda: said.append("taken back"))
    inputs = tuple(t.requires_grad_() for t in make(Case(1, 2, 8, 8, 16)))
    with pytest.raises(microsdpa.InvalidArgument, match="softcap"):
        nodes.attend(inputs, NO_TENSORS, Options(causal="lower_right", softcap=-1.0))  # type: ignore[arg-type]
    assert said == ["told", "taken back"]
    monkeypatch.setattr(forward, "first_call", lambda *_: said.append("plan"))
    with pytest.raises(RuntimeError, match="report this as a bug"):
        nodes.attend(inputs, NO_TENSORS, Options(causal="lower_right"))  # type: ignore[arg-type]
    assert said[2:] == ["told", "taken back", "plan", "told", "taken back"]


@pytest.mark.parametrize("options", [Options(causal="left"), Options(window=[1, 2]), Options(impl="none")])  # type: ignore[arg-type]
def test_options_that_are_not_valid_have_no_operator(options: Options) -> None:
    inputs = tuple(t.requires_grad_() for t in make(Case(1, 2, 8, 8, 16)))
    assert nodes.operator_for(inputs, NO_TENSORS, options) == ("", False)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA: tests/gpu has its kernels")
def test_torch_without_cuda_has_no_kernels() -> None:
    assert not nodes.launcher.register_nodes(nodes.BACKEND, nodes.CUDNN, nodes.FLASH, 0, 1)


def test_an_operator_of_another_form_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SCHEMAS", {**nodes.SCHEMAS, nodes.CUDNN: "(Tensor query) -> Tensor"})
    assert list(nodes.calls.__wrapped__()) == [nodes.FLASH]  # neither cuDNN's nor what is behind its node
