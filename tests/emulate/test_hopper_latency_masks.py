"""hopper/latency under masks in the emulator: alone and together, in every broadcast form, at every head dimension."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import check_in_every_order

import microsdpa
from microsdpa import reference
from microsdpa.call.masks import Masks
from microsdpa.emulate import run
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, Masking, make, make_masks
from microsdpa.kernels.hopper.latency.spec import configuration, specification
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.spec import KernelSpec

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ONE_CTA, PAIR = 1, 2
KINDS: tuple[tuple[Masking, ...], ...] = (
    ("bool",),
    ("padding",),
    ("left padding",),
    ("left padding, numbers",),
    ("additive",),
    ("float32",),
    ("window",),
    ("documents",),
    ("softcap",),
    ("alibi",),
    ("sinks",),
    ("bool", "window", "alibi", "sinks"),
    ("float32", "window", "alibi", "sinks"),
    ("documents", "window", "alibi", "sinks"),
    ("bool", "window", "softcap", "alibi", "sinks"),
    ("additive", "window", "softcap", "alibi", "sinks"),
)
SHAPES = [
    (Case(1, 1, 64, 512, 64), PAIR),  # two rounds
    (Case(1, 2, 70, 300, 64, causal="lower_right", dtype="bfloat16"), PAIR),  # no vector of a mask's row
    (Case(1, 2, 33, 100, 64, heads_kv=1, causal="upper_left"), ONE_CTA),  # one round
    (Case(1, 1, 65, 700, 64), ONE_CTA),  # a ring
]
WIDER = [(Case(1, 1, 64, 256, 128), PAIR), (Case(1, 1, 64, 250, 72), PAIR)]
# Every kind meets the first shape. The others each meet numbers, bits and ranges in memory, and every other mask.
OTHERS: tuple[tuple[tuple[Masking, ...], ...], ...] = (
    (
        ("bool", "window", "softcap", "alibi", "sinks"),
        ("float32", "window", "alibi", "sinks"),
        ("documents", "window", "alibi", "sinks"),
        ("left padding, numbers",),
        ("alibi",),
    ),
    (
        ("bool", "window", "softcap", "alibi", "sinks"),
        ("float32", "window", "alibi", "sinks"),
        ("documents",),
        ("additive",),
        ("sinks",),
    ),
    (
        ("left padding",),
        ("float32",),
        ("documents", "window", "alibi", "sinks"),
        ("additive", "window", "softcap", "alibi", "sinks"),
        ("softcap",),
    ),
)
# More channels change no mask.
WIDER_MASKS: tuple[tuple[tuple[Masking, ...], ...], ...] = (
    (
        ("bool", "window", "alibi", "sinks"),
        ("float32", "window", "alibi", "sinks"),
        ("documents",),
        ("additive", "window", "softcap", "alibi", "sinks"),
        ("softcap",),
    ),
    (
        ("bool", "window", "softcap", "alibi", "sinks"),
        ("float32",),
        ("documents", "window", "alibi", "sinks"),
        ("left padding, numbers",),
        ("window",),
    ),
)
MASKED = [(*SHAPES[0], masks) for masks in KINDS]
MASKED += [(*shape, masks) for shape, kinds in zip(SHAPES[1:], OTHERS, strict=True) for masks in kinds]
MASKED += [(*shape, masks) for shape, kinds in zip(WIDER, WIDER_MASKS, strict=True) for masks in kinds]


def masked_problem(case: Case) -> Problem:
    return replace(case.problem("sm_90a"), mask=Masks(**make_masks(case)).kind)


@pytest.mark.parametrize(("case", "cluster", "masks"), MASKED, ids=str)
def test_masks_are_right_in_every_order(case: Case, cluster: int, masks: tuple[Masking, ...]) -> None:
    case = replace(case, masks=masks)
    problem = masked_problem(case)
    check_in_every_order(specification(problem, configuration(problem, cluster)), problem, case)


BROUGHT: tuple[tuple[Case, int], ...] = (
    (Case(1, 1, 64, 512, 64), PAIR),
    (Case(2, 2, 70, 304, 64, causal="lower_right", dtype="bfloat16"), PAIR),  # keys and queries end in a box
    (Case(1, 2, 33, 128, 64, heads_kv=1), ONE_CTA),
)
TENSORS: tuple[tuple[Masking, ...], ...] = (
    ("bool",),
    ("padding",),
    ("left padding",),
    ("left padding, numbers",),
    ("additive",),
    ("float32",),
    ("bool", "window", "softcap", "alibi", "sinks"),
    ("float32", "window", "alibi", "sinks"),
)


def specification_in_memory(case: Case, cluster: int) -> tuple[KernelSpec, Problem]:
    """The kernel that the masks' place in memory leads to."""
    problem = replace(case.problem("sm_90a"), mask=Masks(**make_masks(case)).kind_in_memory)
    return specification(problem, configuration(problem, cluster)), problem


