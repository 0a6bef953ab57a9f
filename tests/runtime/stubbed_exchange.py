"""Lists of operations (exchange.h) against the stub driver; test_launcher.py runs this in its own process."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import tvm_ffi
from fake_cuda import (
    AWAIT_EVENT,
    AWAIT_VALUE,
    COPY,
    LAUNCH,
    RECORD,
    WRITE,
    forget_operations,
    install_allocator,
    integer,
    operations,
    record,
    set_integer,
    stub,
    tensor,
)
from stub_harness import ADDRESSES, KV, LAUNCH_FAILED, PRIMARY, SHAPE, _clean, call, library, register

from microsdpa.distributed.operations import CALLERS, Operand, Operations, Rows
from microsdpa.errors import MicrosdpaError
from microsdpa.runtime import launcher

__all__ = ["_clean"]
SIDE, BESIDE, EVENT, FLAG, CURRENT = 0x51, 0x52, 0xE1, 0x900000, 0xABC
QUERY, KEY, VALUE, OUT = ADDRESSES
LSE, LSE_SHAPE = 0x500000, (2, 4, 16)
HEAD = 16 * 32 * 2
"""Bytes of a head of query and out."""


@pytest.fixture(autouse=True)
def _on_a_stream() -> Iterator[None]:
    forget_operations()
    install_allocator()
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), CURRENT):
        yield
    set_integer("stub_refused", -1)


def listed() -> Operations:
    """One of each operation but a launch."""
    found = Operations()
    found.record(CALLERS, EVENT)
    found.await_event(SIDE, EVENT)
    found.copy(SIDE, Rows(0x700000, 512), Rows(KEY + 64, 256), (128, 3), Operand.KEY)
    found.copy(SIDE, Rows(0x780000, 512), Rows(VALUE + 32, 256), (128, 3), Operand.VALUE)
    found.write(SIDE, FLAG, 1)
    found.await_value(CALLERS, FLAG, 1)
    return found


def put(keys: int = 0, values: int = 0, current: int = CURRENT) -> list[Any]:
    """What the driver is told of listed(), with keys and values elsewhere by so many bytes."""
    return [
        (RECORD, current, (EVENT, 0, 0, 0, 0, 0)),
        (AWAIT_EVENT, SIDE, (EVENT, 0, 0, 0, 0, 0)),
        (COPY, SIDE, (0x700000, 512, KEY + 64 + keys, 256, 128, 3)),
        (COPY, SIDE, (0x780000, 512, VALUE + 32 + values, 256, 128, 3)),
        (WRITE, SIDE, (FLAG, 1, 0, 0, 0, 0)),
        (AWAIT_VALUE, current, (FLAG, 1, 0, 0, 0, 0)),
    ]


def wholes(**changes: Any) -> list[Any]:
    """Query, key, value, out and LSE of a call over a group."""
    return [*call(**changes)[:4], changes.get("lse")]


def head(of: int, address: int, shape: tuple[int, ...] = SHAPE) -> Any:
    """One head of a tensor."""
    batch, heads, rows, columns = shape
    strides = [heads * rows * columns, rows * columns, columns, 1]
    return tensor((batch, 1, rows, columns), address + of * rows * columns * 2, strides=strides)


def launches(of: int = 0, lse: Any = None) -> tuple[Any, ...]:
    """The call of a launch: attention of one head."""
    masks = None, None, None, -1, -1, None
    given = head(of, QUERY), head(of // 2, KEY, KV), head(of // 2, VALUE, KV), head(of, OUT)
    return *given, lse, 5, 0.5, *masks


def prepared(found: Operations, calls: list[Any], tensors: list[Any] | None = None) -> Any:
    return launcher.prepared_exchange(PRIMARY, found.packed(), tensors or wholes(), calls)


def test_the_context_of_a_device() -> None:
    assert launcher.primary_context(1) == PRIMARY + 1


def test_a_list_is_played_once() -> None:
    launcher.play(PRIMARY, 0xDEF, listed().packed())
    assert operations() == put(current=0xDEF)
    assert record.pushes == record.pops == 1


def test_what_is_no_list_is_refused() -> None:
    def packed(*numbers: int) -> bytes:
        return struct.pack(f"{len(numbers)}q", *numbers)

    rest = [0] * 5
    for numbers, words in (
        (packed(1), "expected 72 bytes for each, got 8"),
        (packed(6, 0, -1, 0, *rest), "expected a code below 6, got 6"),
        (packed(-1, 0, -1, 0, *rest), "expected a code below 6, got -1"),
        (packed(0, 0, 4, 0, *rest), "expected an operand below 4, got 4"),
        (packed(0, 0, -2, 0, *rest), "expected an operand below 4, got -2"),
        (packed(5, 0, -1, 0, *rest), "expected a launch below 0, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            launcher.play(PRIMARY, 0, numbers)
    with pytest.raises(TypeError, match="expected 13 arguments for each of 1 launches, got 0"):
        library.prepared_exchange(PRIMARY, b"", 1, *wholes())
    with pytest.raises(TypeError, match="expected numbers, tensors and calls"):
        library.prepared_exchange(PRIMARY, b"", 0)
    assert operations() == []


def test_a_prepared_list_follows_its_tensors() -> None:
    register(list(launches())[:7])
    found = listed()
    found.launch(CALLERS, 0)
    found.record(SIDE, EVENT)
    play = prepared(found, [launches(3)])
    last = (RECORD, SIDE, (EVENT, 0, 0, 0, 0, 0))
    assert play(*wholes())
    assert operations() == [*put(), (LAUNCH, CURRENT, (QUERY + 3 * HEAD, OUT + 3 * HEAD, 0, 0, 0, 0)), last]
    others = {"query": 0xA00000, "key": 0xB00010, "value": 0xC00000, "out": 0xD00000}
    shapes = {"query": SHAPE, "key": KV, "value": KV, "out": SHAPE}
    moved = wholes(**{name: tensor(shapes[name], at) for name, at in others.items()})
    assert play(*moved)
    launch = LAUNCH, CURRENT, (0xA00000 + 3 * HEAD, 0xD00000 + 3 * HEAD, 0, 0, 0, 0)
    assert operations() == [*put(0xB00010 - KEY, 0xC00000 - VALUE), launch, last]
    key = record.history[(record.launches - 1) % 8].params.key
    assert key == KEY + 1 * 24 * 32 * 2  # gathered keys lie where they lay


def test_an_lse_is_written_where_it_is_given() -> None:
    lse = tensor(LSE_SHAPE, LSE)
    part = tensor((2, 1, 16), LSE + 64)
    register(list(launches(1, part))[:7])
    found = Operations()
    found.launch(CALLERS, 0)
    play = prepared(found, [launches(1, part)], wholes(lse=lse))
    assert play(*wholes(lse=tensor(LSE_SHAPE, LSE + 0x1000)))
    assert operations() == [(LAUNCH, CURRENT, (QUERY + HEAD, OUT + HEAD, LSE + 0x1000 + 64, 0, 0, 0))]
    assert not play(*wholes())
    assert not prepared(found, [launches(1)])(*wholes(lse=lse))
    assert operations() == []


OTHERS: dict[str, dict[str, Any]] = {
    "another shape": {"query": tensor((2, 4, 17, 32), QUERY), "out": tensor((2, 4, 17, 32), OUT)},
    "other strides": {"key": tensor(KV, KEY, strides=(24 * 2 * 32, 32, 64, 1))},
    "another type": {"value": tensor(KV, VALUE, bits=8)},
    "another device": {"query": tensor(SHAPE, QUERY, device=1)},
    "a query that is aligned otherwise": {"query": tensor(SHAPE, QUERY + 8)},
    "an output that is aligned otherwise": {"out": tensor(SHAPE, OUT + 2)},
    "no memory": {"value": tensor(KV, 0)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_tensors_are_not_played_for(name: str) -> None:
    register(list(launches())[:7])
    found = listed()
    found.launch(CALLERS, 0)
    play = prepared(found, [launches()])
    assert not play(*wholes(**OTHERS[name]))
    assert operations() == []


def test_launches_without_a_plan_cannot_be_prepared() -> None:
    found = Operations()
    found.launch(CALLERS, 0)
    assert prepared(found, [launches()]) is None
    register(list(launches())[:7])
    nan = *launches()[:6], float("nan"), *launches()[7:]
    assert prepared(found, [nan]) is None
    play = prepared(found, [launches()])
    library.clear_plans()
    assert play(*wholes())  # it keeps its plan


def test_launches_beside_the_caller_share_memory_that_is_its_own() -> None:
    register(list(launches())[:7], workspace_bytes=5 << 20)
    found = Operations()
    for stream in (CALLERS, SIDE, SIDE):
        found.launch(stream, 0)
    assert prepared(found, [launches()])(*wholes())
    streams = [(stream, numbers[3]) for _, stream, numbers in operations()]
    assert [stream for stream, _ in streams] == [CURRENT, SIDE, SIDE]
    assert streams[1] == streams[2]
    assert streams[0][1] != streams[1][1]
    assert integer("stub_live_bytes") == 0
    found.launch(BESIDE, 0)
    assert prepared(found, [launches()]) is None


def test_a_refused_operation_is_an_error_behind_all_others() -> None:
    found = listed()
    found.launch(CALLERS, 0)
    register(list(launches())[:7])
    play = prepared(found, [launches()])
    set_integer("stub_refused", WRITE)
    words = r"symmetric memory: cuStreamWriteValue32 failed with error 1: .*; use transport='collective'"
    with pytest.raises(MicrosdpaError, match=words):
        launcher.play(PRIMARY, CURRENT, listed().packed())
    assert operations() == put()
    with pytest.raises(MicrosdpaError, match=words):
        play(*wholes())
    assert operations() == put()  # all of them once, and no launch
    set_integer("stub_refused", -1)
    assert play(*wholes())
    library.rethrow_exchange_failure()  # nothing is left of it


def test_a_failed_launch_is_an_error_behind_all_others() -> None:
    found = Operations()
    found.launch(CALLERS, 0)
    found.launch(CALLERS, 0)
    found.numbers += listed().numbers
    register(list(launches())[:7])
    play = prepared(found, [launches()])
    set_integer("stub_error", LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with error 719: the stub was told to fail"):
        play(*wholes())
    assert operations() == put()


def test_memory_that_is_not_there_is_an_error_behind_all_others() -> None:
    found = listed()
    found.launch(SIDE, 0)
    register(list(launches())[:7], workspace_bytes=6 << 20)
    play = prepared(found, [launches()])
    words = ctypes.c_char_p.in_dll(stub, "stub_allocation_error")
    words.value = b"CUDA out of memory"
    try:
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            play(*wholes())
    finally:
        words.value = None
    assert operations() == put()
