"""dropout_p through sdpa on CPU tensors: the generator, gradients, checkpoints, graphs and transforms of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import microsdpa
from microsdpa import reference
from microsdpa.evidence.inputs import Case, make
from microsdpa.execution import dropout, forward
from microsdpa.runtime import launcher

P = 0.4
CASE = Case(2, 4, 20, 30, 32, heads_kv=2, causal="lower_right")


def leaves() -> list[torch.Tensor]:
    return [tensor.requires_grad_() for tensor in make(CASE)]


def attend(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    found = microsdpa.sdpa(*tensors, causal="lower_right", enable_gqa=True, dropout_p=P, **options)
    assert isinstance(found, torch.Tensor)
    return found


def seeded(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    return function(*arguments, **options)


def state_of_seed() -> torch.Tensor:
    """What a call takes next after the seed."""
    state: torch.Tensor = seeded(dropout.draw, torch.device("cpu"))
    return state


@pytest.mark.parametrize("impl", ["auto", "emulate"])
def test_output_and_gradients_have_the_mask_of_the_random_state(impl: str) -> None:
    tensors = leaves()
    out, lse = seeded(
        microsdpa.sdpa, *tensors, causal="lower_right", enable_gqa=True, dropout_p=P, impl=impl, return_lse=True
    )
    weight = torch.randn(out.shape).half()
    found = torch.autograd.grad(out, tensors, weight)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    given: dict[str, Any] = {"causal": "lower_right", "dropout_p": P, "rng_state": state_of_seed()}
    expected, expected_lse = reference.oracle(*exact, **given)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-5)
    for got, want in zip(found, torch.autograd.grad(expected, exact, weight.double()), strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=1e-2)
    with torch.no_grad():
        assert torch.equal(seeded(attend, *tensors, impl=impl), out)
        assert torch.equal(seeded(attend, *tensors, impl=impl, out=torch.empty_like(out)), out)
        assert not torch.equal(attend(*tensors, impl=impl), out)


def test_the_mean_of_many_calls_is_attention_without_dropout() -> None:
    query, key, value = make(Case(1, 1, 4, 20, 16))
    many = torch.stack([microsdpa.sdpa(query, key, value, dropout_p=P).double() for _ in range(400)])  # type: ignore[union-attr]
    expected, _ = reference.oracle(query, key, value)
    error = (many.mean(dim=0) - expected) / (many.std(dim=0) / 400**0.5)
    assert float(error.abs().max()) < 5


def test_checkpoints_make_the_same_mask_again() -> None:
    tensors = leaves()
    whole = seeded(attend, *tensors)
    again = seeded(checkpoint, attend, *tensors, use_reentrant=False)
    assert torch.equal(whole, again)
    pairs = zip(*(torch.autograd.grad(out.float().square().sum(), tensors) for out in (whole, again)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_compiled_graph_draws_its_own_numbers() -> None:
    tensors = leaves()
    compiled = torch.compile(lambda *given: 2 * attend(*given), fullgraph=True, backend="aot_eager")
    first, second = seeded(compiled, *tensors), compiled(*tensors)
    assert torch.equal(first, seeded(compiled, *tensors))
    assert not torch.equal(first, second)
    assert torch.equal(first, 2 * seeded(attend, *tensors))
    eager = torch.autograd.grad(seeded(attend, *tensors).float().sum(), tensors)
    for got, want in zip(torch.autograd.grad(first.float().sum(), tensors), eager, strict=True):
        torch.testing.assert_close(got, 2 * want, atol=2e-3, rtol=2e-3)
    torch._dynamo.reset()


def test_transforms_of_torch_func_see_a_dropout() -> None:
    tensors = leaves()
    query, key, value = (tensor.detach() for tensor in tensors)

    def loss(q: torch.Tensor) -> torch.Tensor:
        return attend(q, key, value).float().square().sum()

    expected = torch.autograd.grad(seeded(attend, *tensors).float().square().sum(), tensors[0])[0]
    assert torch.equal(seeded(torch.func.grad(loss), query), expected)
    same = torch.vmap(lambda q: attend(q, key, value), randomness="same")(torch.stack([query, query]))
    assert torch.equal(same[0], same[1])
    different = torch.vmap(lambda q: attend(q, key, value), randomness="different")(torch.stack([query, query]))
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda q: attend(q, key, value))(torch.stack([query, query]))


def test_gradients_of_masks_have_the_mask_too() -> None:
    query, key, value = make(Case(1, 2, 20, 30, 32))
    masks = {"attn_mask": torch.randn(2, 20, 30), "alibi_slopes": torch.rand(2), "sinks": torch.randn(2)}
    for mask in masks.values():
        mask.requires_grad_()
    out = seeded(microsdpa.sdpa, query, key, value, dropout_p=P, **masks)
    found = torch.autograd.grad(out.float().sum(), list(masks.values()))
    exact = {name: mask.detach().double().requires_grad_() for name, mask in masks.items()}
    expected, _ = reference.oracle(query, key, value, dropout_p=P, rng_state=state_of_seed(), **exact)
    for got, want in zip(found, torch.autograd.grad(expected.sum(), list(exact.values())), strict=True):
        torch.testing.assert_close(got.double(), want, atol=5e-3, rtol=5e-3)


def test_everything_may_be_dropped_and_nothing() -> None:
    tensors = leaves()
    given: dict[str, Any] = {"causal": "lower_right", "enable_gqa": True}
    out = microsdpa.sdpa(*tensors, **given, dropout_p=1.0)
    assert isinstance(out, torch.Tensor)
    assert not out.any()
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), tensors))
    before = torch.get_rng_state()
    plain = microsdpa.sdpa(*tensors, **given, dropout_p=0.0)
    assert torch.equal(plain, microsdpa.sdpa(*tensors, **given))  # type: ignore[arg-type]
    assert torch.equal(before, torch.get_rng_state())


def test_torchs_function_drops_through_this_library() -> None:
    query, key, value = make(Case(1, 2, 20, 30, 32))
    with microsdpa.enabled(strict=True, impl="emulate"):
        found = seeded(F.scaled_dot_product_attention, query, key, value, dropout_p=P)
    assert torch.equal(found, seeded(microsdpa.sdpa, query, key, value, dropout_p=P, impl="emulate"))
    with microsdpa.enabled(strict=True):  # the CPU's own attention stays torch's
        found = seeded(F.scaled_dot_product_attention, query, key, value, dropout_p=P)
    assert torch.equal(found, seeded(F.scaled_dot_product_attention, query, key, value, dropout_p=P))


class _Generator:
    """The part of torch's CUDA generator that a call uses."""

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 8

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


