"""The rungs of the ladder in the emulator: right, in two schedules, and what each promises of its counters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from microsdpa import reference
from microsdpa.emulate import run
from microsdpa.emulate.run import Report
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.verify import check
from microsdpa.kernels import FAMILIES
from microsdpa.kernels.ladder import spec as ladder
from microsdpa.kernels.problem import Causal, Problem
from microsdpa.kernels.select import select

RUNGS = [family.short_name for family in FAMILIES if family.name.startswith("ladder/")]
# Less than a tile, several tiles with ragged ends, and every dtype, mask, layout and head dimension.
CASES = [
    Case(1, 2, 37, 45, 64),
    Case(1, 1, 70, 133, 32, dtype="bfloat16", causal="upper_left"),
    Case(1, 4, 70, 150, 64, heads_kv=2, causal="lower_right", layout="bshd"),
    Case(1, 1, 133, 70, 128, causal="lower_right", layout="unaligned"),
    Case(2, 1, 1, 65, 128, dtype="bfloat16"),
]


@pytest.mark.parametrize("rung", RUNGS[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rung_is_right_in_two_schedules(rung: str, case: Case) -> None:
    assert check(case, "cpu", f"emulate:{rung}").failure == ""


def report(rung: str, seqlen_q: int, seqlen_k: int, head_dim: int = 64, causal: bool = False) -> Report:
    query, key, value = make(Case(1, 1, seqlen_q, seqlen_k, head_dim))
    mask: Causal | None = "upper_left" if causal else None
    problem = Problem(1, 1, 1, seqlen_q, seqlen_k, head_dim, "float16", causal=mask, target="sm_89")
    spec = select(problem, rung).spec
    out = torch.empty_like(query)
    return run.attention(spec, problem, (query, key, value, out, None), None, count_banks=True)


@pytest.mark.parametrize("rung", RUNGS[1:])
def test_tensor_cores_do_all_products_from_rung_02_on(rung: str) -> None:
    counters = report(rung, 128, 192).counters
    assert counters["tensor_flops"] == 4 * 128 * 192 * 64


@pytest.mark.parametrize("rung", RUNGS[2:])
def test_copies_are_asynchronous_from_rung_03_on(rung: str) -> None:
    counters = report(rung, 64, 192).counters
    assert counters["async_copy_bytes"] >= (64 + 2 * 192) * 64 * 2
    assert counters["global_read_bytes"] == counters["async_copy_bytes"]


@pytest.mark.parametrize("rung", RUNGS[3:])
@pytest.mark.parametrize("shape", [(64, 192, 64), (33, 70, 32), (20, 40, 128)], ids=str)
def test_no_bank_conflicts_from_rung_04_on(rung: str, shape: tuple[int, int, int]) -> None:
    found = report(rung, *shape, causal=shape[0] < 64)
    assert found.bank_conflicts == 0, [site for site in found.bank_sites if site.conflicts]


def test_persistent_ctas_take_every_tile_once() -> None:
    """Rung 06 with fewer CTAs than tiles, ragged, and with tiles that see no key at all."""
    for causal in (None, "upper_left", "lower_right"):
        case = Case(2, 2, 150, 70, 64, causal=causal)  # type: ignore[arg-type]
        tensors = make(case)
        problem = Problem(2, 2, 2, 150, 70, 64, "float16", causal=case.causal, target="sm_89")
        spec = replace(select(problem, "ladder/06").spec, max_ctas=5)
        assert spec.grid(problem) == (5, 1, 1)
        out = torch.full_like(tensors[0], torch.nan)
        run.attention(spec, problem, (*tensors, out, None), None)
        expected, _ = reference.oracle(*tensors, causal=case.causal)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("row_tiles", [1, 2])
def test_rung_07_is_right_for_every_division_of_rows_and_keys(
    groups: int, row_tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = ladder.Tiles(block_n=32, row_tiles=row_tiles, row_warps=2, key_groups=groups, stages=2, ctas=1)
    monkeypatch.setattr(ladder, "tuned_tiles", lambda problem: tiles)
    assert check(Case(1, 2, 70, 300, 64, causal="lower_right"), "cpu", "emulate:ladder/07").failure == ""


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive(scale: float) -> None:
    for rung in RUNGS[1:]:
        assert check(Case(1, 1, 40, 70, 32, scale=scale, causal="upper_left"), "cpu", f"emulate:{rung}").failure == ""
