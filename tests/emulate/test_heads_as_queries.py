"""Calls of one query and many query heads a key head, which kernels take as the queries of one head."""

from __future__ import annotations

import pytest
from harness import check_in_every_order

from microsdpa.evidence.inputs import Case
from microsdpa.kernels.select import chosen

CASES = [
    (Case(70, 17, 1, 40, 64, heads_kv=1), "hopper/latency"),
    (Case(32, 64, 1, 70, 128, heads_kv=1, dtype="bfloat16", causal="lower_right"), "hopper/latency"),
    (Case(7, 136, 1, 100, 64, heads_kv=2, layout="bshd", causal="lower_right"), "hopper/latency"),
    (Case(70, 71, 1, 150, 64, heads_kv=1, causal="lower_right"), "hopper/split"),
    (Case(70, 71, 1, 300, 128, heads_kv=1), "hopper/throughput"),
    (Case(40, 30, 1, 90, 256, heads_kv=1, dtype="bfloat16"), "hopper/throughput"),
    (Case(1, 80, 1, 33000, 128, heads_kv=1), "ampere/mma"),  # parts of the keys, which a second kernel puts together
    (Case(70, 20, 1, 40, 33, heads_kv=1), "ampere/general"),
]


@pytest.mark.parametrize(("case", "kernel"), CASES, ids=str)
def test_many_heads_of_a_key_head_are_right(case: Case, kernel: str) -> None:
    problem = case.problem("sm_90a")
    spec = chosen(problem)
    assert spec is not None
    assert (spec.name, spec.heads_as_queries) == (kernel, True)
    check_in_every_order(spec, problem, case)
