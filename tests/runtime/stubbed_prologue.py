"""Calls with norms and rotary embedding against the stub driver; test_launcher.py runs this file by itself."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import pytest
from fake_cuda import install_allocator, integer, last, set_integer, tensor
from stub_harness import ADDRESSES, NO_MEMORY, _clean, call, kernel, prepared, register

from microsdpa.call.options import INTERLEAVED_BIT, LAYER_NORM_BIT, PROLOGUE_BIT, UNROTATED_KEY_BIT
from microsdpa.call.prologue import Prologue
from microsdpa.kernels.params import Params, ProloguedParams, PrologueParams
from microsdpa.runtime import launcher

__all__ = ["_clean"]
OPTIONS = 5 | PROLOGUE_BIT
COS, SIN, POSITIONS, WEIGHT, BIAS, MASK = (0x600000 + 0x10000 * i for i in range(6))
NAMES = (*PrologueParams.TENSORS, "query_first", "key_first", "eps")
FLOAT = {"bits": 32}


@pytest.fixture(autouse=True)
def _raw() -> Iterator[None]:
    install_allocator()
    set_integer("stub_raw_bytes", ctypes.sizeof(ProloguedParams))
    yield
    set_integer("stub_raw_bytes", 0)


def prologued(options: int = OPTIONS, masks: tuple[Any, ...] = (), **changes: Any) -> list[Any]:
    """Arguments of launch() with tables of 40 positions, for 16 queries and 24 keys of 32 columns."""
    tables = {"cos": tensor((40, 8), COS, **FLOAT), "sin": tensor((40, 8), SIN, **FLOAT)}
    given = dict.fromkeys(NAMES) | tables | {"query_first": 0, "key_first": 0, "eps": 1e-5} | changes
    return [*call(options=options), *given.values(), *masks]


def sent(kind: Any = ProloguedParams) -> PrologueParams:
    found: PrologueParams = kind.from_buffer_copy(bytes(last().raw)).prologue
    return found


def test_the_kernel_gets_tensors_strides_and_numbers() -> None:
    positions = tensor((2, 16), POSITIONS, code=0, bits=64)
    weights = {"query_weight": tensor((32,), WEIGHT), "query_bias": tensor((32,), BIAS)}
    wide = tensor((40, 8), SIN, strides=(16, 1), **FLOAT)
    arguments = prologued(query_positions=positions, sin=wide, key_first=3, eps=0.25, **weights)
    register(arguments)
    assert launcher.launch(*arguments) is True
    found = sent()
    assert (found.cos, found.sin, found.query_positions, found.key_positions) == (COS, SIN, POSITIONS, None)
    assert (found.query_weight, found.query_bias, found.key_weight, found.key_bias) == (WEIGHT, BIAS, None, None)
    assert (found.cos_stride, found.sin_stride, found.query_positions_stride) == (8, 16, 16)
    assert (found.positions, found.query_first, found.key_first, found.eps) == (40, 0, 3, 0.25)
    assert last().params.query == 0x100000


def test_masks_stand_behind_it() -> None:
    arguments = prologued(masks=(None, None, tensor((4,), MASK), -1, -1, None), query_first=7)
    register(arguments)
    assert launcher.launch(*arguments) is True
    whole = ProloguedParams.from_buffer_copy(bytes(last().raw))
    assert (whole.masked.sinks, whole.prologue.cos, whole.prologue.query_first) == (MASK, COS, 7)


def test_first_positions_and_epsilon_are_no_part_of_the_plan() -> None:
    register(prologued())
    for first in (0, 5, 16):
        assert launcher.launch(*prologued(query_first=first, key_first=first, eps=float(first))) is True
        assert (sent().query_first, sent().key_first, sent().eps) == (first, first, first)


@pytest.mark.parametrize(
    "changes",
    [
        {"query_first": 25},
        {"key_first": 17},
        {"query_first": -1},
        {"eps": -1.0},
        {"eps": math.nan},
        {"eps": math.inf},
        {"cos": tensor((39, 8), COS, **FLOAT)},
        {"cos": tensor((40, 8), COS)},
        {"cos": tensor((40, 8), COS + 4, **FLOAT)},
        {"cos": tensor((40, 8), COS, strides=(9, 1), **FLOAT)},
        {"cos": tensor((40, 8), NO_MEMORY, **FLOAT)},
        {"cos": tensor((40, 8), 0x400000, **FLOAT)},  # where the output is
        {"key_positions": tensor((24,), POSITIONS, code=0, bits=32)},
        {"query_weight": tensor((32,), WEIGHT)},
        {"options": OPTIONS | INTERLEAVED_BIT},
        {"options": OPTIONS | LAYER_NORM_BIT},
        {"options": OPTIONS | UNROTATED_KEY_BIT},
    ],
)
def test_a_call_of_another_kind_misses(changes: dict[str, Any]) -> None:
    register(prologued())
    assert launcher.launch(*prologued()) is True
    assert launcher.launch(*prologued(**changes)) is None
    assert launcher.launch(*call()) is None


def test_keys_that_are_not_rotated_need_no_angles() -> None:
    options = OPTIONS | UNROTATED_KEY_BIT
    register(prologued(options=options))
    assert launcher.launch(*prologued(options=options, key_first=17)) is True


def test_a_prepared_call_takes_the_tensors_in_their_order() -> None:
    arguments = prologued(query_first=2)
    register(arguments)
    launch = prepared(arguments)
    query, key, value, out = arguments[:4]
    assert launch(query, key, value, out, None, *(None,) * 7, *arguments[7:15]) is True
    assert (sent().cos, sent().query_first, sent().eps) == (COS, 2, pytest.approx(1e-5))
    assert launch(query, key, value, out, None) is None


def test_the_arguments_are_those_that_a_call_gives() -> None:
    """Prologue.arguments and the launcher agree on the order."""
    cos, sin = prologued()[7:9]
    given = Prologue((cos, sin), positions=4).arguments(8)
    arguments = [*call(options=OPTIONS), *given]
    register(arguments)
    assert launcher.launch(*arguments) is True
    assert (sent().cos, sent().sin, sent().query_first, sent().key_first) == (COS, SIN, 12, 4)


ROWS = (0, 0x2000, 0x3000)
"""Bytes from the start of scratch memory to changed rows of Q and K, and to that of the kernels."""


def test_a_kernel_ahead_leaves_rows_that_the_others_read() -> None:
    arguments = prologued()
    register(arguments, [kernel(0x3000), kernel(0x4000, maps=(0, 64, 32, 64, 0))], 0x4000, changed=ROWS)
    assert launcher.launch(*arguments) is True
    ahead = ProloguedParams.from_buffer_copy(bytes(last(1).raw))
    attention = Params.from_buffer_copy(bytes(last().raw))
    query, key, value, out = ADDRESSES
    scratch = ahead.masked.call.out
    assert integer("stub_last_bytes") == 0x4000
    assert (ahead.masked.call.query, ahead.masked.call.key, ahead.prologue.cos) == (query, key, COS)
    assert ahead.masked.call.workspace == scratch + ROWS[1]
    assert (attention.query, attention.key) == (scratch, scratch + ROWS[1])
    assert (attention.value, attention.out, attention.workspace) == (value, out, scratch + ROWS[2])


def test_rows_that_were_changed_are_dense() -> None:
    arguments = prologued()
    shape = arguments[0].shape
    arguments[0] = tensor(tuple(shape), ADDRESSES[0], strides=(16 * 4 * 32, 32, 4 * 32, 1))
    register(arguments, [kernel(), kernel()], 0x4000, changed=(0, -1, 0x2000))
    assert launcher.launch(*arguments) is True
    ahead = ProloguedParams.from_buffer_copy(bytes(last(1).raw))
    attention = Params.from_buffer_copy(bytes(last().raw))
    assert list(ahead.masked.call.query_strides) == [16 * 4 * 32, 32, 4 * 32]
    assert list(attention.query_strides) == [16 * 4 * 32, 16 * 32, 32]
    assert (attention.key, list(attention.key_strides)) == (ADDRESSES[1], [24 * 2 * 32, 24 * 32, 32])


@pytest.mark.parametrize("rotated", [False, True])
def test_a_cache_of_rotated_keys_grows_without_a_plan(rotated: bool) -> None:
    """Q alone is changed in decoding: the plan of one length is that of later ones."""
    options = OPTIONS | (0 if rotated else UNROTATED_KEY_BIT)
    changed = ROWS if rotated else (0, -1, 0x2000)
    register(prologued(options=options), [kernel(), kernel()], 0x4000, (24, 30), changed=changed)
    longer = prologued(options=options)
    longer[1], longer[2] = (tensor((2, 2, 25, 32), address) for address in ADDRESSES[1:3])
    assert launcher.launch(*longer) is (None if rotated else True)
    if not rotated:
        attention = Params.from_buffer_copy(bytes(last().raw))
        assert (attention.seqlen_k, attention.key) == (25, ADDRESSES[1])
        assert attention.query not in ADDRESSES
