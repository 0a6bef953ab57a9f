"""Errors of the framework's allocator, against the stub driver; run by test_launcher.py."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import install_allocator, integer, last, record, set_integer, stub, tensor
from stub_harness import ADDRESSES, KV, LAUNCH_FAILED, SHAPE, _clean, call, register

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


@pytest.mark.usefixtures("_raw_allocator")
def test_scratch_memory_comes_from_torchs_allocator_and_goes_back() -> None:
    before = raw("stub_raw_allocations")
    assert workspace() is True
    assert (raw("stub_raw_allocations"), raw("stub_raw_live")) == (before + 1, 0)
    assert last().params.workspace == ctypes.c_void_p.in_dll(TORCH_CUDA, "stub_raw_last").value
    set_integer("stub_error", LAUNCH_FAILED)
    with pytest.raises(RuntimeError):
        launcher.launch(*call())
    assert (raw("stub_raw_allocations"), raw("stub_raw_live")) == (before + 2, 0)


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
