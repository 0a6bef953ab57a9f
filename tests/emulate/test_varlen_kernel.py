"""ampere/varlen in the emulator: any lengths, any pages, any masks, against FP64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa.emulate.abi import ARRIVALS
from microsdpa.emulate.run import Schedule, scheduled
from microsdpa.evidence.fuzz_varlen import VarlenCall, check
from microsdpa.execution import choice
from microsdpa.kernels import policy
from microsdpa.kernels.ampere.varlen import spec as kernel
from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import chosen
from microsdpa.kernels.spec import Grid, KernelSpec
from varlen_space import Form, after_appending, appending, assert_right, call, in_one_cache, packed

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
FORMS = {
    "decode": Form(BF16, 64, group=4),
    "decode, D = 72": Form(FP16, 72, causal=False, keys="dense"),
    "decode, D = 256": Form(BF16, 256, group=2),
    "decode, D = 48": Form(FP16, 48, group=2),
    "decode, D = 80": Form(BF16, 80, group=4),
    "few queries, D = 112": Form(FP16, 112, group=2, queries=3, value_dim=80),
    "prompts on a cache, D = 144": Form(BF16, 144, group=2, queries=20),
    "few queries": Form(FP16, 64, group=4, queries=6),
    "one key head for 64": Form(FP16, 64, group=64),
    "prompts": Form(FP16, 64, group=2, queries=70, keys="packed"),
    "prompts on a cache, D = 128": Form(BF16, 128, group=4, queries=40),
    "prompts, D = 80": Form(BF16, 80, queries=40, keys="packed", causal=False),
    "prompts, D = 256": Form(FP16, 256, queries=20, keys="dense"),
    "all masks": Form(BF16, 64, 2, 9, "paged", False, (True, True), True, True, torch.float32),
    "causal window": Form(FP16, 64, 2, 1, "paged", True, (True, False), sinks=FP16),
    "V of fewer columns, decode": Form(BF16, 192, group=4, value_dim=128),
    "V of fewer columns, prompts": Form(FP16, 72, group=2, queries=40, keys="packed", value_dim=40),
    "E4M3, decode": Form(BF16, 64, group=4, cache=E4M3),
    "E4M3, decode, D = 256": Form(FP16, 256, group=2, cache=E4M3, each_token=True),
    "E4M3, decode, D = 80": Form(BF16, 80, causal=False, keys="dense", cache=E4M3),
    "E4M3, pages, D = 80": Form(FP16, 80, group=4, cache=E4M3),
    "INT8, pages, D = 160": Form(FP16, 160, group=2, cache=torch.int8, each_token=True),
    "E4M3, a few queries": Form(FP16, 128, group=4, queries=6, cache=E4M3, each_token=True),
    "E4M3, prompts": Form(BF16, 64, group=2, queries=70, keys="packed", cache=E4M3),
    "INT8, decode": Form(FP16, 128, group=4, cache=torch.int8),
    "INT8, scales of tokens": Form(BF16, 64, group=8, keys="dense", cache=torch.int8, each_token=True),
    "INT8, one key head for 64": Form(FP16, 64, group=64, cache=torch.int8),
    "INT8, prompts on a cache, D = 96": Form(BF16, 96, group=4, queries=40, cache=torch.int8, each_token=True),
    "INT8, all masks": Form(BF16, 64, 2, 9, "paged", False, (True, True), True, True, torch.float32, torch.int8),
}


def emulated(given: dict[str, Any], seed: int = 0, backwards: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    query, value = given["query"], given["value"]
    out = query.new_full((*query.shape[:-1], value.shape[-1]), torch.nan)
    with scheduled(Schedule(seed, late=seed % 2 == 0, backwards=backwards)):
        found = microsdpa.sdpa_varlen(**given, out=out, return_lse=True, impl="emulate")
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_any_call(name: str, seed: int) -> None:
    given = call(FORMS[name], seed)
    assert_right(*emulated(given, seed), given)


def cache(pages: int, page: int = 16, heads_kv: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(pages)
    key, value = (torch.randn(pages, page, heads_kv, 64, generator=generator).to(BF16) for _ in range(2))
    return key, value


def decode(lengths: list[int], table: list[list[int]], pages: int = 200) -> dict[str, Any]:
    """A decoding call of one query a sequence."""
    key, value = cache(pages)
    query = torch.randn(len(lengths), 1, 4, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    integers = {
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "page_table": torch.tensor(table, dtype=torch.int32),
    }
    return {"query": query, "key": key, "value": value, **integers, "causal": True}


def test_the_parts_of_many_ctas_are_combined() -> None:
    given = decode([3000, 0, 17], [[(7 * i) % 200 for i in range(188)]] * 3)
    assert_right(*emulated(given), given)
    one, other = emulated(given, 0), emulated(given, 1)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_pages_past_a_length_are_never_looked_at() -> None:
    given = decode([20, 16], [[3, 4, -7, 10**6], [5, -1, -1, -1]])
    assert_right(*emulated(given), given)


def test_pages_before_a_window_are_never_looked_at() -> None:
    given = decode([200], [[-1] * 8 + [1, 2, 3, 4, 5]]) | {"window": (40, -1)}
    out, lse = emulated(given)
    table = given["page_table"].clamp(min=0)
    assert_right(out, lse, given | {"page_table": table})


@pytest.mark.parametrize("wrong", [-1, 200, 2**31 - 1])
def test_a_page_that_the_cache_lacks_gives_nan_and_is_not_read(wrong: int) -> None:
    given = decode([40, 40], [[1, wrong, 3], [4, 5, 6]])
    out, lse = emulated(given)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    right = {
        name: tensor[1:] if name in ("query", "lengths", "page_table") else tensor for name, tensor in given.items()
    }
    assert_right(out[1:], lse[1:], right)


def test_lengths_and_offsets_are_brought_into_bounds() -> None:
    given = decode([-5, 10**6], [[1, 2], [3, 4]])
    assert_right(*emulated(given), given | {"lengths": torch.tensor([0, 32], dtype=torch.int32)})
    key, value = cache(4)
    packed = {
        "query": torch.ones(3, 1, 64, dtype=BF16),
        "key": key,
        "value": value,
        "lengths": torch.tensor([8, 9]).int(),
    }
    packed |= {"page_table": torch.tensor([[0], [1]]).int(), "causal": False}
    wild = emulated(packed | {"query_offsets": torch.tensor([-4, 1, 99]).int()})
    tame = emulated(packed | {"query_offsets": torch.tensor([0, 1, 3]).int()})
    assert all(torch.equal(a, b) for a, b in zip(wild, tame, strict=True))


def test_rows_of_no_sequence_are_not_written() -> None:
    key, value = cache(4)
    out, _ = emulated(
        {
            "query": torch.ones(6, 1, 64, dtype=BF16),
            "key": key,
            "value": value,
            "query_offsets": torch.tensor([1, 3, 3]).int(),
            "page_table": torch.tensor([[0], [1]]).int(),
        }
    )
    assert out[1:3].isfinite().all()
    assert out[0].isnan().all()
    assert out[3:].isnan().all()


def test_a_sequence_has_the_same_output_wherever_its_pages_lie() -> None:
    given = decode([100], [[0, 1, 2, 3, 4, 5, 6]])
    moved = torch.tensor([[9, 3, 60, 2, 1, 0, 44]])
    key, value = (torch.zeros_like(given[name]) for name in ("key", "value"))
    for cache_, name in ((key, "key"), (value, "value")):
        cache_[moved[0]] = given[name][:7]
    elsewhere = given | {"key": key, "value": value, "page_table": moved.int()}
    assert all(torch.equal(a, b) for a, b in zip(emulated(given), emulated(elsewhere), strict=True))


IN_ONE_CACHE = {
    "decode": Form(BF16, 128, group=4, keys="dense"),
    "a few queries": Form(FP16, 64, group=4, queries=6, keys="dense"),
    "prompts": Form(BF16, 64, group=2, queries=70, keys="dense"),
}


@pytest.mark.parametrize("page", [64, 128, 256])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("name", IN_ONE_CACHE)
def test_keys_and_values_are_views_of_one_tensor_of_large_pages(name: str, heads_first: bool, page: int) -> None:
    given = in_one_cache(call(IN_ONE_CACHE[name], page), page, heads_first)
    assert given["key"].stride(0) == 2 * page * given["key"].shape[2] * given["key"].shape[3]
    assert_right(*emulated(given, page), given)
    out, lse = microsdpa.sdpa_varlen(**given, return_lse=True)
    assert_right(out, lse, given)


@pytest.mark.parametrize("page", [128, 256])
def test_new_keys_are_written_to_views_of_one_tensor(page: int) -> None:
    given = in_one_cache(call(Form(BF16, 64, group=4, keys="dense"), page), page)
    generator, batch, heads_kv = torch.Generator().manual_seed(page), len(given["lengths"]), given["key"].shape[2]
    given["query"] = torch.randn(batch, 1, 4 * heads_kv, 64, generator=generator).to(BF16)
    for name in ("new_key", "new_value"):
        given[name] = torch.randn(batch, 1, heads_kv, 64, generator=generator).to(BF16)
    given = {name: value for name, value in given.items() if name not in ("query_offsets", "max_queries")}
    before = given["key"].clone()
    out, lse = emulated(given, page)
    expected = after_appending(given | {"key": before})
    assert_right(out, lse, expected)
    for b, length in enumerate(given["lengths"].tolist()):
        place = given["page_table"][b, length // page], length % page
        assert torch.equal(given["key"][place], given["new_key"][b, 0])
        assert torch.equal(given["value"][place], given["new_value"][b, 0])


def narrow_call(queries: int = 1, dtype: torch.dtype = BF16, length: int = 300) -> dict[str, Any]:
    """Two sequences on an E4M3 cache of one key head, with scales of tokens."""
    generator = torch.Generator().manual_seed(5)
    given = decode([length, 40], [[(7 * i) % 200 for i in range(20)], [(3 * i) % 200 for i in range(20)]])
    given["query"] = torch.randn(2, queries, 4, 64, generator=generator).to(dtype)
    for name, scale in (("key", "k_scale"), ("value", "v_scale")):
        given[name] = (given[name].float() * 100).to(E4M3)
        given[scale] = torch.rand(200, 16, 1, generator=generator) * 0.02 + 1e-3
    return given


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e6])
def test_queries_of_any_size_keep_their_bits(queries: int, size: float) -> None:
    given = narrow_call(queries)
    given["query"][:, :, 1] *= size
    given["scale"] = 0.1
    given["k_scale"] /= max(1.0, size)
    assert_right(*emulated(given), given)


@pytest.mark.parametrize("step", [2.0**-40, 2.0**-9, 2.0**9, 2.0**40])
def test_scales_of_values_of_any_sizes(step: float) -> None:
    given = narrow_call()
    given["v_scale"][given["page_table"][0, 9:].long()] *= step
    assert_right(*emulated(given), given)


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_every_8_bit_value_is_widened_exactly(dtype: torch.dtype) -> None:
    """One key has all of the probability: its value comes out, whatever it is."""
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).view(1, 4, 1, 64)
    value = torch.zeros(8, 32, 1, 64, dtype=torch.uint8).view(dtype)
    key = torch.zeros(8, 32, 1, 64, dtype=torch.uint8).view(dtype)
    for i in range(4):
        value[i, 5 * i] = values[0, i]
        key[i, 5 * i] = torch.full((1, 64), 100.0).to(dtype)
    query = torch.full((8, 1, 1, 64), 2.0, dtype=FP16)
    out, _ = emulated({"query": query, "key": key, "value": value, "k_scale": 1.0, "v_scale": 1.0, "causal": True})
    torch.testing.assert_close(out[:4].view(4, 64), values[0, :4, 0].float().half(), rtol=0, atol=0, equal_nan=True)


BOTH_NORMS = "q_norm", "k_norm"
APPENDING: dict[str, tuple[Any, ...]] = {
    "decode": (Form(group=4), 0, False),
    "decode, rotated": (Form(group=4), 64, False),
    "several tokens, a part rotated in pairs": (Form(torch.float16, 64, 2, 5), 32, True),
    "many tokens, which are written ahead": (Form(BF16, 80, 2, 20), 48, False),
    "rows, rotated": (Form(torch.float16, 64, 2, 3, keys="dense"), 64, False),
    "E4M3, rotated": (Form(BF16, 64, 4, 2, cache=E4M3), 64, False),
    "INT8, scales of tokens": (Form(FP16, 48, 2, 3, cache=torch.int8, each_token=True), 0, False),
    "INT8, dense, rotated": (Form(BF16, 64, 2, 20, "dense", cache=torch.int8, each_token=True), 32, True),
    "decode, norms, rotated": (Form(group=4), 64, False, BOTH_NORMS),
    "a norm of queries, many tokens": (Form(BF16, 80, 2, 20), 48, True, BOTH_NORMS[:1]),
    "V of fewer columns": (Form(BF16, 96, 2, 5, value_dim=64), 96, False, BOTH_NORMS),
    "V of fewer columns, many tokens": (Form(BF16, 96, 2, 20, "dense", value_dim=64), 0, False),
    "a norm of new keys": (Form(torch.float16, 72, 2, 3, keys="dense"), 0, False, BOTH_NORMS[1:]),
    "E4M3, norms, rotated": (Form(BF16, 64, 4, 2, cache=E4M3), 64, False, BOTH_NORMS),
}


@pytest.mark.parametrize("name", APPENDING)
@pytest.mark.parametrize("seed", range(2))
def test_new_keys_are_written_and_seen(name: str, seed: int) -> None:
    assert_appended(appending(APPENDING[name][0], seed, *APPENDING[name][1:]), seed)


def assert_appended(given: dict[str, Any], seed: int = 0) -> None:
    """Compare caches, output and LSE of a call that appends with those of one that finds all keys in its cache."""
    expected = after_appending(given)
    out, lse = emulated(given, seed)
    if "k_scale" in given:  # rotated keys may be rounded otherwise, by a step of the 8 bits
        assert (given["key"].float() - expected["key"].float()).abs().max() <= 32.0
        written = {name: given[name] for name in ("key", "k_scale")}
        assert all(torch.allclose(given[name], expected[name], rtol=1e-2) for name in ("k_scale", "v_scale"))
        expected |= written if {"rotary_cos", "k_norm"} & set(given) else {}
    else:
        torch.testing.assert_close(given["key"], expected["key"], rtol=1e-2, atol=1e-3)
    assert torch.equal(given["value"].float(), expected["value"].float())
    assert_right(out, lse, expected)


def decode_appending(lengths: list[int], queries: int, width: int, rotary: int = 0) -> dict[str, Any]:
    """A call whose sequences each have new keys, and pages of their own for them."""
    pages = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(3)).view(len(lengths), width)
    given = decode(lengths, pages.tolist())
    generator = torch.Generator().manual_seed(2)
    given["query"] = torch.randn(len(lengths), queries, 4, 64, generator=generator).to(BF16)
    for name in ("new_key", "new_value"):
        given[name] = torch.randn(len(lengths), queries, 1, 64, generator=generator).to(BF16)
    if rotary:
        angles = torch.rand(width * 16 + queries, rotary // 2, generator=generator) * 6
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False}
    return given


@pytest.mark.parametrize("queries", [1, 4, 40])
def test_new_keys_without_room_are_left_out(queries: int) -> None:
    assert_appended(decode_appending([48, 30, 47], queries, 3, 64))


def test_new_keys_meet_windows_and_sinks() -> None:
    given = decode_appending([100, 3, 0], 4, 8, 32)
    assert_appended(given | {"window": (2, 0), "sinks": torch.tensor([0.5, 1.0, -1.0, 0.0])})


def test_more_new_keys_than_the_hint_says() -> None:
    form = Form(BF16, 64, 2, 70)
    seed = next(seed for seed in range(99) if "query_offsets" in call(form, seed))
    assert_appended(appending(form, seed, 64) | {"max_queries": 1})


def test_wild_lengths_append_within_the_cache() -> None:
    wild, tame = (decode_appending(lengths, 1, 2, 64) for lengths in ([2**31 - 1, -7], [32, 0]))
    found = zip(emulated(wild), emulated(tame), strict=True)
    assert all(torch.equal(one, other) for one, other in found)
    assert torch.equal(wild["key"], tame["key"])
    assert_appended(decode_appending([32, 0], 1, 2, 64))


@pytest.mark.parametrize("queries", [1, 40])
def test_new_keys_on_a_page_that_the_cache_lacks_are_not_written(queries: int) -> None:
    given = decode_appending([40, 40], queries, 6, 64)
    given["page_table"][0, 2] = -1
    before = given["key"].clone()
    out, _ = emulated(given)
    assert out[0, -1].isnan().all()
    assert out[1].isfinite().all()
    table = given["page_table"][0]
    assert torch.equal(given["key"][table[:2].long()], before[table[:2].long()])


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "emulated_target", lambda _: "sm_90a")


CLUSTERED = {
    "decode": Form(BF16, 64, group=4),
    "decode, D = 128": Form(FP16, 128, group=8),
    "rows": Form(FP16, 64, group=2, queries=5, keys="dense"),
    "a window": Form(BF16, 64, 2, 3, "paged", True, (True, False), sinks=torch.float32),
    "packed": Form(BF16, 64, 2, 6, "packed", False, (True, True)),
    "E4M3": Form(BF16, 128, group=4, cache=E4M3),
    "INT8, scales of tokens": Form(FP16, 64, 2, 3, cache=torch.int8, each_token=True),
    "32 rows": Form(BF16, 64, group=8, queries=4),
    "64 rows": Form(FP16, 128, group=64),
    "64 rows, E4M3": Form(BF16, 64, group=16, queries=4, cache=E4M3),
}


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("name", CLUSTERED)
def test_one_sequence_is_computed_by_clusters(name: str) -> None:
    alone = [seed for seed in range(40) if len(call(CLUSTERED[name], seed).get("lengths", [0, 0])) == 1]
    if name == "packed":
        alone = [seed for seed in range(40) if len(call(CLUSTERED[name], seed)["key_offsets"]) == 2]
    for seed in alone[:4]:
        given = call(CLUSTERED[name], seed)
        assert_right(*emulated(given, seed), given)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("name", CLUSTERED)
def test_few_sequences_are_computed_by_clusters(name: str) -> None:
    several = [seed for seed in range(40) if len(call(CLUSTERED[name], seed).get("lengths", [0])) > 1]
    if name == "packed":
        several = [seed for seed in range(40) if len(call(CLUSTERED[name], seed)["key_offsets"]) > 2]
    for seed in several[:3]:
        given = call(CLUSTERED[name], seed)
        assert_right(*emulated(given, seed), given)


@pytest.mark.usefixtures("_hopper")
def test_clusters_have_sequences_of_any_lengths() -> None:
    given = decode([700, 0, 17, 129], [[(7 * i) % 200 for i in range(44)]] * 4)
    assert_right(*emulated(given), given)
    one, other = emulated(given, 0), emulated(given, 1)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("sequences", "heads_kv", "keys", "cluster", "warps"),
    [
        *((1, 8, 8192, 8, 4), (2, 8, 2048, 4, 4), (2, 8, 2064, 1, 4), (8, 8, 256, 2, 4), (8, 8, 4096, 2, 8)),
        *((8, 8, 4112, 1, 4), (16, 8, 1024, 2, 4), (16, 8, 1040, 1, 4)),
        *((8, 1, 8192, 8, 8), (24, 1, 1024, 4, 8), (64, 1, 4096, 2, 8), (67, 1, 512, 1, 8)),
    ],
)
def test_how_many_ctas_share_a_sequence(sequences: int, heads_kv: int, keys: int, cluster: int, warps: int) -> None:
    """All clusters run at a time; the longest sequence alone keeps its CTAs busy no longer than all of them do."""
    heads = 32 if heads_kv == 8 else 64
    sizes = {"batch": sequences, "heads": heads, "heads_kv": heads_kv, "seqlen_q": 1, "seqlen_k": keys, "head_dim": 128}
    problem = Problem(**sizes, dtype="bfloat16", target="sm_90a", varlen=16)
    tiling = kernel.tiling_of(problem)
    assert (tiling.cluster, tiling.threads // 32) == (cluster, warps)
    assert sequences * heads_kv * cluster <= 2 * chip_of("sm_90a").sms
    is_small = heads == 32 or (cluster > 1 and keys <= policy.MOST_KEYS_OF_MMA)
    assert chosen(problem).name == ("ampere/varlen" if is_small else "hopper/varlen")
    assert kernel.tiling_of(replace(problem, batch=133)).cluster == 1
    assert kernel.tiling_of(replace(problem, packed_queries=True)) == tiling
    assert kernel.tiling_of(replace(problem, target="sm_89")).cluster == 1


MANY_OF_FEW, MANY_NARROW = kernel.MANY_OF_FEW, kernel.MANY_NARROW


@pytest.mark.parametrize(
    ("head_dim", "keys", "tiling"),
    [
        *((64, 128, MANY_OF_FEW), (64, 129, MANY_NARROW), (40, 4096, MANY_NARROW)),
        *((80, 128, MANY_OF_FEW), (72, 129, MANY_NARROW), (80, 4096, MANY_NARROW)),
        *((128, 512, MANY_OF_FEW), (128, 513, kernel.FEW), (96, 513, kernel.FEW), (256, 16, kernel.FEW_LARGE)),
    ],
)
def test_tiles_of_many_sequences(head_dim: int, keys: int, tiling: kernel.Tiling) -> None:
    problem = Problem(133, 4, 1, 1, keys, head_dim, "bfloat16", target="sm_90a", varlen=16)
    assert kernel.tiling_of(problem) == tiling
    assert kernel.tiling_of(replace(problem, packed_queries=True)) == tiling
    for change in ({"batch": 132}, {"target": "sm_89"}):
        assert kernel.tiling_of(replace(problem, **change)) not in (MANY_OF_FEW, MANY_NARROW)  # type: ignore[arg-type]
    spec = kernel.specification(problem, tiling)
    assert spec.max_ctas <= ARRIVALS
    assert spec.max_ctas // 132 * (spec.shared_bytes + 1024) <= chip_of("sm_90a").shared_per_sm


MANY = {
    "few keys": (Form(BF16, 128, group=4), 100),
    "many keys, D = 64": (Form(FP16, 64, group=2, queries=3), 600),
    "many keys, D = 72": (Form(BF16, 72, group=3), 600),
    "many keys, D = 80, a window": (Form(FP16, 80, 4, 1, "dense", True, (True, False), sinks=torch.float32), 600),
}


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("name", MANY)
def test_small_ctas_of_many_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is many for a GPU takes an emulator long: here it begins with two."""
    form, most_keys = MANY[name]
    monkeypatch.setattr(kernel, "SHARING", (kernel.Sharing(1, 1, 8, 8192),))
    for seed in range(4):
        given = call(form, seed)
        if len(given["lengths"]) * given["key"].shape[-2] > 1:
            assert_right(*emulated(given, seed), given)
    lengths = [most_keys - 37 * i for i in range(4)]
    given = call(form, 1) | {"lengths": torch.tensor(lengths, dtype=torch.int32)}
    shape = (4, most_keys, 2, form.head_dim)
    generator = torch.Generator().manual_seed(most_keys)
    key, value = (torch.randn(shape, generator=generator).to(form.dtype) for _ in range(2))
    query = torch.randn(4, form.queries, 2 * form.group, form.head_dim, generator=generator).to(form.dtype)
    given = {name: each for name, each in given.items() if name != "page_table"}
    given |= {"query": query, "key": key, "value": value}
    if form.sinks:
        given["sinks"] = torch.randn(2 * form.group, generator=generator)
    assert_right(*emulated(given), given)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(("pages", "rotary"), [(8, 0), (8, 64), (40, 64)])
