"""hopper/varlen in the emulator: any lengths, pages of many sizes, shared keys, any masks, against FP64."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa.emulate.run import Schedule, scheduled
from microsdpa.evidence.fuzz_varlen import VarlenCall
from microsdpa.evidence.mutate_varlen import PackedCase, of, wrong
from microsdpa.jit.source import KERNELS_DIR
from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.hopper.varlen import spec
from microsdpa.kernels.problem import MaskKind, Problem
from varlen_space import Form, assert_right, call, in_one_cache, offsets, packed

BF16, FP16 = torch.bfloat16, torch.float16
FORMS = {
    "prompts": Form(FP16, 64, group=2, queries=70, keys="packed"),
    "prompts, no mask": Form(BF16, 64, queries=250, keys="packed", causal=False),
    "prompts, D = 128": Form(BF16, 128, group=4, queries=40, keys="packed"),
    "prompts, D = 96": Form(FP16, 96, group=2, queries=70, keys="packed"),
    "prompts, D = 192": Form(FP16, 192, queries=70, keys="dense"),
    "prompts, D = 192, V of 128": Form(BF16, 192, queries=70, keys="packed", value_dim=128),
    "prompts, D = 96, V of 40": Form(FP16, 96, group=2, queries=70, keys="dense", value_dim=40),
    "prompts, D = 256": Form(BF16, 256, queries=70, keys="dense"),
    "prompts, D = 8": Form(FP16, 8, queries=70, keys="packed"),
    "prompts, D = 40": Form(BF16, 40, group=2, queries=70, keys="packed", causal=False),
    "prompts, D = 72": Form(FP16, 72, queries=140, keys="packed"),
    "prompts, D = 80": Form(BF16, 80, group=2, queries=70, keys="dense", causal=False),
    "prompts, D = 104, V of 72": Form(BF16, 104, queries=70, keys="packed", value_dim=72),
    "prompts, D = 136": Form(FP16, 136, queries=70, keys="dense"),
    "one key head for 64, D = 48": Form(FP16, 48, group=64, keys="dense"),
    "one key head for 64": Form(FP16, 64, group=64, keys="dense"),
    "one key head for 64, D = 128": Form(BF16, 128, group=64, keys="dense"),
    "one key head for three": Form(BF16, 128, group=3, queries=33, keys="dense"),
    "one key head for 19, D = 80": Form(FP16, 80, group=19, queries=12, keys="packed"),  # 114 rows of 128
    "queries by cp.async": Form(BF16, 128, group=45, queries=6, keys="packed"),  # two whole ones are 90 rows of 128
    "queries by cp.async, D = 80": Form(FP16, 80, group=37, queries=5, keys="dense"),
    "causal window": Form(BF16, 64, 2, 70, "dense", True, (True, False), sinks=BF16),
    "soft cap": Form(BF16, 128, 4, 70, "dense", softcap=True),
    "all masks": Form(BF16, 64, 2, 70, "dense", False, (True, True), True, True, torch.float32),
}


def emulated(given: dict[str, Any], seed: int = 0, backwards: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    query, value = given["query"], given["value"]
    out = query.new_full((*query.shape[:-1], value.shape[-1]), torch.nan)
    with scheduled(Schedule(seed, late=seed % 2 == 0, backwards=backwards)):
        found = microsdpa.sdpa_varlen(**given, out=out, return_lse=True, impl="emulate:hopper/varlen")
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_any_call(name: str, seed: int) -> None:
    given = call(FORMS[name], seed)
    assert_right(*emulated(given, seed), given)


def in_pages(given: dict[str, Any], page: int, rest: float = torch.nan) -> dict[str, Any]:
    """A call of dense keys with these in shuffled pages; `rest` is what memory holds that no sequence uses."""
    key, lengths = given["key"], given["lengths"].tolist()
    batch, longest, heads_kv, _ = key.shape
    width = -(-longest // page) + 1
    pages = batch * width + 3
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(page))[: batch * width].view(batch, width)
    found = {}
    for name in ("key", "value"):
        cache = torch.full((pages, page, heads_kv, given[name].shape[-1]), rest, dtype=key.dtype)
        for b, length in enumerate(lengths):
            place = torch.arange(length)
            cache[table[b, place // page], place % page] = given[name][b, :length]
        found[name] = cache
    for b, length in enumerate(lengths):
        table[b, -(-length // page) :] = -1
    return given | found | {"page_table": table.int()}


PAGED = {
    8: Form(BF16, 128, 4, 40, "dense"),
    16: Form(FP16, 64, 64, 1, "dense"),
    32: Form(BF16, 64, 2, 70, "dense", True, (True, False)),
    64: Form(FP16, 96, 2, 70, "dense"),
    128: Form(BF16, 112, 2, 70, "dense"),
    192: Form(BF16, 256, 2, 70, "dense"),
}


@pytest.mark.parametrize("page", [64, 128, 256])
@pytest.mark.parametrize("heads_first", [False, True])
def test_keys_and_values_are_views_of_one_tensor_of_large_pages(page: int, heads_first: bool) -> None:
    given = in_one_cache(call(Form(BF16, 128, 4, 40, "dense"), page), page, heads_first)
    assert_right(*emulated(given, page), given)


@pytest.mark.parametrize("page", PAGED)
@pytest.mark.parametrize("seed", range(2))
def test_pages_hold_anything_where_no_sequence_has_keys(page: int, seed: int) -> None:
    given = call(PAGED[page], seed + 10)
    assert_right(*emulated(in_pages(given, page), seed), given)


def test_packed_keys_of_others_may_be_anything() -> None:
    generator, ends = torch.Generator().manual_seed(1), offsets([100, 30, 90])
    query, key, value = (torch.randn(220, heads, 64, generator=generator).to(BF16) for heads in (4, 2, 2))
    given = {"query": query, "key": key, "value": value, "query_offsets": ends, "key_offsets": ends, "causal": True}
    expected, expected_lse = emulated(given)
    wild = given | {"key": key.clone(), "value": value.clone()}
    wild["key"][100:130], wild["value"][100:130] = torch.nan, torch.inf
    out, lse = emulated(wild)
    for part in (slice(0, 100), slice(130, 220)):
        assert torch.equal(out[part], expected[part])
        assert torch.equal(lse[:, part], expected_lse[:, part])


def dense(
    batch: int,
    queries: int,
    heads: tuple[int, int],
    head_dim: int,
    lengths: list[int],
    value_dim: int = 0,
    **masks: Any,
) -> dict[str, Any]:
    generator, cached = torch.Generator().manual_seed(queries), (batch, max(lengths), heads[1])
    query, *cache = (
        torch.randn(shape, generator=generator).to(BF16)
        for shape in ((batch, queries, heads[0], head_dim), (*cached, head_dim), (*cached, value_dim or head_dim))
    )
    inputs = dict(zip(("query", "key", "value"), (query, *cache), strict=True))
    return {**inputs, "lengths": torch.tensor(lengths, dtype=torch.int32), "causal": True, **masks}


SHARED = {
    "few queries": dense(1, 8, (16, 2), 64, [3000]),
    "one key head for 64": dense(3, 1, (64, 1), 128, [2500, 0, 700]),
    "one sequence of many CTAs": dense(1, 1, (64, 1), 64, [6000]),
    "a window": dense(2, 70, (2, 2), 64, [2500, 1000], window=(1000, -1)),
    "sinks": dense(2, 130, (2, 2), 128, [1500, 1000], sinks=torch.tensor([0.5, 3.0])),
    "ALiBi": dense(2, 70, (4, 2), 64, [1500, 1000], alibi_slopes=torch.tensor([0.1, 0.5, 1.0, 0.02])),
}


@pytest.mark.parametrize("name", SHARED)
def test_ctas_share_long_keys_and_give_the_same_bits_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "SHARING", ())  # not in clusters
    given = SHARED[name]
    one = emulated(given, 0)
    assert_right(*one, given)
    for other in (emulated(given, 1), emulated(given, 1, backwards=True)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


CLUSTERS = [(2, False), (4, False), (16, False), (4, True), (8, True)]
OF_CLUSTERS = {
    "D = 128": dense(3, 1, (64, 1), 128, [900, 0, 70]),
    "D = 48": in_pages(dense(2, 1, (64, 1), 48, [700, 1]), 16),
    "D = 72, V of 40": in_pages(dense(2, 1, (80, 2), 72, [300, 650], value_dim=40), 8),
    "several queries": in_pages(dense(2, 15, (8, 2), 128, [800, 9]), 64),
    "no mask": dense(2, 16, (4, 1), 64, [390, 500]) | {"causal": False},
    "window": dense(2, 16, (8, 2), 64, [900, 300], window=(200, -1), sinks=torch.arange(8.0)),
    "all masks": in_pages(
        dense(1, 20, (4, 2), 64, [600], window=(300, 2), softcap=5.0, alibi_slopes=torch.full((4,), 0.2)), 16
    )
    | {"causal": False},
}


def in_clusters(monkeypatch: pytest.MonkeyPatch, cluster: int, wide: bool) -> None:
    monkeypatch.setattr(spec, "SHARING", (spec.Sharing(1000, cluster, 10**6, wide),))


@pytest.mark.parametrize(("cluster", "wide"), CLUSTERS)
@pytest.mark.parametrize("name", OF_CLUSTERS)
def test_clusters_share_keys(name: str, cluster: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    in_clusters(monkeypatch, cluster, wide)
    given = OF_CLUSTERS[name]
    found = microsdpa.explain_varlen(**given, impl="emulate:hopper/varlen").spec
    assert found is not None
    assert (found.cluster, dict(found.template_args)["BLOCK_N"]) == (cluster, "128" if wide else "64")
    one = emulated(given, 0)
    assert_right(*one, given)
    for other in (emulated(given, 1), emulated(given, 1, backwards=True)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


COUNTS = {
    "as the hint says": [15, 0, 1, 9],
    "more than the hint says": [1, 0, 40, 3, 17],
    "of more sequences than a warp has lanes": [1] * 33 + [33, 0, 5],
}


@pytest.mark.parametrize(("cluster", "wide"), [(2, False), (4, True)])
@pytest.mark.parametrize("name", COUNTS)
def test_clusters_have_packed_queries(name: str, cluster: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint that is wrong costs time alone: clusters behind those of first tiles have the others."""
    in_clusters(monkeypatch, cluster, wide)
    counts = COUNTS[name]
    lengths = [(137 * i + 90) % 350 for i in range(len(counts))]
    sinks = torch.arange(4.0)
    given = packed(in_pages(dense(len(counts), max(counts), (4, 1), 64, lengths, sinks=sinks), 16, 0.0), counts)
    given["max_queries"] = 15
    spec = microsdpa.explain_varlen(**given, impl="emulate:hopper/varlen").spec
    assert spec is not None
    assert spec.cluster == cluster
    assert ("PACKED", "true") in spec.template_args
    one = emulated(given)
    assert_right(*one, given)
    assert all(torch.equal(a, b) for a, b in zip(one, emulated(given, 1, backwards=True), strict=True))