class _OnGpu:
    """What a call asks of a tensor on a GPU before it takes its random numbers."""

    is_cuda, device = True, torch.device("cuda", 0)


def test_on_a_gpu_seed_and_offset_are_those_of_torchs_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = _Generator(2**64 - 5)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first, second = (dropout.take(_OnGpu(), False) for _ in range(2))  # type: ignore[arg-type]
    assert (first.drawn, first.seed, first.offset, first.state) == (None, -5, 8, None)
    assert (second.seed, second.offset, generator.offset) == (-5, 12, 16)


def test_a_capture_draws_them_in_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(dropout, "draw", lambda device: (device, "drawn"))
    assert dropout.take(_OnGpu(), True).drawn == (_OnGpu.device, "drawn")  # type: ignore[arg-type]


def test_a_warm_call_makes_one_foreign_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is there: what is launched has the call's random numbers."""
    launched: list[tuple[Any, ...]] = []

    def launch(*given: Any) -> bool:
        launched.append(given)
        return True

    query = make(Case(1, 2, 20, 20, 32))[0]
    monkeypatch.setattr(launcher, "launch_dropped", launch)
    monkeypatch.setattr(forward, "first_call", None)
    out = microsdpa.sdpa(query, query, query, dropout_p=0.25)
    assert isinstance(out, torch.Tensor)
    ((kept, factor, drawn, seed, offset, state, *rest),) = launched
    assert (kept, factor, seed, offset, state) == (49152, pytest.approx(4 / 3), 0, 0, None)
    assert drawn.shape == (2,)
    assert rest[:3] == [query, query, query]


def test_threads_take_numbers_of_their_own() -> None:
    query = make(Case(1, 1, 20, 20, 32))[0]
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(attend(query, query, query))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(torch.equal(one, other) for i, one in enumerate(found) for other in found[:i])
