"""Calls with masks against the stub driver; test_launcher.py runs this file in a process of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import NO_SPILL, install_allocator, integer, last, record, set_integer, tensor
from stub_harness import ADDRESSES, KV, NO_MEMORY, PRIMARY, SHAPE, _clean, call, check_allocated_lse, prepared, register

from microsdpa.attention import api
from microsdpa.attention.explain import Explanation
from microsdpa.attention.plan import Expected, make_masked_plan
from microsdpa.call.masks import Masks
from microsdpa.kernels.problem import Problem
from microsdpa.runtime import launcher

__all__ = ["_clean"]
KDL_BOOL = 6
MASK, SLOPES, SINKS = 0x600000, 0x700000, 0x800000
library = launcher._library


@pytest.fixture(autouse=True)
def _masked() -> Iterator[None]:
    set_integer("stub_masked", 1)
    yield
    set_integer("stub_masked", 0)


def mask(*shape: int, address: int = MASK, **options: Any) -> Any:
    return tensor(shape, address, **({"code": KDL_BOOL, "bits": 8} | options))


def masked(**changes: Any) -> list[Any]:
    """Arguments of launch() with masks, causal and aligned to the lower right."""
    names = "attn_mask", "alibi_slopes", "sinks", "left", "right", "softcap"
    plain = {name: value for name, value in changes.items() if name not in names}
    rest = {"attn_mask": None, "alibi_slopes": None, "sinks": None, "left": -1, "right": -1, "softcap": None}
    return [*call(**({"options": 6} | plain)), *(rest | {k: v for k, v in changes.items() if k in names}).values()]


def test_masks_of_any_rank_are_broadcast() -> None:
    for shape, strides, expected in (
        ((2, 4, 16, 24), None, [1536, 384, 24, 1]),
        ((2, 1, 1, 24), None, [24, 0, 0, 1]),
        ((4, 16, 1), None, [0, 16, 1, 0]),
        ((16, 24), (48, 2), [0, 0, 48, 2]),
        ((24,), None, [0, 0, 0, 1]),
        ((), None, [0, 0, 0, 0]),
    ):
        arguments = masked(attn_mask=mask(*shape, strides=strides))
        register(arguments)
        assert launcher.launch(*arguments) is True
        assert [*last().mask_strides, last().mask_column_stride] == expected
        assert last().mask == MASK


def test_the_kernel_gets_the_masks_and_the_call() -> None:
    slopes, sinks = mask(2, 4, address=SLOPES, code=2, bits=32), mask(4, address=SINKS, code=2, bits=16)
    arguments = masked(alibi_slopes=slopes, sinks=sinks, left=5, right=7, softcap=2.5, scale=0.5)
    register(arguments)
    assert launcher.launch(*arguments)
    found = last()
    assert (found.mask, found.slopes, found.sinks) == (None, SLOPES, SINKS)
    assert (found.slope_batch_stride, found.slope_head_stride, found.sink_head_stride) == (4, 1, 1)
    assert (found.position, found.lowest, found.params.diagonal) == (8, 3, 8)
    assert found.softcap_log2 == pytest.approx(2.5 * math.log2(math.e), rel=1e-7)
    assert found.params.scale_log2 == pytest.approx(0.5 * math.log2(math.e), rel=1e-7)
    assert found.params.query == 0x100000


@pytest.mark.parametrize(("options", "causal"), [(4, None), (5, "upper_left"), (6, "lower_right")])
@pytest.mark.parametrize("ends", [(-1, -1), (0, 0), (3, -1), (-1, 5), (40, 2**31), (2**31, 7), (2**62, 2**62)])
@pytest.mark.parametrize("lengths", [(16, 24), (24, 16)])
def test_the_bounds_are_those_of_masks(
    options: int, causal: Any, ends: tuple[int, int], lengths: tuple[int, int]
) -> None:
    """The launcher and masks.py say the same."""
    seqlen_q, seqlen_k = lengths
    sizes = {"query": (2, 4, seqlen_q, 32), "key": (2, 2, seqlen_k, 32), "value": (2, 2, seqlen_k, 32)}
    given = {name: tensor(shape, address) for (name, shape), address in zip(sizes.items(), ADDRESSES, strict=False)}
    out = tensor(sizes["query"], ADDRESSES[3])
    arguments = masked(**given, out=out, options=options, left=ends[0], right=ends[1], softcap=1.0)
    register(arguments)
    assert launcher.launch(*arguments) is True
    expected = Masks(window=ends).bounds(causal, seqlen_q, seqlen_k)
    assert (last().position, last().lowest, last().params.diagonal) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_mask": None},
        {"attn_mask": mask(1, 24)},
        {"attn_mask": mask(16, 24, strides=(48, 1))},
        {"attn_mask": mask(16, 24, code=2, bits=16)},
        {"attn_mask": mask(16, 24, device=1)},
        {"left": 4},
        {"right": 4},
        {"softcap": None},
        {"sinks": mask(4, address=SINKS, code=2, bits=16)},
        {"softcap": 0.0},
        {"softcap": math.nan},
        {"softcap": -1.0},
        {"softcap": 1e300},
        {"softcap": 1e-300},
        {"scale": 1e300},
        {"attn_mask": mask(1, 1, 1, 16, 24)},
        {"attn_mask": mask(16, 24, address=0x400000)},  # where the output is
        {"attn_mask": mask(16, 24, address=NO_MEMORY)},
        {"query": tensor(SHAPE, NO_MEMORY)},
    ],
)
def test_a_call_with_other_masks_misses(changes: dict[str, Any]) -> None:
    arguments = {"attn_mask": mask(16, 24), "softcap": 1.0}
    register(masked(**arguments))
    assert launcher.launch(*masked(**arguments)) is True
    assert launcher.launch(*masked(**(arguments | changes))) is None
    assert launcher.launch(*call()) is None


@pytest.mark.parametrize("name", ["attn_mask", "alibi_slopes", "sinks"])
def test_each_of_the_masks_needs_memory(name: str) -> None:
    def given(address: int) -> list[Any]:
        return masked(**{name: mask(4, address=address, code=2, bits=32)})

    register(given(MASK))
    assert launcher.launch(*given(MASK)) is True
    assert launcher.launch(*given(NO_MEMORY)) is None
    assert prepared(given(NO_MEMORY)) is None
    with pytest.raises(ValueError, match="CUDA tensors that do not overlap"):
        register(given(NO_MEMORY))


def test_an_lse_is_the_callers_or_allocated_or_none() -> None:
    install_allocator()
    register(masked(left=3))
    check_allocated_lse(launcher.launch(*masked(left=3, lse=True)), last().params.lse)
    set_integer("stub_last_bytes", -1)
    for lse, address in ((tensor((2, 4, 16), 0x500000), 0x500000), (None, None), (False, None)):
        assert launcher.launch(*masked(left=3, lse=lse)) is True
        assert last().params.lse == address
    assert launcher.launch(*masked(left=4, lse=True)) is None
    assert integer("stub_last_bytes") == -1


def test_another_mask_of_the_same_form_and_another_cap_hit() -> None:
    register(masked(attn_mask=mask(16, 24), softcap=1.0))
    assert launcher.launch(*masked(attn_mask=mask(16, 24, address=0x900000), softcap=3.0))
    assert last().mask == 0x900000
    assert last().softcap_log2 == pytest.approx(3.0 * math.log2(math.e), rel=1e-7)


def test_plans_with_masks_are_counted_and_cleared() -> None:
    register(masked(left=3))
    assert library.plan_count() == 1
    library.clear_plans()
    assert launcher.launch(*masked(left=3)) is None


def test_a_plan_of_a_mask_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="CUDA tensors that do not overlap"):
        register(masked(attn_mask=mask(1, 1, 1, 16, 24)))


def test_prepare_registers_what_sdpa_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from microsdpa.kernels import KernelSpec

    spec = KernelSpec("test/masked", "", "", (), threads=64, block_m=16, params="microsdpa::MaskedParams")
    monkeypatch.setattr(
        launcher, "compile_kernel", lambda stage, target, strict: SimpleNamespace(spec=stage, resources=NO_SPILL)
    )
    monkeypatch.setattr(launcher, "load_kernel", lambda kernel, device: (0x5000, PRIMARY))
    query, key, value, out, *_ = call()
    masks = Masks(window=(6, 2), softcap=2.0)
    problem = Problem(2, 4, 2, 16, 24, 32, "float16", causal="lower_right", mask=masks.kind)
    query_like = type("Query", (), {"device": type("Device", (), {"index": 0})})
    monkeypatch.setattr(launcher, "_library", _Forward(query, query_like))
    rest = key, value, out, None, 6, None, None, None, None, 6, 2, 2.0
    launcher.prepare(problem, spec, (query_like, *rest))
    assert launcher.launch(query, *rest) is True
    assert (last().position, last().lowest, last().params.diagonal) == (8, 2, 8)
    assert record.launches


class _Forward:
    """The library, which gets the tensor for what stands for it in Python."""

    def __init__(self, query: Any, stands_for: Any) -> None:
        self._query, self._stands_for = query, stands_for

    def __getattr__(self, name: str) -> Any:
        function = getattr(library, name)
        return lambda *a: function(*(self._query if x is self._stands_for else x for x in a))


def test_sdpa_finds_a_plan_with_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the public call, with arguments that Python passes through."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(api, "_launch_or_kind", lambda *a: seen.append(a) or True)
    q = type("Tensor", (), {"requires_grad": False})()
    assert api.sdpa(q, q, q, window=(3, 4), out=q) is q
    assert api.sdpa(q, q, q, causal="lower_right", attn_mask=q, softcap=2.0, out=q, scale=0.5) is q
    options = api.OPTIONS[False, None, False, "auto", None], api.OPTIONS[False, "lower_right", False, "auto", None]
    assert seen[0] == (q, q, q, q, False, options[0], None, None, None, None, 3, 4, None)
    assert seen[1] == (q, q, q, q, False, options[1], 0.5, q, None, None, -1, -1, 2.0)


def test_a_prepared_call_with_masks_launches_its_plan_without_the_table() -> None:
    arguments = masked(attn_mask=mask(16, 24), left=5, softcap=2.0, scale=0.5)
    assert prepared(arguments) is None
    register(arguments)
    launch = prepared(arguments)
    library.clear_plans()
    lse = tensor((2, 4, 16), 0x500000)
    other = call(query=tensor((2, 4, 16, 32), 0x900000))
    assert launch(*other[:4], lse, mask(16, 24, address=0xA00000), None, None) is True
    found = last()
    assert (found.params.query, found.params.lse, found.mask) == (0x900000, 0x500000, 0xA00000)
    assert (found.slopes, found.sinks, found.position, found.lowest) == (None, None, 8, 3)
    assert found.softcap_log2 == pytest.approx(2.0 * math.log2(math.e), rel=1e-7)
    assert found.params.scale_log2 == pytest.approx(0.5 * math.log2(math.e), rel=1e-7)


def test_a_prepared_call_with_masks_allocates_the_lse_that_is_asked_for() -> None:
    install_allocator()
    arguments = masked(attn_mask=mask(16, 24))
    register(arguments)
    launch, masks = prepared(arguments), (mask(16, 24), None, None)
    check_allocated_lse(launch(*call()[:4], True, *masks), last().params.lse)
    for lse in (None, False):
        assert launch(*call()[:4], lse, *masks) is True
        assert last().params.lse is None


@pytest.mark.parametrize(
    "others",
    [
        (None, None, None),
        (mask(1, 24), None, None),
        (mask(16, 24, code=2, bits=16), None, None),
        (mask(16, 24, strides=(48, 1)), None, None),
        (mask(16, 24), mask(4, address=SLOPES, code=2, bits=32), None),
        (mask(16, 24), None, mask(4, address=SINKS, code=2, bits=16)),
        (mask(16, 24, address=0x400000), None, None),  # where the output is
        (mask(16, 24, address=NO_MEMORY), None, None),
    ],
)
def test_a_prepared_call_refuses_other_masks(others: tuple[Any, ...]) -> None:
    register(masked(attn_mask=mask(16, 24)))
    launch = prepared(masked(attn_mask=mask(16, 24)))
    before = record.launches
    assert launch(*call()[:4], None, *others) is None
    for query in (tensor((2, 4, 17, 32), 0x100000), tensor(SHAPE, NO_MEMORY)):
        assert launch(*call(query=query)[:4], None, mask(16, 24), None, None) is None
    assert record.launches == before


def test_a_plan_object_with_masks_reaches_the_prepared_call() -> None:
    arguments = masked(attn_mask=mask(16, 24), right=3)
    register(arguments)
    expected = Expected({}, True, {"return_lse": False})
    plan = make_masked_plan(prepared(arguments), expected, Explanation("stub", "a test"))
    with torch.no_grad():  # the stub's tensors are not torch's
        assert plan(*arguments[:3], out=arguments[3], attn_mask=mask(16, 24, address=0xB00000)) is arguments[3]
    assert last().mask == 0xB00000


def test_a_plan_object_with_masks_gives_the_lse() -> None:
    install_allocator()
    arguments = masked(attn_mask=mask(16, 24), right=3)
    register(arguments)
    expected = Expected({}, True, {"return_lse": True})
    plan = make_masked_plan(prepared(arguments), expected, Explanation("stub", "a test"))
    with torch.no_grad():
        out, lse = plan(*arguments[:3], out=arguments[3], attn_mask=mask(16, 24))  # type: ignore[misc]
    assert out is arguments[3]
    check_allocated_lse(lse, last().params.lse)


def test_a_known_mask_is_launched_with_for_its_own_keys_alone() -> None:
    arguments = masked(attn_mask=mask(16, 24))
    register(arguments)
    before = record.launches
    assert launcher.launch_known(KV[2], False, *arguments) is True
    assert last().mask == MASK
    assert launcher.launch_known(KV[2] + 1, False, *arguments) is None
    assert launcher.launch_known(KV[2], False, *masked(attn_mask=mask(16, 24), options=5)) is None
    assert launcher.launch_known(KV[2], False, *masked(attn_mask=mask(16, 24), scale=math.nan)) is None
    assert record.launches == before + 1
    with pytest.raises(TypeError, match="a number of keys, a bool and a call"):
        launcher.launch_known(KV[2], False)


@pytest.mark.parametrize("may_be_captured", [False, True])
def test_a_known_mask_is_captured_where_the_caller_says_so(may_be_captured: bool) -> None:
    arguments = masked(attn_mask=mask(16, 24))
    register(arguments)
    set_integer("stub_capturing", 1)
    try:
        assert launcher.launch_known(KV[2], may_be_captured, *arguments) is (True if may_be_captured else None)
    finally:
        set_integer("stub_capturing", 0)