def test_a_cluster_of_a_sequence_without_queries_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    in_clusters(monkeypatch, 4, False)
    given = packed(in_pages(dense(1, 9, (4, 1), 64, [300]), 16, 0.0), [9]) | {"query_offsets": offsets([0])}
    out, _ = emulated(given)  # rows that are no sequence's
    assert out.isnan().all()


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_a_page_that_the_cache_lacks_gives_nan_in_clusters(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_clusters(monkeypatch, 4, False)
    given = in_pages(dense(2, 1, (64, 1), 64, [500, 300]), 16, rest=0.0)
    expected = emulated(given)
    assert_right(*expected, given)
    given["page_table"][0, 2] = wrong
    out, lse = emulated(given)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert torch.equal(out[1], expected[0][1])


@pytest.mark.parametrize(
    ("batch", "heads_kv", "keys", "tiles"),
    [
        *((1, 4, 16384, (16, 64)), (1, 4, 16385, (1, 64)), (1, 5, 16384, (8, 128)), (12, 1, 2, (8, 128))),
        *((13, 1, 8192, (4, 128)), (28, 1, 8193, (1, 64)), (29, 1, 8192, (4, 64)), (7, 8, 8192, (4, 64))),
        *((57, 1, 4096, (2, 64)), (128, 1, 4096, (2, 64)), (128, 1, 4097, (1, 64)), (129, 1, 16, (1, 64))),
    ],
)
def test_how_many_ctas_share_a_sequence(batch: int, heads_kv: int, keys: int, tiles: tuple[int, int]) -> None:
    problem = Problem(batch, 64 * heads_kv, heads_kv, 1, keys, 128, "bfloat16", target="sm_90a", varlen=16)
    found = spec.tiles_of(problem)
    assert (found.cluster, found.block_n) == tiles
    assert batch * heads_kv * found.cluster <= found.resident * chip_of("sm_90a").sms or found.cluster == 1
    assert spec.tiles_of(replace(problem, packed_queries=True)) == found
    for more in ({"seqlen_q": 2}, {"head_dim": 136}):
        assert spec.tiles_of(replace(problem, **more)).cluster == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, 10**6, -(2**31)])
