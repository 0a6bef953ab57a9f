"""hopper/fwd_split in the emulator: every way through its keys is right, free of races and of bank conflicts."""

from __future__ import annotations

import pytest
import torch

from microsdpa import reference
from microsdpa.emulate import run
from microsdpa.emulate.run import Schedule
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.problem import Problem
from microsdpa.specs.hopper_split import Split, specification

ONE, TWO, ONE_IN_TURN, TWO_IN_TURN = Split(1), Split(2), Split(1, turns=True), Split(2, turns=True)
CASES = [
    (Case(1, 2, 64, 256, 64), ONE),  # a tile of keys for every warpgroup
    (Case(1, 1, 64, 130, 64, scale=-0.3, dtype="bfloat16"), ONE),  # a warpgroup without keys
    (Case(1, 1, 64, 1200, 64, scale=20.0), ONE),  # a ring; references move after the first tile
    (Case(1, 4, 70, 300, 64, heads_kv=2, causal="lower_right"), ONE),
    (Case(1, 1, 100, 40, 64, causal="lower_right"), ONE),  # rows without a key
    (Case(1, 2, 128, 256, 64), TWO),
    (Case(1, 1, 60, 900, 64, kind="outliers"), TWO),  # a CTA of one query tile, and a ring
    (Case(1, 1, 1100, 1100, 64, causal="upper_left"), TWO),  # tiles that one of the query tiles does not see, in a ring
    (Case(1, 2, 300, 200, 64, scale=-0.2, causal="lower_right"), TWO),
    (Case(1, 1, 64, 600, 64), ONE_IN_TURN),
    (Case(1, 1, 70, 130, 64, causal="upper_left"), ONE_IN_TURN),  # warpgroups whose turns pass by
    (Case(1, 1, 1100, 1100, 64, causal="upper_left"), TWO_IN_TURN),
    (Case(1, 1, 60, 900, 64), TWO_IN_TURN),
    (Case(1, 1, 130, 190, 64, scale=0.0, causal="upper_left", layout="bshd"), TWO),
]


@pytest.mark.parametrize(("case", "choice"), CASES, ids=str)
def test_a_configuration_is_right_in_every_order(case: Case, choice: Split) -> None:
    query, key, value = make(case)
    problem = Problem(
        *(case.batch, case.heads, case.kv_heads, case.seqlen_q, case.seqlen_k, case.head_dim, case.dtype),
        causal=case.causal,
        target="sm_90a",
    )
    spec = specification(problem, choice)
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
