"""Tensors on one GPU while another is current: every way to call, graphs captured there, threads on both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import microsdpa
from microsdpa import reference
from microsdpa.call.scales import _check_positive, _is_captured
from microsdpa.errors import InvalidArgument
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.runtime import launcher

COUNT = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT < 2, reason=f"needs 2 GPUs, this machine has {COUNT}"),
]
PLACES = [("cuda:0", 1), ("cuda:1", 0), ("cuda:1", 1)]
"""Where the tensors are, and which device is current."""
Tensors = tuple[torch.Tensor, ...]
CASE = Case(2, 4, 70, 90, 64)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No plan of another test: the first call of a form loads its kernels on the device."""
    launcher.forget_plans()
    before = torch.cuda.current_device()
    yield
    torch.cuda.set_device(before)


def plain(tensors: Tensors) -> Any:
    return microsdpa.sdpa(*tensors, return_lse=True)


def out_given(tensors: Tensors) -> Any:
    return microsdpa.sdpa(*tensors, out=torch.empty_like(tensors[0]))


def causal(tensors: Tensors) -> Any:
    return microsdpa.sdpa(*tensors, causal="lower_right", return_lse=True)


def masked(tensors: Tensors) -> Any:
    mask = torch.ones(70, 90, dtype=torch.bool, device=tensors[0].device).tril(20)
    return microsdpa.sdpa(*tensors, attn_mask=mask, softcap=20.0, return_lse=True)


def decoding(tensors: Tensors) -> Any:
    return microsdpa.sdpa(tensors[0][:, :, :1], *tensors[1:], window=(40, 0), causal="lower_right", return_lse=True)


def split(tensors: Tensors) -> Any:
    """Keys divided among CTAs, with scratch memory."""
    key, value = (t.repeat(1, 1, 60, 1) for t in tensors[1:])
    return microsdpa.sdpa(tensors[0][:1, :1, :1], key[:1, :1], value[:1, :1], return_lse=True)


def quantizing(tensors: Tensors) -> Any:
    return microsdpa.sdpa(*tensors, precision="int8_fp8", return_lse=True)


def quantized(tensors: Tensors) -> Any:
    q, k, v = (microsdpa.quantize(t, "e4m3", "head") for t in tensors)
    return microsdpa.sdpa(q.values, k.values, v.values, q_scale=q.scale, k_scale=k.scale, v_scale=v.scale)


def number_scales(tensors: Tensors) -> Any:
    q, k, v = (microsdpa.quantize(t, "e4m3").values for t in tensors)
    return microsdpa.sdpa(q, k, v, q_scale=0.01, k_scale=0.01, v_scale=0.01)


def planned(tensors: Tensors) -> Any:
    return microsdpa.plan(*tensors, return_lse=True)(*tensors)


def planned_masks(tensors: Tensors) -> Any:
    mask = torch.ones(70, 90, dtype=torch.bool, device=tensors[0].device).tril(20)
    return microsdpa.plan(*tensors, attn_mask=mask)(*tensors, attn_mask=mask)


def enabled(tensors: Tensors) -> Any:
    with microsdpa.enabled(strict=True):
        return F.scaled_dot_product_attention(*tensors)


def operator(tensors: Tensors) -> Any:
    nothing = (None,) * 3
    return torch.ops.microsdpa.attention(*tensors, *nothing, None, None, False, [-1, -1], None, "auto")


def gradients(tensors: Tensors) -> Any:
    inputs = [t.clone().requires_grad_() for t in tensors]
    out = microsdpa.sdpa(*inputs)
    assert isinstance(out, torch.Tensor)
    return torch.autograd.grad(out.sum(), inputs)


def compiled(tensors: Tensors) -> Any:
    return torch.compile(microsdpa.sdpa, fullgraph=True, backend="aot_eager")(*tensors)


def one_kernel(tensors: Tensors) -> Any:
    return microsdpa.sdpa(*tensors, impl="ampere/general")


DOORS: list[Callable[[Tensors], Any]] = [
    *(plain, out_given, causal, masked, decoding, split, quantizing, quantized, number_scales, planned, planned_masks),
    *(enabled, operator, gradients, compiled, one_kernel),
]


