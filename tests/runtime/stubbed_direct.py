"""Built-in functions that torch's tensors come by (direct.h), against the stub driver; run by test_launcher.py.

The launcher of these tests takes tensors on a CPU for those of a GPU: torch makes no others here.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from fake_cuda import last, record, set_context, set_integer, tensor
from stub_harness import ADDRESSES, KV, LAUNCH_FAILED, NO_VARLEN, PRIMARY, SHAPE, UNCHANGED, kernel, packed

from microsdpa.runtime import direct as directs
from microsdpa.runtime.direct import direct

PLACE = Path(os.environ["LD_LIBRARY_PATH"].partition(":")[0])
library = tvm_ffi.load_module(str(PLACE / "cpu_launcher.so"))
launch = direct(library, library.sdpa)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    library.clear_plans()
    set_context(0)
    yield
    set_integer("stub_error", 0)


def call(**changes: Any) -> list[Any]:
    query, out = (torch.zeros(SHAPE, dtype=torch.float16) for _ in range(2))
    key, value = (torch.zeros(KV, dtype=torch.float16) for _ in range(2))
    named = {"query": query, "key": key, "value": value, "out": out, "lse": None, "options": 5, "scale": None}
    return list((named | changes).values())


def numbers(growth: tuple[int, int] = (1, 0)) -> bytes:
    return packed(PRIMARY, 0, *growth, *NO_VARLEN, *UNCHANGED, 1, *kernel())


def register(arguments: list[Any]) -> None:
    library.register_plan(numbers(), b"", *arguments)


def launched() -> dict[str, Any]:
    params = last().params
    names = "query", "key", "value", "out", "lse", "batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "scale_log2"
    strides = {f"{name}_strides": list(getattr(params, f"{name}_strides")) for name in names[:4]}
    return {name: getattr(params, name) for name in names} | strides


def test_it_is_a_built_in_function() -> None:
    assert type(launch) is type(len)
    assert launch.__name__ == "launch"


MASK = torch.ones(16, 24, dtype=torch.bool)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a scale": {"scale": 0.3},
    "a scale of an integer": {"scale": 2},
    "no LSE": {"lse": False},
    "an LSE to write to": {"lse": torch.zeros(2, 4, 16)},
    "a parameter": {"query": torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float16))},
    "rows that follow one another": {"key": torch.zeros(2, 24, 2, 32, dtype=torch.float16).transpose(1, 2)},
    "a part of a tensor": {"value": torch.zeros(4, 2, 24, 32, dtype=torch.float16)[2:]},
    "a mask": {"mask": MASK},
    "all masks": {"mask": MASK, "slopes": torch.ones(4), "sinks": None, "left": 4, "right": -1, "softcap": 2.0},
}


@pytest.mark.parametrize("name", CALLS)
def test_it_launches_what_the_function_of_tvm_ffi_does(name: str) -> None:
    arguments = call(**CALLS[name])
    assert launch(*arguments) is None
    register(arguments)
    assert library.sdpa(*arguments) is True
    expected = launched()
    assert expected["query"] == arguments[0].data_ptr()
    before = record.launches
    assert launch(*arguments) is True
    assert record.launches == before + 1
    assert launched() == expected


def test_an_lse_is_memory_of_torchs_allocator() -> None:
    register(call())
    lse = launch(*call(lse=True))
    assert type(lse) is torch.Tensor
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == (SHAPE[:3], torch.float32, True)
    assert last().params.lse == lse.data_ptr()
    references = sys.getrefcount(lse)
    assert references == 2  # the name, and the argument
    lse.zero_()


def test_arguments_and_results_are_given_back() -> None:
    arguments = call(scale=0.123)
    register(arguments)
    launch(*arguments)
    counts = [sys.getrefcount(argument) for argument in arguments]
    for _ in range(1000):
        launch(*arguments)
    assert [sys.getrefcount(argument) for argument in arguments] == counts


class Subclass(torch.Tensor):
    """A tensor that may have a say in what is done with it."""


class Number:
    def __float__(self) -> float:
        return 0.3


NOT_READ: dict[str, dict[str, Any]] = {
    "a tensor of tvm_ffi's": {"query": tensor(SHAPE, ADDRESSES[0])},
    "None in the place of a tensor": {"out": None},
    "a word": {"scale": "0.3"},
    "an object": {"scale": Number()},
    "an integer of more than 64 bits": {"options": 1 << 70},
    "a tensor without memory": {"key": torch.zeros(KV, dtype=torch.float16, device="meta")},
    "a sparse tensor": {"key": torch.zeros(KV, dtype=torch.float16).to_sparse()},
    "a subclass": {"key": torch.zeros(KV, dtype=torch.float16).as_subclass(Subclass)},
    "a list": {"key": [1.0]},
}


def outcome(function: Any, arguments: list[Any]) -> Any:
    """What a call gives, or raises, without the places in C++ that torch adds to its words."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error), str(error).partition("\n")[0]


