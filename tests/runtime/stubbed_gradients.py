"""Calls for gradients against the stub driver; test_launcher.py runs this file in a process of its own."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import pytest
from fake_cuda import install_allocator, integer, last, record, set_integer, tensor
from stub_harness import NO_VARLEN, OF_LAUNCH, PRIMARY, SHAPE, UNCHANGED, _clean, call, kernel, packed

from microsdpa.execution.gradients import PLACES
from microsdpa.kernels.params import BackwardParams
from microsdpa.runtime import launcher

__all__ = ["_clean"]
GRAD_OUT, LSE = 0x900000, 0xA00000
MADE = 0xB00000, 0xC00000, 0xD00000
NAMES = "query", "key", "value", "out", "lse", "grad_out", "grad_query", "grad_key", "grad_value", "workspace"
OPERANDS = launcher._OPERANDS
library = launcher._library


@pytest.fixture(autouse=True)
def _raw() -> Iterator[None]:
    install_allocator()
    set_integer("stub_raw_bytes", ctypes.sizeof(BackwardParams))
    yield
    set_integer("stub_raw_bytes", 0)


def asked(**changes: Any) -> list[Any]:
    """Arguments of launcher.gradients(): those of a call, and of what is made of query, key and value."""
    arguments = {
        **dict(zip(("query", "key", "value", "out", "lse", "options", "scale"), call(), strict=True)),
        "lse": tensor(SHAPE[:3], LSE, bits=32),
        **{"mask": None, "slopes": None, "sinks": None, "left": -1, "right": -1, "softcap": None},
        **{"grad_out": tensor(SHAPE, GRAD_OUT), "grad_lse": None},
        **{name: tensor(SHAPE, at) for name, at in zip(("q", "k", "v"), MADE, strict=True)},
        **{"grad_mask": None, "grad_slopes": None, "grad_sinks": None},
    }
    return list((arguments | changes).values())


def register(arguments: list[Any], workspace_bytes: int = 64) -> None:
    pointers = [number for name in NAMES for number in (PLACES[name], OPERANDS.index(name), 0)]
    numbers = (BackwardParams.forward.offset + _SCALE, launcher.SCALE_LOG2)
    own = [0, ctypes.sizeof(BackwardParams), len(NAMES), *pointers, 1, *numbers, 0]
    one = [*kernel()[:OF_LAUNCH], *own]
    integers = packed(PRIMARY, workspace_bytes, 1, 0, *NO_VARLEN, *UNCHANGED, 1, *one)
    library.register_gradients(integers, bytes(ctypes.sizeof(BackwardParams)), *arguments)


_SCALE = type(BackwardParams().forward.call).scale_log2.offset


def launched() -> BackwardParams:
    return BackwardParams.from_buffer_copy(bytes(last().raw))


def test_a_call_for_gradients_gets_its_addresses_in_one_launch() -> None:
    arguments = asked(scale=0.5)
    assert launcher.gradients(*arguments) is False
    register(arguments)
    assert launcher.gradients(*arguments) is True
    found = launched()
    call_ = found.forward.call
    assert (call_.query, call_.key, call_.value, call_.out, call_.lse) == (*(0x100000 * i for i in range(1, 5)), LSE)
    assert (found.grad_out, found.grad_query, found.grad_key, found.grad_value) == (GRAD_OUT, *MADE)
    assert found.grad_lse is None
    assert integer("stub_last_bytes") == 64
    assert call_.workspace
    assert call_.scale_log2 == pytest.approx(0.5 * math.log2(math.e), rel=1e-7)


def test_the_gradient_of_the_output_may_be_the_output() -> None:
    arguments = asked(grad_out=tensor(SHAPE, 0x400000))
    register(arguments)
    assert launcher.gradients(*arguments) is True
    assert launched().grad_out == 0x400000


@pytest.mark.parametrize(
    "changes",
    [
        {"options": 6},
        {"grad_out": tensor(SHAPE, GRAD_OUT, strides=(4 * 16 * 32, 32, 128, 1))},
        {"grad_out": tensor(SHAPE, GRAD_OUT + 2)},
        {"grad_lse": tensor(SHAPE[:3], 0xE00000, bits=32)},
        {"grad_sinks": tensor((4,), 0xE00000)},
        {"mask": tensor((16, 24), 0x600000)},
        {"softcap": 2.0},
        {"left": 3},
        {"scale": math.nan},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_call_has_no_plan(changes: dict[str, Any]) -> None:
    register(asked())
    assert launcher.gradients(*asked(**changes)) is False
    assert record.launches == 0 or last().function == 0x3000


def test_a_call_of_the_forward_pass_has_no_plan_of_gradients() -> None:
    register(asked())
    assert launcher.launch(*call()) is None


def test_too_few_arguments_are_an_error() -> None:
    with pytest.raises(TypeError, match="expected 21 arguments, got 20"):
        launcher.gradients(*asked()[:-1])
