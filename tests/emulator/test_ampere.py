"""Tilings of ampere/fwd_mma that no small problem selects, in the emulator: right, free of races and bank conflicts."""

from __future__ import annotations

import pytest
import torch

from microsdpa import reference
from microsdpa.emulate import run
from microsdpa.emulate.run import Schedule
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.problem import Problem
from microsdpa.specs.ampere import Tiling, specification

RUNS = [
    (Case(1, 2, 100, 130, 64), Tiling(64, 1, 4), 1),
    (Case(1, 1, 100, 130, 64, causal="upper_left"), Tiling(64, 2, 2, stages=3), 1),
    (Case(1, 1, 70, 200, 64, causal="lower_right"), Tiling(64, 2, 1, 4, 1, resident=True), 1),
    (Case(1, 1, 70, 500, 64), Tiling(64, 2, 2, 4, 2, resident=True), 1),
    (Case(1, 1, 70, 300, 128, dtype="bfloat16"), Tiling(32, 2, 4, kept=0), 1),
    (Case(1, 1, 20, 90, 96), Tiling(32, 1, 1, 4, 2), 1),
    (Case(1, 1, 40, 100, 48), Tiling(32, 1, 2), 1),
    (Case(1, 1, 40, 70, 256), Tiling(32, 1, 4, kept=0), 1),
    (Case(1, 8, 5, 100, 64, heads_kv=2, causal="lower_right"), Tiling(32, 1, 1, 4, 2), 4),
    (Case(1, 2, 100, 40, 64, causal="lower_right"), Tiling(32, 2, 1, 2, 1, resident=True), 1),
    (Case(1, 1, 50, 70, 64, scale=-0.3), Tiling(64, 1, 2), 1),
    (Case(1, 1, 50, 70, 64, scale=0.0, causal="upper_left"), Tiling(64, 1, 2), 1),
    (Case(1, 1, 50, 70, 64, kind="outliers"), Tiling(64, 1, 2), 1),
    (Case(1, 1, 50, 70, 64, scale=100.0), Tiling(64, 1, 2), 1),
]


@pytest.mark.parametrize(("case", "tiling", "pack"), RUNS, ids=str)
def test_a_tiling_is_right_without_bank_conflicts(case: Case, tiling: Tiling, pack: int) -> None:
    query, key, value = make(case)
    problem = Problem(
        *(case.batch, case.heads, case.kv_heads, case.seqlen_q, case.seqlen_k, case.head_dim, case.dtype),
        causal=case.causal,
        target="sm_89",
    )
    outs = []
    for schedule in (Schedule(0, late=True), Schedule(1, late=False)):
        out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:3], torch.nan)
        report = run.attention(
            *(specification(problem, tiling, pack), problem, query, key, value, out, lse, case.scale),
            schedule=schedule,
            count_banks=True,
        )
        assert report.bank_conflicts == 0
        outs.append((out, lse))
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))
    expected = reference.oracle(query, key, value, causal=case.causal, scale=case.scale)
    eager = reference.eager(query, key, value, causal=case.causal, scale=case.scale)
    for got, exact, plain in zip(outs[0], expected, eager, strict=True):
        allowed = compare.tolerance(plain, exact, got.dtype)
        assert allowed.admits(compare.measure(got, exact))
