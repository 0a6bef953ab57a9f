"""Which tiles hopper/throughput takes, when impl="auto" takes it, and which problems it refuses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from microsdpa.jit.source import KERNELS_DIR
from microsdpa.kernels import KernelSpec, Rejection
from microsdpa.kernels.chip import REGISTERS_PER_SM, chip_of
from microsdpa.kernels.hopper.throughput import spec as tiles
from microsdpa.kernels.problem import Causal, MaskKind, Problem
from microsdpa.kernels.select import select
from microsdpa.kernels.spec import TileLists

LONG = Problem(4, 32, 32, 4096, 4096, 64, "float16")


def named(head_dim: int, block_m: int) -> tiles.Tiles:
    return next(t for t in tiles.CANDIDATES[head_dim] if t.block_m == block_m)


@pytest.mark.parametrize("head_dim", tiles.CANDIDATES)
def test_every_candidate_fits_the_chip(head_dim: int) -> None:
    chip = chip_of("sm_90a")
    for candidate in tiles.CANDIDATES[head_dim]:
        spec = tiles.specification(replace(LONG, head_dim=head_dim), candidate)
        arguments = dict(spec.template_args)
        assert spec.shared_bytes <= chip.shared_per_cta
        # One CTA an SM; with 32 columns it is the registers that leave no room for a second one.
        assert head_dim == 32 or spec.shared_bytes > chip.shared_per_cta // 2
        assert int(arguments["STAGES"]) >= 2
        assert spec.threads <= REGISTERS_PER_SM // 96
        assert spec.block_m == 64 * int(arguments["CONSUMERS"])
        # What a causal mask lets the first consumer skip stays in the rings.
        assert (spec.block_m - 64 + candidate.block_n - 1) // candidate.block_n < int(arguments["STAGES"])


@pytest.mark.parametrize(("head_dim", "padded"), [(8, 32), (40, 48), (72, 80), (104, 112), (136, 160), (256, 256)])
def test_head_dimensions_are_padded_to_the_next_kernel(head_dim: int, padded: int) -> None:
    spec = tiles.throughput(replace(LONG, head_dim=head_dim))
    assert isinstance(spec, KernelSpec)
    assert dict(spec.template_args)["HEAD_DIM"] == str(padded)


def test_a_narrow_box_of_each_tensor_has_the_last_columns_of_80() -> None:
    spec = tiles.throughput(replace(LONG, head_dim=72))
    assert isinstance(spec, KernelSpec)
    assert [(m.tensor, m.columns, m.swizzle) for m in spec.tensor_maps] == [
        (name, *box) for box in ((64, 128), (16, 32)) for name in ("query", "key", "value", "out")
    ]
    added = replace(LONG, head_dim=72, mask=MaskKind("float16", bulk=True))
    spec = tiles.throughput(added)
    assert isinstance(spec, KernelSpec)
    assert dict(spec.template_args)["HEAD_DIM"] == "96"  # a mask of numbers takes a map too


@pytest.mark.parametrize(
    ("change", "block_m"),
    [
        ({"seqlen_q": 2705, "seqlen_k": 1017, "batch": 5, "heads": 16, "heads_kv": 16}, 192),
        ({"seqlen_q": 1024, "seqlen_k": 1024, "batch": 2, "heads": 16, "heads_kv": 16}, 128),
    ],
)
def test_choices_at_80(change: dict[str, int], block_m: int) -> None:
    assert tiles.choose(replace(LONG, head_dim=80, **change)) == named(80, block_m)  # type: ignore[arg-type]


def test_tiles_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ValueError, match="expected some that fit 232448 bytes with head_dim 256"):
        tiles.specification(replace(LONG, head_dim=256), named(64, 192))


@pytest.mark.parametrize(
    ("change", "block_m"),
    [
        ({"batch": 32, "seqlen_q": 512, "seqlen_k": 512}, 256),
        ({"batch": 16, "seqlen_q": 1024, "seqlen_k": 1024}, 256),
        ({"batch": 1, "seqlen_q": 16384, "seqlen_k": 16384}, 192),
        ({"batch": 8, "seqlen_q": 2048, "seqlen_k": 2048}, 192),
        ({"batch": 8, "seqlen_q": 2048, "seqlen_k": 2048, "causal": "upper_left"}, 256),
        ({"batch": 32, "seqlen_q": 512, "seqlen_k": 512, "causal": "upper_left"}, 256),
        ({"batch": 1, "heads": 16, "heads_kv": 16, "seqlen_q": 1024, "seqlen_k": 1024}, 128),
    ],
)
def test_choices(change: dict[str, int], block_m: int) -> None:
    problem = replace(LONG, **change)  # type: ignore[arg-type]
    assert tiles.choose(problem) == named(64, block_m)


@pytest.mark.parametrize(
    ("change", "rounds"),
    [
        ({}, 20 + 2 * (0.6 + 0.4 / 3)),  # 20 rounds of whole tiles and 48 more, 128 of 64 rows: 84, then 44
        ({"batch": 2}, 11),  # 10 and 24 more, beside which all 64 of 64 rows go
        ({"batch": 8, "seqlen_q": 2048}, 19 + 3 * (0.6 + 0.8 / 3)),  # 19 and 52 more, 256 of 128 rows: 80, 132, 44
        ({"batch": 2, "seqlen_q": 8022}, 21),  # no consumer is idle in the last tiles
        ({"batch": 1, "seqlen_q": 100}, 1),
    ],
)
def test_last_tiles_of_heads_fill_the_last_rounds(change: dict[str, int], rounds: float) -> None:
    problem = replace(LONG, **change)  # type: ignore[arg-type]
    sms, heads = chip_of(problem.target).sms, problem.batch * problem.heads
    found = tiles.rounds(sms, heads, problem.seqlen_q, problem.causal is not None, named(64, 192))
    assert found == pytest.approx(rounds)


def test_the_grid_is_the_chip() -> None:
    assert select(LONG).spec.grid(LONG) == (chip_of("sm_90a").sms, 1, 1)


@pytest.mark.parametrize("head_dim", tiles.CANDIDATES)
def test_auto_takes_it_where_it_is_faster(head_dim: int) -> None:
    problem = replace(LONG, head_dim=head_dim)
    selection = select(problem)
    assert selection.spec.name == "hopper/throughput"
    if head_dim in (64, 128):
        assert selection.reasons[0] == (
            *("hopper/latency", "its tiles of 64 queries are more than the SMs: hopper/throughput is faster"),
        )
    small = replace(problem, batch=1, heads=8, heads_kv=8, seqlen_q=512, seqlen_k=512)
    assert select(small).spec.name == ("hopper/latency" if head_dim <= 128 else "hopper/throughput")
    assert select(small, "hopper/throughput").spec.name == "hopper/throughput"
    decoding = replace(problem, seqlen_q=1)
    assert select(decoding).spec.name == "ampere/mma"
    few_long = replace(problem, batch=1, heads=8, heads_kv=8, seqlen_q=64, seqlen_k=4096)
    kernels = dict.fromkeys((80, 112), "hopper/throughput")
    assert select(few_long).spec.name == kernels.get(head_dim, "ampere/mma")


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "head_dim", "causal"),
    [(1, 17, 1024, 64, None), (1, 32, 512, 128, None), (2, 32, 512, 64, "upper_left")],
)
def test_problems_of_two_rounds_of_small_tiles(
    batch: int, heads: int, seqlen: int, head_dim: int, causal: Causal | None
) -> None:
    problem = Problem(batch, heads, heads, seqlen, seqlen, head_dim, "float16", causal=causal)
    assert select(problem).spec.name == "hopper/throughput"
    few = replace(problem, batch=1, heads=8, heads_kv=8, seqlen_q=512, seqlen_k=512)
    assert select(few).spec.name == "hopper/latency"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": "sm_89"}, "sm_89 has no wgmma"),
        ({"head_dim": 84}, "head_dim 84 is not a multiple of 8 up to 256"),
        ({"alignment": 2}, "not aligned to 16 bytes"),
        ({"batch": 2**30}, "query tiles exceed 536870912"),
    ],
)
def test_refusals_say_why(change: dict[str, object], reason: str) -> None:
    found = tiles.throughput(replace(LONG, **change))  # type: ignore[arg-type]
    assert isinstance(found, Rejection)
    assert reason in found.reason
    assert found.nearest
    assert isinstance(tiles.throughput(LONG), KernelSpec)


def test_the_kernels_that_list_tiles_are_launched_as_they_are_written() -> None:
    text = (KERNELS_DIR / "hopper/throughput/list_tiles.cu").read_text(encoding="utf-8")
    written = {name: int(value) for name, value in re.findall(r"\b(MARK_WARPS|MARK_TILES) = (\d+)", text)}
    assert written == {"MARK_WARPS": tiles.MARK_THREADS // 32, "MARK_TILES": TileLists.MARKED}


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "launches"),
    [(64, 384, 1), (64, 385, 2), (64, 2048, 2), (64 * 128, 2048, 1), (64 * 128, 2049, 2)],
)
def test_a_mask_is_read_ahead_of_its_lists_where_they_are_few_or_long(
    seqlen_q: int, seqlen_k: int, launches: int
) -> None:
    problem = replace(LONG, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=128)
    problem = replace(problem, mask=MaskKind("bool", per_batch=True, per_query=True, bulk=True))
    spec = tiles.specification(problem, tiles.CANDIDATES[128][0])
    assert spec.tile_lists is not None
    assert spec.tile_lists.block_n == 128
    assert len(spec.stages) == 1 + launches


DIVIDED = Problem(1, 4, 4, 2048, 2048, 128, "float16", causal="lower_right")
"""One tile of 128 queries for every other SM."""


@pytest.mark.parametrize(
    ("change", "ctas"),
    [
        ({}, 2),
        ({"heads": 8, "heads_kv": 8}, 2),  # a long and a short tile of queries for each pair of CTAs
        ({"heads": 8, "heads_kv": 8, "causal": None}, 1),  # two rounds with half of the keys take as long as one
        ({"heads": 1, "heads_kv": 1}, 4),
        ({"heads": 10, "heads_kv": 10, "seqlen_q": 282, "head_dim": 160}, 4),
        ({"heads": 2, "heads_kv": 2, "seqlen_q": 400, "seqlen_k": 6000, "head_dim": 256}, 8),
        ({"heads": 16, "heads_kv": 16}, 1),
        ({"dropout": True}, 1),
        ({"mask": MaskKind(left=True)}, 1),
    ],
    ids=str,
)
def test_ctas_share_the_keys_of_few_query_tiles(change: dict[str, object], ctas: int) -> None:
    problem = replace(DIVIDED, **change)  # type: ignore[arg-type]
    spec = tiles.throughput(problem)
    assert isinstance(spec, KernelSpec)
    assert (spec.cluster, spec.split) == (ctas, ctas)
    assert spec.grid(problem)[0] % ctas == 0
    if ctas > 1:
        assert select(problem).spec is spec
        # With two tiles of 64 queries, or one, for every SM it is hopper/latency that the division is faster than.
        named = problem.head_dim <= 128 and problem.heads * problem.seqlen_q <= 64 * chip_of("sm_90a").sms
        assert not named or "whose CTAs share them" in str(select(problem).reasons)


@pytest.mark.parametrize("head_dim", [8, 32, 40, 48, 64, 72, 80, 96, 112, 128, 136, 160, 192, 200, 256])
def test_tiles_whose_keys_are_shared_fit_the_chip(head_dim: int) -> None:
    problem = replace(DIVIDED, head_dim=head_dim)
    found = tiles.dividing(problem)
    assert [one.ctas for one in found] == [2, 4, 8]
    for one in found:
        spec = tiles.specification(problem, one)
        assert spec.shared_bytes <= chip_of("sm_90a").shared_per_cta
        columns = int(dict(spec.template_args)["HEAD_DIM"])
        assert columns >= head_dim
        assert columns // 8 % one.ctas == 0
