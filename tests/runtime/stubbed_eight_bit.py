"""Calls with 8-bit operands against the stub driver; test_launcher.py runs this file in a process of its own."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, compiled, install_allocator, integer, last, record, set_integer
from stub_harness import (
    ADDRESSES,
    KV,
    LAUNCH_FAILED,
    NO_MEMORY,
    NO_VARLEN,
    OF_LAUNCH,
    PRIMARY,
    SHAPE,
    UNCHANGED,
    Map,
    _clean,
    call,
    check_allocated_lse,
    kernel,
    library,
    packed,
)

from microsdpa.attention import api
from microsdpa.attention import plan as plan_module
from microsdpa.attention.plan import Expected, make_plan, make_scaled_plan
from microsdpa.call.call import NO_SCALES, Call, Scales
from microsdpa.call.masks import NONE, Masks
from microsdpa.call.options import Options
from microsdpa.call.scales import UNCOUNTED
from microsdpa.call.validate import Checked
from microsdpa.execution import forward, quantized
from microsdpa.kernels import KernelSpec, TensorMap
from microsdpa.kernels.eight_bit_params import EightBitParams, QuantizeParams, RestoreLseParams, ScaledMaskedParams
from microsdpa.kernels.problem import PRECISIONS, Precision, Problem
from microsdpa.kernels.quantize.spec import SCHEMES
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher
from microsdpa.runtime.launcher import NO_MASKS

__all__ = ["_clean"]

LSE = 0x500000
KDL_INT, KDL_FLOAT, KDL_E4M3 = 0, 2, 10


class Tensor(FakeCuda):
    """A tensor that the launcher reads as one on a GPU, and Python as much of torch's as it looks at."""

    requires_grad = False
    _version = UNCOUNTED
    device = SimpleNamespace(index=0, type="cuda")

    def __init__(self, shape: tuple[int, ...], address: int, dtype: torch.dtype = torch.float16, **rest: Any) -> None:
        types = {torch.float16: KDL_FLOAT, torch.float32: KDL_FLOAT, torch.float8_e4m3fn: KDL_E4M3, torch.int8: KDL_INT}
        super().__init__(shape, address, code=types[dtype], bits=8 * dtype.itemsize, **rest)
        self.dtype = dtype

    def stride(self) -> tuple[int, ...]:
        return tuple(self.strides)

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return int(self.managed.tensor.data or 0)


OUTPUTS = itertools.count(0x10000000, 0x100000)
"""Addresses of outputs that are allocated."""


