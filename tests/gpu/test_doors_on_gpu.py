"""Warm calls through the doors on a GPU: nodes in C++, plans of a K that grows, threads that share all of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import microsdpa
from microsdpa.evidence import training
from microsdpa.evidence.inputs import Case, documents, make, make_masks
from microsdpa.execution import forward, gradients, new_sizes, nodes
from microsdpa.runtime import launcher

pytestmark = pytest.mark.gpu

CALLS: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (Case(1, 8, 512, 512, 64), {}),
    "causal": (Case(2, 4, 200, 300, 128), {"is_causal": True}),
    "scale": (Case(2, 4, 200, 300, 64), {"scale": 0.3}),
    "grouped heads": (Case(2, 8, 200, 200, 64, heads_kv=2), {"enable_gqa": True}),
    "lower right": (Case(2, 4, 200, 200, 64), {"causal": "lower_right"}),
    "mask of booleans": (Case(2, 4, 200, 304, 64, masks=("bool",)), {}),
    "mask of numbers": (Case(2, 4, 200, 304, 64, masks=("additive",)), {}),
    "a kernel by name": (Case(2, 4, 200, 300, 64), {"impl": "ampere/mma"}),
    "B, S, H, D in memory": (Case(2, 4, 200, 300, 64, layout="bshd"), {}),
    "bfloat16": (Case(2, 4, 200, 300, 64, dtype="bfloat16"), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_that_takes_gradients_runs_no_python_below_its_node(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, options = CALLS[name]
    tensors = make(case, "cuda")
    masks = make_masks(case, "cuda")
    expected = microsdpa.sdpa(*tensors, **options, **masks)
    leaves = tuple(t.requires_grad_() for t in tensors)
    first = microsdpa.sdpa(*leaves, **options, **masks)

    def seen(*_: Any, **__: Any) -> Any:
        raise AssertionError("a warm call came to Python")

    for place, what in ((forward, "first_call"), (forward, "attend"), (nodes, "_operator_for")):
        monkeypatch.setattr(place, what, seen)
    second = microsdpa.sdpa(*leaves, **options, **masks)
    for out in (first, second):
        assert type(out.grad_fn).__name__.startswith("ScaledDotProduct")  # type: ignore[union-attr]
        assert torch.equal(out, expected)  # type: ignore[arg-type]
        assert out.stride() == expected.stride()  # type: ignore[union-attr]
    grads = torch.autograd.grad(second.sum(), leaves)  # type: ignore[union-attr]
    assert all(bool(g.isfinite().all()) for g in grads)


OWN_CALLS = {
    "short": Case(1, 8, 512, 512, 64),
    "long, causal": Case(2, 8, 2048, 2048, 128, heads_kv=2, dtype="bfloat16", causal="upper_left"),
    "lower right": Case(1, 8, 300, 512, 64, layout="bshd", causal="lower_right", scale=0.3),
    "padding": Case(4, 8, 700, 700, 64, masks=("padding",)),
    "documents": Case(2, 8, 900, 900, 64, masks=("documents",), causal="upper_left"),
}


@pytest.mark.parametrize("name", OWN_CALLS)
def test_gradients_of_this_library_behind_a_node_run_no_python_either(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only on Hopper this library's gradients are the faster ones")
    case = OWN_CALLS[name]
    launcher.forget_plans()
    tensors = make(case, "cuda")
    weight = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(5)).to(tensors[0])
    masks = make_masks(case, "cuda")
    if "documents" in case.masks:
        masks = {"document_ids": tuple(ids.cuda() for ids in documents(case))}
    exact, plain = training.expected(case, tensors, weight)
    leaves = tuple(t.requires_grad_() for t in tensors)
    attend = functools.partial(
        microsdpa.sdpa, causal=case.causal, scale=case.scale, enable_gqa=case.kv_heads != case.heads, **masks
    )
    made: list[Any] = []
    compute = gradients.compute
    monkeypatch.setattr(gradients, "compute", lambda of: made.append(of) or compute(of))
    for _ in range(2):
        out = attend(*leaves)
        assert type(out.grad_fn).__name__ == "ScaledDotProductCudnnAttentionBackward0"
        found = torch.autograd.grad(out, leaves, weight)
        assert training.check(found, exact, plain)[1] == ""
        assert len(made) == 1, "a warm backward pass came to Python"
        assert [g.stride() for g in found] == [t.stride() for t in leaves]
    with torch.autograd.graph.save_on_cpu():
        out = attend(*leaves)
    assert training.check(torch.autograd.grad(out, leaves, weight), exact, plain)[1] == ""
    # Where the same bits are asked for when the backward pass runs, these kernels give them.
    out = attend(*leaves)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (torch.autograd.grad(out, leaves, weight, retain_graph=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))
    assert training.check(first, exact, plain)[1] == ""


def test_a_node_runs_on_the_current_stream_and_is_captured() -> None:
    query, key, value = (t.requires_grad_() for t in make(Case(1, 8, 512, 512, 64), "cuda"))
    expected = microsdpa.sdpa(query, key, value)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        microsdpa.sdpa(query, key, value)
        with torch.cuda.graph(graph, stream=stream):
            out = microsdpa.sdpa(query, key, value)
    assert isinstance(out, torch.Tensor)
    with torch.no_grad():
        out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)  # type: ignore[arg-type]


GROWING = {
    "decoding": (Case(1, 32, 1, 90, 128, heads_kv=8), {}, 60),
    "decoding, window": (Case(2, 8, 1, 90, 64), {"window": (30, 0), "causal": "lower_right"}, 40),
    "queries, padded": (Case(2, 4, 16, 90, 64), {"mask": True}, 40),
    "tensor maps": (Case(1, 4, 200, 300, 128), {"impl": "hopper/throughput", "causal": "lower_right"}, 40),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_k_that_grows_gives_what_a_new_plan_gives(name: str) -> None:
    case, given, lengths = GROWING[name]
    options = {key: option for key, option in given.items() if key != "mask"}
    query, *whole = make(Case(**{**vars(case), "seqlen_k": case.seqlen_k + lengths}), "cuda")

    def attend(length: int) -> Any:
        key, value = (t[:, :, :length].contiguous() for t in whole)
        mask = {"attn_mask": torch.arange(length, device="cuda") % 5 != 2} if "mask" in given else {}
        return microsdpa.sdpa(query, key, value, enable_gqa=True, return_lse=True, **mask, **options)

    launcher.forget_plans()
    made, found = [], []
    prepare = forward.prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "prepare", lambda *a: made.append(a) or prepare(*a))
        for length in range(case.seqlen_k, case.seqlen_k + lengths):
            try:
                found.append(attend(length))
            except microsdpa.UnsupportedProblem as refusal:
                pytest.skip(str(refusal))
    assert len(made) < lengths / 2
    for length, (out, lse) in enumerate(found, start=case.seqlen_k):
        launcher.forget_plans()
        new_sizes._decoding.clear()
        expected, expected_lse = attend(length)
        assert torch.equal(out, expected), length
        assert torch.equal(lse, expected_lse), length


def test_threads_call_through_different_doors() -> None:
    """Each gives what it gives alone, from the first calls on, which make the plans."""
    tensors = make(Case(2, 8, 128, 128, 64), "cuda")
    mask = torch.rand(128, 128, device="cuda") > 0.2

    def graded() -> Any:
        leaves = [t.detach().requires_grad_() for t in tensors]
        with torch.enable_grad():
            out = microsdpa.sdpa(*leaves)
            return torch.autograd.grad(out.sum(), leaves)[2]  # type: ignore[union-attr]

    doors: list[Callable[[], Any]] = [
        lambda: microsdpa.sdpa(*tensors),
        lambda: microsdpa.sdpa(*tensors, return_lse=True)[1],
        lambda: microsdpa.sdpa(*tensors, attn_mask=mask, softcap=20.0),
        lambda: microsdpa.sdpa(*tensors, precision="fp8"),
        lambda: torch.ops.microsdpa.attention(*tensors)[0],
        lambda: F.scaled_dot_product_attention(*tensors, attn_mask=mask),
        graded,
    ]
    failures: list[str] = []
    with microsdpa.enabled(strict=True):
        expected = [door() for door in doors]
        launcher.forget_plans()
        start = threading.Barrier(len(doors))

        def work(index: int) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    start.wait()
                    for turn in range(200):
                        out = doors[index]()
                        torch.cuda.current_stream().synchronize()
                        if not torch.equal(out, expected[index]):
                            failures.append(f"door {index}, turn {turn}: another result")
            except Exception as error:
                failures.append(f"door {index}: {type(error).__name__}: {error}")

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(doors))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