def flat(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize(("place", "current"), PLACES)
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_every_door_where_another_device_is_current(door: Callable[[Tensors], Any], place: str, current: int) -> None:
    torch.cuda.set_device(torch.device(place).index)
    expected = flat(door(make(CASE, place)))
    launcher.forget_plans()
    torch.cuda.set_device(current)
    tensors = make(CASE, place)
    for _ in range(2):  # with a new plan, and with that one
        found = flat(door(tensors))
        assert torch.cuda.current_device() == current
        for one, other in zip(found, expected, strict=True):
            assert one.device == torch.device(place)
            if door is gradients:  # torch adds them up in any order
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
            else:
                assert torch.equal(one, other)


@pytest.mark.parametrize(("place", "current"), PLACES)
def test_the_answer_is_the_oracles(place: str, current: int) -> None:
    torch.cuda.set_device(current)
    tensors = make(CASE, place)
    out = microsdpa.sdpa(*tensors)
    assert isinstance(out, torch.Tensor)
    expected, _ = reference.oracle(*tensors)
    assert compare.tolerance(reference.eager(*tensors)[0], expected, out.dtype).admits(compare.measure(out, expected))


@pytest.mark.parametrize(("place", "current"), PLACES)
@pytest.mark.parametrize("door", [plain, masked, decoding, split, quantizing, planned])
def test_graphs_that_are_captured_there(door: Callable[[Tensors], Any], place: str, current: int) -> None:
    """The stream that captures is of the tensors' device, and another one is current; it is the first such call."""
    torch.cuda.set_device(current)
    tensors, fresh = make(CASE, place), make(Case(2, 4, 70, 90, 64, seed=3), place)
    with torch.cuda.device(place):
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream), torch.cuda.device(current):
            captured = flat(door(tensors))
    assert torch.cuda.current_device() == current
    for tensor, new in zip(tensors, fresh, strict=True):
        tensor.copy_(new)
    with torch.cuda.device(place):
        graph.replay()
        torch.cuda.synchronize()
    for one, other in zip(captured, flat(door(fresh)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("place", "current"), PLACES[:2])
def test_scales_are_not_read_where_their_device_is_captured(place: str, current: int) -> None:
    """Whether a capture is under way is asked of the scales' device, and not of the current one."""
    other = f"cuda:{current}"
    scale = torch.ones((), device=place)
    with torch.cuda.device(place):
        stream = torch.cuda.Stream()
    with torch.cuda.device(place), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        with torch.cuda.device(other):
            assert _is_captured(torch.device(place))
            assert not _is_captured(torch.device(other))
            _check_positive("q_scale", scale)  # a read would end the capture with an error
        torch.ones((), device=place)
    assert not _is_captured(torch.device(place))


@pytest.mark.parametrize(("place", "current"), PLACES[:2])
def test_the_stream_of_the_tensors_device_is_used(place: str, current: int) -> None:
    torch.cuda.set_device(current)
    tensors = make(Case(1, 8, 512, 512, 64), place)
    expected = microsdpa.sdpa(*tensors)
    with torch.cuda.device(place):
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda.set_device(current)
        with torch.cuda.device(place):
            torch.cuda._sleep(200_000_000)
        out = microsdpa.sdpa(*tensors)
        done = torch.cuda.Event()
        with torch.cuda.device(place):
            done.record(side)
    torch.cuda.current_stream(place).synchronize()
    assert not done.query()  # the kernel waits behind the sleep of the stream that is current on its device
    side.synchronize()
    assert torch.equal(out, expected)  # type: ignore[arg-type]


def test_threads_on_two_devices() -> None:
    wrong: list[str] = []

    def work(place: str, current: int, seed: int) -> None:
        torch.cuda.set_device(current)
        tensors = make(Case(1, 3, 50 + seed, 64, 64, seed=seed), place)
        with torch.cuda.device(place):
            mine = torch.cuda.Stream()
        mine.wait_stream(torch.cuda.current_stream(place))
        with torch.cuda.stream(mine):
            torch.cuda.set_device(current)
            found = [(microsdpa.sdpa(*tensors), masks(tensors)) for _ in range(100)]
        mine.synchronize()
        expected, _ = reference.oracle(*tensors)
        allowed = compare.tolerance(reference.eager(*tensors)[0], expected, torch.float16)
        first, first_masked = found[0]
        assert isinstance(first, torch.Tensor)
        same = all(torch.equal(a, first) and torch.equal(b, first_masked) for a, b in found)  # type: ignore[arg-type]
        if not same or not allowed.admits(compare.measure(first, expected)):
            wrong.append(f"{place} with {current} current")

    def masks(tensors: Tensors) -> Any:
        return microsdpa.sdpa(*tensors, window=(20, 20))

    failures: list[BaseException] = []

    def guarded(*arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=guarded, args=(place, current, seed))
        for seed, (place, current) in enumerate([*PLACES, ("cuda:0", 0)] * 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert wrong == []


@pytest.mark.parametrize("name", ["key", "value", "out", "attn_mask", "alibi_slopes", "sinks"])
def test_tensors_of_two_devices_are_refused(name: str) -> None:
    query, key, value = make(CASE, "cuda:0")
    given: dict[str, Any] = {"key": key, "value": value}
    other = {
        "out": query,
        "attn_mask": torch.ones(70, 90, dtype=torch.bool),
        "alibi_slopes": torch.ones(4),
        "sinks": torch.ones(4),
    }
    given[name] = (given | other)[name].to("cuda:1")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=f"{name}: expected .*cuda:0.*got cuda:1"):
            microsdpa.sdpa(query, **given)
        microsdpa.sdpa(query, key, value)
