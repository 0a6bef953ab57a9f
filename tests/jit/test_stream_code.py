"""Machine code of ampere/stream, which no small problem of the catalogue selects: no spills, eight warps an SM."""

from __future__ import annotations

from itertools import product

from compiled import all_figures

from microsdpa.kernels.problem import Causal, Problem
from microsdpa.kernels.select import select

TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_120")
MASKS: tuple[Causal | None, ...] = (None, "upper_left")
PROBLEMS = [
    *(Problem(4, 32, 32, 4096, 4096, d, "float16", c, target=t) for t, d, c in product(TARGETS, (64, 128), MASKS)),
    *(Problem(8, 32, 32, 2048, 2048, 128, "float16", c, target="sm_90a") for c in MASKS),
    *(Problem(4, 32, 32, 4096, 4096, d, "bfloat16", c, target="sm_90a") for d, c in product((80, 96, 112, 128), MASKS)),
]
BUDGET = {("sm_90a", 64): 8, ("sm_90a", 128): 8, ("sm_89", 64): 8, ("sm_89", 128): 4}
"""Warps that an SM has to hold, by target and head dimension: two CTAs of four, or one of eight."""


def test_no_spills_and_as_many_warps_as_designed() -> None:
    specs = [select(problem, "ampere/mma").spec for problem in PROBLEMS]
    assert {spec.source for spec in specs} == {"ampere/stream/kernel.cu"}
    jobs = [(spec, problem.target) for spec, problem in zip(specs, PROBLEMS, strict=True)]
    for kernel, problem in zip(all_figures(jobs, counted=True), PROBLEMS, strict=True):
        assert not kernel.resources.uses_local_memory, problem
        counts = kernel.instructions
        # Two copies of the products, for whole tiles and for others, and those of the first keys.
        assert counts["HMMA"] >= 2 * 2 * kernel.spec.threads // 32 * problem.head_dim // 8
        assert counts["LDGSTS"] >= 4
        assert kernel.held.warps >= BUDGET.get((problem.target, problem.head_dim), 4), problem
