"""sdpa_varlen on a GPU: any call against FP64, and one CUDA graph whose lengths and pages change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import microsdpa
from varlen_space import Form, after_appending, appending, assert_right, call, moved

pytestmark = pytest.mark.gpu

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
NORMS = "q_norm", "k_norm"
FORMS = {
    "decode": Form(BF16, 128, group=4),
    "decode, D = 72": Form(FP16, 72, causal=False, keys="dense"),
    "decode, D = 256": Form(BF16, 256, group=2),
    "few queries": Form(FP16, 64, group=4, queries=6),
    "one key head for 64": Form(FP16, 128, group=64),
    "prompts": Form(FP16, 64, group=2, queries=70, keys="packed"),
    "prompts on a cache": Form(BF16, 128, group=4, queries=40),
    "V of 128 beside K of 192, decode": Form(BF16, 192, group=4, value_dim=128),
    "V of 128 beside K of 192, prompts": Form(BF16, 192, queries=300, keys="packed", value_dim=128),
    "V of fewer columns, prompts on a cache": Form(FP16, 96, 2, 70, value_dim=40),
    "all masks": Form(BF16, 64, 2, 9, "paged", False, (True, True), True, True, torch.float32),
    "causal window": Form(FP16, 64, 2, 1, "paged", True, (True, False), sinks=FP16),
    "E4M3, decode": Form(BF16, 128, group=4, cache=E4M3),
    "E4M3, D = 80": Form(FP16, 80, causal=False, keys="dense", cache=E4M3),
    "E4M3, few queries": Form(FP16, 64, group=4, queries=6, cache=E4M3, each_token=True),
    "E4M3, prompts on a cache": Form(BF16, 128, group=4, queries=40, cache=E4M3),
    "INT8, decode": Form(FP16, 128, group=8, cache=torch.int8, each_token=True),
    "INT8, decode, D = 256": Form(BF16, 256, group=2, cache=torch.int8),
    "INT8, prompts": Form(BF16, 64, group=2, queries=70, keys="packed", cache=torch.int8, each_token=True),
    "INT8, all masks": Form(BF16, 64, 2, 9, "paged", False, (True, True), True, True, torch.float32, torch.int8),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", range(6))
def test_any_call(name: str, seed: int) -> None:
    given = call(FORMS[name], seed)
    there = moved(given, "cuda")
    first = microsdpa.sdpa_varlen(**there, return_lse=True)
    assert_right(*first, given)
    again = microsdpa.sdpa_varlen(**there, return_lse=True)  # its plan is there now
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("rotary", "norms"), [(0, ()), (64, ()), (64, NORMS), (0, NORMS[:1]), (32, NORMS[1:])])
@pytest.mark.parametrize("queries", [5, 40])
@pytest.mark.parametrize("seed", range(4))
def test_new_keys_are_written_and_seen(rotary: int, norms: tuple[str, ...], queries: int, seed: int) -> None:
    given = appending(Form(BF16, 64, 2, queries), seed, rotary, norms=norms)
    expected, there = after_appending(given), moved(given, "cuda")
    out, lse = microsdpa.sdpa_varlen(**there, return_lse=True)
    torch.testing.assert_close(there["key"].cpu(), expected["key"], rtol=1e-2, atol=1e-3)
    assert torch.equal(there["value"].cpu(), expected["value"])
    assert_right(out, lse, expected)


APPENDING: dict[str, tuple[Form, int, tuple[str, ...]]] = {
    "E4M3, scales of heads": (Form(BF16, 128, group=4, cache=E4M3), 0, ()),
    "E4M3, scales of heads, norms, rotated": (Form(BF16, 128, group=4, cache=E4M3), 128, NORMS),
    "E4M3, scales of tokens, rotated": (Form(BF16, 64, 2, 5, cache=E4M3, each_token=True), 64, ()),
    "INT8, scales of heads, rotated": (Form(FP16, 128, 4, 3, cache=torch.int8), 32, ()),
    "INT8, scales of tokens, prompts": (Form(FP16, 64, 2, 40, cache=torch.int8, each_token=True), 0, ()),
}


@pytest.mark.parametrize("name", APPENDING)
@pytest.mark.parametrize("seed", range(4))
def test_new_keys_are_quantized_and_seen(name: str, seed: int) -> None:
    form, rotary, norms = APPENDING[name]
    given = appending(form, seed, rotary, norms=norms)
    expected, there = after_appending(given), moved(given, "cuda")
    out, lse = microsdpa.sdpa_varlen(**there, return_lse=True)
    there = moved(there, "cpu")
    assert torch.equal(there["value"].float(), expected["value"].float())
    torch.testing.assert_close(there["v_scale"], expected["v_scale"])
    assert_right(out, lse, expected | {name: there[name] for name in ("key", "k_scale")})


@pytest.mark.parametrize("batch", [1, 5])
def test_one_graph_serves_all_lengths_and_pages(batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    key, value = (torch.randn(300, 16, 2, 64, generator=generator).to(BF16).cuda() for _ in range(2))
    query = torch.randn(batch, 1, 8, 64, generator=generator).to(BF16).cuda()
    table, lengths = (torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in ((batch, 50), (batch,)))
    given = {"query": query, "key": key, "value": value, "page_table": table, "lengths": lengths, "causal": True}
    microsdpa.sdpa_varlen(**given, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls = [microsdpa.sdpa_varlen(**given, return_lse=True) for _ in range(2)]
    for turn in range(8):
        longest = (0, 1, 16, 17, 100, 799, 800, 333)[turn]
        lengths.copy_(torch.randint(0, longest + 1, (batch,), generator=generator))
        lengths[0] = longest
        table.copy_(torch.randint(0, 300, (batch, 50), generator=generator))
        graph.replay()
        for out, lse in calls:
            assert_right(out, lse, moved(given, "cpu"))


def test_streams_do_not_share_counters() -> None:
    given = moved(call(Form(BF16, 128, group=4), 2), "cuda")
    expected = microsdpa.sdpa_varlen(**given)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(microsdpa.sdpa_varlen(**given))
    torch.cuda.synchronize()
    assert all(torch.equal(one, expected) for one in found)


def forty(head_dim: int, queries: int, seed: int = 0) -> dict[str, Any]:
    """40 sequences in pages of 16, from none to 3,000 keys: many have a tile of keys or two."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 3000, (40,), generator=generator)
    lengths[::2] = torch.randint(0, 130, (20,), generator=generator)
    lengths[:4] = torch.tensor([0, 64, 512, 3000])
    width = 3000 // 16 + 1
    table = torch.randperm(40 * width, generator=generator).view(40, width)
    key, value = (torch.randn(40 * width, 16, 2, head_dim, generator=generator).to(BF16) for _ in range(2))
    query = torch.randn(40, queries, 8, head_dim, generator=generator).to(BF16)
    integers = {"lengths": lengths.int(), "page_table": table.int()}
    return {"query": query, "key": key, "value": value, **integers, "causal": True}


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("head_dim", "queries"), [(64, 1), (128, 1), (128, 5), (256, 1), (64, 20)])
def test_every_run_gives_the_same_bits(head_dim: int, queries: int, batch_invariant: bool) -> None:
    given = forty(head_dim, queries)
    there = moved(given, "cuda") | {"batch_invariant": batch_invariant, "return_lse": True}
    first = microsdpa.sdpa_varlen(**there)
    assert_right(*first, given)
    found = [microsdpa.sdpa_varlen(**there) for _ in range(50)]
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, first, strict=True))