def test_a_page_that_the_cache_lacks_gives_nan_and_is_not_read(wrong: int) -> None:
    given = in_pages(dense(2, 70, (2, 2), 64, [100, 100]), 16, rest=0.0)
    given["page_table"][0, 2] = wrong
    out, lse = emulated(given)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    right = {
        name: tensor[1:] if name in ("query", "lengths", "page_table") else tensor for name, tensor in given.items()
    }
    assert_right(out[1:], lse[1:], right)


def test_pages_before_a_window_are_never_looked_at() -> None:
    given = in_pages(dense(1, 40, (2, 2), 64, [400], window=(50, -1)), 16)
    expected = emulated(given)
    given["page_table"][0, :18] = -1
    assert all(torch.equal(a, b) for a, b in zip(emulated(given), expected, strict=True))
    assert expected[0].isfinite().all()


def costs(directory: Path, old: str = "", new: str = "") -> Path:
    """A copy of the sources where CTAs share few keys in parts, and whose scheduler has one more replacement."""
    shutil.copytree(KERNELS_DIR, directory / "cuda")
    scheduler = directory / "cuda/hopper/varlen/scheduler.cuh"
    text = scheduler.read_text()
    replaced = {"SHARING_COSTS = 3, LEAST_SHARE = 4, ": "SHARING_COSTS = 0, LEAST_SHARE = 1, "}
    replaced |= {"APART = 4;": "APART = 1;", "L2_BYTES = 32 << 20": "L2_BYTES = 0"}
    for before, after in (replaced | ({old: new} if old else {})).items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    scheduler.write_text(text)
    return directory / "cuda"


