from __future__ import annotations

from dataclasses import replace

import pytest

from microsdpa.kernels.ampere.mma import tiles
from microsdpa.kernels.chip import CHIPS, chip_of
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

MISSION = Problem(1, 8, 8, 512, 512, 64, "float16", target="sm_90a")
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")
PROBLEMS = [
    replace(MISSION, batch=b, heads=h, heads_kv=k, seqlen_q=q, seqlen_k=s, head_dim=d, causal=causal)  # type: ignore[arg-type]
    for b, h, k, q, s in (
        *((1, 2, 2, 64, 64), (1, 8, 8, 512, 512), (1, 32, 8, 1, 8192), (4, 32, 32, 4096, 4096)),
        *((1, 8, 8, 16, 64), (2, 8, 2, 7, 300), (1, 4, 4, 64, 4096), (64, 32, 8, 1, 64)),
    )
    for d in (16, 48, 64, 80, 128, 176, 256)
    for causal in (None, "upper_left")
]


@pytest.mark.parametrize("target", TARGETS)
def test_every_choice_is_legal(target: str) -> None:
    for problem in PROBLEMS:
        here = replace(problem, target=target)
        tiling = tiles.choose(here)
        assert tiling in tiles.candidates(here)
        assert tiles.illegal(here, tiling) == ""
        spec = select(here, "ampere/mma").spec
        assert spec.shared_bytes <= chip_of(target).shared_per_cta
        assert spec.grid(here)[0] == tiles.ctas_of(here, tiling)


@pytest.mark.parametrize(
    ("change", "tiling"),
    [
        ({}, tiles.TINY_512),
        ({"heads": 2, "heads_kv": 2, "seqlen_q": 64, "seqlen_k": 64}, tiles.TINY_64),
        ({"heads": 4, "heads_kv": 4, "seqlen_q": 128, "seqlen_k": 128}, tiles.TINY_128),
        ({"batch": 32, "heads": 32, "heads_kv": 32}, tiles.STREAM_DEEP),
        ({"heads": 32, "heads_kv": 32, "seqlen_q": 16384, "seqlen_k": 16384}, tiles.STREAM_DEEP),
        ({"heads": 16, "heads_kv": 16, "seqlen_q": 16384, "seqlen_k": 16384, "head_dim": 128}, tiles.STREAM_WIDE),
        ({"heads": 16, "heads_kv": 16, "seqlen_q": 16384, "seqlen_k": 2048, "head_dim": 128}, tiles.STREAM_LARGE_STEP),
        ({"heads": 4, "heads_kv": 4, "seqlen_q": 16384, "seqlen_k": 16384, "head_dim": 128}, tiles.STREAM_LARGE_STEP),
        ({"heads": 16, "heads_kv": 16, "seqlen_q": 16384, "seqlen_k": 16384, "head_dim": 96}, tiles.STREAM_SMALL_STEP),
    ],
)
def test_measured_choices(change: dict[str, int], tiling: tiles.Tiling) -> None:
    assert tiles.measured(replace(MISSION, **change)) == tiling  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "late"),
    [
        ({}, 132),
        ({"head_dim": 64, "heads": 32, "heads_kv": 32}, 132),
        ({"batch": 16, "seqlen_q": 1024, "seqlen_k": 1024}, 132),
        ({"batch": 8, "seqlen_q": 2048, "seqlen_k": 2048}, 0),
        ({"causal": "upper_left"}, 0),
        ({"batch": 20}, 0),
        ({"target": "sm_89"}, 0),
    ],
)
def test_ctas_that_begin_late(change: dict[str, object], late: int) -> None:
    short = replace(MISSION, batch=32, heads=16, heads_kv=16, head_dim=128)
    problem = replace(short, **change)  # type: ignore[arg-type]
    arguments = dict(select(problem, "ampere/mma").spec.template_args)
    assert arguments["LATE"] == str(late)


def test_other_chips_have_no_measured_choices() -> None:
    for target in ("sm_80", "sm_89", "sm_120"):
        assert tiles.measured(replace(MISSION, target=target)) is None


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_problems_that_fill_another_chip_stream_too(target: str) -> None:
    filling = replace(MISSION, batch=4, heads=32, heads_kv=32, seqlen_q=4096, seqlen_k=4096, target=target)
    assert tiles.choose(filling) == tiles.STREAM_LEAN
    assert tiles.choose(replace(filling, head_dim=128, causal="upper_left")) == tiles.STREAM_LEAN_128


def test_illegal_tilings_say_why() -> None:
    assert "99" in tiles.illegal(replace(MISSION, target="sm_89"), tiles.TINY_512).replace("101376", "99")
    assert "513 keys do not fit" in tiles.illegal(replace(MISSION, seqlen_k=513), tiles.TINY_512)
    packed = replace(MISSION, heads=32, heads_kv=8, seqlen_q=1)
    assert "heads are packed" in tiles.illegal(packed, tiles.STREAM)


@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
def test_long_keys_are_split_among_ctas_where_few_queries_leave_the_chip_empty(target: str) -> None:
    problem = replace(MISSION, heads=32, heads_kv=8, seqlen_q=1, seqlen_k=8192, head_dim=128, target=target)
    spec = select(problem, "ampere/mma").spec
    assert spec.split > 1
    assert spec.pack == 4
    assert [stage.source for stage in spec.stages] == ["ampere/mma/kernel.cu", "ampere/combine/kernel.cu"]
    assert spec.workspace_bytes(problem) == spec.split * 32 * (128 * 4 + 8)
    assert tiles.choose(replace(problem, seqlen_k=64)).split == 1
    assert not any(tiling.clustered for tiling in tiles.candidates(problem) if not tiles.illegal(problem, tiling))


