"""hopper/varlen in calls whose sequences have one length: its tiles have the rows of all query heads of a key head."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import check_in_every_order

from microsdpa.evidence.inputs import Case, masks_of
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.hopper.varlen.spec import for_one_length

CASES = [
    (Case(2, 6, 20, 100, 64, heads_kv=3, causal="lower_right"), "clusters"),  # of 40 rows, whose keys 8 CTAs share
    (Case(1, 8, 5, 40, 72, heads_kv=1, dtype="bfloat16"), "clusters"),
    (Case(2, 6, 33, 200, 64, heads_kv=2, layout="bshd", causal="lower_right"), "resident"),
    (Case(1, 10, 50, 700, 64, heads_kv=1, dtype="bfloat16"), "resident"),  # three consumers, which share keys
    (Case(1, 6, 30, 333, 128, heads_kv=1, causal="lower_right", layout="bshd"), "resident"),
    (Case(3, 4, 17, 90, 80, heads_kv=1, kind="outliers"), "resident"),
    (Case(1, 8, 3, 130, 256, heads_kv=2, dtype="bfloat16", causal="lower_right"), "resident"),
    (Case(2, 2, 40, 30, 40, heads_kv=1, causal="lower_right"), "resident"),  # the first queries see no key
]


def _specification(case: Case) -> KernelSpec:
    masks = masks_of(case)
    found = for_one_length(replace(case.problem("sm_90a"), mask=masks.kind if case.masks else None))
    assert isinstance(found, KernelSpec)
    return found


@pytest.mark.parametrize(("case", "order"), CASES, ids=str)
def test_it_is_right(case: Case, order: str) -> None:
    spec = _specification(case)
    assert spec.grid_order == order
    check_in_every_order(spec, case.problem("sm_90a"), case, conflicts=True)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 6, 24, 300, 64, heads_kv=2, causal="lower_right", masks=("window", "alibi")),
        Case(1, 6, 18, 150, 128, heads_kv=2, dtype="bfloat16", masks=("softcap", "sinks")),
    ],
    ids=str,
)
def test_masks_are_its_own(case: Case) -> None:
    spec = _specification(case)
    problem = replace(case.problem("sm_90a"), mask=masks_of(case).kind)
    check_in_every_order(spec, problem, case, conflicts=True)
