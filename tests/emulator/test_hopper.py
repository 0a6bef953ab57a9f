"""hopper/latency in the emulator: every way through its keys is right, free of races and of bank conflicts."""

from __future__ import annotations

import pytest
import torch
from harness import check_in_every_order

from microsdpa import reference
from microsdpa.emulate import run
from microsdpa.emulate.run import Schedule
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.kernels.hopper.latency.spec import configuration, specification
from microsdpa.kernels.problem import Problem

ONE_CTA, PAIR = 1, 2
CASES = [
    (Case(1, 2, 64, 128, 64), ONE_CTA),  # one round
    (Case(1, 1, 64, 512, 64), PAIR),  # two rounds, the first one's maximum as reference
    (Case(1, 1, 64, 512, 64, scale=20.0), PAIR),  # which overflows: again with each row's maximum
    (Case(1, 3, 64, 64, 64, scale=-300.0), ONE_CTA),  # as do tiles that are the only ones
    (Case(1, 3, 64, 256, 64, scale=8.0), PAIR),
    (Case(1, 1, 64, 256, 64), PAIR),  # one round of a pair
    (Case(1, 1, 7, 200, 64, scale=-0.3, dtype="bfloat16"), ONE_CTA),
    (Case(1, 1, 70, 300, 64, scale=0.0, causal="upper_left"), PAIR),
    (Case(1, 4, 33, 300, 64, heads_kv=2, causal="lower_right"), PAIR),
    (Case(1, 1, 100, 40, 64, causal="lower_right"), ONE_CTA),  # rows without a key
    (Case(1, 1, 65, 900, 64), ONE_CTA),  # a ring
    (Case(1, 1, 65, 700, 128, causal="lower_right"), ONE_CTA),  # a ring of two stages
    (Case(1, 1, 65, 1100, 128), PAIR),
]


@pytest.mark.parametrize(("case", "cluster"), CASES, ids=str)
def test_a_configuration_is_right_in_every_order(case: Case, cluster: int) -> None:
    problem = case.problem("sm_90a")
    check_in_every_order(specification(problem, configuration(problem, cluster)), problem, case)


@pytest.mark.parametrize("owner", [0, 1])
def test_rows_of_one_cta_may_overflow_alone(owner: int) -> None:
    """The other CTA sends these rows again, and its own stay as they are."""
    case = Case(1, 1, 64, 512, 64)
    query, key, value = make(case)
    query[:, :, 32 * owner : 32 * (owner + 1)] *= 60
    problem = Problem(1, 1, 1, 64, 512, 64, case.dtype, target="sm_90a")
    spec = specification(problem, configuration(problem, PAIR))
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:3], torch.nan)
    report = run.attention(spec, problem, (query, key, value, out, lse), None, schedule=Schedule(0, late=True))
    straight = 2 * (2 * 4096 + 2 * 32 * 8)  # bytes that two CTAs send each other when nothing overflows
    assert report.counters["peer_bytes"] == straight * 3 // 2
    expected = reference.oracle(query, key, value)
    eager = reference.eager(query, key, value)
    for got, exact, plain in zip((out, lse), expected, eager, strict=True):
        assert compare.tolerance(plain, exact, got.dtype).admits(compare.measure(got, exact))


def test_a_hidden_key_may_be_no_number() -> None:
    """S begins with the mask, to which the product of such a key would be added."""
    case = Case(1, 1, 64, 256, 64, causal="upper_left")
    query, key, value = make(case)
    expected = reference.oracle(query, key, value, causal=case.causal)
    eager = reference.eager(query, key, value, causal=case.causal)
    key[:, :, 64:] = torch.nan  # keys that no query sees, of another tile
    key[:, :, 63] = torch.inf  # and one that the last query sees
    problem = Problem(1, 1, 1, 64, 256, 64, case.dtype, causal=case.causal, target="sm_90a")
    spec = specification(problem, configuration(problem, PAIR))
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:3], torch.nan)
    run.attention(spec, problem, (query, key, value, out, lse), None, schedule=Schedule(0, late=True))
    for got, exact, plain in zip((out, lse), expected, eager, strict=True):
        seen = slice(0, 63)
        assert compare.tolerance(plain[:, :, seen], exact[:, :, seen], got.dtype).admits(
            compare.measure(got[:, :, seen], exact[:, :, seen])
        )
