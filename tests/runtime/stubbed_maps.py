"""Tensor maps and workspaces against the stub driver; test_launcher.py runs this file in a process of its own."""

from __future__ import annotations

import pytest
from fake_cuda import KDL_BFLOAT, install_allocator, integer, last, record, set_integer, tensor
from stub_harness import (
    ALL_MAPS,
    BFLOAT16,
    FLOAT16,
    KV,
    LAUNCH_FAILED,
    PROMOTION_256B,
    SHAPE,
    UINT8,
    Map,
    _clean,
    _four_maps,
    call,
    kernel,
    library,
    maps_of_last,
    register,
)

from microsdpa.runtime import launcher

__all__ = ["_clean", "_four_maps"]


@pytest.mark.usefixtures("_four_maps")
def test_tensor_maps_describe_the_tensors_innermost_first() -> None:
    bshd = (24 * 2 * 32, 32, 2 * 32, 1)
    arguments = call(key=tensor(KV, 0x200000, strides=bshd))
    register(arguments, [kernel(maps=ALL_MAPS)])
    assert launcher.launch(*arguments)
    query, key, value, out = maps_of_last()
    common = {"dtype": FLOAT16, "rank": 4, "interleave": 0, "promotion": PROMOTION_256B, "fill": 0}
    ones = (1, 1, 1, 1)
    dense_q, dense_kv = (64, 16 * 64, 4 * 16 * 64), (64, 24 * 64, 2 * 24 * 64)
    q_sizes, kv_sizes = (32, 16, 4, 2), (32, 24, 2, 2)
    box = {"box": (32, 64, 1, 1), "steps": ones}
    assert query == Map(0x100000, swizzle=2, sizes=q_sizes, strides=dense_q, **common, **box)
    box["box"] = (32, 80, 1, 1)
    assert key == Map(0x200000, swizzle=3, sizes=kv_sizes, strides=(2 * 64, 64, 24 * 2 * 64), **common, **box)
    box["box"] = (16, 16, 1, 1)
    assert value == Map(0x300000, swizzle=1, sizes=kv_sizes, strides=dense_kv, **common, **box)
    box["box"] = (32, 8, 1, 1)
    assert out == Map(0x400000, swizzle=0, sizes=q_sizes, strides=dense_q, **common, **box)


def test_boxes_of_several_heads_have_these_beside_each_other() -> None:
    """Such a tensor is seen as [D, H, S, B]."""
    set_integer("stub_tensor_maps", 1)
    try:
        register(call(), [kernel(maps=(0, 5, 32, 64, 4))])
        assert launcher.launch(*call())
        (query,) = maps_of_last(1)
    finally:
        set_integer("stub_tensor_maps", 0)
    assert (query.sizes, query.strides) == ((32, 4, 16, 2), (16 * 64, 64, 4 * 16 * 64))
    assert query.box == (32, 4, 5, 1)


@pytest.mark.usefixtures("_four_maps")
def test_tensor_maps_are_encoded_once_and_follow_the_addresses() -> None:
    arguments = call()
    before = record.encoded, record.moved
    register(arguments, [kernel(maps=ALL_MAPS)])
    for _ in range(3):
        launcher.launch(*arguments)
    assert (record.encoded - before[0], record.moved - before[1]) == (4, 0)
    moved = call(key=tensor(KV, 0x600000), out=tensor(SHAPE, 0x700000))
    launcher.launch(*moved)
    assert [each.address for each in maps_of_last()] == [0x100000, 0x600000, 0x300000, 0x700000]
    launcher.launch(*arguments)
    assert [each.address for each in maps_of_last()] == [0x100000, 0x200000, 0x300000, 0x400000]
    assert (record.encoded - before[0], record.moved - before[1]) == (4, 2)


DECODED = (3, 64, 1, 32)


