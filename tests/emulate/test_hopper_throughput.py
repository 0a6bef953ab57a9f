"""hopper/throughput in the emulator: every configuration is right, free of races and of bank conflicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import check_in_every_order

from microsdpa.evidence.inputs import Case
from microsdpa.kernels.hopper.throughput.spec import CANDIDATES, padded, specification

CASES = [
    (Case(1, 2, 256, 256, 64), 0),
    (Case(1, 1, 300, 450, 64, causal="lower_right"), 0),
    (Case(2, 4, 250, 200, 64), 0),  # last tiles of the heads, with two consumers idle, over more than one round
    (Case(1, 5, 64, 200, 64), 0),  # no other tiles
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
    (Case(1, 3, 130, 200, 8, causal="upper_left"), 0),  # columns that the tensors do not have are zeros
    (Case(1, 3, 200, 300, 32), 1),
    (Case(1, 3, 200, 300, 40, causal="upper_left", layout="bshd"), 2),
    (Case(1, 3, 200, 300, 48), 0),
    (Case(2, 2, 140, 200, 72, dtype="bfloat16"), 0),
    (Case(1, 3, 200, 300, 72, scale=-0.2, causal="lower_right", layout="bshd"), 1),
    (Case(1, 3, 140, 400, 80, causal="upper_left"), 0),
    (Case(1, 3, 130, 300, 112, causal="lower_right", layout="bshd"), 0),
    (Case(1, 3, 140, 300, 160, causal="lower_right", dtype="bfloat16"), 0),
    (Case(1, 2, 140, 200, 200), 0),
    (Case(1, 2, 400, 33000, 64, causal="upper_left"), 2),  # a section for each head, of two rounds
    (Case(1, 2, 780, 33000, 64, causal="upper_left"), 2),  # of three rounds
]
CTAS = 3
"""Fewer than there are query tiles, so that each takes several."""


@pytest.mark.parametrize(("case", "candidate"), CASES, ids=str)
def test_a_configuration_is_right_in_every_order(case: Case, candidate: int) -> None:
    problem = case.problem("sm_90a")
    check_in_every_order(
        replace(specification(problem, CANDIDATES[padded(problem)][candidate]), max_ctas=CTAS), problem, case
    )
