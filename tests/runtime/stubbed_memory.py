"""Errors of the framework's allocator, against the stub driver; run by test_launcher.py."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from fake_cuda import install_allocator, integer, last, record, set_integer, stub, tensor
from stub_harness import ADDRESSES, KV, LAUNCH_FAILED, SHAPE, _clean, call, kernel, library, register

from microsdpa.runtime import launcher

__all__ = ["_clean"]

TORCH_CUDA = ctypes.CDLL(str(Path(os.environ["LD_LIBRARY_PATH"].partition(":")[0]) / "stub_torch_cuda.so"))

WORDS = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB."
RAISED = "\nException raised from malloc at ../c10/cuda/CUDACachingAllocator.cpp:1585 (most recent call first):\n#0 ..."


@contextmanager
def failing(words: str) -> Iterator[None]:
    error = ctypes.c_char_p.in_dll(stub, "stub_allocation_error")
    install_allocator()
    error.value = words.encode()
    try:
        yield
    finally:
        error.value = None


def workspace() -> Any:
    arguments = call()
    register(arguments, workspace_bytes=4096)
    return launcher.launch(*arguments)


def lse() -> Any:
    arguments = call(lse=True)
    register(arguments)
    return launcher.launch(*arguments)


ALLOCATIONS = [workspace, lse]


@pytest.mark.parametrize("allocate", ALLOCATIONS)
def test_out_of_memory_is_torchs_error_and_the_next_call_works(allocate: Callable[[], Any]) -> None:
    launches = record.launches
    live = integer("stub_live_bytes")
    with failing(WORDS + RAISED), pytest.raises(torch.OutOfMemoryError) as caught:
        allocate()
    assert str(caught.value) == WORDS
    assert isinstance(caught.value, RuntimeError)
    assert record.launches == launches
    assert integer("stub_live_bytes") == live
    assert allocate() is not None


@pytest.mark.parametrize("allocate", ALLOCATIONS)
def test_another_error_of_the_allocator_is_a_runtime_error(allocate: Callable[[], Any]) -> None:
    words = "CUDA error: an illegal memory access was encountered"
    with failing(words + RAISED), pytest.raises(RuntimeError) as caught:
        allocate()
    assert type(caught.value) is RuntimeError
    assert str(caught.value) == words


@pytest.fixture
def _raw_allocator() -> Iterator[None]:
    set_raw("stub_raw_allocator", 1)
    yield
    set_raw("stub_raw_allocator", 0)


def set_raw(name: str, value: int) -> None:
    ctypes.c_int.in_dll(TORCH_CUDA, name).value = value


def raw(name: str) -> int:
    return ctypes.c_int.in_dll(TORCH_CUDA, name).value


def of_size(workspace_bytes: int) -> int | None:
    """Where the scratch memory of a call is that needs so much."""
    library.clear_plans()
    register(call(), workspace_bytes=workspace_bytes)
    assert launcher.launch(*call()) is True
    address: int | None = last().params.workspace
    return address


MEGABYTE = 1 << 20
LARGEST_KEPT = 4 * MEGABYTE


@pytest.mark.usefixtures("_raw_allocator")
def test_large_scratch_memory_comes_from_torchs_allocator_and_goes_back() -> None:
    before, live = raw("stub_raw_allocations"), raw("stub_raw_live")
    for count in (1, 2):
        found = of_size(LARGEST_KEPT + 1)
        assert (raw("stub_raw_allocations"), raw("stub_raw_live")) == (before + count, live)
        assert found == ctypes.c_void_p.in_dll(TORCH_CUDA, "stub_raw_last").value
    set_integer("stub_error", LAUNCH_FAILED)
    with pytest.raises(RuntimeError):
        launcher.launch(*call())
    assert raw("stub_raw_live") == live


@pytest.mark.usefixtures("_raw_allocator")
def test_a_stream_keeps_the_two_blocks_of_small_scratch_memory_that_it_used_last() -> None:
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), 0xA1):
        before, live = raw("stub_raw_allocations"), raw("stub_raw_live")
        first = of_size(100_000)
        assert of_size(120_000) == first  # it has room for both
        second = of_size(LARGEST_KEPT)
        assert second != first
        assert [of_size(100_000), of_size(LARGEST_KEPT)] == [first, second]
        assert (raw("stub_raw_allocations"), raw("stub_raw_live")) == (before + 2, live + 2)
        third = of_size(MEGABYTE)
        assert third not in (first, second)
        assert (raw("stub_raw_allocations"), raw("stub_raw_live")) == (before + 3, live + 2)
        assert of_size(MEGABYTE) == third
        set_integer("stub_error", LAUNCH_FAILED)
        with pytest.raises(RuntimeError):
            launcher.launch(*call())
        set_integer("stub_error", 0)
        assert of_size(MEGABYTE) == third
        assert (raw("stub_raw_allocations"), raw("stub_raw_live")) == (before + 3, live + 2)


@pytest.mark.usefixtures("_raw_allocator")
def test_streams_share_no_scratch_memory_and_only_so_many_keep_some() -> None:
    places, live = set(), raw("stub_raw_live")
    for stream in range(0xB01, 0xB01 + 40):
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
            first, before = of_size(4096), raw("stub_raw_allocations")
            second = of_size(4096)
            if raw("stub_raw_allocations") == before:
                assert first == second
                places.add(first)
    assert 1 <= len(places) <= 16
    assert len(places) == raw("stub_raw_live") - live


@pytest.mark.usefixtures("_raw_allocator")
def test_a_captured_launch_uses_scratch_memory_that_nobody_keeps() -> None:
    """The graph may run on any stream: memory of its own comes from torch, which knows that a graph is captured."""
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), 0xA1):
        kept = of_size(4096)
        assert of_size(4096) == kept
        before, live = raw("stub_raw_allocations"), raw("stub_raw_live")
        set_integer("stub_capturing", 1)
        try:
            assert of_size(4096) != kept
        finally:
            set_integer("stub_capturing", 0)
        assert (raw("stub_raw_allocations"), raw("stub_raw_live")) == (before + 1, live)
        assert of_size(4096) == kept


@pytest.mark.usefixtures("_raw_allocator")
def test_calls_of_threads_that_launch_at_once_share_no_scratch_memory() -> None:
    """The kernels of one plan are several: those of another call on the same stream may come between them."""
    register(call(), [kernel(), kernel(0x4000)], workspace_bytes=4096)

    def run() -> None:
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), 0xA1):
            launcher.launch(*call())

    run()
    set_integer("stub_held", 1)
    live = raw("stub_raw_live")
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while raw("stub_raw_live") < live + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    waiting = raw("stub_raw_live") - live
    set_integer("stub_held", 0)
    for thread in threads:
        thread.join()
    assert waiting == 2


@pytest.mark.usefixtures("_raw_allocator")
def test_scratch_memory_of_another_device_than_the_current_one_is_the_frameworks() -> None:
    install_allocator()
    before = raw("stub_raw_allocations")
    shapes = {"query": SHAPE, "key": KV, "value": KV, "out": SHAPE}
    named = zip(shapes.items(), ADDRESSES, strict=True)
    arguments = call(**{name: tensor(shape, at, device=1) for (name, shape), at in named})
    register(arguments, workspace_bytes=4096)
    assert launcher.launch(*arguments) is True
    assert raw("stub_raw_allocations") == before
    assert integer("stub_last_bytes") == 4096