@pytest.mark.parametrize(
    ("case", "cluster", "masks"),
    [  # a tensor alone meets two of three
        (*BROUGHT[(i + k) % 3], masks) for i, masks in enumerate(TENSORS) for k in range(1, 3 if len(masks) == 1 else 2)
    ],
    ids=str,
)
def test_masks_that_bulk_copies_bring_are_right(case: Case, cluster: int, masks: tuple[Masking, ...]) -> None:
    case = replace(case, masks=masks)
    spec, problem = specification_in_memory(case, cluster)
    assert any(box.tensor == "attn_mask" for box in spec.tensor_maps)
    # Two rows of numbers in FP32 meet in a bank where a thread reads a pair.
    check_in_every_order(spec, problem, case, conflicts="float32" in masks)


THREE_OR_FOUR: tuple[tuple[int, int, tuple[Masking, ...]], ...] = (
    *((384, ONE_CTA, masks) for masks in (("bool",), ("window", "softcap", "sinks"))),
    *((500, ONE_CTA, masks) for masks in (("padding",), ("window", "alibi"))),
    *((1000, PAIR, masks) for masks in (("bool",), ("padding",), ("window", "alibi"), ("softcap", "sinks"))),
)


@pytest.mark.parametrize(("keys", "cluster", "masks"), THREE_OR_FOUR, ids=str)
def test_rounds_under_masks_are_unrolled(keys: int, cluster: int, masks: tuple[Masking, ...]) -> None:
    case = Case(1, 1, 64, keys, 64, masks=masks)
    spec, problem = specification_in_memory(case, cluster)
    assert dict(spec.template_args)["ROUNDS"] in ("3", "4")
    check_in_every_order(spec, problem, case)


@pytest.mark.parametrize("keys", [256, 512])
@pytest.mark.parametrize("masked", [False, True])
def test_a_key_that_is_no_number_leaves_none_to_any_row(keys: int, masked: bool) -> None:
    query, key, value = make(Case(1, 1, 64, keys, 64))
    key[0, 0, keys - 3] = torch.nan
    masks = {"attn_mask": torch.ones(keys, dtype=torch.bool)} if masked else {}
    for found in microsdpa.sdpa(query, key, value, return_lse=True, impl="emulate:hopper/latency", **masks):
        assert found.isnan().all()


@pytest.mark.parametrize(
    ("head_dim", "cluster"),
    [  # tiles of each width meet one CTA and two
        *((8, ONE_CTA), (24, PAIR), (40, ONE_CTA), (56, PAIR), (72, ONE_CTA), (80, PAIR)),
        *((96, ONE_CTA), (96, PAIR), (104, ONE_CTA), (120, PAIR)),
    ],
)
def test_columns_that_tensors_do_not_have_are_zeros(head_dim: int, cluster: int) -> None:
    case = Case(1, 2, 40, 300, head_dim, layout="bshd")
    problem = case.problem("sm_90a")
    check_in_every_order(specification(problem, configuration(problem, cluster)), problem, case)


