"""Calls of one query and many query heads a key head, which kernels take as the queries of one head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import check_in_every_order

from microsdpa import reference
from microsdpa.attention.explain import Explanation
from microsdpa.emulate.run import attention
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.kernels.problem import Problem
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


MOST_BATCHES = 9
"""What the chosen kernel is run for: each batch has tiles of its own, and fewer than an H200 has SMs in all."""
MOST_KEYS = 3001
"""Six tiles for each of the 16 CTAs that share them, which is twice what they hold at a time."""


@pytest.mark.parametrize(("case", "kernel"), CASES, ids=str)
def test_many_heads_of_a_key_head_are_right(case: Case, kernel: str) -> None:
    spec = chosen(case.problem("sm_90a"))
    assert spec is not None
    assert (spec.name, spec.heads_as_queries) == (kernel, True)
    run = replace(case, batch=min(case.batch, MOST_BATCHES), seqlen_k=min(case.seqlen_k, MOST_KEYS))
    check_in_every_order(spec, run.problem("sm_90a"), run)


def test_a_value_of_other_columns() -> None:
    problem = Problem(35, 70, 2, 1, 90, 192, "float16", value_dim=128, target="sm_90a")
    spec = chosen(problem)
    assert spec is not None
    assert spec.heads_as_queries
    query, key, _ = make(Case(35, 70, 1, 90, 192, heads_kv=2))
    value = torch.randn(35, 2, 90, 128, generator=torch.Generator().manual_seed(1)).half()
    out, lse = torch.full((35, 70, 1, 128), torch.nan).half(), torch.full((35, 70, 1), torch.nan)
    attention(spec, problem, (query, key, value, out, lse))
    exact, plain = reference.oracle(query, key, value), reference.eager(query, key, value)
    for got, expected, usual in zip((out, lse), exact, plain, strict=True):
        assert compare.tolerance(usual, expected, got.dtype).admits(compare.measure(got, expected))


def test_explain_says_so() -> None:
    spec = chosen(Problem(64, 64, 1, 1, 4096, 128, "float16", target="sm_90a"))
    assert "the query heads of a key head, as the queries" in str(Explanation("hopper/latency", "", spec))
    one_head = chosen(Problem(64, 64, 64, 1, 4096, 128, "float16", target="sm_90a"))
    assert "as the queries" not in str(Explanation("ampere/mma", "", one_head))