def test_small_ctas_append_and_rotate(pages: int, rotary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SHARING", (kernel.Sharing(1, 1, 8, 8192),))
    assert_appended(decode_appending([16 * pages - 5, 0, 33], 2, pages, rotary))


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("length", [0, 1, 129, 1100])
def test_a_cluster_has_any_number_of_keys(length: int) -> None:
    given = decode([length], [[(7 * i) % 200 for i in range(80)]])
    out, lse = emulated(given)
    assert_right(out, lse, given)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("length", [0, 15, 511, 600])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_cluster_appends_and_rotates(length: int, queries: int) -> None:
    assert_appended(decode_appending([length], queries, 40, 64))


COUNTS = {
    "one each": [1] * 6,
    "none of some": [0, 1, 1, 0, 4, 0],
    "more than the hint says": [1, 0, 19, 1, 2, 0],
    "of more sequences than a warp has lanes": [1] * 33 + [9, 0, 5, 13],
}


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("rotary", [None, 0, 64])
@pytest.mark.parametrize("name", COUNTS)
def test_clusters_have_packed_queries(name: str, rotary: int | None) -> None:
    """A hint that is wrong costs time alone: clusters behind those of first tiles have the others."""
    counts = COUNTS[name]
    width = 200 // len(counts)  # of the cache's 200 pages
    lengths = [(37 * i + 90) % (16 * min(width, 12) - max(counts)) for i in range(len(counts))]
    given = packed(decode_appending(lengths, max(counts), width, rotary or 0), counts) | {"max_queries": 1}
    if rotary is None:
        given = {name: each for name, each in given.items() if not name.startswith("new_")}
    spec = microsdpa.explain_varlen(**given, impl="emulate:ampere/varlen").spec
    assert spec is not None
    assert spec.cluster > 1
    assert ("PACKED", "true") in spec.template_args
    if rotary is None:
        assert_right(*emulated(given), given)
    else:
        assert_appended(given)


APPENDED_BY_CLUSTERS = {
    "norms, rotated": APPENDING["decode, norms, rotated"],
    "several tokens, a part rotated in pairs": APPENDING["several tokens, a part rotated in pairs"],
    "a norm of new keys": APPENDING["a norm of new keys"],
    "V of fewer columns": APPENDING["V of fewer columns"],
    "D = 256, a norm of queries": (Form(BF16, 256, 4, 2), 128, True, BOTH_NORMS[:1]),
    "more rows than are taken at once": (Form(FP16, 128, 2, 8), 128, False, BOTH_NORMS),
    "a window, in pages of any size": (Form(BF16, 64, 2, 3, "paged", True, (True, False)), 64, False),
}


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("name", APPENDED_BY_CLUSTERS)
@pytest.mark.parametrize("seed", range(2))
def test_clusters_append_and_change_rows(name: str, seed: int) -> None:
    form, *change = APPENDED_BY_CLUSTERS[name]
    alone = [seed for seed in range(40) if len(call(form, seed).get("lengths", [0, 0])) == 1]
    assert_appended(appending(form, alone[seed], *change), seed)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("length", [14, 600])
def test_tables_and_weights_that_are_not_aligned(length: int) -> None:
    given = decode_appending([length], 3, 40, 64)
    for name in ("rotary_cos", "rotary_sin"):
        table = torch.empty(given[name].shape[0], given[name].shape[1] + 1)
        table[:, 1:] = given[name]
        given[name] = table[:, 1:]
    weights = torch.rand(2, 65, generator=torch.Generator().manual_seed(4)).to(BF16)[:, 1:]
    assert_appended(given | dict(zip(BOTH_NORMS, weights, strict=True)) | {"norm_eps": 1e-5})


@pytest.mark.usefixtures("_hopper")
def test_a_cluster_reads_no_page_that_the_cache_lacks() -> None:
    out, lse = emulated(decode([40], [[1, -5, 3]]))
    assert out.isnan().all()
    assert lse.isnan().all()
    given = decode([16], [[1, -5, 3]])
    assert_right(*emulated(given), given)


@pytest.mark.parametrize("page", [1, 3, 4])
@pytest.mark.parametrize("head_dim", [16, 48, 72, 80])
def test_each_new_key_goes_to_its_own_page(head_dim: int, page: int) -> None:
    """A tile whose rows one pass copies, on pages of fewer keys: the thread that stores a row may copy another one."""
    sizes = {"queries": (3, 1), "keys": (5, 0), "heads_kv": 2, "head_dim": head_dim}
    new = VarlenCall(**sizes, packed=True, storage="paged", page=page, append=True, rotary=16)
    assert check(new, "cpu").failure == ""


def invariant(given: dict[str, Any], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return emulated(given | {"batch_invariant": True}, seed)


@pytest.mark.parametrize("name", ["decode", "decode, D = 72", "decode, D = 256", "few queries", "all masks"])
@pytest.mark.parametrize("seed", range(2))
def test_any_call_whose_parts_have_a_fixed_size(name: str, seed: int) -> None:
    given = call(FORMS[name], seed)
    assert_right(*invariant(given, seed), given)


@pytest.mark.parametrize("head_dim", [32, 96])
@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
def test_an_8_bit_cache_in_parts_of_a_fixed_size(cache: torch.dtype, head_dim: int) -> None:
    """Rows of an odd number of 32 bytes: a group of two warps would copy more of them than its tiles have."""
    given = call(Form(head_dim=head_dim, group=4, queries=7, cache=cache), 1)
    assert_right(*invariant(given), given)


LONG = {"plain": {}, "window": {"window": (700, 0)}, "sinks": {"sinks": torch.tensor([0.5, 1.0, -1.0, 4.0])}}


@pytest.mark.parametrize("masks", LONG)
@pytest.mark.parametrize("most_parts", [4096, 3])
def test_bits_do_not_depend_on_the_batch(masks: str, most_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = [[(7 * i) % 200 for i in range(100)]] * 3
    alone = decode([1300], table[:1]) | LONG[masks]
    expected = invariant(alone)
    assert_right(*expected, alone)
    monkeypatch.setattr(kernel, "MOST_PARTS", most_parts)
    kernel._specification.cache_clear()
    batch = decode([40, 900, 1300], table) | LONG[masks]
    batch["query"][2] = alone["query"][0]
    out, lse = invariant(batch, 1)
    assert_right(out, lse, batch)
    assert torch.equal(out[2], expected[0][0])
    assert torch.equal(lse[2], expected[1][0])
    kernel._specification.cache_clear()


@pytest.mark.parametrize("masks", LONG)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(masks: str) -> None:
    """The last queries of a prompt, by tiles of other rows, beside the whole of it."""
    whole = decode([1100], [[(7 * i) % 200 for i in range(69)]]) | LONG[masks]
    whole["query"] = torch.randn(1, 90, 4, 64, generator=torch.Generator().manual_seed(5)).to(BF16)
    out, lse = invariant(whole)
    assert_right(out, lse, whole)
    for queries in (1, 3, 50):
        last = whole | {"query": whole["query"][:, -queries:]}
        part_out, part_lse = invariant(last, 1)
        assert torch.equal(part_out, out[:, -queries:])
        assert torch.equal(part_lse, lse[..., -queries:])
    before = whole | {"query": whole["query"][:, :20], "lengths": whole["lengths"] - 70}
    assert torch.equal(invariant(before)[0], out[:, :20])


def few_ctas(monkeypatch: pytest.MonkeyPatch, ctas: int, abreast: int = 1) -> None:
    """Launches so many CTAs for all keys, for each of so many neighbouring key heads."""
    room = kernel.workspace_bytes

    def grid_of(spec: KernelSpec, *_: Any) -> Grid:
        return (ctas, 1, 1) if kernel.is_batch_invariant(spec) else (abreast, ctas, 1)

    monkeypatch.setattr(kernel, "grid_of", grid_of)
    monkeypatch.setattr(kernel, "workspace_bytes", lambda spec: room(replace(spec, max_ctas=ctas * abreast)))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("ctas", [2, 3, 5])
def test_parts_of_many_sequences_on_few_ctas(ctas: int, backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CTA begins with several tiles of rows, and the next CTA is ready first with parts of the last of them."""
    few_ctas(monkeypatch, ctas)
    lengths = [1300, 20, 1100, 700, 1500, 530]
    given = decode(lengths, [[(7 * i + b) % 200 for i in range(100)] for b in range(len(lengths))])
    assert_right(*emulated(given, backwards=backwards), given)
    assert_right(*emulated(given | {"batch_invariant": True}, backwards=backwards), given)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("ctas", "abreast"), [(97, 1), (60, 2), (194, 1)])
def test_more_parts_than_are_combined_at_once(
    ctas: int, abreast: int, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 97 CTAs with two tiles each, one has the last part of a head, alone in its sixteen, and the next one's first.

    So all have one head after the other, or every other one has the same keys of the second head.
    """
    few_ctas(monkeypatch, ctas, abreast)
    given = decode([97 * 64 - 3], [[(7 * i) % 200 for i in range(388)]])
    given |= {name: torch.cat((given[name], given[name].flip(0)), 2) for name in ("key", "value")}
    one, other = emulated(given, 0, backwards), emulated(given, 1)
    assert_right(*one, given)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_short_sequences_one_after_the_other(seed: int, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CTA has rows whose keys are fewer tiles than its ring: each sequence's are asked for while the one before runs.

    Copies that nobody waits for are an error of the emulator.
    """
    few_ctas(monkeypatch, 2)
    lengths = [20, 40, 0, 10, 64, 0, 0, 200, 63, 5, 130, 1]
    given = decode(lengths, [[(7 * i + b) % 200 for i in range(13)] for b in range(len(lengths))])
    assert_right(*emulated(given | {"batch_invariant": batch_invariant}, seed), given)


def test_bits_do_not_depend_on_who_appends() -> None:
    given = decode_appending([600, 20], 3, 40, 64)
    expected = invariant(after_appending(given))
    assert all(torch.equal(one, other) for one, other in zip(invariant(given), expected, strict=True))
