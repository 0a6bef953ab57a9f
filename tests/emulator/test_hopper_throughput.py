"""hopper/fwd_throughput in the emulator: every configuration is right, free of races and of bank conflicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from microsdpa import reference
from microsdpa.emulate import run
from microsdpa.emulate.run import Schedule
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.problem import Problem
from microsdpa.specs.hopper_throughput import CANDIDATES, specification

CASES = [
    (Case(1, 2, 256, 256, 64), 0),
    (Case(1, 1, 300, 450, 64, causal="lower_right"), 0),
    (Case(1, 2, 200, 500, 64, scale=20.0), 1),  # references move after the first tile
    (Case(1, 4, 520, 260, 64, heads_kv=2, causal="upper_left"), 1),  # tiles that some warpgroups skip
    (Case(1, 2, 300, 100, 64, causal="lower_right"), 1),  # rows without a key
    (Case(1, 3, 300, 200, 64, scale=-0.2), 1),
    (Case(3, 3, 70, 30, 64, dtype="bfloat16"), 2),  # query tiles of one tile of keys
    (Case(1, 3, 200, 500, 64, scale=0.0, causal="upper_left"), 2),
    (Case(1, 3, 200, 300, 96, causal="upper_left"), 0),
    (Case(1, 3, 200, 500, 128, scale=-0.3, causal="upper_left"), 0),
    (Case(1, 3, 130, 400, 128, kind="outliers", scale=3.0, layout="bshd"), 0),
    (Case(1, 3, 300, 100, 128, causal="lower_right", dtype="bfloat16"), 0),
    (Case(1, 3, 140, 200, 192, causal="lower_right"), 0),
    (Case(1, 3, 130, 200, 256, causal="upper_left"), 0),
]
CTAS = 3
"""Fewer than there are query tiles, so that each takes several."""


@pytest.mark.parametrize(("case", "candidate"), CASES, ids=str)
def test_a_configuration_is_right_in_every_order(case: Case, candidate: int) -> None:
    query, key, value = make(case)
    problem = Problem(
        *(case.batch, case.heads, case.kv_heads, case.seqlen_q, case.seqlen_k, case.head_dim, case.dtype),
        causal=case.causal,
        target="sm_90a",
    )
    spec = replace(specification(problem, CANDIDATES[case.head_dim][candidate]), max_ctas=CTAS)
    outs = []
    for schedule in (Schedule(0, late=True), Schedule(1, late=False)):
        out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:3], torch.nan)
        report = run.attention(
            *(spec, problem, query, key, value, out, lse, case.scale), schedule=schedule, count_banks=True
        )
        assert report.bank_conflicts == 0
        outs.append((out, lse))
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))
    expected = reference.oracle(query, key, value, causal=case.causal, scale=case.scale)
    eager = reference.eager(query, key, value, causal=case.causal, scale=case.scale)
    for got, exact, plain in zip(outs[0], expected, eager, strict=True):
        assert compare.tolerance(plain, exact, got.dtype).admits(compare.measure(got, exact))
