"""The launcher's hot path against the stub driver; test_launcher.py runs this file in a process of its own."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tvm_ffi
from fake_cuda import KDL_BFLOAT, install_allocator, integer, last, record, set_context, set_integer, tensor

from microsdpa import api
from microsdpa.explanation import Explanation
from microsdpa.prepared import Expected, make_plan
from microsdpa.problem import Problem
from microsdpa.runtime import launcher
from microsdpa.specs import KernelSpec, TensorMap

SHAPE = (2, 4, 16, 32)
KV = (2, 2, 24, 32)
ADDRESSES = (0x100000, 0x200000, 0x300000, 0x400000)
PRIMARY = 0x1000
LAUNCH_FAILED = 719
library = launcher._library


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    library.clear_plans()
    set_context(0)
    set_integer("stub_error", 0)
    record.pushes = record.pops = 0
    yield
    assert record.pushes == record.pops


def call(**changes: Any) -> list[Any]:
    """Arguments of launch(): aligned, contiguous, apart from one another."""
    arguments = {
        "query": tensor(SHAPE, ADDRESSES[0]),
        "key": tensor(KV, ADDRESSES[1]),
        "value": tensor(KV, ADDRESSES[2]),
        "out": tensor(SHAPE, ADDRESSES[3]),
        "lse": None,
        "options": 5,
        "scale": None,
    }
    return list((arguments | changes).values())


def kernel(function: int = 0x3000, grid: tuple[int, ...] = (7, 1, 1), maps: tuple[int, ...] = (), **fields: int) -> Any:
    """One kernel of a plan; `maps` are (operand, rows, columns, swizzle) of each of its tensor maps."""
    rest = {"threads": 128, "shared_bytes": 4096, "cluster": 1, "programmatic": 0} | fields
    return tvm_ffi.Shape([function, *grid, *rest.values(), *maps])


def register(arguments: list[Any], kernels: list[Any] | None = None, workspace_bytes: int = 0) -> None:
    query, key, value, out, _, options, _ = arguments
    library.register_plan(query, key, value, out, options, PRIMARY, kernels or [kernel()], workspace_bytes, 3)


@pytest.fixture
def _programmatic() -> Iterator[None]:
    launcher.set_programmatic(True)
    yield
    launcher.set_programmatic(True)


def test_a_call_without_a_plan_misses_and_with_one_launches() -> None:
    arguments = call()
    assert launcher.launch(*arguments) is None
    register(arguments)
    before = record.launches
    assert launcher.launch(*arguments) is True
    assert record.launches == before + 1


def test_the_kernel_gets_pointers_strides_sizes_and_scale() -> None:
    strided = tensor(KV, 0x200000, strides=(24 * 2 * 32, 32, 64, 1))
    arguments = call(key=strided, lse=tensor((2, 4, 16), 0x500000))
    register(arguments)
    assert launcher.launch(*arguments)
    p = last().params
    assert (p.query, p.key, p.value, p.out, p.lse) == (0x100000, 0x200000, 0x300000, 0x400000, 0x500000)
    assert list(p.query_strides) == list(p.out_strides) == [4 * 16 * 32, 16 * 32, 32]
    assert list(p.key_strides) == [24 * 2 * 32, 32, 64]
    assert list(p.value_strides) == [2 * 24 * 32, 24 * 32, 32]
    assert (p.batch, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.diagonal) == (2, 4, 2, 16, 24, 3)
    assert p.scale_log2 == pytest.approx(32**-0.5 * math.log2(math.e), rel=1e-7)


@pytest.mark.parametrize("scale", [0.25, 3, -1.0, 0.0])
def test_an_explicit_scale_is_used(scale: float) -> None:
    arguments = call(scale=scale)
    register(arguments)
    assert launcher.launch(*arguments)
    assert last().params.scale_log2 == pytest.approx(scale * math.log2(math.e), rel=1e-7)


def test_the_lse_of_one_call_does_not_leak_into_the_next() -> None:
    with_lse, without = call(lse=tensor((2, 4, 16), 0x500000)), call()
    register(without)
    assert launcher.launch(*with_lse)
    assert last().params.lse == 0x500000
    assert launcher.launch(*without)
    assert last().params.lse is None


def test_the_launch_is_the_plans_on_the_current_stream() -> None:
    arguments = call()
    register(arguments)
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), 0xABC):
        launcher.launch(*arguments)
    assert (list(last().grid), last().threads, last().shared_bytes) == ([7, 1, 1], 128, 4096)
    assert (last().function, last().stream) == (0x3000, 0xABC)


@pytest.mark.usefixtures("_programmatic")
@pytest.mark.parametrize("cluster", [1, 2, 16])
@pytest.mark.parametrize("programmatic", [0, 1])
def test_a_launch_has_the_attributes_of_its_kernel_and_no_others(cluster: int, programmatic: int) -> None:
    arguments = call()
    register(arguments, [kernel(cluster=cluster, programmatic=programmatic)])
    launcher.launch(*arguments)
    assert list(last().cluster) == ([cluster, 1, 1] if cluster > 1 else [0, 0, 0])
    assert last().programmatic == programmatic
    assert last().attributes == (cluster > 1) + programmatic


@pytest.mark.usefixtures("_programmatic")
def test_programmatic_launch_can_be_switched_off_for_the_process() -> None:
    arguments = call()
    register(arguments, [kernel(cluster=2, programmatic=1)])
    assert launcher.set_programmatic(False) is True
    launcher.launch(*arguments)
    assert (last().programmatic, last().attributes) == (0, 1)
    assert launcher.set_programmatic(True) is False
    launcher.launch(*arguments)
    assert (last().programmatic, last().attributes) == (1, 2)


@pytest.mark.usefixtures("_programmatic")
def test_kernels_are_launched_in_order_with_the_same_parameters() -> None:
    arguments = call()
    first = kernel(0x3000, (8, 1, 1), cluster=2)
    then = kernel(0x4000, (5, 1, 1), threads=64, shared_bytes=0, programmatic=1)
    register(arguments, [first, then])
    before = record.launches
    assert launcher.launch(*arguments) is True
    assert record.launches == before + 2
    assert (last(1).function, list(last(1).grid), last(1).threads, last(1).shared_bytes) == (
        0x3000,
        [8, 1, 1],
        128,
        4096,
    )
    assert (last().function, list(last().grid), last().threads, last().shared_bytes) == (0x4000, [5, 1, 1], 64, 0)
    assert (last(1).programmatic, last().programmatic) == (0, 1)
    assert bytes(last(1).params) == bytes(last().params)


@dataclass(frozen=True)
class Map:
    """What the stub was asked to encode."""

    address: int
    dtype: int
    rank: int
    interleave: int
    swizzle: int
    promotion: int
    fill: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]

    @staticmethod
    def of(words: Any) -> Map:
        """Read the words that the stub wrote."""
        box, steps = (tuple(word >> shift & 0xFFFF for shift in (0, 16, 32, 48)) for word in words[14:16])
        return Map(*words[:7], tuple(words[7:11]), tuple(words[11:14]), box, steps)


FLOAT16, BFLOAT16, UINT8 = 6, 9, 0
PROMOTION_256B = 3
ALL_MAPS = (0, 64, 32, 64, 1, 80, 32, 128, 2, 16, 16, 32, 3, 8, 32, 0)


def maps_of_last(count: int = 4) -> list[Map]:
    return [Map.of(list(words)) for words in last().tensor_maps[:count]]


@pytest.fixture
def _four_maps() -> Iterator[None]:
    set_integer("stub_tensor_maps", 4)
    yield
    set_integer("stub_tensor_maps", 0)


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


@pytest.mark.usefixtures("_four_maps")
def test_the_map_of_an_allocated_output_has_its_address() -> None:
    install_allocator()
    arguments = call(out=None)
    register(arguments, [kernel(maps=ALL_MAPS)])
    launcher.launch(*arguments)
    assert maps_of_last()[3].address == last().params.out != 0


@pytest.mark.usefixtures("_four_maps")
def test_each_kernel_of_a_plan_has_its_own_maps() -> None:
    arguments = call()
    register(arguments, [kernel(maps=ALL_MAPS), kernel(0x4000, maps=ALL_MAPS[12:] * 4)])
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


@pytest.mark.parametrize(("current", "pushes"), [(0, 1), (PRIMARY, 0), (PRIMARY + 1, 1)])
def test_the_tensors_device_is_current_during_the_launch_only(current: int, pushes: int) -> None:
    arguments = call()
    register(arguments)
    set_context(current)
    record.pushes = record.pops = 0
    launcher.launch(*arguments)
    assert last().context == PRIMARY
    assert record.pushes == record.pops == pushes


MISSES = {
    "shape": {"query": tensor((2, 4, 17, 32), 0x100000), "out": tensor((2, 4, 17, 32), 0x400000)},
    "strides": {"value": tensor(KV, 0x300000, strides=(24 * 2 * 32, 32, 64, 1))},
    "dtype": {"key": tensor(KV, 0x200000, code=KDL_BFLOAT)},
    "device": {"value": tensor(KV, 0x300000, device=1)},
    "options": {"options": 6},
    "misaligned": {"query": tensor(SHAPE, 0x100002)},
    "misaligned out": {"out": tensor(SHAPE, 0x400008)},
    "no out of that layout": {"out": tensor(SHAPE, 0x400000, strides=(4 * 16 * 32, 32, 128, 1))},
    "rank": {"query": tensor((4, 16, 32), 0x100000)},
    "CPU tensor": {"key": torch.zeros(KV, dtype=torch.float16)},
    "NaN scale": {"scale": math.nan},
    "infinite scale": {"scale": math.inf},
    "out is query": {"out": tensor(SHAPE, 0x100000)},
    "out ends inside key": {"out": tensor(SHAPE, 0x200000 - 16)},
    "out starts inside value": {"out": tensor(SHAPE, 0x300000 + 2 * 2 * 24 * 32 * 2 - 16)},
}


@pytest.mark.parametrize("change", MISSES.values(), ids=MISSES.keys())
def test_a_call_that_differs_from_what_was_validated_misses(change: dict[str, Any]) -> None:
    register(call())
    assert launcher.launch(*call()) is True
    assert launcher.launch(*call(**change)) is None


def test_out_just_behind_an_input_is_no_overlap() -> None:
    arguments = call(out=tensor(SHAPE, 0x300000 + 2 * 2 * 24 * 32 * 2))
    register(arguments)
    assert launcher.launch(*arguments) is True


def test_alignment_looks_at_addresses_and_strides() -> None:
    def alignment(**changes: Any) -> int:
        return int(library.alignment(*call(**changes)[:4]))

    assert alignment() == 16
    assert alignment(out=None) == 16
    assert alignment(key=tensor(KV, 0x200002)) == 0
    assert alignment(key=tensor(KV, 0x200000, strides=(24 * 2 * 36, 24 * 36, 36, 1))) == 0
    assert alignment(key=tensor((2, 1, 24, 32), 0x200000, strides=(24 * 32, 3, 32, 1))) == 16  # one head: no stride
    assert alignment(out=tensor(SHAPE, 0x100000)) == -1


@pytest.mark.parametrize(
    "strides", [(4 * 16 * 32, 16 * 32, 32, 1), (16 * 4 * 32, 32, 4 * 32, 1), (32, 2 * 16 * 32, 2 * 32, 1)]
)
def test_an_allocated_output_has_the_memory_order_of_the_query(strides: tuple[int, ...]) -> None:
    install_allocator()
    arguments = call(out=None, query=tensor(SHAPE, 0x100000, strides=strides))
    register(arguments)
    out = launcher.launch(*arguments)
    assert tuple(out.shape) == SHAPE
    assert tuple(out.strides) == strides
    assert list(last().params.out_strides) == list(strides[:3])
    assert last().params.out % 256 == 0
    assert last().params.out != 0


def test_a_padded_query_gets_a_dense_output_of_its_order() -> None:
    install_allocator()
    arguments = call(out=None, query=tensor(SHAPE, 0x100000, strides=(16 * 4 * 96, 96, 4 * 96, 1)))
    register(arguments)
    assert tuple(launcher.launch(*arguments).strides) == (16 * 4 * 32, 32, 4 * 32, 1)


def test_a_failed_launch_raises_the_drivers_words_and_restores_the_context() -> None:
    arguments = call()
    register(arguments)
    set_integer("stub_error", LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with error 719: the stub was told to fail"):
        launcher.launch(*arguments)


def test_loading_restores_context_and_capture_mode() -> None:
    record.capture_mode = 0
    assert list(library.load_kernel(1, b"cubin", "kernel", 1024, 1)) == [0x3000, PRIMARY + 1]
    assert record.capture_mode == 0


@pytest.mark.parametrize(("cubin", "symbol"), [(b"nonsense", "kernel"), (b"cubin", "absent")])
def test_a_kernel_that_does_not_load_raises_and_restores(cubin: bytes, symbol: str) -> None:
    record.capture_mode = 0
    with pytest.raises(RuntimeError, match="loading the kernel failed"):
        library.load_kernel(0, cubin, symbol, 0, 1)
    assert record.capture_mode == 0


def test_more_than_48_kb_of_shared_memory_is_asked_for() -> None:
    record.max_shared_bytes = 0
    library.load_kernel(0, b"cubin", "kernel", 100_000, 1)
    assert record.max_shared_bytes == 100_000


@pytest.mark.parametrize(("cluster", "asked"), [(1, 0), (8, 0), (16, 1)])
def test_a_cluster_that_not_every_gpu_runs_is_asked_for(cluster: int, asked: int) -> None:
    record.large_clusters = 0
    library.load_kernel(0, b"cubin", "kernel", 0, cluster)
    assert record.large_clusters == asked


@pytest.mark.usefixtures("_four_maps", "_programmatic")
@pytest.mark.parametrize("device", [0, 1])
def test_a_specification_becomes_a_plan(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_kernel(spec: KernelSpec, target: str) -> SimpleNamespace:
        assert target == "sm_90a"
        return SimpleNamespace(spec=spec, signature=spec.name, cubin=b"cubin", symbol="kernel")

    monkeypatch.setattr(launcher, "compile_kernel", compile_kernel)
    install_allocator()
    maps = tuple(TensorMap(name, 64, 32, 64) for name in ("value", "out", "key", "query"))
    then = KernelSpec(
        "test/then", "", "", (), threads=64, block_m=4, tensor_maps=maps, programmatic=True, workspace_row_bytes=24
    )
    spec = KernelSpec(
        "test/first", "", "", (), 256, 8, shared_bytes=100, cluster=2, split=2, tensor_maps=maps[:1] * 4, then=then
    )
    problem = Problem(2, 4, 2, 16, 24, 32, "float16", causal="lower_right", target="sm_90a")
    shapes = (SHAPE, KV, KV, SHAPE)
    tensors = [tensor(shape, at, device=device) for shape, at in zip(shapes, ADDRESSES, strict=True)]
    launcher.prepare(problem, spec, *tensors, options=5)
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", device), 0xABC):
        launcher.launch(*tensors, None, 5, None)
    first, second = last(1), last()
    assert first.context == second.context == PRIMARY + device
    assert first.stream == second.stream == 0xABC
    assert (list(first.grid), first.threads, first.shared_bytes) == ([2 * 2 * 8, 1, 1], 256, 100)
    assert (list(first.cluster), first.programmatic) == ([2, 1, 1], 0)
    assert (list(second.grid), second.threads, second.programmatic) == ([4 * 8, 1, 1], 64, 1)
    assert [words[0] for words in first.tensor_maps[:4]] == [0x300000] * 4
    assert [words[0] for words in second.tensor_maps[:4]] == [0x300000, 0x400000, 0x200000, 0x100000]
    assert maps_of_last()[0].box == (32, 64, 1, 1)
    assert integer("stub_last_bytes") == 24 * 2 * 4 * 16
    assert second.params.diagonal == 24 - 16


def prepared(arguments: list[Any]) -> Any:
    query, key, value, out, _, options, scale = arguments
    return library.prepared_call(query, key, value, out, options, scale)


def test_a_prepared_call_launches_its_plan_without_the_table() -> None:
    arguments = call(scale=0.5)
    assert prepared(arguments) is None
    assert prepared(call(scale=math.nan)) is None
    register(arguments, [kernel(0x3000), kernel(0x4000)])
    launch = prepared(arguments)
    library.clear_plans()
    lse = tensor((2, 4, 16), 0x500000)
    other = call(query=tensor(SHAPE, 0x800000))
    assert launch(*other[:4], lse) is True
    assert (last(1).function, last().function) == (0x3000, 0x4000)
    assert (last().params.query, last().params.lse) == (0x800000, 0x500000)
    assert last().params.scale_log2 == pytest.approx(0.5 * math.log2(math.e), rel=1e-7)


@pytest.mark.parametrize("change", MISSES.values(), ids=MISSES.keys())
def test_a_prepared_call_refuses_what_it_was_not_prepared_for(change: dict[str, Any]) -> None:
    register(call())
    launch = prepared(call())
    before = record.launches
    if change.keys() <= {"query", "key", "value", "out"}:
        assert launch(*call(**change)[:4], None) is None
        assert record.launches == before


def test_a_prepared_call_admits_tensors_of_better_alignment() -> None:
    misaligned = call(query=tensor(SHAPE, 0x100002))
    register(misaligned)
    assert prepared(misaligned)(*call()[:4], None) is True


def test_a_prepared_call_allocates_when_no_output_is_given() -> None:
    install_allocator()
    register(call())
    launch = prepared(call())
    out = launch(*call(out=None)[:4], None)
    assert tuple(out.shape) == SHAPE
    assert last().params.out not in (None, 0x400000)
    strided = call(out=tensor(SHAPE, 0x400000, strides=(4 * 16 * 32, 32, 128, 1)))
    register(strided)
    assert prepared(strided)(*call(out=None)[:4], None) is None


def test_a_plan_object_reaches_the_prepared_call() -> None:
    arguments = call()
    register(arguments)
    plan = make_plan(prepared(arguments), Expected({}, True, {"return_lse": False}), Explanation("stub", "a test"))
    with torch.no_grad():  # the stub's tensors are not torch's
        assert plan(*arguments[:3], out=arguments[3]) is arguments[3]
    assert last().params.out == 0x400000


def test_a_plan_object_reports_a_failed_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call falls through to sdpa, which launches again and raises what the driver says."""
    arguments = call()
    register(arguments)
    expected = Expected({}, True, {"return_lse": False, "impl": "auto"})
    plan = make_plan(prepared(arguments), expected, Explanation("stub", "a test"))
    monkeypatch.setattr(Expected, "check", lambda *_: None)
    monkeypatch.setattr(api, "sdpa", lambda *tensors, **options: (tensors, options))
    set_integer("stub_error", LAUNCH_FAILED)
    with torch.no_grad():
        tensors, options = plan(*arguments[:3], out=arguments[3])
    assert tensors == tuple(arguments[:3])
    assert options == {"out": arguments[3], "return_lse": False, "impl": "auto"}


