"""Prepared calls, threads and the plan table against the stub driver; test_launcher.py runs this in its own process."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tvm_ffi
from fake_cuda import compiled, install_allocator, integer, last, record, set_integer, tensor
from stub_harness import (
    ADDRESSES,
    KV,
    LAUNCH_FAILED,
    MISSES,
    OF_LAUNCH,
    PRIMARY,
    SHAPE,
    _clean,
    _four_maps,
    _programmatic,
    call,
    check_allocated_lse,
    kernel,
    library,
    maps_of_last,
    packed,
    prepared,
    register,
)

from microsdpa.attention import api
from microsdpa.attention.explain import Explanation
from microsdpa.attention.plan import Expected, make_plan
from microsdpa.kernels import KernelSpec, TensorMap
from microsdpa.kernels.problem import Problem
from microsdpa.runtime import launcher

__all__ = ["_clean", "_four_maps", "_programmatic"]


def test_loading_restores_context_and_capture_mode() -> None:
    record.capture_mode = 0
    assert list(library.load_kernel(1, b"cubin", "kernel", 1024, 1)) == [0x3000, PRIMARY + 1]
    assert record.capture_mode == 0


@pytest.mark.parametrize(("cubin", "symbol"), [(b"nonsense", "kernel"), (b"cubin", "absent")])
def test_a_kernel_that_does_not_load_raises_and_restores(cubin: bytes, symbol: str) -> None:
    record.capture_mode = 0
    with pytest.raises(RuntimeError, match="loading the kernel failed"):
        library.load_kernel(0, cubin, symbol, 0, 1)
    assert record.capture_mode == 0


def test_more_than_48_kb_of_shared_memory_is_asked_for() -> None:
    record.max_shared_bytes = 0
    library.load_kernel(0, b"cubin", "kernel", 100_000, 1)
    assert record.max_shared_bytes == 100_000


@pytest.mark.parametrize(("cluster", "asked"), [(1, 0), (8, 0), (16, 1)])
def test_a_cluster_that_not_every_gpu_runs_is_asked_for(cluster: int, asked: int) -> None:
    record.large_clusters = 0
    library.load_kernel(0, b"cubin", "kernel", 0, cluster)
    assert record.large_clusters == asked


@pytest.fixture
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_kernel(spec: KernelSpec, target: str, *, strict: bool) -> SimpleNamespace:
        assert not strict
        assert target == "sm_90a"
        return compiled(spec, target)

    monkeypatch.setattr(launcher, "compile_kernel", compile_kernel)
    install_allocator()


@pytest.mark.usefixtures("_compiled", "_four_maps", "_programmatic")
@pytest.mark.parametrize("device", [0, 1])
def test_a_specification_becomes_a_plan(device: int) -> None:
    maps = tuple(TensorMap(name, 64, 32, 64) for name in ("value", "out", "key", "query"))
    second = KernelSpec(
        "test/second", "", "", (), threads=64, block_m=4, tensor_maps=maps, programmatic=True, workspace_row_bytes=24
    )
    spec = KernelSpec(
        "test/first",
        "",
        "",
        (),
        256,
        8,
        shared_bytes=100,
        cluster=2,
        split=2,
        tensor_maps=maps[:1] * 4,
        next_kernel=second,
    )
    problem = Problem(2, 4, 2, 16, 24, 32, "float16", causal="lower_right", target="sm_90a")
    shapes = (SHAPE, KV, KV, SHAPE)
    tensors = [tensor(shape, at, device=device) for shape, at in zip(shapes, ADDRESSES, strict=True)]
    launcher.prepare(problem, spec, (*tensors, None, 6, None))
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", device), 0xABC):
        launcher.launch(*tensors, None, 6, None)
    first, second = last(1), last()
    assert first.context == second.context == PRIMARY + device
    assert first.stream == second.stream == 0xABC
    assert (list(first.grid), first.threads, first.shared_bytes) == ([2 * 2 * 8, 1, 1], 256, 100)
    assert (list(first.cluster), first.programmatic) == ([2, 1, 1], 0)
    assert (list(second.grid), second.threads, second.programmatic) == ([4 * 8, 1, 1], 64, 1)
    assert [words[0] for words in first.tensor_maps[:4]] == [0x300000] * 4
    assert [words[0] for words in second.tensor_maps[:4]] == [0x300000, 0x400000, 0x200000, 0x100000]
    assert maps_of_last()[0].box == (32, 64, 1, 1)
    assert integer("stub_last_bytes") == 24 * 2 * 4 * 16
    assert second.params.diagonal == 24 - 16


@pytest.mark.usefixtures("_compiled")
def test_a_kernel_that_counts_has_a_counter_of_its_stream_or_of_its_capture() -> None:
    spec = KernelSpec("test/counting", "", "", (), 128, 64, counts=True)
    arguments = call()
    launcher.prepare(Problem(2, 4, 2, 16, 24, 32, "float16", target="sm_90a"), spec, tuple(arguments))

    def counter(stream: int) -> int:
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
            assert launcher.launch(*arguments) is True
        return int(last().params.workspace)

    own = counter(0xA1)
    assert own == counter(0xA1) != counter(0xA2)
    set_integer("stub_capturing", 1)
    try:
        captured = {counter(0xA1) for _ in range(3)}
    finally:
        set_integer("stub_capturing", 0)
    assert len(captured) == 3
    assert own not in captured
    assert max(captured) - min(captured) == 2 * 128, "a captured launch has a cache line for ever, and no more"
    assert integer("stub_live_bytes") == 0, "it allocates no scratch memory"


def test_a_prepared_call_launches_its_plan_without_the_table() -> None:
    arguments = call(scale=0.5)
    assert prepared(arguments) is None
    assert prepared(call(scale=math.nan)) is None
    assert prepared(call(scale=1e300)) is None
    register(arguments, [kernel(0x3000), kernel(0x4000)])
    launch = prepared(arguments)
    library.clear_plans()
    lse = tensor((2, 4, 16), 0x500000)
    other = call(query=tensor(SHAPE, 0x800000))
    assert launch(*other[:4], lse) is True
    assert (last(1).function, last().function) == (0x3000, 0x4000)
    assert (last().params.query, last().params.lse) == (0x800000, 0x500000)
    assert last().params.scale_log2 == pytest.approx(0.5 * math.log2(math.e), rel=1e-7)


@pytest.mark.parametrize("change", MISSES.values(), ids=MISSES.keys())
def test_a_prepared_call_refuses_what_it_was_not_prepared_for(change: dict[str, Any]) -> None:
    register(call())
    launch = prepared(call())
    before = record.launches
    if change.keys() <= {"query", "key", "value", "out"}:
        assert launch(*call(**change)[:4], None) is None
        assert record.launches == before


def test_a_prepared_call_admits_tensors_of_better_alignment() -> None:
    misaligned = call(query=tensor(SHAPE, 0x100002))
    register(misaligned)
    assert prepared(misaligned)(*call()[:4], None) is True


def test_a_prepared_call_allocates_the_lse_that_is_asked_for() -> None:
    install_allocator()
    register(call())
    launch = prepared(call())
    check_allocated_lse(launch(*call()[:4], True), last().params.lse)
    set_integer("stub_last_bytes", -1)
    for lse, address in ((tensor((2, 4, 16), 0x500000), 0x500000), (None, None), (False, None)):
        assert launch(*call()[:4], lse) is True
        assert last().params.lse == address
    assert launch(*call(query=tensor((2, 4, 17, 32), 0x100000))[:4], True) is None
    assert integer("stub_last_bytes") == -1


def test_a_prepared_call_always_has_an_output() -> None:
    register(call())
    with pytest.raises(TypeError, match="from type `None` to `DLTensor\\*`"):
        prepared(call(out=None))
    with pytest.raises(TypeError, match="from type `None` to `DLTensor\\*`"):
        prepared(call())(*call(out=None)[:4], None)


def test_a_plan_object_reaches_the_prepared_call() -> None:
    arguments = call()
    register(arguments)
    plan = make_plan(prepared(arguments), Expected({}, True, {"return_lse": False}), Explanation("stub", "a test"))
    with torch.no_grad():  # the stub's tensors are not torch's
        assert plan(*arguments[:3], out=arguments[3]) is arguments[3]
    assert last().params.out == 0x400000


def test_a_plan_object_reports_a_failed_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call falls through to sdpa, which launches again and raises what the driver says."""
    arguments = call()
    register(arguments)
    expected = Expected({}, True, {"return_lse": False, "impl": "auto"})
    plan = make_plan(prepared(arguments), expected, Explanation("stub", "a test"))
    monkeypatch.setattr(Expected, "check", lambda *_: None)
    monkeypatch.setattr(api, "sdpa", lambda *tensors, **options: (tensors, options))
    set_integer("stub_error", LAUNCH_FAILED)
    with torch.no_grad():
        tensors, options = plan(*arguments[:3], out=arguments[3])
    assert tensors == tuple(arguments[:3])
    assert options == {"out": arguments[3], "return_lse": False, "impl": "auto"}