def call(case: Case, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = make(case)
    impl = "emulate:hopper/latency"
    return microsdpa.sdpa(query, key, value, enable_gqa=True, return_lse=True, impl=impl, **more)


def assert_exact(case: Case, tensors: Tensors, found: tuple[torch.Tensor, torch.Tensor], **masks: Any) -> None:
    arguments = {"causal": case.causal, "scale": case.scale, **masks}
    for got, exact, plain in zip(
        found, reference.oracle(*tensors, **arguments), reference.eager(*tensors, **arguments), strict=True
    ):
        assert compare.tolerance(plain, exact, got.dtype).admits(compare.measure(got, exact))


@pytest.mark.parametrize("elements", ["bool", "float16", "float32"])
@pytest.mark.parametrize("keys", [128, 70])
def test_strides_of_every_dimension_are_followed(keys: int, elements: str) -> None:
    """The kernels to which bulk copies bring a mask are those of BROUGHT's last case."""
    case = Case(2, 2, 33, keys, 64, heads_kv=1)

    def mask(*shape: int) -> torch.Tensor:
        numbers = torch.randn(shape)
        return numbers < 0.3 if elements == "bool" else numbers.to(getattr(torch, elements))

    whole, wide = mask(keys, 33, 2, 2).permute(3, 2, 1, 0), mask(33, 2 * keys)
    views = [whole, whole[:, :1], whole[..., :1], wide[:, ::2], wide[:, :keys], wide[:, 2 : keys + 2], wide[0, :keys]]
    views += [mask(1), mask(2, 2, 33, keys), mask(2, 1, 1, keys), mask(1, 2, 33, 1)]
    for view in views:
        found = call(case, attn_mask=view)
        same = call(case, attn_mask=view.expand(2, 2, 33, keys).contiguous())
        assert all(torch.equal(*pair) for pair in zip(found, same, strict=True))
        assert_exact(case, make(case), found, attn_mask=view)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e30, -65504.0])
@pytest.mark.parametrize("scale", [None, 1e-6, 0.0, -0.3])
def test_rows_of_the_lowest_number_are_averages(lowest: float, scale: float | None) -> None:
    case = Case(1, 1, 16, 256, 64, scale=scale)
    mask = torch.randn(16, 256)
    mask[2], mask[3], mask[5, 20:], mask[7], mask[9, :200] = 1e4, lowest, lowest, -torch.inf, lowest
    found = call(case, attn_mask=mask, scale=scale)
    assert_exact(case, make(case), found, attn_mask=mask)
    assert (found[0][0, 0, 7] == 0).all()


def test_a_sink_alone_gives_zeros_and_its_logit() -> None:
    sinks = torch.tensor([1.5, -torch.inf, 30.0])
    for hidden in (torch.zeros(16, 300, dtype=torch.bool), torch.full((16, 300), -torch.inf)):
        out, lse = call(Case(1, 3, 16, 300, 64), attn_mask=hidden, sinks=sinks)
        assert (out == 0).all()
        torch.testing.assert_close(lse[0], sinks[:, None].expand(3, 16))


@pytest.mark.parametrize("sink", [-2e7, -40.0, 40.0, 2e7])
def test_a_sink_may_be_far_from_all_scores(sink: float) -> None:
    case, sinks = Case(1, 1, 64, 256, 64), torch.tensor([sink])
    out, lse = call(case, sinks=sinks)
    if sink == 2e7:  # whose exponential the eager computation cannot have
        assert (out == 0).all()
        assert (lse == sink).all()
    else:
        assert_exact(case, make(case), (out, lse), sinks=sinks)


PAIR_BYTES = 2 * (2 * 4096 + 2 * 32 * 8)
"""What two CTAs send each other where every probability is in range."""


def run_pair(case: Case, tensors: Tensors, in_memory: bool = False, **masks: Any) -> int:
    """Check a call that a pair of CTAs computes, and give the bytes that they sent each other.

    `in_memory`: bulk copies bring the mask tensor as far as its memory allows it.
    """
    out, lse = torch.full_like(tensors[0], torch.nan), torch.full(tensors[0].shape[:3], torch.nan)
    given = Masks(**masks)
    problem = replace(case.problem("sm_90a"), mask=given.kind_in_memory if in_memory else given.kind)
    spec = specification(problem, configuration(problem, PAIR))
    assert not in_memory or len(spec.tensor_maps) == 4
    schedule = run.Schedule(0, late=True)
    report = run.attention(spec, problem, (*tensors, out, lse), case.scale, schedule=schedule, masks=Masks(**masks))
    assert_exact(case, tensors, (out, lse), **masks)
    return report.counters["peer_bytes"]


