"""Calls whose K has another length than before, against the stub driver; test_launcher.py runs this file."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import KDL_BFLOAT, install_allocator, last, record, set_integer, tensor
from stub_harness import (
    ADDRESSES,
    KV,
    NO_VARLEN,
    PRIMARY,
    SHAPE,
    UNCHANGED,
    _clean,
    _four_maps,
    call,
    check_allocated_lse,
    kernel,
    library,
    maps_of_last,
    packed,
    register,
)

from microsdpa.call.masks import Masks
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.ranges import SizeRange
from microsdpa.kernels.select import chosen
from microsdpa.runtime import launcher

__all__ = ["_clean", "_four_maps"]
MAPS = tuple(n for operand in range(4) for n in (operand, 64, 32, 64, 0))


def of_length(seqlen_k: int, heads: int = 2, dtype: int = 2, value_length: int | None = None, **rest: Any) -> list[Any]:
    """A call whose K and V have a length, dense."""
    shapes = (KV[0], heads, seqlen_k, KV[3]), (KV[0], heads, value_length or seqlen_k, KV[3])
    key, value = (tensor(s, at, code=dtype) for s, at in zip(shapes, ADDRESSES[1:3], strict=True))
    return call(**({"key": key, "value": value, "options": 6} | rest))


def test_a_longer_k_gets_the_plan_of_the_one_before() -> None:
    register(of_length(24), growth=(24, 40))
    assert library.plan_count() == 1
    for length in (25, 40, 32):
        assert launcher.launch(*of_length(length)) is True
        params = last().params
        assert (params.seqlen_q, params.seqlen_k, params.diagonal) == (16, length, length - 16)
        assert list(params.key_strides) == list(params.value_strides) == [2 * length * 32, length * 32, 32]
    assert library.plan_count() == 4
    before = record.encoded
    assert launcher.launch(*of_length(32)) is True
    assert record.encoded == before


@pytest.mark.parametrize(
    "other",
    [
        of_length(23),
        of_length(41),
        of_length(32, heads=1),
        of_length(32, dtype=4),
        of_length(32, value_length=31),
        of_length(32, options=5),
        of_length(32, query=tensor((2, 4, 17, 32), ADDRESSES[0]), out=tensor((2, 4, 17, 32), ADDRESSES[3])),
        of_length(32, query=tensor(SHAPE, ADDRESSES[0] + 2)),
        of_length(32, key=tensor((2, 2, 32, 32), ADDRESSES[1], strides=(2048, 1024, 1, 32))),
        [*of_length(32), None, None, None, 3, -1, None],
        [*of_length(32), None, None, None, -1, -1, 2.0],
        [*of_length(32), *[None] * 3, -1, -1, None, *(tensor((2, n), 0x600000, bits=32) for n in (4, 2, 2))],
    ],
    ids=("shorter", "longer", "heads", "dtype", "V", "causal", "S_q", "alignment", "D", "window", "softcap", "scales"),
)
def test_what_the_kernels_were_not_chosen_for_has_no_plan(other: list[Any]) -> None:
    register(of_length(24), growth=(24, 40))
    assert launcher.launch(*other) is None


def test_strides_are_the_calls_own() -> None:
    register(of_length(24), growth=(24, 24))
    shape = (2, 2, 24, 32)
    strided = tensor(shape, ADDRESSES[1], strides=(24 * 64, 32, 64, 1))
    assert launcher.launch(*of_length(24, key=strided)) is True
    assert list(last().params.key_strides) == [24 * 64, 32, 64]
    assert list(last().params.value_strides) == [2 * 24 * 32, 24 * 32, 32]


@pytest.mark.usefixtures("_four_maps")
def test_tensor_maps_are_of_the_new_length() -> None:
    register(of_length(24), [kernel(maps=MAPS)], growth=(24, 40))
    encoded = record.encoded
    assert launcher.launch(*of_length(33)) is True
    assert record.encoded == encoded + 4
    query, key, value, _ = maps_of_last()
    assert query.sizes == (32, 16, 4, 2)
    assert key.sizes == value.sizes == (32, 33, 2, 2)
    assert key.strides == (64, 33 * 64, 2 * 33 * 64)
    far = tensor((2, 2, 33, 32), ADDRESSES[1], strides=(2**39, 33 * 32, 32, 1))
    assert launcher.launch(*of_length(33, key=far)) is None


def test_masks_grow_along() -> None:
    def masked(length: int, columns: int | None = None) -> list[Any]:
        mask = tensor((2, 1, 16, columns or length), 0x600000, code=6, bits=8)
        return [*of_length(length), mask, None, None, 9, -1, None]

    set_integer("stub_masked", 1)
    try:
        register(masked(24), growth=(24, 40))
        assert launcher.launch(*masked(30)) is True
        assert [*last().mask_strides, last().mask_column_stride] == [16 * 30, 0, 30, 1]
        bounds = Masks(window=(9, -1)).bounds("lower_right", 16, 30)
        assert (last().position, last().lowest, last().params.diagonal) == bounds
        assert launcher.launch(*masked(30, columns=1)) is None
    finally:
        set_integer("stub_masked", 0)


def test_plans_that_are_forgotten_grow_no_more() -> None:
    register(of_length(24), growth=(24, 40))
    library.clear_plans()
    assert launcher.launch(*of_length(25)) is None


def test_a_plan_is_registered_and_launched_at_once() -> None:
    install_allocator()
    own = kernel()
    numbers = packed(PRIMARY, 0, 1, 0, *NO_VARLEN, *UNCHANGED, 1, *own)
    given = of_length(24, lse=True)
    launches = record.launches
    check_allocated_lse(library.register_and_launch(numbers, b"", *given), last().params.lse)
    assert (record.launches, library.plan_count()) == (launches + 1, 1)
    assert launcher.launch(*of_length(24)) is True
    assert library.register_and_launch(numbers, b"", *of_length(25, scale=math.nan)) is None
    with pytest.raises(ValueError, match="do not overlap"):
        library.register_and_launch(numbers, b"", *of_length(24, out=of_length(24)[0]))


def test_numbers_that_sizes_change_may_come_by_themselves() -> None:
    install_allocator()
    function, *rest = kernel()
    given = of_length(24, lse=True)
    launches = record.launches
    behind = packed(*NO_VARLEN, *UNCHANGED, 1, function)
    parts = packed(PRIMARY, 0), 24, 30, behind, 5, 3, 2, packed(*rest[3:])
    check_allocated_lse(library.register_sized(*parts, *given), last().params.lse)
    assert (list(last().grid), last().threads, last().function) == ([5, 3, 2], 128, function)
    assert launcher.launch(*of_length(30)) is True
    assert launcher.launch(*of_length(31)) is None
    assert record.launches == launches + 2
    with pytest.raises(ValueError, match="expected more than"):
        library.register_sized(*parts[:-1], b"", *given)
    with pytest.raises(TypeError, match="register_sized: expected numbers, growth, grid and a call"):
        library.register_sized(*parts)


@pytest.mark.parametrize("batch", [1, 40])
def test_a_new_size_is_registered_with_the_numbers_of_any_other_plan(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(batch, 8, 8, 200, 200, 64, "float16", target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    monkeypatch.setattr(launcher, "_loaded_specs", {})
    monkeypatch.setattr(launcher, "_compiled", lambda spec, _: spec)
    monkeypatch.setattr(launcher, "load_kernel", lambda *_: (0x3000, PRIMARY))
    sized: list[Any] = []
    whole: list[Any] = []
    monkeypatch.setattr(launcher, "_register_sized", lambda *given: sized.append(given))
    monkeypatch.setattr(launcher, "_register_and_launch", lambda *given: whole.append(given))
    call = SimpleNamespace(device=SimpleNamespace(index=0)), "further arguments"
    launcher.prepare_and_launch(problem, spec, call)
    ((head, first, last, rest, x, y, z, tail, *given),) = sized
    assert (first, last, (x, y, z), tuple(given)) == (*launcher.NO_LENGTHS, spec.grid(problem), call)
    expected = launcher._numbers_of(problem, spec, call, None)
    assert head + packed(first, last) + rest + packed(x, y, z) + tail == expected
    others = SizeRange(1, 50, 129, 210, True)
    launcher.prepare_and_launch(problem, spec, call, others)
    assert whole.pop() == (launcher._numbers_of(problem, spec, call, others), b"", *call)
    split = chosen(decoding := Problem(1, 8, 8, 1, 60_000, 64, "float16", target="sm_90a"))
    assert split is not None
    assert len(split.stages) > 1
    launcher.prepare_and_launch(decoding, split, call)
    assert whole == [(launcher._numbers_of(decoding, split, call, None), b"", *call)]
    assert len(sized) == 1


NUMBER = 7


def sized(batch: int, queries: int, keys: int, heads: int = 4, **changes: Any) -> list[Any]:
    """A call of these sizes, with no tensor that meets another one."""
    tensors = {
        "query": tensor((batch, heads, queries, 32), 0x10000000),
        "key": tensor((batch, 2, keys, 32), 0x20000000),
        "value": tensor((batch, 2, keys, 32), 0x30000000),
        "out": tensor((batch, heads, queries, 32), 0x40000000),
    }
    return call(**tensors | changes)


def test_calls_of_a_kind_have_a_number() -> None:
    assert library.sdpa_or_kind(*sized(2, 16, 24)) is None
    assert library.register_kind(NUMBER, *sized(2, 16, 24))
    strided = tensor((3, 2, 30, 32), 0x20000000, strides=(30 * 64, 32, 64, 1))
    for given in (sized(2, 16, 24), sized(1, 1, 1), sized(300, 77, 1000), sized(3, 5, 30, key=strided)):
        assert library.sdpa_or_kind(*given) == NUMBER
    library.clear_kinds()
    assert library.sdpa_or_kind(*sized(2, 16, 24)) is None
    library.register_kind(NUMBER, *sized(2, 16, 24))
    library.clear_plans()
    assert library.sdpa_or_kind(*sized(2, 16, 24)) is None


def test_a_kind_has_the_columns_of_its_value() -> None:
    def narrow(batch: int, keys: int, of_value: int = 24, of_output: int = 24) -> list[Any]:
        value = tensor((batch, 2, keys, of_value), 0x30000000)
        return sized(batch, 16, keys, value=value, out=tensor((batch, 4, 16, of_output), 0x40000000))

    assert library.register_kind(NUMBER, *narrow(2, 24))
    assert library.sdpa_or_kind(*narrow(5, 70)) == NUMBER
    for wrong in (narrow(5, 70, 32), narrow(5, 70, 24, 32), narrow(5, 70, 16, 16), sized(5, 16, 70)):
        assert library.sdpa_or_kind(*wrong) is None


WRONG_KINDS: dict[str, list[Any]] = {
    "options": sized(2, 16, 24, options=6),
    "heads": sized(2, 16, 24, heads=8),
    "type": sized(2, 16, 24, key=tensor((2, 2, 24, 32), 0x20000000, code=KDL_BFLOAT)),
    "device": sized(2, 16, 24, value=tensor((2, 2, 24, 32), 0x30000000, device=1)),
    "alignment": sized(2, 16, 24, query=tensor((2, 4, 16, 32), 0x10000002)),
    "batch of the key": sized(2, 16, 24, key=tensor((1, 2, 24, 32), 0x20000000)),
    "batch of key and value": sized(
        2, 16, 24, **{name: tensor((1, 2, 24, 32), at) for name, at in (("key", 0x20000000), ("value", 0x30000000))}
    ),
    "length of the value": sized(2, 16, 24, value=tensor((2, 2, 25, 32), 0x30000000)),
    "head dimension of the value": sized(2, 16, 24, value=tensor((2, 2, 24, 40), 0x30000000)),
    "shape of the output": sized(2, 16, 24, out=tensor((2, 4, 15, 32), 0x40000000)),
    "stride of the last dimension": sized(
        2, 16, 24, key=tensor((2, 2, 24, 32), 0x20000000, strides=(3072, 1536, 64, 2))
    ),
    "a stride that bulk copies cannot address": sized(
        2, 16, 24, key=tensor((2, 2, 24, 32), 0x20000000, strides=(2**39, 768, 32, 1))
    ),
    "no keys": sized(2, 16, 0),
    "an output that meets an input": sized(2, 16, 24, out=tensor((2, 4, 16, 32), 0x10000000)),
    "a scale that is no number": sized(2, 16, 24, scale=float("nan")),
    "a mask": [*sized(2, 16, 24), tensor((2, 1, 16, 24), 0x60000000, code=6, bits=8), None, None, -1, -1, None],
    "a window": [*sized(2, 16, 24), None, None, None, 3, -1, None],
    "a soft cap": [*sized(2, 16, 24), None, None, None, -1, -1, 2.0],
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_what_has_to_be_looked_at_is_of_no_kind(name: str) -> None:
    library.register_kind(NUMBER, *sized(2, 16, 24))
    assert library.sdpa_or_kind(*WRONG_KINDS[name]) is None


def test_a_kind_is_of_calls_without_tensors_of_masks() -> None:
    assert not library.register_kind(NUMBER, *WRONG_KINDS["a mask"])
    for name, changes in (("a window", (4, -1, None)), ("a soft cap", (-1, -1, None))):
        library.register_kind(NUMBER, *WRONG_KINDS[name])
        assert library.sdpa_or_kind(*WRONG_KINDS[name]) == NUMBER
        *call, left, right, softcap = WRONG_KINDS[name]
        assert library.sdpa_or_kind(*sized(5, 9, 70), *call[7:], left, right, softcap) == NUMBER
        assert library.sdpa_or_kind(*call, *changes) is None