ROWS = VarlenCall(queries=(100,), keys=(760,), storage="dense", causal=True, group=2, head_dim=128)
TWO = replace(ROWS, queries=(100, 100))
MANY = replace(ROWS, queries=(1,) * 40, keys=(*range(480, 485), 60, *range(474, 508)), group=64, head_dim=136)
IN_PARTS = {
    "two of three parts a CTA": PackedCase(ROWS, ctas=3),
    "three of two parts a CTA": PackedCase(replace(TWO, keys=(1280, 1270), sinks="inputs"), ctas=3),
    "others have fewer parts": PackedCase(replace(TWO, keys=(1400, 500)), ctas=12),
    "of more sequences than a warp has lanes": PackedCase(MANY, ctas=27),
    "more than are added at once": PackedCase(replace(ROWS, queries=(60,), keys=(2430,)), ctas=19),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_ctas_share_keys_in_parts(name: str, tmp_path: Path) -> None:
    """A replacement in the part of the scheduler that does this shows that it is what runs."""
    case = IN_PARTS[name]
    (found,) = of(case, "hopper/varlen")
    for schedule in (Schedule(0), Schedule(1, late=True, backwards=True)):
        assert wrong(case, *found, costs(tmp_path / f"{schedule.backwards}"), schedule) == ""
    broken = costs(tmp_path / "broken", "- first), segment.first_tile += first;", "- first), segment.first_tile += 0;")
    assert wrong(case, *found, broken, Schedule(0)) != ""


def test_a_cta_goes_on_behind_a_part_without_keys(tmp_path: Path) -> None:
    case = IN_PARTS["of more sequences than a warp has lanes"]
    (found,) = of(case, "hopper/varlen")
    ends = costs(tmp_path, "if (segment.tiles > 0) return segment;", "if (segment.tiles >= 0) return segment;")
    assert wrong(case, *found, ends, Schedule(0)) != ""


FOUR = {
    "one tile of rows": dense(2, 230, (2, 2), 64, [300, 64]),
    "two tiles": in_pages(dense(1, 200, (4, 2), 40, [900], sinks=torch.tensor([0.5, 3.0, -1.0, 9.0])), 32),
    "a window": in_pages(dense(2, 100, (4, 2), 32, [500, 90], window=(150, -1)), 16),
}


@pytest.mark.parametrize("name", FOUR)
def test_four_warpgroups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "FEWEST_LARGE", 1)
    given = FOUR[name]
    found = microsdpa.explain_varlen(**given, impl="emulate:hopper/varlen").spec
    assert found is not None
    assert found.block_m == spec.LARGE.block_m
    one = emulated(given, 0)
    assert_right(*one, given)
    assert all(torch.equal(a, b) for a, b in zip(one, emulated(given, 1, backwards=True), strict=True))


@pytest.mark.parametrize(
    ("rows", "batch", "keys", "consumers"),
    [
        *((192, 64, 300, 3), (193, 64, 300, 4), (256, 64, 300, 4), (257, 64, 300, 3), (384, 64, 300, 3)),
        *((385, 64, 300, 4), (512, 64, 300, 4), (513, 64, 300, 3), (1000, 64, 300, 3)),
        *((256, 63, 4095, 3), (256, 1, 4096, 4)),
    ],
)
def test_which_rows_have_tiles_of_four_warpgroups(rows: int, batch: int, keys: int, consumers: int) -> None:
    problem = Problem(batch, 1, 1, rows, keys, 64, "bfloat16", target="sm_90a", varlen=16)
    assert spec.tiles_of(problem).consumers == consumers
    assert spec.tiles_of(replace(problem, head_dim=80)).consumers == 2
    assert spec.tiles_of(replace(problem, mask=MaskKind(softcap=True))).consumers == 3
