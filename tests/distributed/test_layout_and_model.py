"""Shards, what their queries see, and estimates: numbers alone, no processes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from microsdpa.call.masks import Masks
from microsdpa.distributed import model, simulate
from microsdpa.distributed.layout import Layout, even, put, take
from microsdpa.distributed.visible import Piece, Visible, of_piece
from microsdpa.evidence import context_parallel, results, suites


@pytest.mark.parametrize(
    ("total", "world", "order"), list(product((0, 1, 7, 64, 101), (1, 2, 3, 8), ("balanced", "contiguous")))
)
def test_shards_are_the_whole(total: int, world: int, order: Any) -> None:
    layout, tokens = even(total, world, order), torch.arange(total)
    assert layout.lengths == layout.expected
    back = torch.full_like(tokens, -1)
    for rank in range(world):
        put(take(tokens, layout, rank, 0), back, layout, rank, 0)
    assert torch.equal(back, tokens)


def shown(piece: Piece, ranges: torch.Tensor) -> torch.Tensor:
    """What a call of sdpa shows: bool [queries, keys of its slice]."""
    keys = piece.stop - piece.start
    if piece.ranged:
        first, stop = of_piece(ranges, piece)[0, 0].unbind(dim=-1)
        place = torch.arange(keys)
        return (first[:, None] <= place) & (place < stop[:, None])
    found = Masks(window=piece.window).visible(piece.causal, piece.length, keys, torch.device("cpu"))
    return torch.ones(piece.length, keys, dtype=torch.bool) if found is None else found


@pytest.mark.parametrize("window", [(-1, -1), (4, -1), (3, 2), (-1, 0), (0, 5)])
@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (23, 50), (50, 23), (3, 3), (9, 0)])
@pytest.mark.parametrize("order", ["balanced", "contiguous"])
def test_calls_show_what_the_masks_show(order: Any, seqlen_q: int, seqlen_k: int, causal: Any, window: Any) -> None:
    """Of all keys, and shard by shard, in which no pair may be counted twice."""
    queries, keys = even(seqlen_q, 3, order), even(seqlen_k, 3, order)
    visible = Visible(queries, keys, causal, window, False)
    everything = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    mask = Masks(window=window).visible(causal, seqlen_q, seqlen_k, torch.device("cpu"))
    wanted = everything if mask is None else mask
    for rank in range(3):
        rows = take(wanted, queries, rank, 0)
        ranges = visible.ranges(rank, torch.device("cpu"))
        of_all = torch.zeros(rows.shape, dtype=torch.int32)
        for piece in visible.pieces[rank]:
            of_all[piece.at : piece.at + piece.length, piece.start : piece.stop] += shown(piece, ranges).int()
        assert torch.equal(of_all, rows.int())
        for source in range(3):
            of_shard = take(rows, keys, source, 1).int()
            found = torch.zeros_like(of_shard)
            for piece in visible.blocks(rank, source):
                found[piece.at : piece.at + piece.length, piece.start : piece.stop] += shown(piece, ranges).int()
            assert torch.equal(found, of_shard)


def test_head_groups_are_all_heads() -> None:
    for heads, seqlen, world in product(range(1, 70), (512, 8192, 65536), (2, 4)):
        layout = even(seqlen, world, "balanced")
        visible = Visible(layout, layout, "lower_right", (-1, -1), False)
        groups = model.head_groups(model.Problem(1, heads, heads, 128, 2, visible))
        assert [low for low, _ in groups] == [0, *(high for _, high in groups[:-1])]
        assert groups[-1][1] == heads
        assert all(low < high for low, high in groups)


def test_estimates_follow_the_arithmetic() -> None:
    """Of 131,072 tokens and 8 key heads of 128 in BF16, K and V are 537 MB; three quarters come to each of four."""
    layout = even(131072, 4, "balanced")
    problem = model.Problem(1, 32, 8, 128, 2, Visible(layout, layout, "lower_right", (-1, -1), False))
    found = {one.method: one for one in model.estimates(problem, True)}
    assert found["all_gather"].received == pytest.approx(0.75 * 536.87e6, rel=1e-3)
    assert found["all_gather"].compute == pytest.approx(
        4 * 131072**2 / 2 * 32 * 128 / 4 / model.Machine().flops, rel=1e-3
    )
    assert found["all_gather"].total < found["ring"].total
    window = Visible(layout, layout, "lower_right", (1000, -1), False)
    near = model.estimates(model.Problem(1, 32, 8, 128, 2, window), True)
    assert {one.method: one for one in near}["all_gather"].received < 0.05 * found["all_gather"].received


def test_short_calls_do_not_exchange_heads() -> None:
    """Two H200 took 4.9 ms for 8,192 tokens of 32 heads in four groups: the host launches some 300 us an exchange."""
    for world, heads_kv in product((2, 4, 8), (32, 8)):
        layout = even(8192, world, "balanced")
        problem = model.Problem(1, 32, heads_kv, 128, 2, Visible(layout, layout, "lower_right", (-1, -1), False))
        assert model.estimates(problem, True)[0].method == "all_gather"
        assert model.parts_of_heads(heads_kv // world, problem.is_short) == 1


def test_the_simulation_prints_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    simulate.main(["--seqlen", "65536"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["GPUs", *(str(2**power) for power in range(1, 11))]


def test_layouts_of_other_lengths_are_seen() -> None:
    assert Layout("balanced", (5, 4)).expected == (5, 4)
    assert Layout("balanced", (9, 0)).expected == (5, 4)


def test_rows_have_the_times_of_every_rank() -> None:
    case = suites.load(context_parallel.SUITE).cases[0]
    fields = {"impl": "microsdpa", "variant": "auto", "mode": "eager", "inputs": "bfloat16", "case": "2 GPUs"}
    ok = [([5.0, 7.0, 6.0], "ok", ""), ([6.0, 6.0, 8.0], "ok", "")]
    row = context_parallel.row_of_ranks(case, fields, ok)
    assert row["metrics"] == {"rank_0_us": 6.0, "rank_1_us": 6.0, "gpus": 2.0}
    assert row["samples_us"] == [6.0, 7.0, 8.0]
    failed = context_parallel.row_of_ranks(case, fields, [ok[0], ([], "unavailable", "no such backend")])
    assert failed["reason"] == "rank 1: no such backend"
    results.validate(results.make(context_parallel.SUITE, "test", [row, failed]), "made here")


def test_the_suite_asks_for_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert "torchrun" in context_parallel.absence()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not context_parallel.absence()
    assert not context_parallel.is_first()