def test_the_lse_is_allocated_in_fp32_without_the_last_dimension() -> None:
    install_allocator()
    lse = launcher.allocate_lse(call()[0])
    assert (tuple(lse.shape), str(lse.dtype)) == ((2, 4, 16), "float32")
    assert integer("stub_last_bytes") == 2 * 4 * 16 * 4
    with pytest.raises(ValueError, match="expected 4 dimensions, got 3"):
        launcher.allocate_lse(tensor((4, 16, 32), 0x100000))


def test_strides_of_dimensions_of_size_one_make_no_other_plan() -> None:
    def one_row(*strides: int) -> list[Any]:
        shape = (1, 4, 1, 32)
        return call(query=tensor(shape, 0x100000, strides=strides), out=tensor(shape, 0x400000))

    register(one_row(128, 32, 32, 1))
    assert launcher.launch(*one_row(7, 32, 3, 1)) is True


def test_the_plan_table_is_bounded() -> None:
    for options in range(9000):
        register(call(options=options))
    assert 0 < library.plan_count() <= 8192
    assert launcher.launch(*call(options=8999)) is True


def test_threads_launch_while_plans_come_and_go() -> None:
    arguments = [call(options=options) for options in range(4)]
    for each in arguments:
        register(each)
    failures: list[object] = []

    def work(own: list[Any]) -> None:
        for _ in range(2000):
            result = launcher.launch(*own)
            if result is not True:
                failures.append(result)

    def churn() -> None:
        for options in range(100, 2100):
            register(call(options=options))

    threads = [threading.Thread(target=work, args=(each,)) for each in arguments] + [threading.Thread(target=churn)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.usefixtures("_four_maps")
def test_threads_share_a_plan_and_none_sees_the_addresses_of_another() -> None:
    """The stub counts maps whose address is not that of the launch's parameters (`torn`)."""
    first = call()
    register(first, [kernel(maps=(0, 64, 32, 64, 1, 64, 32, 64, 2, 64, 32, 64, 3, 64, 32, 64))])
    launch = prepared(first)
    before, failures = record.torn, []

    def work(offset: int) -> None:
        own = [
            tensor(shape, address + offset) for shape, address in zip((SHAPE, KV, KV, SHAPE), ADDRESSES, strict=True)
        ]
        for _ in range(1000):
            if launch(*own, None) is not True or launcher.launch(*own, None, 5, None) is not True:
                failures.append(offset)

    threads = [threading.Thread(target=work, args=(0x10000000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert record.torn == before


@pytest.mark.parametrize(("version", "reason"), [(12040, "supports CUDA 12.4"), (13000, "torch sees no CUDA device")])
def test_the_driver_says_its_version(version: int, reason: str) -> None:
    set_integer("stub_version", version)
    assert launcher.driver_version() == version
    assert reason in (launcher.device_error() or "")
    set_integer("stub_version", 13000)


def test_a_plan_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 8 integers each and 4 for each of at most 8 tensor maps, got 2"):
        register(call(), [tvm_ffi.Shape([1, 2])])
    for maps in ((0, 64, 64), (0, 64, 64, 128) * 9):
        with pytest.raises(ValueError, match=f"got {8 + len(maps)}"):
            register(call(), [kernel(maps=maps)])
    with pytest.raises(ValueError, match="expected an operand below 4, got 4"):
        register(call(), [kernel(maps=(4, 64, 64, 128))])
    with pytest.raises(RuntimeError, match="swizzle of 0, 32, 64 or 128 bytes, got 16"):
        register(call(), [kernel(maps=(0, 64, 64, 16))])
    assert library.plan_count() == 0


def test_a_plan_of_tensors_that_cannot_launch_is_refused() -> None:
    with pytest.raises(ValueError, match="CUDA tensors that do not overlap"):
        register(call(query=tensor((4, 16, 32), 0x100000)))


def test_one_kernel_with_parameters_that_the_caller_has_filled() -> None:
    params = bytes(range(1, 201)) + bytes(200)
    library.launch_one(1, PRIMARY, kernel(grid=(5, 1, 1), cluster=2, programmatic=1, shared_bytes=70_000), params)
    found = last()
    assert list(found.grid) == [5, 1, 1]
    assert (found.threads, found.shared_bytes, found.context) == (128, 70_000, PRIMARY)
    assert found.programmatic == 1
    assert list(found.cluster) == [2, 1, 1]
    given = bytes(found.params)
    assert given == params[: len(given)]
    with pytest.raises(ValueError, match="fields: expected 8 integers, got 7"):
        library.launch_one(0, PRIMARY, tvm_ffi.Shape([1] * 7), params)
    set_integer("stub_error", LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="the stub was told to fail"):
        library.launch_one(0, PRIMARY, kernel(), params)
