"""F.scaled_dot_product_attention with microsdpa enabled, against torch's math in FP64, and the flash registry."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import microsdpa
from microsdpa import reference
from microsdpa.call.call import Call, MaskTensors
from microsdpa.call.options import Options
from microsdpa.call.validate import check
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.integrations import dropin, flash_backend

TORCHS_OWN = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    dropin._logged.clear()
    yield
    assert F.scaled_dot_product_attention is TORCHS_OWN


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 256])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("form", ["none", "causal", "bool", "float", "padding"])
def test_the_answer_is_that_of_fp64(dtype: str, head_dim: int, heads_kv: int, form: str) -> None:
    tensors = make(Case(2, 4, 20, 33, head_dim, heads_kv=heads_kv, dtype=dtype))  # type: ignore[arg-type]
    mask = {
        "bool": torch.rand(20, 33) < 0.7,
        "float": torch.randn(2, 1, 20, 33).to(tensors[0].dtype),
        "padding": torch.arange(33).expand(2, 1, 1, 33) < 20,
    }.get(form)
    with microsdpa.enabled(strict=True):
        out = F.scaled_dot_product_attention(*tensors, mask, 0.0, form == "causal", scale=0.3, enable_gqa=True)
    causal = "upper_left" if form == "causal" else None
    expected, _ = reference.oracle(*tensors, causal=causal, scale=0.3, attn_mask=mask)
    plain, _ = reference.eager(*tensors, causal=causal, scale=0.3, attn_mask=mask)
    assert compare.tolerance(plain, expected, out.dtype).admits(compare.measure(out, expected))


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


FALLBACKS: list[tuple[str, tuple[torch.Tensor, ...], dict[str, Any]]] = [
    ("torch.float32", (torch.randn(1, 2, 5, 8),) * 3, {}),
    ("3 dimensions", (half(2, 5, 8),) * 3, {}),
    ("over 256", (half(1, 1, 5, 264),) * 3, {}),
    ("no unit stride", (half(1, 2, 8, 5).mT,) * 3, {}),
]


@pytest.mark.parametrize(("reason", "tensors", "options"), FALLBACKS, ids=[f[0] for f in FALLBACKS])
def test_what_it_does_not_do_is_torchs_with_one_line(
    reason: str, tensors: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with microsdpa.enabled(), caplog.at_level(logging.WARNING, "microsdpa"):
        for _ in range(2):
            torch.manual_seed(0)
            out = F.scaled_dot_product_attention(*tensors, **options)
    torch.manual_seed(0)
    assert torch.equal(out, TORCHS_OWN(*tensors, **options))
    assert [reason in record.message for record in caplog.records] == [True]
    with microsdpa.enabled(strict=True), pytest.raises(microsdpa.UnsupportedProblem, match=reason):
        F.scaled_dot_product_attention(*tensors, **options)


def test_a_reason_is_logged_once_whatever_the_shape(caplog: pytest.LogCaptureFixture) -> None:
    with microsdpa.enabled(impl="emulate"), caplog.at_level(logging.WARNING, "microsdpa"):
        for size in range(5, 10):
            F.scaled_dot_product_attention(half(1, 1, size, 8), half(size, 1, 4, 8), half(size, 1, 4, 8))
    assert len(caplog.records) == 1


def test_reasons_that_differ_in_numbers_alone_take_one_line_and_one_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "microsdpa"):
        for n in range(50):
            dropin.note_fallback(f"key: expected {n} heads, got shape {list(range(n + 1))}, {n / 7} and -{n}e-{n}")
            dropin.note_fallback(f"impl: expected 'auto', got <object at {id(n) + n:#x}> on cuda:{n}")
        dropin.note_fallback("the inputs are of torch.float32")
        dropin.note_fallback("the inputs are of torch.float64")
    assert len(caplog.records) == 4 == len(dropin._logged)


@pytest.mark.parametrize("impl", ["auto", "emulate"])
@pytest.mark.parametrize("dropout_p", [-1.0, math.nan])
def test_no_probability_is_torchs_refusal(dropout_p: float, impl: str) -> None:
    tensors = (half(1, 2, 4, 32),) * 3
    with pytest.raises(RuntimeError) as theirs:
        TORCHS_OWN(*tensors, dropout_p=dropout_p)
    with microsdpa.enabled(impl=impl), pytest.raises(RuntimeError) as ours:
        F.scaled_dot_product_attention(*tensors, dropout_p=dropout_p)
    assert str(ours.value) == str(theirs.value)
    with microsdpa.enabled(strict=True, impl=impl), pytest.raises(microsdpa.UnsupportedProblem, match="dropout_p"):
        F.scaled_dot_product_attention(*tensors, dropout_p=dropout_p)


def test_what_torch_refuses_is_torchs_refusal() -> None:
    tensors = make(Case(1, 2, 5, 5, 8))
    mask = torch.ones(5, 4).bool()
    with pytest.raises(RuntimeError) as theirs:
        TORCHS_OWN(*tensors, mask)
    with microsdpa.enabled(), pytest.raises(RuntimeError) as ours:
        F.scaled_dot_product_attention(*tensors, mask)
    assert str(ours.value) == str(theirs.value)


VARIANTS = [(causal_upper_left, 20, 33), (causal_lower_right, 20, 33), (causal_lower_right, 20, 20)]


@pytest.mark.parametrize(("variant", "seqlen_q", "seqlen_k"), VARIANTS)
def test_a_causal_bias_is_an_alignment(variant: Any, seqlen_q: int, seqlen_k: int) -> None:
    tensors, bias = make(Case(2, 2, seqlen_q, seqlen_k, 16)), variant(seqlen_q, seqlen_k)
    alignment = "lower_right" if variant is causal_lower_right else "upper_left"
    wide = [t.float() for t in tensors]
    expected = TORCHS_OWN(*wide, bias)
    with microsdpa.enabled():
        assert torch.equal(F.scaled_dot_product_attention(*wide, bias), expected)  # which it leaves to torch
        with pytest.raises(ValueError, match="should not be used with causal=True"):
            F.scaled_dot_product_attention(*tensors, bias, is_causal=True)
    with microsdpa.enabled(strict=True):
        out = F.scaled_dot_product_attention(*tensors, bias)
    assert torch.equal(out, microsdpa.sdpa(*tensors, causal=alignment))  # type: ignore[arg-type]
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)
    with microsdpa.enabled(strict=True):
        compiled = torch.compile(lambda *t: F.scaled_dot_product_attention(*t, bias), fullgraph=True, backend="eager")
        assert torch.equal(compiled(*tensors), out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.float16])
def test_autocast_casts_as_it_does_for_torch(dtype: torch.dtype, given: torch.dtype) -> None:
    tensors = [t.to(given) for t in make(Case(1, 2, 12, 20, 16))]
    for mask in (None, torch.randn(12, 20)):
        with torch.autocast("cpu", dtype):
            expected = TORCHS_OWN(*tensors, mask)
            with microsdpa.enabled(strict=True):
                out = F.scaled_dot_product_attention(*tensors, mask)
        assert out.dtype == expected.dtype == dtype
        torch.testing.assert_close(out, expected)


class OwnTensor(torch.Tensor):
    """A tensor with a type of its own, which torch dispatches."""


def test_tensor_types_and_transforms_are_left_to_torch() -> None:
    tensors = make(Case(3, 2, 12, 20, 16))
    expected = TORCHS_OWN(*tensors)
    with microsdpa.enabled():
        own = F.scaled_dot_product_attention(tensors[0].as_subclass(OwnTensor), *tensors[1:])
        assert type(own) is OwnTensor
        mapped = torch.vmap(F.scaled_dot_product_attention)(*tensors)
        with attention.sdpa_kernel(attention.SDPBackend.MATH):  # the others have no forward-mode gradient
            function = lambda query: F.scaled_dot_product_attention(query, *tensors[1:])  # noqa: E731
            _, tangent = torch.func.jvp(function, tensors[:1], tensors[:1])
    torch.testing.assert_close(mapped, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(own.as_subclass(torch.Tensor), expected)
    assert tangent.abs().max() > 0
    with microsdpa.enabled(strict=True):
        with pytest.raises(microsdpa.UnsupportedProblem, match="tensor type of its own"):
            F.scaled_dot_product_attention(tensors[0].as_subclass(OwnTensor), *tensors[1:])
        with pytest.raises(microsdpa.UnsupportedProblem, match=r"torch\.func"):
            torch.vmap(F.scaled_dot_product_attention)(*(t[:, None] for t in tensors))
        parameters = [torch.nn.Parameter(t, requires_grad=False) for t in tensors]
        torch.testing.assert_close(F.scaled_dot_product_attention(*parameters), expected)


def test_nested_tensors_are_left_to_torch() -> None:
    lengths = (5, 1, 9)
    nested = [torch.nested.nested_tensor([torch.randn(2, n, 16) for n in lengths]) for _ in range(3)]
    with microsdpa.enabled():
        out = F.scaled_dot_product_attention(*nested)
    for found, *parts in zip(out.unbind(), *(t.unbind() for t in nested), strict=True):
        torch.testing.assert_close(found, TORCHS_OWN(*parts))
    with microsdpa.enabled(strict=True), pytest.raises(microsdpa.UnsupportedProblem, match="nested"):
        F.scaled_dot_product_attention(*nested)


def test_it_nests_and_is_undone() -> None:
    tensors = (torch.randn(1, 2, 5, 8),) * 3
    with microsdpa.enabled(strict=True):
        with microsdpa.enabled():
            F.scaled_dot_product_attention(*tensors)
        with pytest.raises(microsdpa.UnsupportedProblem):
            F.scaled_dot_product_attention(*tensors)
    with pytest.raises(RuntimeError, match="got none"):
        microsdpa.disable()


BACKENDS = attention.SDPBackend
LISTS = {
    "math": [BACKENDS.MATH],
    "flash and math": [BACKENDS.FLASH_ATTENTION, BACKENDS.MATH],
    "all but math": [BACKENDS.FLASH_ATTENTION, BACKENDS.EFFICIENT_ATTENTION, BACKENDS.CUDNN_ATTENTION],
}


@pytest.mark.parametrize("backends", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("strict", [False, True])
def test_a_list_of_backends_is_torchs(strict: bool, backends: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever names backends wants them: microsdpa is none of them, whatever it was enabled with."""
    tensors = make(Case(1, 2, 8, 8, 16))
    asked: list[Any] = []
    real = dropin.attend
    monkeypatch.setattr(dropin, "attend", lambda *a, **b: asked.append(a) or real(*a, **b))
    with microsdpa.enabled(strict=strict):
        with attention.sdpa_kernel(backends):
            found, expected = F.scaled_dot_product_attention(*tensors), TORCHS_OWN(*tensors)
        assert torch.equal(found, expected)
        assert not asked
        with attention.sdpa_kernel([*LISTS["all but math"], BACKENDS.MATH]):  # nothing is left out
            F.scaled_dot_product_attention(*tensors)
        F.scaled_dot_product_attention(*tensors)
    assert len(asked) == 2