@pytest.mark.parametrize("masks", [{}, {"window": (700, 0)}, {"sinks": torch.linspace(-1, 4, 8)}])
@pytest.mark.parametrize(("head_dim", "queries"), [(64, 1), (128, 1), (128, 5), (256, 1), (64, 20)])
def test_bits_of_a_sequence_do_not_depend_on_its_batch(head_dim: int, queries: int, masks: dict[str, Any]) -> None:
    given = moved(forty(head_dim, queries) | masks, "cuda") | {"batch_invariant": True, "return_lse": True}
    out, lse = microsdpa.sdpa_varlen(**given)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    shuffled = {name: given[name][order.cuda()] for name in ("query", "lengths", "page_table")}
    other_out, other_lse = microsdpa.sdpa_varlen(**given | shuffled)
    assert torch.equal(other_out, out[order.cuda()])
    assert torch.equal(other_lse, lse[order.cuda()])
    for b in range(0, 40, 3):
        alone = {name: given[name][b : b + 1] for name in ("query", "lengths", "page_table")}
        one_out, one_lse = microsdpa.sdpa_varlen(**given | alone)
        assert torch.equal(one_out[0], out[b])
        assert torch.equal(one_lse[0], lse[b])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bits_of_a_prompt_do_not_depend_on_how_it_is_cut(head_dim: int) -> None:
    given = moved(forty(head_dim, 90), "cuda") | {"batch_invariant": True}
    whole = microsdpa.sdpa_varlen(**given)
    for queries in (1, 3, 50):
        last = microsdpa.sdpa_varlen(**given | {"query": given["query"][:, -queries:]})
        seen = given["lengths"] >= queries  # of a shorter one, other queries are the last
        assert torch.equal(last[seen], whole[:, -queries:][seen])