@pytest.mark.parametrize("name", NOT_READ)
def test_whatever_else_comes_goes_through_tvm_ffi(name: str) -> None:
    register(call())
    arguments = call(**NOT_READ[name])
    assert outcome(launch, arguments) == outcome(library.sdpa, arguments)
    assert launch(*call()) is True  # no error is left behind


@pytest.mark.parametrize("count", [0, 3, 41])
def test_a_wrong_number_of_arguments_is_refused_in_the_same_words(count: int) -> None:
    arguments = (call() * 6)[:count]
    assert outcome(launch, arguments) == outcome(library.sdpa, arguments)
    assert outcome(launch, arguments)[0] is TypeError


def test_a_launch_that_fails_is_tvm_ffis_error() -> None:
    register(call())
    set_integer("stub_error", LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with error 719: the stub was told to fail"):
        launch(*call())
    with pytest.raises(RuntimeError, match="719"):
        launch(*call(lse=True))
    set_integer("stub_error", 0)
    assert launch(*call()) is True


@pytest.mark.parametrize("scale", [math.nan, math.inf, 1e300])
def test_a_scale_that_validation_refuses_finds_no_plan(scale: float) -> None:
    register(call())
    assert launch(*call(scale=scale)) is None


def test_other_results_are_those_of_tvm_ffi() -> None:
    assert direct(library, library.sdpa_or_kind)(*call()) is None
    library.register_kind(7, *call())
    assert direct(library, library.sdpa_or_kind)(*call()) == 7
    assert direct(library, library.plan_count)() == library.plan_count()
    echo = tvm_ffi.convert(lambda *given: tvm_ffi.convert(list(given)))
    assert list(direct(library, echo)(1, 2)) == [1, 2]


def test_bytes_are_read() -> None:
    arguments = call()
    registering = direct(library, library.register_and_launch)
    before = record.launches
    assert registering(numbers(), b"", *arguments) is True
    assert record.launches == before + 1
    assert launch(*arguments) is True


def test_the_function_is_freed_with_what_it_calls() -> None:
    freed = []

    class Noted:
        def __del__(self) -> None:
            freed.append(True)

    def made() -> Any:
        noted = Noted()
        return direct(library, tvm_ffi.convert(lambda: (noted, None)[1]))

    function = made()
    assert function() is None
    assert not freed
    del function
    gc.collect()
    assert freed


def test_other_threads_run_while_a_launch_waits() -> None:
    """With the interpreter held, a full queue would wait for a thread that cannot run."""
    arguments = call()
    register(arguments)
    set_integer("stub_held", 1)

    def release() -> None:
        time.sleep(0.05)
        set_integer("stub_held", 0)

    thread = threading.Thread(target=release)
    thread.start()
    assert launch(*arguments) is True
    thread.join()


def test_threads_launch_with_their_own_arguments() -> None:
    calls = [call(scale=0.5 + i) for i in range(4)]
    for arguments in calls:
        register(arguments)
    failures: list[Any] = []

    def run(arguments: list[Any]) -> None:
        for _ in range(300):
            lse = launch(*arguments[:4], True, *arguments[5:])
            if type(lse) is not torch.Tensor or lse.shape != SHAPE[:3]:
                failures.append(lse)

    threads = [threading.Thread(target=run, args=(arguments,)) for arguments in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("version", [0, 1])
def test_without_torchs_interface_it_is_the_function_itself(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without it, or with another version of it, whose functions nobody knows."""
    table = (ctypes.c_uint64 * 8)(version << 32 | 99, *[0] * 7)
    monkeypatch.setattr(directs, "_exchange_api", lambda: ctypes.addressof(table) if version else 0)
    assert direct(library, library.sdpa) is library.sdpa