@pytest.mark.usefixtures("_four_maps")
@pytest.mark.parametrize("between", [1, 2], ids=["dense", "rows apart"])
def test_a_kernel_may_have_heads_as_queries(between: int) -> None:
    row = 32 * between
    query, out = (tensor(DECODED, at, strides=(64 * row, row, row, 1)) for at in (0x100000, 0x400000))
    key, value = (tensor((3, 2, 24, 32), at) for at in (0x200000, 0x300000))
    arguments = call(query=query, key=key, value=value, out=out, options=6)
    register(arguments, [kernel(maps=ALL_MAPS, heads_as_queries=1)])
    assert launcher.launch(*arguments)
    p = last().params
    assert (p.batch, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k) == (3, 2, 2, 32, 24)
    assert p.diagonal == -1  # as in calls without a mask
    assert list(p.query_strides) == list(p.out_strides) == [64 * row, 32 * row, row]
    assert list(p.key_strides) == [2 * 24 * 32, 24 * 32, 32]
    for seen in maps_of_last()[::3]:
        assert (seen.sizes, seen.strides) == ((32, 32, 2, 3), (2 * row, 64 * row, 128 * row))
    assert maps_of_last()[1].sizes == (32, 24, 2, 3)


@pytest.mark.usefixtures("_four_maps")
def test_it_has_them_in_the_plan_of_a_longer_k_too() -> None:
    def of_length(seqlen_k: int) -> list[object]:
        query, out = (tensor(DECODED, at) for at in (0x100000, 0x400000))
        key, value = (tensor((3, 2, seqlen_k, 32), at) for at in (0x200000, 0x300000))
        return call(query=query, key=key, value=value, out=out, options=6)

    register(of_length(24), [kernel(maps=ALL_MAPS, heads_as_queries=1)], growth=(24, 40))
    assert launcher.launch(*of_length(40))
    p = last().params
    assert (p.heads, p.seqlen_q, p.seqlen_k, list(p.out_strides)) == (2, 32, 40, [64 * 32, 32 * 32, 32])
    assert maps_of_last()[0].sizes == (32, 32, 2, 3)
    assert maps_of_last()[1].sizes == (32, 40, 2, 3)


@pytest.mark.usefixtures("_four_maps")
def test_each_kernel_of_a_plan_has_its_own_maps() -> None:
    arguments = call()
    register(arguments, [kernel(maps=ALL_MAPS), kernel(0x4000, maps=ALL_MAPS[15:] * 4)])
    launcher.launch(*arguments)
    assert {each.address for each in maps_of_last()} == {0x400000}
    assert Map.of(list(last(1).tensor_maps[0])).address == 0x100000


@pytest.mark.usefixtures("_four_maps")
def test_the_stride_of_a_dimension_of_size_one_is_made_legal() -> None:
    odd = tensor((2, 1, 24, 32), 0x200000, strides=(24 * 32, 3, 32, 1))
    arguments = call(key=odd, value=odd)
    register(arguments, [kernel(maps=ALL_MAPS)])
    launcher.launch(*arguments)
    assert maps_of_last()[1].strides == (64, 64, 24 * 64)


@pytest.mark.usefixtures("_four_maps")
def test_tensor_maps_know_the_element_type() -> None:
    arguments = call(query=tensor(SHAPE, 0x100000, code=KDL_BFLOAT), key=tensor(KV, 0x200000, bits=8))
    register(arguments, [kernel(maps=ALL_MAPS)])
    launcher.launch(*arguments)
    query, key, value, _ = maps_of_last()
    assert (query.dtype, key.dtype, value.dtype) == (BFLOAT16, UINT8, FLOAT16)
    assert key.strides == (32, 24 * 32, 2 * 24 * 32)


def test_strides_that_no_tensor_map_takes_are_the_drivers_error() -> None:
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled failed with error 1"):
        register(call(key=tensor(KV, 0x200000, strides=(24 * 2 * 36, 24 * 36, 36, 1))), [kernel(maps=ALL_MAPS)])
    assert library.plan_count() == 0


def test_a_workspace_is_allocated_for_each_call_and_given_back() -> None:
    install_allocator()
    arguments = call()
    register(arguments, [kernel(), kernel(0x4000)], workspace_bytes=1234)
    live = integer("stub_live_bytes")
    launcher.launch(*arguments)
    assert last().params.workspace == last(1).params.workspace != 0
    assert integer("stub_last_bytes") == 1234
    assert integer("stub_live_bytes") == live
    register(arguments)
    launcher.launch(*arguments)
    assert last().params.workspace is None


def test_a_failed_launch_gives_the_workspace_back() -> None:
    install_allocator()
    arguments = call()
    register(arguments, workspace_bytes=1234)
    live = integer("stub_live_bytes")
    set_integer("stub_error", LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="719"):
        launcher.launch(*arguments)
    assert integer("stub_live_bytes") == live
