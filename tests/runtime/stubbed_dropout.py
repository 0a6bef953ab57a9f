"""Calls that drop probabilities against the stub driver; test_launcher.py runs this file in a process of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from fake_cuda import install_allocator, last, record, set_integer, tensor
from stub_harness import NO_VARLEN, OF_LAUNCH, PRIMARY, UNCHANGED, _clean, call, kernel, packed, register
from stubbed_gradients import GRAD_OUT, LSE, MADE, NAMES, OPERANDS, asked

from microsdpa.call.dropout import Random, kept_of
from microsdpa.call.options import DROPOUT_BIT
from microsdpa.execution.gradients import _KEPT, _KEPT_SCALE, PLACES
from microsdpa.kernels.params import DropoutParams, DroppedBackwardParams, DroppedParams
from microsdpa.runtime import launcher

__all__ = ["_clean"]
DRAWN, STATE = 0xE00000, 0xF00000
OPTIONS = 5 | DROPOUT_BIT
library = launcher._library


def numbers(address: int) -> Any:
    """Two int64 on the device."""
    return tensor((2,), address, code=0, bits=64)


@pytest.fixture(autouse=True)
def _raw() -> Iterator[None]:
    install_allocator()
    set_integer("stub_raw_bytes", ctypes.sizeof(DroppedParams))
    yield
    set_integer("stub_raw_bytes", 0)


def dropout() -> DropoutParams:
    return DroppedParams.from_buffer_copy(bytes(last().raw)).dropout


def test_seed_and_offset_are_handed_on_in_one_launch() -> None:
    arguments = call(options=OPTIONS, scale=0.5)
    register(arguments)
    state = numbers(STATE)
    assert launcher.launch_dropped(*kept_of(0.25), *Random(None, -(2**62) - 5, 2**40 + 4, state), *arguments) is True
    found = dropout()
    assert (found.drawn, found.state) == (None, STATE)
    assert (found.seed, found.offset) == (2**64 - 2**62 - 5, 2**40 + 4)
    assert (found.kept, found.scale) == (49152, pytest.approx(4 / 3, rel=1e-7))
    assert last().params.query == 0x100000
    before = record.launches
    launcher.launch_dropped(*kept_of(0.5), *Random(numbers(DRAWN)), *arguments)
    assert record.launches == before + 1
    assert (dropout().drawn, dropout().state, dropout().kept) == (DRAWN, None, 32768)


def test_calls_with_and_without_dropout_have_plans_of_their_own() -> None:
    register(call(options=OPTIONS))
    assert launcher.launch(*call()) is None
    library.clear_plans()
    register(call())
    assert launcher.launch_dropped(*kept_of(0.5), *Random(None), *call(options=OPTIONS)) is None
    assert launcher.launch(*call()) is True


def test_a_call_that_drops_is_not_prepared() -> None:
    """Its random numbers would be those of the first call."""
    register(call(options=OPTIONS))
    assert library.prepared_call(*call(options=OPTIONS)) is None


def test_the_gradients_find_seed_and_offset() -> None:
    set_integer("stub_raw_bytes", ctypes.sizeof(DroppedBackwardParams))
    arguments = asked(options=OPTIONS)
    names = *NAMES, "drawn"
    pointers = [number for name in names for number in (PLACES[name], OPERANDS.index(name), 0)]
    size = ctypes.sizeof(DroppedBackwardParams)
    places = _KEPT, launcher.KEPT, _KEPT_SCALE, launcher.KEPT_SCALE
    one = [*kernel()[:OF_LAUNCH], 0, size, len(names), *pointers, 2, *places, 0]
    library.register_gradients(packed(PRIMARY, 64, 1, 0, *NO_VARLEN, *UNCHANGED, 1, *one), bytes(size), *arguments)
    assert launcher.gradients(*asked()) is False
    assert launcher.gradients_dropped(*kept_of(0.75), *Random(numbers(DRAWN)), *arguments) is True
    found = DroppedBackwardParams.from_buffer_copy(bytes(last().raw))
    assert (found.dropout.drawn, found.dropout.kept, found.dropout.scale) == (DRAWN, 16384, 4.0)
    assert (found.call.grad_out, found.call.grad_query, found.call.forward.call.lse) == (GRAD_OUT, MADE[0], LSE)


def test_too_few_arguments_are_an_error() -> None:
    for function in (launcher.launch_dropped, launcher.gradients_dropped):
        with pytest.raises(TypeError, match="a call with dropout"):
            function(1, 2.0, None)
