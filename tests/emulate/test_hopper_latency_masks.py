"""hopper/latency under masks in the emulator: alone and together, in every broadcast form, at every head dimension."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import check_in_every_order

from microsdpa.call.masks import Masks
from microsdpa.evidence.inputs import Case, Masking, make_masks
from microsdpa.kernels.hopper.latency.spec import configuration, specification
from microsdpa.kernels.problem import Problem

ONE_CTA, PAIR = 1, 2
KINDS: tuple[tuple[Masking, ...], ...] = (
    ("bool",),
    ("padding",),
    ("left padding",),
    ("left padding, numbers",),
    ("additive",),
    ("float32",),
    ("window",),
    ("softcap",),
    ("alibi",),
    ("sinks",),
    ("bool", "window", "alibi", "sinks"),
    ("float32", "window", "alibi", "sinks"),
    ("bool", "window", "softcap", "alibi", "sinks"),
    ("additive", "window", "softcap", "alibi", "sinks"),
)
SHAPES = [
    (Case(1, 1, 64, 512, 64), PAIR),  # two rounds
    (Case(1, 2, 70, 300, 64, causal="lower_right", dtype="bfloat16"), PAIR),  # no vector of a mask's row
    (Case(1, 2, 33, 100, 64, heads_kv=1, causal="upper_left"), ONE_CTA),  # one round
    (Case(1, 1, 65, 700, 64), ONE_CTA),  # a ring
    (Case(1, 1, 64, 256, 128), PAIR),
    (Case(1, 1, 64, 250, 72), PAIR),
]


def masked_problem(case: Case) -> Problem:
    return replace(case.problem("sm_90a"), mask=Masks(**make_masks(case)).kind)


@pytest.mark.parametrize("masks", KINDS, ids=", ".join)
@pytest.mark.parametrize(("case", "cluster"), SHAPES, ids=str)
def test_masks_are_right_in_every_order(case: Case, cluster: int, masks: tuple[Masking, ...]) -> None:
    case = replace(case, masks=masks)
    problem = masked_problem(case)
    check_in_every_order(specification(problem, configuration(problem, cluster)), problem, case)


@pytest.mark.parametrize("head_dim", [8, 24, 40, 56, 72, 80, 96, 104, 120])
def test_columns_that_tensors_do_not_have_are_zeros(head_dim: int) -> None:
    case = Case(1, 2, 40, 300, head_dim, layout="bshd")
    problem = case.problem("sm_90a")
    for cluster in (ONE_CTA, PAIR):
        check_in_every_order(specification(problem, configuration(problem, cluster)), problem, case)