@pytest.mark.parametrize("masks", [kind for kind in KINDS if "softcap" not in kind or len(kind) < 4], ids=", ".join)
def test_ordinary_scores_are_computed_once(masks: tuple[Masking, ...]) -> None:
    case = Case(1, 1, 64, 512, 64, masks=masks)
    assert run_pair(case, make(case), **make_masks(case)) == PAIR_BYTES


@pytest.mark.parametrize("slope", [0.0, 0.5, 4.0, -0.5])
def test_the_stabilizer_knows_what_masks_add(slope: float) -> None:
    """ALiBi raises the last keys of a CTA by hundreds of powers of two above the first ones, or lowers them."""
    case, slopes = Case(1, 1, 64, 512, 64), torch.tensor([slope])
    tensors, distances = make(case), (torch.arange(64)[:, None] - torch.arange(512)).abs()
    assert run_pair(case, tensors, alibi_slopes=slopes) == PAIR_BYTES
    assert run_pair(case, tensors, attn_mask=-slope * distances.float()) == PAIR_BYTES


@pytest.mark.parametrize("slope", [0.5, 0.1, -0.5])
def test_half_of_the_numbers_tells_where_the_largest_one_is(slope: float) -> None:
    """Of FP32 masks that bulk copies bring, later tiles are looked at every second eight keys."""
    case = Case(1, 1, 64, 512, 64)
    distances = (torch.arange(64)[:, None] - torch.arange(512)).abs()
    assert run_pair(case, make(case), in_memory=True, attn_mask=-slope * distances.float()) == PAIR_BYTES


def test_keys_that_are_not_looked_at_may_be_all_that_rows_see() -> None:
    case = Case(1, 1, 64, 512, 64)
    mask = torch.full((64, 512), torch.finfo(torch.float32).min)
    for first in (8, 24, 32, 48, 392, 496):  # of a tile, keys that are left out
        mask[:, first : first + 8] = torch.randn(64, 8)
    mask[3, :384] = -torch.inf
    run_pair(case, make(case), in_memory=True, attn_mask=mask)


@pytest.mark.parametrize("change", ["far above", "far below", "not a number", "hidden, not a number"])
@pytest.mark.parametrize("form", ["bool", "float16", "window", "softcap"])
def test_probabilities_out_of_range_are_computed_again(form: str, change: str) -> None:
    """The stabilizer, from the first 16 keys, may lie far from the largest score that a row sees."""
    case = Case(1, 1, 64, 512, 64)
    query, key, value = make(case)
    shown = torch.ones(64, 512, dtype=torch.bool)
    query.abs_()
    if change == "far above":
        key[:, :, 20:] = key[:, :, 20:].abs() * 3
    elif change == "far below":
        key[:, :, :16] = key[:, :, :16].abs() * 3
        shown[:, :17] = False
    elif change == "not a number":
        key[:, :, 300] = torch.nan
    else:
        key[:, :, 2:5] = torch.nan
        shown[:, 2:5] = False
    masks: dict[str, Any] = {"attn_mask": shown}
    if form == "float16":
        masks = {"attn_mask": torch.zeros(64, 512).masked_fill(~shown, -torch.inf).half()}
    elif form == "window":
        if change == "hidden, not a number":
            pytest.skip("a window has no gaps")
        masks = {"window": (46, 400)} if change == "far below" else {"window": (600, 600)}
    elif form == "softcap":
        masks |= {"softcap": 40.0}
    again = run_pair(case, (query, key, value), **masks) > PAIR_BYTES
    # A soft cap of 40 keeps scores near one another. What a bool mask hides has no probability, whatever the product.
    near = form == "softcap" and change == "far below"
    assert again or near or (change == "hidden, not a number" and form in ("bool", "softcap"))


def test_keys_outside_the_window_are_not_loaded_by_a_ring() -> None:
    query, key, value = make(Case(1, 1, 64, 2048, 64))
    loaded = []
    for window in ((-1, 4000), (100, 0)):
        masks = Masks(window=window)
        problem = Problem(1, 1, 1, 64, 2048, 64, "float16", causal="lower_right", mask=masks.kind, target="sm_90a")
        spec = specification(problem, configuration(problem, ONE_CTA))
        report = run.attention(spec, problem, (query, key, value, torch.empty_like(query), None), None, masks=masks)
        loaded.append(report.counters["bulk_copy_bytes"])
    assert loaded[1] < loaded[0] / 4
