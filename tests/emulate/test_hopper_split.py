"""hopper/split in the emulator: every way through its keys is right, free of races and of bank conflicts."""

from __future__ import annotations

import pytest
from harness import check_in_every_order

from microsdpa.evidence.inputs import Case
from microsdpa.kernels.hopper.split.spec import Split, specification

ONE, TWO = Split(1), Split(2)
CASES = [
    (Case(1, 2, 64, 256, 64), ONE),  # a tile of keys for every warpgroup
    (Case(1, 1, 64, 130, 64, scale=-0.3, dtype="bfloat16"), ONE),  # a warpgroup without keys
    (Case(1, 1, 64, 1200, 64, scale=20.0), ONE),  # a ring; references move after the first tile
    (Case(1, 4, 70, 300, 64, heads_kv=2, causal="lower_right"), ONE),
    (Case(1, 1, 100, 40, 64, causal="lower_right"), ONE),  # rows without a key
    (Case(1, 2, 128, 256, 64), TWO),
    (Case(1, 1, 128, 1100, 64, scale=-0.3), TWO),  # warpgroups with a round less, and a ring
    (Case(1, 1, 60, 900, 64, kind="outliers"), TWO),  # a CTA of one query tile, and a ring
    (Case(1, 1, 1100, 1100, 64, causal="upper_left"), TWO),  # tiles that one of the query tiles does not see, in a ring
    (Case(1, 2, 300, 200, 64, scale=-0.2, causal="lower_right"), TWO),
    (Case(1, 1, 64, 600, 64), ONE),
    (Case(1, 1, 70, 130, 64, causal="upper_left"), ONE),  # warpgroups without work
    (Case(1, 1, 60, 900, 64), TWO),
    (Case(1, 1, 130, 190, 64, scale=0.0, causal="upper_left", layout="bshd"), TWO),
]


@pytest.mark.parametrize(("case", "choice"), CASES, ids=str)
def test_a_configuration_is_right_in_every_order(case: Case, choice: Split) -> None:
    problem = case.problem("sm_90a")
    check_in_every_order(specification(problem, choice), problem, case)
