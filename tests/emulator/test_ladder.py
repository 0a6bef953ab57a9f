"""The rungs of the ladder in the emulator: right, in two schedules, and what each promises of its counters."""

from __future__ import annotations

import pytest
import torch

from microsdpa.emulate import run
from microsdpa.emulate.run import Report
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.verify import check
from microsdpa.problem import Problem
from microsdpa.select import select
from microsdpa.specs import FAMILIES

RUNGS = [family.short_name for family in FAMILIES if family.name.startswith("ladder/")]
# Less than a tile, several tiles with ragged ends, and every dtype, mask, layout and head dimension.
CASES = [
    Case(1, 2, 37, 45, 64),
    Case(1, 1, 70, 133, 32, dtype="bfloat16", causal="upper_left"),
    Case(1, 4, 70, 150, 64, heads_kv=2, causal="lower_right", layout="bshd"),
    Case(1, 1, 133, 70, 128, causal="lower_right", layout="unaligned"),
    Case(2, 1, 1, 65, 128, dtype="bfloat16"),
]


@pytest.mark.parametrize("rung", RUNGS[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rung_is_right_in_two_schedules(rung: str, case: Case) -> None:
    assert check(case, "cpu", f"emulate:{rung}").failure == ""


def report(rung: str, seqlen_q: int, seqlen_k: int, causal: bool = False) -> Report:
    query, key, value = make(Case(1, 1, seqlen_q, seqlen_k, 64))
    mask = "upper_left" if causal else None
    problem = Problem(1, 1, 1, seqlen_q, seqlen_k, 64, "float16", causal=mask, target="sm_89")
    spec = select(problem, rung).spec
    out = torch.empty_like(query)
    return run.attention(spec, problem, query, key, value, out, None, None, count_banks=True)


@pytest.mark.parametrize("rung", RUNGS[1:])
def test_tensor_cores_do_all_products_from_rung_02_on(rung: str) -> None:
    counters = report(rung, 128, 192).counters
    assert counters["tensor_flops"] == 4 * 128 * 192 * 64


@pytest.mark.parametrize("rung", RUNGS[2:])
def test_copies_are_asynchronous_from_rung_03_on(rung: str) -> None:
    counters = report(rung, 64, 192).counters
    assert counters["async_copy_bytes"] >= (64 + 2 * 192) * 64 * 2
    assert counters["global_read_bytes"] == counters["async_copy_bytes"]
