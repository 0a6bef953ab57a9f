"""The simulation of hopper/throughput's schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from microsdpa.evidence import render, results, schedule, suites
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.schedule import Cell, Clocks, Load
from microsdpa.kernels.hopper.throughput.spec import Tiles, choose

TILES = Tiles(2, 128, True, 2600, 4300)
FIXED = replace(TILES, overlap=False)
BOTH = pytest.mark.parametrize("tiles", [TILES, FIXED], ids=["dealt", "fixed"])
"""Whether CTAs take query tiles as they come to them, or have those of their place."""
TRUE = Clocks(2500.0, 4000.0, 700.0)


def _cells(clocks: Clocks) -> list[Cell]:
    """What suite schedule would measure at D = 128 if these were the clocks."""
    cells = []
    for case in suites.load(schedule.SUITE).cases:
        if case.head_dim == 128:
            problem = case.problem("sm_90a")
            cell = Cell(problem, choose(problem), 1.0, 1980.0)
            cells.append(replace(cell, measured_us=schedule.predicted_us(cell, clocks)))
    return cells


@pytest.mark.parametrize("causal", [None, "upper_left"])
@BOTH
@pytest.mark.parametrize(("batch", "seqlen"), [(1, 16384), (4, 4096), (32, 512), (1, 256), (3, 640)])
def test_every_tile_is_computed_once(batch: int, seqlen: int, tiles: Tiles, causal: str | None) -> None:
    problem = Case(batch, 16, seqlen, seqlen, 128, causal=causal).problem("sm_90a")  # type: ignore[arg-type]
    found = schedule.loads(problem, tiles, TRUE)
    of_head, heads = seqlen // 128, batch * 16
    assert len(found) == min(132, of_head * heads)
    assert sum(load.query_tiles for load in found) == of_head * heads
    keys = of_head * (of_head + 1) // 2 if causal else of_head**2
    assert sum(load.key_tiles for load in found) == keys * heads


@BOTH
def test_sums_of_tiles_are_alike(tiles: Tiles) -> None:
    """The picture of docs/causal-schedule.md, with 132 CTAs: 66 heads of 4 tiles are two rounds."""
    problem = Case(66, 1, 512, 512, 64, causal="upper_left").problem("sm_90a")
    assert set(schedule.loads(problem, tiles, TRUE)) == {Load(2, 5, 2)}


def test_who_is_done_first_takes_the_next_query_tile() -> None:
    """So no CTA has more to do than another one by more than a query tile of four tiles of keys."""
    problem = Case(33, 4, 512, 512, 128, causal="upper_left").problem("sm_90a")
    of_keys, of_tiles = (
        schedule.loads(problem, TILES, Clocks(*clocks)) for clocks in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))
    )
    assert max(load.key_tiles for load in of_keys) - min(load.key_tiles for load in of_keys) <= 4
    assert {load.query_tiles for load in of_tiles} == {4}


@BOTH
@pytest.mark.parametrize(("batch", "heads", "heads_kv"), [(1, 32, 8), (4, 32, 8), (8, 16, 16), (1, 66, 66)])
def test_few_queries_of_many_keys_keep_every_cta_busy(batch: int, heads: int, heads_kv: int, tiles: Tiles) -> None:
    """Keys of one head fill L2's share: sections of one head left all CTAs but a few idle."""
    plain = Case(batch, heads, 512, 65536, 128, causal="upper_left").problem("sm_90a")
    query_tiles = batch * heads * 4
    found = schedule.loads(replace(plain, heads_kv=heads_kv), tiles, TRUE)
    assert len(found) == min(132, query_tiles)
    assert max(load.query_tiles for load in found) <= -(-query_tiles // 132) + tiles.overlap


@BOTH
def test_few_rounds_are_one_section(tiles: Tiles) -> None:
    """Two sections of four and three heads gave some CTAs the longest tile of each."""
    problem = Case(1, 7, 4476, 4476, 192, causal="upper_left").problem("sm_90a")
    found = [load.key_tiles for load in schedule.loads(problem, tiles, TRUE)]
    assert max(found) <= 1.1 * sum(found) / len(found)


@BOTH
def test_grouped_heads_share_a_section(tiles: Tiles) -> None:
    plain = Case(1, 64, 8192, 8192, 128, causal="upper_left").problem("sm_90a")
    grouped = replace(plain, heads_kv=8)
    assert schedule.loads(plain, tiles, TRUE) != schedule.loads(grouped, tiles, TRUE)


def test_a_fit_finds_the_clocks_and_predicts_the_other_lengths() -> None:
    cells = _cells(TRUE)
    found = schedule.fit([cell for cell in cells if cell.problem.seqlen_k in schedule.FITTED])
    assert (found.tile, found.around, found.diagonal) == pytest.approx((2500.0, 4000.0, 700.0), rel=1e-6)
    table = schedule.lines(cells)
    assert len(table) == 13
    assert {line[5] for line in table[1:]} == {"1.000", "1.000 (fitted)"}


def test_a_wrong_model_is_seen_in_the_table() -> None:
    """A case that took 5% longer than the model has it."""
    cells = [
        replace(cell, measured_us=cell.measured_us * 1.05) if cell.problem.seqlen_k == 4096 else cell
        for cell in _cells(TRUE)
    ]
    assert {line[5] for line in schedule.lines(cells) if line[1] == "4096"} == {"0.952"}


def test_the_suite_has_zeros_and_no_peers() -> None:
    suite = suites.load(schedule.SUITE)
    assert len(suite.cases) == 36
    assert suite.peers == "none"
    assert {case.kind for case in suite.cases} == {"zeros"}
    small = replace(suite.cases[0], batch=1, heads=2, seqlen_q=16, seqlen_k=16)
    assert not any(torch.count_nonzero(tensor) for tensor in make(small))


def test_a_recording_is_rendered(tmp_path: Path) -> None:
    text = f"<!-- microsdpa:table gpu=h200 suite={schedule.SUITE} -->\n<!-- microsdpa:end -->\n"
    assert "Not recorded yet" in render.rendered(text, tmp_path, "page")
    rows = []
    for case, cell in zip(
        (c for c in suites.load(schedule.SUITE).cases if c.head_dim == 128), _cells(TRUE), strict=True
    ):
        timed = {"median_us": cell.measured_us, "min_us": cell.measured_us, "samples_us": [cell.measured_us] * 20}
        ran = {"impl": "microsdpa", "version": "1", "kernel": "hopper/throughput", "sm_clock_mhz": 1980.0}
        rows.append(results.row(case, **(timed | ran | {"inputs": "float16", "kind": "zeros"})))
    result = results.make(schedule.SUITE, "microsdpa bench --suite schedule", rows)
    table = schedule.markdown(result)
    assert table.count("\n| D = 128, 128 x 128 overlapped") == 12
    assert schedule.cells_of(result | {"rows": [rows[0] | {"sm_clock_mhz": None}]}) == []
