"""The general kernel in the emulator: every mask, alone and together, odd head dimensions and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import microsdpa
from argument_space import Form, assert_right, calls, forms
from microsdpa import BlockTable, reference
from microsdpa.call.masks import Masks
from microsdpa.emulate import run
from microsdpa.evidence.cases import MASKINGS
from microsdpa.evidence.inputs import Case, Masking, make
from microsdpa.evidence.verify import check, problem_of
from microsdpa.kernels.problem import MaskKind, Problem
from microsdpa.kernels.select import select

GENERAL = "emulate:ampere/general"
CASES = [
    *(Case(2, 4, 40, 90, 32, heads_kv=2, causal=causal, masks=masks) for causal, masks in MASKINGS),
    Case(2, 4, 40, 90, 64, heads_kv=2, dtype="bfloat16", masks=("bool", "window", "softcap", "alibi", "sinks")),
    Case(1, 2, 40, 90, 64, layout="unaligned", causal="lower_right", masks=("additive", "sinks")),
    Case(1, 1, 20, 70, 256, dtype="bfloat16", masks=("float32",)),
    Case(1, 1, 20, 70, 192, layout="bshd", causal="upper_left", masks=("padding", "softcap")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_masks_are_right_in_two_schedules(case: Case) -> None:
    assert check(case, "cpu", "emulate").failure == ""


@pytest.mark.parametrize("masks", [(), ("padding",), ("additive",)])
def test_warps_of_two_tiles_of_queries_and_few_keys(masks: tuple[Masking, ...]) -> None:
    """What many heads of 65 to 128 queries take."""
    case = Case(12, 9, 70, 90, 32, masks=masks)
    spec = select(problem_of(case, "sm_80"), "ampere/general").spec
    assert (spec.block_m, dict(spec.template_args)["BLOCK_N"]) == (128, "32")
    assert check(case, "cpu", GENERAL).failure == ""


@pytest.mark.parametrize("head_dim", [1, 8, 40, 72, 80, 250])
@pytest.mark.parametrize("layout", ["bhsd", "unaligned"])
def test_any_head_dimension(head_dim: int, layout: str) -> None:
    case = Case(1, 2, 20, 70, head_dim, causal="lower_right", layout=layout)  # type: ignore[arg-type]
    assert check(case, "cpu", GENERAL).failure == ""


def test_strides_of_every_dimension_are_followed() -> None:
    query, key, value = make(Case(2, 2, 33, 70, 32))
    mask = torch.rand(70, 33, 2, 2) < 0.6
    whole, wide = mask.permute(3, 2, 1, 0), torch.rand(33, 140) < 0.6
    for view in (whole, whole[:, :1], whole[..., :1], wide[:, ::2], mask[:, 0, 0, 0], torch.tensor(True)):
        out = microsdpa.sdpa(query, key, value, attn_mask=view, impl="emulate")
        same = microsdpa.sdpa(query, key, value, attn_mask=view.expand(2, 2, 33, 70).contiguous(), impl="emulate")
        assert torch.equal(out, same)


def test_a_mask_and_a_causal_alignment_hold_together() -> None:
    query, key, value = make(Case(1, 2, 33, 70, 32))
    mask = torch.rand(33, 70) < 0.6
    both = microsdpa.sdpa(query, key, value, attn_mask=mask, causal="lower_right", impl="emulate")
    one = microsdpa.sdpa(query, key, value, attn_mask=mask & torch.ones(33, 70).bool().tril(37), impl="emulate")
    assert torch.equal(both, one)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e30, -65504.0])
def test_rows_of_the_lowest_number_are_averages(lowest: float) -> None:
    """Some callers write the lowest finite number for -inf: a row of nothing else is their mean, not zeros."""
    query, key, value = make(Case(1, 1, 16, 40, 32))
    mask = torch.zeros(16, 40)
    mask[3], mask[5, 20:], mask[7] = lowest, lowest, -torch.inf
    out = microsdpa.sdpa(query, key, value, attn_mask=mask, impl="emulate")
    expected, _ = reference.oracle(query, key, value, attn_mask=mask)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
    assert (out[0, 0, 7] == 0).all()


def test_a_sink_alone_gives_zeros_and_its_logit() -> None:
    query, key, value = make(Case(1, 2, 16, 40, 32))
    sinks = torch.tensor([1.5, -torch.inf])
    hidden = torch.zeros(16, 40, dtype=torch.bool)
    out, lse = microsdpa.sdpa(query, key, value, attn_mask=hidden, sinks=sinks, return_lse=True, impl="emulate")
    assert (out == 0).all()
    torch.testing.assert_close(lse[0], sinks[:, None].expand(2, 16))


def test_a_tile_that_a_mask_hides_costs_no_product() -> None:
    query, key, value = make(Case(1, 1, 64, 256, 64))
    products = []
    for first_hidden in (256, 65, 64):
        mask = torch.arange(256)[None] < first_hidden
        problem = Problem(1, 1, 1, 64, 256, 64, "float16", mask=MaskKind("bool"), target="sm_89")
        spec = select(problem).spec
        out = torch.empty_like(query)
        report = run.attention(spec, problem, (query, key, value, out, None), None, masks=Masks(attn_mask=mask))
        products.append(report.counters["tensor_instructions"])
    assert products[0] == 2 * products[1] == 4 * products[2]


def test_keys_outside_the_window_are_not_loaded() -> None:
    query, key, value = make(Case(1, 1, 64, 1024, 64))
    loaded = []
    for window in ((-1, -1), (100, 0)):
        masks = Masks(window=window)
        problem = Problem(1, 1, 1, 64, 1024, 64, "float16", causal="lower_right", mask=masks.kind, target="sm_89")
        spec = select(problem, "ampere/general").spec
        report = run.attention(spec, problem, (query, key, value, torch.empty_like(query), None), None, masks=masks)
        loaded.append(report.counters["async_copy_bytes"])
    assert loaded[1] < loaded[0] / 4


@pytest.mark.parametrize(("kernel", "seqlen_q"), [("ampere/general", 128), ("ampere/general", 40), ("ampere/mma", 5)])
def test_keys_that_no_range_of_a_tile_has_are_not_loaded(kernel: str, seqlen_q: int) -> None:
    query, key, value = make(Case(1, 2, seqlen_q, 2048, 64))
    found = []
    for ends in ((0, 2048), (512, 576), (1000, 1000)):
        ranges = torch.tensor(ends, dtype=torch.int32).repeat(seqlen_q, 1)
        ranges[1:-1, 1] = ranges[0, 0]  # which see nothing
        masks = Masks(attn_mask=ranges)
        problem = Problem(1, 2, 2, seqlen_q, 2048, 64, "float16", mask=masks.kind, target="sm_89")
        spec = select(problem, kernel).spec
        out = torch.empty_like(query)
        report = run.attention(spec, problem, (query, key, value, out, None), None, masks=masks)
        found.append((report.counters["async_copy_bytes"], report.counters["tensor_instructions"]))
        expected, _ = reference.oracle(query, key, value, attn_mask=ranges)
        torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
    for whole, part, nothing in zip(*found, strict=True):
        assert part < whole / 4
        assert nothing < part
    assert found[2][1] == 0


@pytest.mark.parametrize("head_dim", [64, 40, 160])
def test_keys_of_blocks_that_are_hidden_are_not_loaded(head_dim: int) -> None:
    query, key, value = make(Case(2, 2, 200, 1024, head_dim))
    seen = torch.zeros(2, 1, 4, 16, dtype=torch.bool)
    found = []
    for shown in ((slice(None),), (0, 0, slice(None), 5), (1, 0, 2, slice(3, 7))):
        seen[shown] = True
        table = BlockTable(seen, 64, 200, 1024)
        seen[...] = False
        masks = Masks(attn_mask=table.memory)
        problem = Problem(2, 2, 2, 200, 1024, head_dim, "float16", mask=masks.kind, target="sm_89")
        spec = select(problem).spec
        out = torch.full_like(query, torch.nan)
        report = run.attention(spec, problem, (query, key, value, out, None), None, masks=masks)
        found.append(report.counters["async_copy_bytes"])
        plain = microsdpa.sdpa(query, key, value, attn_mask=table.mask, impl=GENERAL)
        assert torch.equal(out, plain)
    assert max(found[1:]) < found[0] / 4


def test_any_number_may_stand_in_a_range() -> None:
    query, key, value = make(Case(1, 1, 64, 100, 32))
    least, most = -(2**31), 2**31 - 1
    for first, last in ((least, most), (least, least), (most, most), (most, least), (-1, 7), (90, most), (50, 20)):
        ranges = torch.tensor([first, last], dtype=torch.int32)
        out = microsdpa.sdpa(query, key, value, attn_mask=ranges, impl=GENERAL)
        expected, _ = reference.oracle(query, key, value, attn_mask=ranges)
        torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


FORMS = [
    Form(torch.float16, torch.int32),
    Form(torch.bfloat16, torch.int32, left=True, alibi=True, sinks=torch.float32),
    Form(torch.float16, torch.bool),
    Form(torch.float16, torch.float32, left=True, alibi=True),
    Form(torch.bfloat16, torch.bfloat16, right=True, softcap=True, sinks=torch.float32),
    Form(torch.float16, None, left=True, right=True, sinks=torch.float16),
    Form(torch.bfloat16, torch.bool, True, True, True, True, torch.bfloat16),
]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(call=calls(st.sampled_from(FORMS), st.just(32)))
def test_any_call(call: dict[str, Any]) -> None:
    """Few compile-time forms, which a GPU has all of; everything else at random."""
    out, lse = microsdpa.sdpa(**call, return_lse=True, impl=GENERAL)
    assert_right(out, lse, call)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(call=calls(forms(), st.integers(1, 300)))
def test_any_call_on_the_cpu(call: dict[str, Any]) -> None:
    """impl="auto" on CPU tensors is torch's own attention, with this library's arguments."""
    assert_right(*microsdpa.sdpa(**call, return_lse=True), call)
