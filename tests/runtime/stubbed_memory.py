"""Errors of the framework's allocator, against the stub driver; run by test_launcher.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_cuda import install_allocator, integer, record, stub
from stub_harness import _clean, call, register

from microsdpa.runtime import launcher

__all__ = ["_clean"]

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