def test_a_plan_object_gives_the_lse() -> None:
    install_allocator()
    register(call())
    plan = make_plan(prepared(call()), Expected({}, True, {"return_lse": True}), Explanation("stub", "a test"))
    arguments = call()
    with torch.no_grad():
        out, lse = plan(*arguments[:3], out=arguments[3])  # type: ignore[misc]
    assert out is arguments[3]
    check_allocated_lse(lse, last().params.lse)


def test_strides_of_dimensions_of_size_one_make_no_other_plan() -> None:
    def one_row(*strides: int) -> list[Any]:
        shape = (1, 4, 1, 32)
        return call(query=tensor(shape, 0x100000, strides=strides), out=tensor(shape, 0x400000))

    register(one_row(128, 32, 32, 1))
    assert launcher.launch(*one_row(7, 32, 3, 1)) is True


def test_the_plan_table_is_bounded() -> None:
    for options in range(9000):
        register(call(options=options))
    assert 0 < library.plan_count() <= 8192
    assert launcher.launch(*call(options=8999)) is True


def test_threads_launch_while_plans_come_and_go() -> None:
    arguments = [call(options=options) for options in range(4)]
    for each in arguments:
        register(each)
    failures: list[object] = []

    def work(own: list[Any]) -> None:
        for _ in range(2000):
            result = launcher.launch(*own)
            if result is not True:
                failures.append(result)

    def churn() -> None:
        for options in range(100, 2100):
            register(call(options=options))

    threads = [threading.Thread(target=work, args=(each,)) for each in arguments] + [threading.Thread(target=churn)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.usefixtures("_four_maps")
def test_threads_share_a_plan_and_none_sees_the_addresses_of_another() -> None:
    """The stub counts maps whose address is not that of the launch's parameters (`torn`)."""
    first = call()
    register(first, [kernel(maps=tuple(n for operand in range(4) for n in (operand, 64, 32, 64, 0)))])
    launch = prepared(first)
    before, failures = record.torn, []

    def work(offset: int) -> None:
        own = [
            tensor(shape, address + offset) for shape, address in zip((SHAPE, KV, KV, SHAPE), ADDRESSES, strict=True)
        ]
        for _ in range(1000):
            if launch(*own, None) is not True or launcher.launch(*own, None, 5, None) is not True:
                failures.append(offset)

    threads = [threading.Thread(target=work, args=(0x10000000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert record.torn == before


@pytest.mark.parametrize(("version", "reason"), [(12040, "supports CUDA 12.4"), (13000, "torch sees no CUDA device")])
def test_the_driver_says_its_version(version: int, reason: str) -> None:
    set_integer("stub_version", version)
    assert launcher.driver_version() == version
    assert reason in (launcher.device_error() or "")
    set_integer("stub_version", 13000)


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        ([[1, 2]], "expected more than 18 integers"),
        ([kernel(maps=(0, 64, 64, 128, 0))[:-1]], "expected more than 46 integers"),
        ([[*kernel(), *(1, 9, 0), *(2, 1, 1, 64, 0, 0), 0]], "expected no more after 1 kernels"),
        ([[*kernel(), *(1, 9, 0), *(2, 1, 1, 64, 0)]], "expected more than"),
        ([[*kernel(), *(1, 9, 0), *(2, 1, 0, 64, 0, 0)]], "expected rows of a tile"),
        ([kernel(maps=(0, 64, 64, 128, 0) * 9)], "expected at most 8 tensor maps, got 9"),
        ([kernel()] * 9, "expected at most 8 kernels, got 9"),
        ([kernel(maps=(34, 64, 64, 128, 0))], "expected an operand below 34, got 34"),
    ],
)
def test_a_plan_of_other_integers_is_refused(kernels: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        register(call(), kernels)
    assert library.plan_count() == 0


def test_a_plan_without_a_call_is_refused() -> None:
    with pytest.raises(TypeError, match="expected numbers, params and a call"):
        library.register_plan(b"", b"")
    with pytest.raises(TypeError, match="expected 7 to 28 arguments, got 6"):
        library.register_plan(b"", b"", *call()[:6])
    with pytest.raises(TypeError, match="expected 7 to 28 arguments, got 29"):
        launcher.launch(*call(), *[None] * 22)


def test_a_tensor_map_that_cannot_be_is_refused() -> None:
    with pytest.raises(RuntimeError, match="swizzle of 0, 32, 64 or 128 bytes, got 16"):
        register(call(), [kernel(maps=(0, 64, 64, 16, 0))])
    assert library.plan_count() == 0


def test_a_plan_of_tensors_that_cannot_launch_is_refused() -> None:
    with pytest.raises(ValueError, match="CUDA tensors that do not overlap"):
        register(call(query=tensor((4, 16, 32), 0x100000)))


def test_one_kernel_with_parameters_that_the_caller_has_filled() -> None:
    params = bytes(range(1, 201)) + bytes(200)
    integers = packed(PRIMARY, *kernel(grid=(5, 1, 1), cluster=2, programmatic=1, shared_bytes=70_000)[:OF_LAUNCH], 0)
    library.launch_one(0xABC, integers, params)
    found = last()
    assert found.stream == 0xABC
    assert list(found.grid) == [5, 1, 1]
    assert (found.threads, found.shared_bytes, found.context) == (128, 70_000, PRIMARY)
    assert found.programmatic == 1
    assert list(found.cluster) == [2, 1, 1]
    given = bytes(found.params)
    assert given == params[: len(given)]
    with pytest.raises(ValueError, match="expected more than 12 integers"):
        library.launch_one(0, integers[:-8], params)
    set_integer("stub_error", LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="the stub was told to fail"):
        library.launch_one(0, integers, params)
