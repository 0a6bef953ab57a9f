"""What a call costs on its second turn, through every public way in: one foreign call, and its output's memory.

The launcher's functions have stand-ins that find a plan for CPU tensors, so no GPU is needed and nothing is computed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from door_harness import (
    BATCH,
    HEAD_DIM,
    HEADS,
    KERNEL,
    NOTHING,
    SEQLEN_K,
    SEQLEN_Q,
    Door,
    Launcher,
    Seen,
    Setting,
    watch,
)
from door_list import (
    DOORS,
    DROPIN,
    E4M3,
    GRADED,
    HALF,
    LENGTHS,
    OPERATORS,
    SDPA,
    angles,
    bits,
    documents,
    output,
    slopes,
    tensors,
    weights,
)

import microsdpa
from microsdpa.attention import api, explain, varlen
from microsdpa.call.scales import check_scales
from microsdpa.errors import MicrosdpaError
from microsdpa.execution import forward


@pytest.mark.parametrize("masks", [{}, {"window": (4, 0)}, {"attn_mask": bits}, {"rotary": angles}])
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_value_of_other_columns_is_one_foreign_call_with_an_output_of_its_own(
    with_lse: bool, masks: dict[str, Any], launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = tensors()
    value = value[..., : HEAD_DIM // 2]
    made = {name: mask() if callable(mask) else mask for name, mask in masks.items()}
    monkeypatch.setattr(api, "other_value_dims", {HEAD_DIM // 2})  # as the first call on a GPU leaves it
    monkeypatch.setattr(forward, "other_value_dims", {HEAD_DIM // 2})

    def call() -> Any:
        return microsdpa.sdpa(query, key, value, return_lse=with_lse, **made)

    call()
    result, seen = watch(call, launcher)
    assert seen == Seen(1, Counter({"aten::empty_strided": 1}))
    out = result[0] if with_lse else result
    assert out.data_ptr() == launcher.calls[-1][3].data_ptr()
    assert out.shape == (BATCH, HEADS, SEQLEN_Q, HEAD_DIM // 2)
    assert out.transpose(1, 2).is_contiguous()  # the memory order is that of query
    with microsdpa.enabled(strict=True, impl=KERNEL):
        through = F.scaled_dot_product_attention(query, key, value)
    assert through.data_ptr() == launcher.calls[-1][3].data_ptr()
    assert through.shape == out.shape


@pytest.mark.parametrize("with_lse", [False, True])
def test_packed_values_of_fewer_columns_are_one_foreign_call_with_an_output_of_their_own(
    with_lse: bool, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = (torch.zeros(6, HEADS, columns).half() for columns in (HEAD_DIM, HEAD_DIM, HEAD_DIM // 2))
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    monkeypatch.setattr(varlen, "other_value_dims", {HEAD_DIM // 2})

    def call() -> Any:
        where = {"query_offsets": offsets, "key_offsets": offsets}
        return microsdpa.sdpa_varlen(query, key, value, return_lse=with_lse, **where)

    call()
    result, seen = watch(call, launcher)
    assert seen == Seen(1, Counter({"aten::empty_strided": 1}))
    out = result[0] if with_lse else result
    assert out.data_ptr() == launcher.calls[-1][3].data_ptr()
    assert out.shape == (6, HEADS, HEAD_DIM // 2)


CONTINUED = {
    "plain": {},
    "with masks": {"attn_mask": bits, "window": (4, 4), "softcap": 2.0, "sinks": slopes},
    "causal": {"causal": "lower_right", "scale": 0.3},
}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_second_call_that_goes_on_from_an_output_is_one_foreign_call(name: str, launcher: Launcher) -> None:
    """It allocates nothing: the launch writes to both tensors that it is given."""
    given, previous = tensors(), (output(), torch.zeros(BATCH, HEADS, SEQLEN_Q))
    made = {key: value() if callable(value) else value for key, value in CONTINUED[name].items()}

    def call() -> Any:
        return microsdpa.sdpa(*given, **made, continue_from=previous, return_lse=True)

    call()
    result, seen = watch(call, launcher)
    assert seen == Seen(1, NOTHING)
    assert [id(tensor) for tensor in result] == [id(tensor) for tensor in previous]
    assert [id(tensor) for tensor in launcher.calls[-1][3:5]] == [id(tensor) for tensor in previous]


@pytest.mark.parametrize("option", [{"rotary_positions": 3}, {"q_norm": weights()}, {"rotary": angles()}])
def test_an_option_that_continue_from_lacks_is_refused_although_there_is_a_plan(
    option: dict[str, Any], launcher: Launcher
) -> None:
    previous = output(), torch.zeros(BATCH, HEADS, SEQLEN_Q)
    with pytest.raises(microsdpa.MicrosdpaError):
        microsdpa.sdpa(*tensors(), continue_from=previous, **option)
    assert not launcher.calls


def check(door: Door, launcher: Launcher) -> None:
    """The second call through a door does no more than it must, and gives what the launch wrote to."""
    with Setting(launcher) as setting:
        call = door.open(setting)
        call()
        result, seen = watch(call, launcher)
    assert seen == Seen(1, door.operators), f"{door.name}: {seen}"
    out, lse = result if door.gives_lse else (result, None)
    written, asked = launcher.calls[-1][3:5]
    assert out.data_ptr() == written.data_ptr(), f"{door.name}: the output is not what the launch wrote to"
    assert (out.shape, out.dtype) == (door.shape, door.dtype), door.name
    assert asked is door.lse, f"{door.name}: lse={asked}"
    if door.operators and door not in LENGTHS:
        assert written.stride() == tensors()[0].stride(), f"{door.name}: the memory order is not that of query"
    if door.gives_lse:
        assert lse is not None
        assert lse.data_ptr() == launcher.found[-1].data_ptr(), f"{door.name}: the LSE is not that of the launch"
    assert out.requires_grad == (door in GRADED), door.name


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_a_second_call_is_one_foreign_call_and_the_memory_of_its_output(door: Door, launcher: Launcher) -> None:
    check(door, launcher)


@pytest.mark.parametrize("door", GRADED, ids=lambda door: door.name)
def test_a_gradient_comes_back_through_each_door_that_records_one(door: Door, launcher: Launcher) -> None:
    with Setting(launcher) as setting:
        found = door.open(setting)()
        out = found[0] if door.gives_lse else found
        out.backward(torch.ones_like(out))
    inputs = [node.variable for node, _ in out.grad_fn.next_functions if hasattr(node, "variable")]
    query, key, value = inputs[:3]
    assert all(tensor.grad.shape == tensor.shape and tensor.grad.isfinite().all() for tensor in inputs), door.name
    assert query.shape[2] == SEQLEN_Q, door.name
    assert key.shape[2] == value.shape[2] == SEQLEN_K, door.name
    # A query's weights add up to 1: so do the gradients of the values, over all keys, but for FP16's rounding.
    total = value.grad.float().sum(2)
    torch.testing.assert_close(total, torch.full_like(total, SEQLEN_Q), rtol=2.0**-11, atol=0.0)


def _twice(*given: torch.Tensor) -> Any:
    return microsdpa.sdpa(*given, out=microsdpa.sdpa(*given))  # type: ignore[arg-type]


def _opens_a_file(*given: torch.Tensor) -> Any:
    with open(__file__) as file:
        file.read(1)
    return microsdpa.sdpa(*given)


def _asks_for_a_file(*given: torch.Tensor) -> Any:
    Path(__file__).is_file()
    return microsdpa.sdpa(*given)


def _computes_a_signature(*given: torch.Tensor) -> Any:
    with suppress(AssertionError, AttributeError):
        explain.signature(None, "sm_90a")  # type: ignore[arg-type, attr-defined]
    return microsdpa.sdpa(*given)


def _allocates(*given: torch.Tensor) -> Any:
    torch.empty(3)
    return microsdpa.sdpa(*given)


def _casts(*given: torch.Tensor) -> Any:
    given[1].to(torch.float32)
    return microsdpa.sdpa(*given)


def _copies(*given: torch.Tensor) -> Any:
    return microsdpa.sdpa(*given).clone()  # type: ignore[union-attr]


def _asks_for_an_lse(*given: torch.Tensor) -> Any:
    return microsdpa.sdpa(*given, return_lse=True)[0]


def _finds_a_mask_anew(*given: torch.Tensor) -> Any:
    mask = api.combined(given, None, documents(SEQLEN_Q, SEQLEN_K), None)  # type: ignore[arg-type]
    return microsdpa.sdpa(*given, attn_mask=mask)


def _has_another_order(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    return microsdpa.sdpa(query, key, value, out=torch.empty_like(query, memory_format=torch.contiguous_format))


def _misses(*given: torch.Tensor) -> Any:
    return F.scaled_dot_product_attention(given[0], given[1], given[2])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (_twice, "foreign=2"),
        (_misses, "foreign=0"),
        (_opens_a_file, "open.*test_doors"),
        (_asks_for_a_file, "stat.*test_doors"),
        (_computes_a_signature, "signatures=.*sm_90a"),
        (_allocates, "aten::empty'"),
        (_casts, "aten::_to_copy"),
        (_copies, "aten::clone"),
        (_finds_a_mask_anew, "masks=.*arguments"),
        (_asks_for_an_lse, "lse=True"),
        (_has_another_order, "memory order"),
    ],
)
def test_a_door_that_does_more_is_caught(wrong: Callable[..., Any], told: str, launcher: Launcher) -> None:
    def start(_: Setting) -> Callable[[], Any]:
        given = tensors()
        return lambda: wrong(*given)

    with pytest.raises(AssertionError, match=f"(?s)a wrong door.*{told}"):
        check(Door("a wrong door", start), launcher)


SIDE_BY_SIDE = [
    *(SDPA[0], OPERATORS[0], DROPIN[0], LENGTHS[0]),
    *(door for door in SDPA if door.name in ("sdpa attn_mask of bool", "sdpa precision fp8")),
]


@pytest.mark.parametrize("other", SIDE_BY_SIDE, ids=lambda door: door.name)
@pytest.mark.parametrize("held", SIDE_BY_SIDE, ids=lambda door: door.name)
def test_a_thread_waits_for_no_launch_of_another(held: Door, other: Door, launcher: Launcher) -> None:
    """A launch through one door does not come back before a call of another thread has ended."""
    launching, ended = threading.Event(), threading.Event()
    launch, waiting = launcher.__call__, threading.local()

    class Slow(Launcher):
        def __call__(self, *given: Any) -> Any:
            if getattr(waiting, "here", False):
                launching.set()
                assert ended.wait(20), "the other call does not end while this one is launching"
            return launch(*given)

    with Setting(launcher) as setting:
        calls = held.open(setting), other.open(setting)
        for call in calls:
            call()
        launcher.__class__ = Slow
        failures: list[BaseException] = []

        def hold() -> None:
            waiting.here = True
            try:
                calls[0]()
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=hold)
        thread.start()
        assert launching.wait(20)
        calls[1]()
        ended.set()
        thread.join()
    assert not failures


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("other", ["changed", "a number", "not looked at", "missing"])
def test_scales_that_are_not_known_to_be_positive_are_not_launched_with(
    launcher: Launcher, which: int, other: str
) -> None:
    values = tuple(torch.zeros(BATCH, HEADS, SEQLEN_Q, HEAD_DIM).to(E4M3) for _ in range(3))
    scales: list[Any] = [torch.ones(BATCH, HEADS) for _ in range(3)]
    check_scales(*values, tuple(scales))

    def attend() -> torch.Tensor:
        return microsdpa.sdpa(*values, q_scale=scales[0], k_scale=scales[1], v_scale=scales[2])

    with torch.no_grad():
        attend()
        assert len(launcher.calls) == 1
        if other == "changed":
            scales[which].neg_()
        else:
            scales[which] = {"a number": 1.0, "not looked at": torch.ones(BATCH, HEADS), "missing": None}[other]
        if (which, other) == (2, "missing"):
            attend()  # a value of 16 bits has no scale: that the call has a plan, the launcher's key says
            assert len(launcher.calls) == 2
        else:
            with pytest.raises(MicrosdpaError):  # these tensors are on no GPU
                attend()
            assert len(launcher.calls) == 1


def test_scales_of_inference_mode_are_launched_with(launcher: Launcher) -> None:
    values = tuple(torch.zeros(BATCH, HEADS, SEQLEN_Q, HEAD_DIM).to(E4M3) for _ in range(3))
    with torch.inference_mode():
        scales = tuple(torch.ones(BATCH, HEADS) for _ in range(3))
        check_scales(*values, scales)
        out = microsdpa.sdpa(*values, q_scale=scales[0], k_scale=scales[1], v_scale=scales[2])
    assert (out.dtype, len(launcher.calls)) == (HALF, 1)