@pytest.mark.parametrize(
    ("change", "split", "clustered", "base"),
    [
        ({"seqlen_k": 512}, 4, True, tiles.DECODE_DEEP),
        ({"seqlen_k": 1024}, 8, True, tiles.DECODE_DEEP),
        ({"seqlen_k": 4096}, 8, True, tiles.DECODE_WIDE),
        ({"seqlen_k": 16384}, 16, False, tiles.DECODE_WIDE),  # a second kernel costs less than half of the SMs
        ({"seqlen_k": 1024, "batch": 4}, 2, True, tiles.DECODE_WIDE),  # 32 clusters of four do not fit
        ({"seqlen_k": 4096, "seqlen_q": 8}, 8, False, tiles.DECODE_WIDE),
        ({"seqlen_k": 2048, "batch": 32}, 1, False, tiles.DECODE_WIDE),
        ({"seqlen_k": 800, "batch": 64}, 1, False, tiles.DECODE_WIDE),
        ({"seqlen_k": 512, "batch": 64}, 1, False, tiles.DECODE_LEAN),  # 0.98 of DECODE_DEEP's time in the mean
        ({"seqlen_k": 256, "batch": 64}, 1, False, tiles.DECODE_LEAN),  # 26.1 us on an H100, DECODE_DEEP 28.4
        ({"seqlen_k": 128, "batch": 64}, 1, False, tiles.TINY_128),  # 14.3 and 19.1
        ({"seqlen_k": 64, "batch": 64}, 1, False, tiles.TINY_64),  # 8.2 and 14.8
        ({"seqlen_k": 32, "batch": 200, "heads": 8}, 1, False, tiles.TINY_64),  # 12.9 and 35.9
        ({"seqlen_k": 1500, "batch": 24}, 1, False, tiles.DECODE_LEAN),  # 50.9 us on an H100, DECODE_WIDE 55.3
        ({"seqlen_k": 1500, "batch": 24, "head_dim": 64}, 1, False, tiles.DECODE_LEAN_DEEP),  # 27.0 and 29.9
        ({"seqlen_k": 600, "batch": 24, "head_dim": 64}, 1, False, tiles.DECODE_LEAN_DEEP),  # DECODE_LEAN 5% more
        ({"seqlen_k": 1500, "batch": 25}, 1, False, tiles.DECODE_WIDE),  # over one and a half CTAs an SM
        ({"seqlen_k": 600, "batch": 32}, 1, False, tiles.DECODE_LEAN_DEEP),  # 28.6 us on an H100, DECODE_LEAN 32.3
        ({"seqlen_k": 600, "batch": 32, "head_dim": 80}, 1, False, tiles.DECODE_LEAN),  # 19.0 and 21.9
        ({"seqlen_k": 729, "batch": 32, "head_dim": 72}, 1, False, tiles.DECODE_LEAN),  # 18.4 on an H200, _WIDE 19.8
        ({"seqlen_k": 400, "batch": 40, "head_dim": 72}, 1, False, tiles.DECODE_LEAN_DEEP),  # 15.3 and 17.6
        ({"seqlen_k": 729, "batch": 50, "head_dim": 72}, 1, False, tiles.DECODE_LEAN_DEEP),  # 27.8, DECODE_WIDE 32.9
        ({"seqlen_k": 600, "batch": 64, "head_dim": 80}, 1, False, tiles.DECODE_LEAN),
        ({"seqlen_k": 4096, "head_dim": 256}, 8, True, tiles.DECODE_LARGE_HEADS),
    ],
)
def test_decoding_on_an_h200(change: dict[str, int], split: int, clustered: bool, base: tiles.Tiling) -> None:
    decoding = replace(MISSION, heads=32, heads_kv=8, seqlen_q=1, head_dim=128)
    problem = replace(decoding, **change)  # type: ignore[arg-type]
    spec = select(problem).spec
    assert spec.name == "ampere/mma"
    assert tiles.choose(problem) == replace(base, split=split, clustered=clustered)
    assert tiles.choose(problem) in tiles.candidates(problem)
    assert (spec.cluster, len(spec.stages)) == (split if clustered else 1, 2 if split > 1 and not clustered else 1)
    assert spec.workspace_row_bytes == (0 if clustered or split == 1 else split * (4 * problem.head_dim + 8))


def test_few_tiles_of_queries_and_long_keys_on_an_h200() -> None:
    problem = replace(MISSION, heads=16, heads_kv=16, seqlen_q=64, seqlen_k=4096)
    assert select(problem).spec.name == "ampere/mma"
    assert tiles.choose(problem) == replace(tiles.PAIRED, split=8)
    assert tiles.choose(replace(problem, head_dim=256)) == replace(tiles.LARGE_HEADS, split=8)


def test_a_chip_that_is_not_known_is_taken_for_an_older_one() -> None:
    assert chip_of("sm_87") is CHIPS[8, 6]
    assert chip_of("sm_100a") is CHIPS[9, 0]
