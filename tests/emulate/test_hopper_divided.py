"""hopper/throughput with the keys of a query tile divided among CTAs: right, free of races and of bank conflicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import check_in_every_order

from microsdpa.evidence.inputs import Case
from microsdpa.kernels.hopper.throughput.spec import dividing, specification

CASES = [
    (Case(1, 2, 256, 500, 64), 2),
    (Case(1, 2, 200, 700, 64, causal="lower_right"), 4),
    (Case(2, 2, 250, 200, 64), 4),  # CTAs without keys
    (Case(1, 3, 64, 300, 64, heads_kv=1), 2),  # one of two consumers has rows
    (Case(1, 2, 200, 900, 64, scale=20.0), 4),  # stabilizers move after the first tile
    (Case(1, 4, 520, 260, 64, heads_kv=2, causal="upper_left"), 2),  # tiles that some warpgroups skip
    (Case(1, 2, 300, 100, 64, causal="lower_right"), 2),  # rows without a key
    (Case(1, 3, 200, 300, 64, scale=-0.2), 2),
    (Case(3, 3, 70, 30, 64, dtype="bfloat16"), 4),  # one tile of keys
    (Case(1, 3, 200, 500, 40, causal="upper_left", layout="bshd"), 2),  # columns that the tensors do not have
    (Case(1, 2, 200, 600, 8), 4),
    (Case(1, 2, 200, 600, 32), 2),
    (Case(1, 3, 200, 300, 72, causal="lower_right", layout="bshd"), 2),  # tiles with a tail
    (Case(1, 2, 140, 300, 112, scale=-0.2), 2),
    (Case(1, 3, 200, 300, 96, causal="upper_left"), 4),  # an odd number of blocks of columns
    (Case(1, 3, 200, 500, 128, scale=-0.3, causal="upper_left"), 2),
    (Case(1, 2, 130, 600, 128, kind="outliers", scale=3.0, layout="bshd"), 4),
    (Case(1, 3, 140, 300, 160, causal="lower_right", dtype="bfloat16"), 4),
    (Case(1, 2, 140, 200, 192, causal="lower_right"), 2),  # in three chunks
    (Case(1, 2, 140, 300, 192), 4),
    (Case(1, 2, 130, 200, 256, causal="upper_left"), 2),  # in two chunks
    (Case(1, 2, 130, 300, 256), 4),
    (Case(1, 2, 200, 1200, 64, causal="lower_right"), 8),
    (Case(1, 2, 130, 500, 112, dtype="bfloat16"), 8),  # more columns in shared memory than with fewer CTAs
    (Case(1, 2, 200, 300, 160, causal="upper_left"), 8),
    (Case(1, 2, 130, 300, 256), 8),
]
CLUSTERS = 2
"""Fewer than there are query tiles, so that each takes several."""


@pytest.mark.parametrize(("case", "ctas"), CASES, ids=str)
def test_keys_divided_among_ctas_are_right_in_every_order(case: Case, ctas: int) -> None:
    problem = case.problem("sm_90a")
    tiles = next(tiles for tiles in dividing(problem) if tiles.ctas == ctas)
    check_in_every_order(replace(specification(problem, tiles), max_ctas=ctas * CLUSTERS), problem, case)
