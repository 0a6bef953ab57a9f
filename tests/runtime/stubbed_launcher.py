"""The launcher's hot path against the stub driver; test_launcher.py runs this file in a process of its own."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import pytest
import torch
import tvm_ffi
from fake_cuda import install_allocator, integer, last, record, set_context, set_integer, tensor
from stub_harness import (
    ADDRESSES,
    KV,
    LAUNCH_FAILED,
    LSE_BYTES,
    MISSES,
    NO_MEMORY,
    PRIMARY,
    SHAPE,
    _clean,
    _programmatic,
    address_of,
    call,
    check_allocated_lse,
    kernel,
    library,
    register,
)

from microsdpa.attention import api
from microsdpa.call.options import CONTINUED_BIT
from microsdpa.runtime import launcher

__all__ = ["_clean", "_programmatic"]


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
    assert (p.batch, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.diagonal) == (2, 4, 2, 16, 24, 0)
    assert p.scale_log2 == pytest.approx(32**-0.5 * math.log2(math.e), rel=1e-7)


NOT_INITIALIZED, ILLEGAL_ADDRESS, OUT_OF_RESOURCES = 3, 700, 701


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


def test_an_lse_that_is_asked_for_is_allocated_and_given() -> None:
    install_allocator()
    register(call())
    live = integer("stub_live_bytes")
    lse = launcher.launch(*call(lse=True))
    check_allocated_lse(lse, last().params.lse)
    assert integer("stub_live_bytes") == live + LSE_BYTES
    another = launcher.launch(*call(lse=True))
    check_allocated_lse(another, last().params.lse)
    assert address_of(another) != address_of(lse)
    del lse, another
    assert integer("stub_live_bytes") == live


@pytest.mark.parametrize("lse", [None, False, tensor((2, 4, 16), 0x500000)], ids=["None", "False", "given"])
def test_an_lse_is_allocated_for_nobody_else(lse: Any) -> None:
    install_allocator()
    register(call())
    set_integer("stub_last_bytes", -1)
    assert launcher.launch(*call(lse=lse)) is True
    assert last().params.lse == (0x500000 if lse else None)
    assert integer("stub_last_bytes") == -1


def test_a_call_without_a_plan_allocates_no_lse() -> None:
    install_allocator()
    set_integer("stub_last_bytes", -1)
    assert launcher.launch(*call(lse=True)) is None
    assert integer("stub_last_bytes") == -1


def test_a_failed_launch_gives_the_lse_back() -> None:
    install_allocator()
    register(call())
    live = integer("stub_live_bytes")
    set_integer("stub_error", LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="719"):
        launcher.launch(*call(lse=True))
    assert integer("stub_live_bytes") == live


def test_a_call_always_has_an_output() -> None:
    """The callers allocate it: None is refused by its type, with a plan and without."""
    for _ in range(2):
        with pytest.raises(TypeError, match="from type `None` to `DLTensor\\*`"):
            launcher.launch(*call(out=None))
        register(call())


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


@pytest.mark.parametrize(("current", "pushes"), [(0, 1), (PRIMARY, 0), (PRIMARY + 1, 1)])
def test_the_tensors_device_is_current_during_the_launch_only(current: int, pushes: int) -> None:
    arguments = call()
    register(arguments)
    set_context(current)
    record.pushes = record.pops = 0
    launcher.launch(*arguments)
    assert last().context == PRIMARY
    assert record.pushes == record.pops == pushes


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
    assert alignment(key=tensor(KV, 0x200002)) == 0
    assert alignment(key=tensor(KV, 0x200000, strides=(24 * 2 * 36, 24 * 36, 36, 1))) == 0
    assert alignment(key=tensor((2, 1, 24, 32), 0x200000, strides=(24 * 32, 3, 32, 1))) == 16  # one head: no stride
    assert alignment(out=tensor(SHAPE, 0x100000)) == -1
    with pytest.raises(TypeError, match="Expected `DLTensor\\*` but got `None`"):
        alignment(out=None)


def test_a_failed_launch_raises_the_drivers_words_and_restores_the_context() -> None:
    arguments = call()
    register(arguments)
    set_integer("stub_error", LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with error 719: the stub was told to fail"):
        launcher.launch(*arguments)


def test_a_lost_context_is_laid_at_no_kernels_door() -> None:
    arguments = call()
    register(arguments)
    for error in (LAUNCH_FAILED, ILLEGAL_ADDRESS):
        set_integer("stub_error", error)
        with pytest.raises(RuntimeError, match="a kernel before this call, of any library, has lost the CUDA context"):
            launcher.launch(*arguments)
    set_integer("stub_error", OUT_OF_RESOURCES)
    with pytest.raises(RuntimeError) as caught:
        launcher.launch(*arguments)
    assert str(caught.value).endswith("failed with error 701: another error")


def test_a_forked_process_is_told_why_it_has_no_cuda() -> None:
    arguments = call()
    register(arguments)
    assert launcher.launch(*arguments) is not None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            set_integer("stub_error", NOT_INITIALIZED)
            launcher.launch(*arguments)
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reading, 1000).decode()
    assert "cuLaunchKernelEx failed with error 3" in said
    assert "CUDA was used before this process was forked" in said
    assert "spawn or forkserver" in said


def test_the_plain_call_does_no_more_than_launch() -> None:
    """Masks, operators, 8-bit operands and drop-in use cost it nothing: two questions are asked before the launch."""
    arguments = call(options=api.OPTIONS[False, None, False, "auto", None])
    register(arguments)
    query, key, value, out, *_ = arguments
    events: list[tuple[str, str]] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            events.append((event, frame.f_code.co_name if event == "call" else argument.__name__))

    with torch.no_grad():  # the stub's tensors are not torch's
        before = record.launches
        sys.setprofile(note)
        try:
            api.sdpa(query, key, value, out=out)
        finally:
            sys.setprofile(None)
    assert record.launches == before + 1
    asked = [("call", "is_dynamo_compiling"), ("c_call", "is_grad_enabled")]
    assert events[:-1] == [("call", "sdpa"), *asked, ("c_call", "launch")]


def test_no_call_of_torch_jit_trace_is_launched() -> None:
    """A launch would not be in the graph, whose output would be memory that nobody has written to."""
    arguments, found = call(), []
    register(arguments)

    def traced(x: torch.Tensor) -> torch.Tensor:
        found.append(library.sdpa(*arguments))
        return x + 1

    launches = record.launches
    torch.jit.trace(traced, torch.zeros(2), check_trace=False)
    assert found == [None]
    assert record.launches == launches
    assert library.sdpa(*arguments) is not None


def test_a_call_that_goes_on_from_an_lse_gets_it() -> None:
    lse = tensor((2, 4, 16), 0x500000, bits=32)
    given = {"options": 5 | CONTINUED_BIT, "lse": lse}
    register(call(**given))
    assert launcher.launch(*call(**given)) is True
    assert last().params.lse == 0x500000
    assert launcher.launch(*call(options=5, lse=lse)) is None


@pytest.mark.parametrize(
    "lse",
    [
        True,
        None,
        tensor((2, 4, 15), 0x500000, bits=32),
        tensor((8, 16), 0x500000, bits=32),
        tensor((2, 4, 16), 0x500000, bits=16),
        tensor((2, 4, 16), 0x500000, bits=32, strides=(64, 1, 4)),
        tensor((2, 4, 16), 0x500000, bits=32, device=1),
        tensor((2, 4, 16), ADDRESSES[3] + 64, bits=32),
        tensor((2, 4, 16), ADDRESSES[0], bits=32),
        tensor((2, 4, 16), NO_MEMORY, bits=32),
    ],
)
def test_no_other_lse_is_gone_on_from(lse: Any) -> None:
    register(call(options=5 | CONTINUED_BIT, lse=tensor((2, 4, 16), 0x500000, bits=32)))
    assert launcher.launch(*call(options=5 | CONTINUED_BIT, lse=lse)) is None