def test_threads_keep_their_own_strictness() -> None:
    """Blocks of two threads end in the order in which they began: each takes away its own, and no other."""
    tensors = (torch.randn(1, 2, 5, 8),) * 3  # float32, which is torch's
    both, first_ended, found = threading.Barrier(2), threading.Event(), dict[str, list[bool]]()

    def is_strict() -> bool:
        try:
            F.scaled_dot_product_attention(*tensors)
        except microsdpa.UnsupportedProblem:
            return True
        return False

    def lenient() -> None:
        with microsdpa.enabled():
            both.wait()
            found["lenient"] = [is_strict()]
            both.wait()
        first_ended.set()

    def strict() -> None:
        with microsdpa.enabled(strict=True):
            both.wait()
            found["strict"] = [is_strict()]
            both.wait()
            first_ended.wait()
            found["strict"].append(is_strict())

    threads = [threading.Thread(target=target) for target in (lenient, strict)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"lenient": [False], "strict": [True, True]}
    assert F.scaled_dot_product_attention is TORCHS_OWN


def test_a_thread_without_a_block_has_what_another_one_enabled() -> None:
    tensors = (torch.randn(1, 2, 5, 8),) * 3
    raised = []

    def call() -> None:
        with pytest.raises(microsdpa.UnsupportedProblem):
            F.scaled_dot_product_attention(*tensors)
        raised.append(True)

    with microsdpa.enabled(strict=True):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert raised == [True]