def empty_like(query: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """torch.empty_like for a dense tensor of the stub's: memory of its own in the same order."""
    return Tensor(tuple(query.shape), next(OUTPUTS), dtype or query.dtype, strides=query.stride())


@pytest.fixture(autouse=True)
def _eight_bit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def compile_kernel(spec: KernelSpec, target: str, *, strict: bool) -> SimpleNamespace:
        assert not strict
        assert target == "sm_89"
        return compiled(spec, target)

    monkeypatch.setattr(launcher, "compile_kernel", compile_kernel)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    for module in (api, forward):
        monkeypatch.setattr(module, "_empty_like", empty_like)
    install_allocator()
    set_integer("stub_raw_bytes", 512)
    yield
    set_integer("stub_raw_bytes", 0)


def tensors(dtype: torch.dtype = torch.float16, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (Tensor(s, a + offset, dtype) for s, a in zip((SHAPE, KV, KV), ADDRESSES[:3], strict=True))
    return q, k, v


def output() -> Tensor:
    return Tensor(SHAPE, ADDRESSES[3])


def validated(call: Call) -> Checked:
    """What check() gives for the stub's tensors."""
    scale, precision = call.options.scale, call.options.precision
    scales = NO_SCALES if precision else call.scales
    return Checked(call, "auto", False, None, scale, NONE, torch.float16, SCHEMES[precision or "fp8"].operands, scales)


def problem_of(checked: Checked) -> Problem:
    """The problem of the shapes of the stub's tensors."""
    terms = checked.scheme.query_terms if checked.scheme else 1
    return Problem(*(2, 4, 2, 16, 24, 32, "float16"), target="sm_89", operands=checked.operands, query_terms=terms)


def register(*given: Any, options: Options, scales: Scales = NO_SCALES) -> Checked:
    """Register the plan of a call that has been validated; `given` are its tensors and its output."""
    *inputs, out = given
    checked = validated(Call(tuple(inputs), scales=scales, options=options))  # type: ignore[arg-type]
    problem = problem_of(checked)
    planned = quantized.planned(checked, problem, select(problem).spec, out)
    launcher.register(forward.foreign_call(checked, out), *planned)
    return checked


QUANTISING = Options(enable_gqa=True, scale=0.5, precision="fp8")
VALUES = Options(enable_gqa=True)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that were validated in Python; the stub's tensors are no torch tensors, and pass."""
    seen: list[Any] = []

    def check(call: Call) -> Checked:
        seen.append(call)
        return validated(call)

    monkeypatch.setattr(forward, "check", check)
    monkeypatch.setattr(forward, "problem_of", lambda checked, out: problem_of(checked))
    return seen


def attend(*given: Any, precision: Precision | None = "fp8", scales: Any = NO_SCALES, **options: Any) -> Any:
    """The public call, of two heads of the query for each of the key."""
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    with torch.no_grad():
        return api.sdpa(*given, precision=precision, enable_gqa=True, **named, **options)


def params(kind: Any, back: int = 0) -> Any:
    return kind.from_buffer_copy(bytes(last(back).raw))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_repeated_call_is_validated_and_planned_once(precision: Precision, checks: list[Any]) -> None:
    before = record.launches
    for turn in range(3):
        out = attend(*tensors(offset=0x100 * turn), precision=precision)
        assert tuple(out.shape) == SHAPE
        assert out.dtype == torch.float16
        assert record.launches == before + 2 * (turn + 1)
        quantize, attention = params(QuantizeParams, 1), params(EightBitParams)
        assert [quantize.query, quantize.key, quantize.value] == [a + 0x100 * turn for a in ADDRESSES[:3]]
        assert attention.out == out.data_ptr()
        assert attention.lse is None
    assert len(checks) == 1


@pytest.mark.parametrize("given", [(0.5, None, None), (None, 0.5, None), (None, None, 0.5)], ids=str)
def test_scales_beside_a_precision_are_looked_at_although_there_is_a_plan(given: Any, checks: list[Any]) -> None:
    attend(*tensors())
    attend(*tensors())
    assert len(checks) == 1
    attend(*tensors(), scales=given)
    assert len(checks) == 2  # these refuse them


def test_the_kernels_share_one_workspace(checks: list[Any]) -> None:
    attend(*tensors())
    quantize, attention = params(QuantizeParams, 1), params(EightBitParams)
    quantized = quantize.quantized_query, quantize.quantized_key, quantize.quantized_value
    assert quantized == (attention.query, attention.key, attention.value)
    assert quantize.query_scale == attention.query_scale.data
    assert quantize.key_scale == attention.key_scale.data
    assert quantize.value_scale == attention.value_scale.data
    places = sorted(
        [
            (quantize.quantized_query, 2 * 4 * 16 * 64),  # two terms a query
            (quantize.quantized_key, 2 * 2 * 24 * 32),
            (quantize.quantized_value, 2 * 2 * 24 * 32),
            (quantize.query_scale, 2 * 4 * 16 * 4),
            (quantize.key_scale, 2 * 2 * 24 * 4),
            (quantize.value_scale, 2 * 2 * 32 * 4),
            (quantize.key_mean, 2 * 2 * 32 * 4),
        ]
    )
    for (start, size), (following, _) in itertools.pairwise(places):
        assert start % 16 == 0
        assert start + size <= following
    assert places[-1][0] + places[-1][1] <= places[0][0] + integer("stub_last_bytes")


def test_an_lse_has_a_launch_of_its_own(checks: list[Any]) -> None:
    before = record.launches
    _, lse = attend(*tensors(), return_lse=True, scale=0.25)
    assert record.launches == before + 3
    restore, attention = params(RestoreLseParams), params(EightBitParams, 1)
    assert restore.lse == attention.lse
    check_allocated_lse(lse, restore.lse, among_others=True)
    assert restore.query == ADDRESSES[0]
    assert restore.key_mean == params(QuantizeParams, 2).key_mean
    assert restore.scale == 0.25
    assert attention.scale_log2 == pytest.approx(0.25 * math.log2(math.e), rel=1e-7)
    attend(*tensors(), scale=0.25)
    assert record.launches == before + 5
    assert params(EightBitParams).lse is None
    assert len(checks) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"causal": "lower_right"},
        {"precision": "int8_fp8"},
        {"impl": "ladder/11"},
        {"query": Tensor(SHAPE, ADDRESSES[0], strides=(16 * 4 * 32, 32, 4 * 32, 1))},
        {"value": Tensor(KV, ADDRESSES[2], strides=(24 * 2 * 32, 32, 64, 1))},
        {"out": Tensor(SHAPE, ADDRESSES[3], strides=(16 * 4 * 32, 32, 4 * 32, 1))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_call_has_another_plan(change: dict[str, Any], checks: list[Any]) -> None:
    attend(*tensors())
    given = dict(zip(("query", "key", "value"), tensors(), strict=True))
    changed = given | {name: tensor for name, tensor in change.items() if name in given}
    rest = {name: option for name, option in change.items() if name not in given}
    for _ in range(2):
        attend(*changed.values(), **rest)
    assert len(checks) == 2
    attend(*tensors())
    assert len(checks) == 2


def test_another_scale_is_the_same_plan(checks: list[Any]) -> None:
    attend(*tensors())
    for scale in (1 / math.sqrt(32), 0.3):
        attend(*tensors(), scale=scale)
        assert params(EightBitParams).scale_log2 == pytest.approx(scale * math.log2(math.e), rel=1e-7)
    assert len(checks) == 1


@pytest.mark.parametrize("wrong", ["misaligned", "overlapping out", "NaN scale", "grad"])
def test_what_validation_must_see_goes_there(wrong: str, checks: list[Any]) -> None:
    attend(*tensors())
    q, k, v = tensors()
    if wrong == "misaligned":
        k = Tensor(KV, ADDRESSES[1] + 8)
    q.requires_grad = wrong == "grad"
    options: dict[str, Any] = {"out": Tensor(SHAPE, ADDRESSES[0] + 64)} if wrong == "overlapping out" else {}
    options |= {"scale": math.nan} if wrong == "NaN scale" else {}

    class SeenError(Exception):
        pass

    def check(*_: Any) -> Any:
        raise SeenError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "check", check)
        patch.setattr(forward, "_is_grad_enabled", lambda: wrong == "grad")
        with pytest.raises(SeenError):
            attend(q, k, v, **options)


def scales(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    found = zip(shapes, (0x600000, 0x700000, 0x800000), strict=True)
    return tuple(Tensor(shape, address, torch.float32) for shape, address in found)


def test_quantized_values_with_scales_are_one_launch(checks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_changes", defaultdict(lambda: UNCOUNTED))
    monkeypatch.setattr(torch, "Tensor", Tensor)
    quantized = tensors(torch.float8_e4m3fn)
    before = record.launches
    for _ in range(2):
        out = attend(*quantized, precision=None, scales=scales((2, 4), (2, 2, 3), (2, 2, 32)))
    assert out.dtype == torch.float16
    assert record.launches == before + 2
    assert len(checks) == 1
    found = params(EightBitParams)
    assert (found.query, found.query_scale.data, found.key_scale.data) == (ADDRESSES[0], 0x600000, 0x700000)
    assert (found.out, found.lse) == (out.data_ptr(), None)
    assert (found.query_scale.shift, found.key_scale.shift, found.key_scale.step) == (31, 3, 1)
    assert (found.value_scale.data, found.value_scale.head, found.value_scale.channel) == (0x800000, 32, 1)
    assert found.query_strides.row == 32
    assert found.out_strides.row == 64
    # One scale for each of two heads is not one for each of two blocks.
    attend(*quantized, precision=None, scales=scales((2, 4), (2, 2), (2, 2, 32)))
    assert len(checks) == 2


def test_masks_beside_quantized_values_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def check(call: Call) -> Checked:
        seen.append(call)
        (mask, slopes, sinks), options = call.masks, call.options
        return validated(call)._replace(masks=Masks(mask, options.window, options.softcap, slopes, sinks))

    def masked_problem(checked: Checked, out: Any) -> Problem:
        return replace(problem_of(checked), target="sm_90a", mask=checked.masks.kind_in_memory)

    def compile_kernel(spec: KernelSpec, target: str, *, strict: bool) -> SimpleNamespace:
        assert not strict
        assert (spec.name, target) == ("hopper/latency_8bit", "sm_90a")
        return compiled(spec, target)

    monkeypatch.setattr(forward, "check", check)
    monkeypatch.setattr(forward, "problem_of", masked_problem)
    monkeypatch.setattr(api, "_changes", defaultdict(lambda: UNCOUNTED))
    monkeypatch.setattr(launcher, "compile_kernel", compile_kernel)
    monkeypatch.setattr(torch, "Tensor", Tensor)
    slopes, sinks = Tensor((4,), 0xA00000, torch.float32), Tensor((4,), 0xB00000)
    before = record.launches
    set_integer("stub_tensor_maps", 4)
    try:
        for turn in range(2):
            mask = Tensor((4, 16, 24), 0x900000 + 0x100 * turn)
            given = scales((2, 4), (2, 2), (2, 2, 32))
            masks = {"attn_mask": mask, "alibi_slopes": slopes, "sinks": sinks, "window": (5, 7), "softcap": 2.5}
            attend(*tensors(torch.float8_e4m3fn), precision=None, scales=given, scale=0.5, **masks)
    finally:
        set_integer("stub_tensor_maps", 0)
    assert (record.launches, len(seen)) == (before + 2, 1)
    found = params(ScaledMaskedParams)
    masked, call = found.call, found.call.call
    assert (masked.mask, masked.slopes, masked.sinks) == (0x900100, 0xA00000, 0xB00000)
    assert [*masked.mask_strides, masked.mask_column_stride] == [0, 384, 24, 1]
    assert (masked.slope_batch_stride, masked.slope_head_stride, masked.sink_head_stride) == (0, 1, 1)
    assert (masked.position, masked.lowest, call.diagonal) == (0, -5, 7)
    assert masked.softcap_log2 == pytest.approx(2.5 * math.log2(math.e), rel=1e-7)
    assert call.scale_log2 == pytest.approx(0.5 * math.log2(math.e), rel=1e-7)
    assert (found.query_scale.data, found.value_scale.data) == (0x600000, 0x800000)
    described = Map.of(list(last().tensor_maps[3]))
    assert described.address == 0x900100
    assert described.sizes == (24, 16, 4, 1)


def test_a_plan_object_launches_without_the_table() -> None:
    given = tensors()
    like_out = empty_like(given[0])
    launch = forward.prepared(register(*given, like_out, options=QUANTISING), like_out)  # type: ignore[arg-type]
    library.clear_plans()
    plan = make_plan(launch, Expected({}, True, {"return_lse": True}), SimpleNamespace())  # type: ignore[arg-type]
    before = record.launches
    with torch.no_grad():
        out, lse = plan(*tensors(offset=0x1000))  # type: ignore[misc]
    assert record.launches == before + 3
    assert tuple(out.shape) == SHAPE
    assert params(EightBitParams, 1).out == out.data_ptr()
    check_allocated_lse(lse, params(EightBitParams, 1).lse, among_others=True)
    assert params(QuantizeParams, 2).query == ADDRESSES[0] + 0x1000
    assert last().context == PRIMARY
    for wanted, address in ((Tensor(SHAPE[:3], LSE, torch.float32), LSE), (None, None), (False, None)):
        assert launch(*tensors(), like_out, wanted) is True
        assert params(EightBitParams, 1 if address else 0).lse == address
    assert launch(*tensors(torch.int8), like_out, None) is None
    assert launch(Tensor(SHAPE, NO_MEMORY), *given[1:], like_out, None) is None
    with pytest.raises(TypeError, match="from type `None` to `DLTensor\\*`"):
        launch(*given, None, None)
    with pytest.raises(RuntimeError, match="is not found"):
        launcher.prepared_call((*given, like_out, None, QUANTISING.code, 0.7))


def test_a_plan_for_quantized_values_launches_with_its_scales_or_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Tensor", Tensor)
    monkeypatch.setattr(plan_module, "known_positive", lambda scales: True)
    quantized, given = tensors(torch.float8_e4m3fn), Scales(*scales((2, 4), (2, 2), (2, 2, 32)))
    like_out = empty_like(quantized[0], torch.float16)
    launch = forward.prepared(register(*quantized, like_out, options=VALUES, scales=given), like_out)  # type: ignore[arg-type]
    library.clear_plans()
    expected = Expected({}, True, {"return_lse": False}, torch.float16)
    plan = make_scaled_plan(launch, expected, SimpleNamespace(), (given, given))  # type: ignore[arg-type]
    before = record.launches
    out: Any = plan(*quantized)  # type: ignore[arg-type]
    assert out.dtype == torch.float16
    assert params(EightBitParams).query_scale.data == 0x600000
    other = Tensor((2, 4), 0xC00000, torch.float32)
    plan(*quantized, q_scale=other, k_scale=given.k_scale, v_scale=given.v_scale)  # type: ignore[arg-type]
    assert record.launches == before + 2
    assert params(EightBitParams).query_scale.data == 0xC00000


def test_tensor_maps_describe_quantized_values_in_the_workspace_and_follow_it(checks: list[Any]) -> None:
    maps = (TensorMap("query", 64, 32, 32), TensorMap("value", 128, 32, 32))
    spec = KernelSpec("test/maps", "", "", (), threads=128, block_m=64, tensor_maps=maps)
    mapped = (
        launcher.Mapped("query", 0, SHAPE, (4096, 2048, 32, 1), 1),
        launcher.Mapped("workspace", 512, KV, (9008, 4096, 48, 1), 1),
    )
    kernel = launcher.PlannedKernel(spec, (1, 1, 1), bytes(64), ((8, "workspace", 0),), (), mapped)
    launcher.register((*tensors(), output(), None, 5, None), [kernel], "sm_89", 4096)
    set_integer("stub_tensor_maps", 2)
    try:
        launcher.launch(*tensors(offset=0x1000), output(), None, 5, None)
    finally:
        set_integer("stub_tensor_maps", 0)
    first, second = (Map.of(list(words)) for words in last().tensor_maps[:2])
    assert first.address == ADDRESSES[0] + 0x1000
    assert first.sizes == (SHAPE[3], SHAPE[2], SHAPE[1], SHAPE[0])
    assert second.strides == (48, 4096, 9008)
    assert second.address == int.from_bytes(bytes(last().params)[8:16], "little") + 512
    assert (second.box[:2], second.swizzle) == ((32, 128), 1)


def test_tensors_without_memory_have_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, given = tensors(torch.float8_e4m3fn), scales((2, 4), (2, 2), (2, 2, 32))
    monkeypatch.setattr(torch, "Tensor", Tensor)
    code = register(*quantized, output(), options=VALUES, scales=Scales(*given)).call.options.code
    assert launcher.launch(*quantized, output(), None, code, 1e300, *NO_MASKS, *given) is None
    assert launcher.launch(*quantized, output(), None, code, None, *NO_MASKS, *given) is True
    for index in range(3):
        traced = list(quantized)
        traced[index] = Tensor(tuple(traced[index].shape), NO_MEMORY, torch.float8_e4m3fn)
        assert launcher.launch(*traced, output(), None, code, None, *NO_MASKS, *given) is None
        without = list(given)
        without[index] = Tensor(tuple(without[index].shape), NO_MEMORY, torch.float32)
        assert launcher.launch(*quantized, output(), None, code, None, *NO_MASKS, *without) is None
    assert launcher.launch(*quantized, Tensor(SHAPE, NO_MEMORY), None, code, None, *NO_MASKS, *given) is None


def test_quantized_values_with_an_lse_have_the_callers_or_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, given = tensors(torch.float8_e4m3fn), scales((2, 4), (2, 2), (2, 2, 32))
    monkeypatch.setattr(torch, "Tensor", Tensor)
    code = register(*quantized, output(), options=VALUES, scales=Scales(*given)).call.options.code
    lse = launcher.launch(*quantized, output(), True, code, None, *NO_MASKS, *given)
    check_allocated_lse(lse, params(EightBitParams).lse)
    set_integer("stub_last_bytes", -1)
    for wanted, address in ((Tensor(SHAPE[:3], LSE, torch.float32), LSE), (None, None), (False, None)):
        assert launcher.launch(*quantized, output(), wanted, code, None, *NO_MASKS, *given) is True
        assert params(EightBitParams).lse == address
    assert integer("stub_last_bytes") == -1


def test_a_failed_launch_is_told(checks: list[Any]) -> None:
    attend(*tensors())
    set_integer("stub_error", LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="the stub was told to fail"):
        attend(*tensors())


@pytest.mark.parametrize(
    ("size", "own", "words"),
    [
        (641, (641, 0, 0), "expected at most 640 bytes of a parameter, got 641"),
        (64, (65, 0, 0), "expected 65 bytes more, got 64"),
        (64, (64, 1, 57, 0, 0, 0), "a place in 64 bytes of a parameter, got 57"),
        (64, (64, 1, 0, 34, 0, 0), "an operand below 34, got 34"),
        (64, (64, 0, 1, 61, 0), "a place in 64 bytes of a parameter, got 61"),
        (64, (64, 0, 1, 0, 8), "an operand below 8, got 8"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(size: int, own: tuple[int, ...], words: str) -> None:
    numbers = packed(PRIMARY, 0, 1, 0, *NO_VARLEN, *UNCHANGED, 1, *kernel()[:OF_LAUNCH], 0, *own, 0)
    with pytest.raises(ValueError, match=words):
        library.register_plan(numbers, bytes(size), *tensors(), output(), None, 5, None)


def test_scales_come_with_a_call_that_has_no_masks() -> None:
    given = call(options=api.OPTIONS[False, None, False, "auto", None])
    assert launcher.launch_scaled(*given, None, None, None) is None
    for wrong in (given, [*given, *NO_MASKS, None, None, None]):
        with pytest.raises(TypeError, match="sdpa_scaled: expected a call and its scales"):
            launcher.launch_scaled(*wrong)