def test_disable_leaves_blocks_alone() -> None:
    tensors = (torch.randn(1, 2, 5, 8),) * 3
    microsdpa.enable()
    with microsdpa.enabled(strict=True):
        microsdpa.disable()
        with pytest.raises(microsdpa.UnsupportedProblem):
            F.scaled_dot_product_attention(*tensors)
        with pytest.raises(RuntimeError, match="got none"):
            microsdpa.disable()


def test_a_model_trains_and_compiles_through_it() -> None:
    def model(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).square()

    tensors = [t.requires_grad_() for t in make(Case(1, 2, 12, 12, 16))]
    with microsdpa.enabled(strict=True):
        plain = torch.autograd.grad(model(*tensors).sum(), tensors)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        traced = torch.autograd.grad(compiled(*tensors).sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


def test_registering_changes_nothing_until_it_is_activated() -> None:
    before = attention.current_flash_attention_impl()
    microsdpa.register()
    assert flash_backend.IMPL in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() == before


def test_the_flash_operator_gives_what_torch_expects_of_it() -> None:
    tensors = make(Case(1, 2, 12, 20, 16))
    out, lse, _, _, max_q, max_k, *_ = flash_backend.flash_forward(*tensors, is_causal=True)
    expected, expected_lse = microsdpa.sdpa(*tensors, causal="lower_right", return_lse=True)
    assert (max_q, max_k) == (12, 20)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    kernel = flash_backend._kernel()
    assert torch.equal(kernel(None, *tensors, 0.0, True)[0], expected)
    if not torch.backends.cuda.is_built():  # else torch's own flash attention makes the mask
        with pytest.raises(microsdpa.UnsupportedProblem, match="no debug mask"):
            kernel(None, *tensors, 0.1, False, True)


def test_the_flash_operators_drop_the_same_probabilities() -> None:
    query, key, value = make(Case(1, 2, 12, 20, 16))
    torch.manual_seed(3)
    out, lse, *_, state, scalar, _ = flash_backend._kernel()(None, query, key, value, 0.4, True)
    weight = torch.randn(out.shape).half()
    given = weight, query, key, value, out, lse, None, None, 12, 20, 0.4, True, state, scalar
    found = flash_backend._backward_kernel()(None, *given)
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    expected, _ = reference.oracle(*leaves, causal="lower_right", dropout_p=0.4, rng_state=state)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    for got, want in zip(found, torch.autograd.grad(expected, leaves, weight.double()), strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-2, rtol=1e-2)


TRACED_FALLBACKS: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "one batch of queries": ((half(1, 4, 5, 16), half(3, 4, 7, 16), half(3, 4, 7, 16)), {}),
    "one batch of values": ((half(3, 4, 5, 16), half(3, 4, 7, 16), half(1, 4, 7, 16)), {}),
    "one key head": ((half(2, 4, 5, 16), half(2, 1, 7, 16), half(2, 1, 7, 16)), {}),
    "one value head": ((half(2, 4, 5, 16), half(2, 4, 7, 16), half(2, 1, 7, 16)), {}),
    "a larger mask": (
        (half(1, 4, 5, 16), half(1, 4, 7, 16), half(1, 4, 7, 16)),
        {"attn_mask": torch.rand(1, 4, 5, 7) < 0.9},
    ),
    "a mask of lengths": (
        (half(2, 4, 5, 16), half(2, 4, 7, 16), half(2, 4, 7, 16)),
        {"attn_mask": torch.arange(7).expand(2, 1, 5, 7) < 6},
    ),
    "shared heads": ((half(2, 4, 5, 16), half(2, 2, 7, 16), half(2, 2, 7, 16)), {"enable_gqa": True}),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", TRACED_FALLBACKS)
def test_a_compiled_call_is_left_to_torch_where_one_without_a_graph_is(name: str, dynamic: bool | None) -> None:
    """The operator in a graph would raise for these, when it is too late to leave them."""
    tensors, options = TRACED_FALLBACKS[name]
    torch._dynamo.reset()
    with microsdpa.enabled():
        eager = F.scaled_dot_product_attention(*tensors, **options)
        compiled = torch.compile(
            lambda *t: F.scaled_dot_product_attention(*t, **options), fullgraph=True, dynamic=dynamic, backend="eager"
        )
        torch.testing.assert_close(compiled(*tensors), eager, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("impl", ["auto", "emulate"])
def test_what_is_refused_when_traced_is_what_is_refused_at_once(impl: str) -> None:
    """One list of reasons, in two forms: each problem that sdpa refuses has a reason, and no other has."""
    sizes = [(2, 4, 5, 16), (1, 4, 5, 16), (2, 2, 5, 16), (2, 3, 5, 16), (2, 4, 5, 8), (2, 4, 0, 16)]
    masks = [None, torch.ones(2, 1, 1, 5, dtype=torch.bool), torch.ones(3, 5, dtype=torch.bool), torch.ones(1).bool()]
    checked = {True: 0, False: 0}
    for query_size in sizes:
        for key_size in sizes:
            for value_size in (key_size, (2, 4, 5, 16)):
                for mask in masks:
                    for gqa in (False, True):
                        tensors = half(*query_size), half(*key_size), half(*value_size)
                        if dropin.why_not(*tensors, mask, 0.0):
                            continue
                        options: dict[str, Any] = {"enable_gqa": gqa, "impl": impl}
                        reason = dropin.why_not_traced(*tensors, mask, options)
                        try:
                            check(Call(tensors, MaskTensors(mask), options=Options(enable_gqa=gqa, impl=impl)))
                            refused = False
                        except microsdpa.InvalidArgument:
                            refused = True
                        assert bool(reason) == refused, (query_size, key_size, value_size, mask, gqa, reason)
                        checked[refused] += 1
    assert min(checked.values()) > 20
