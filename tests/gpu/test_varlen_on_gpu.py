"""sdpa_varlen on a GPU: any call against FP64, and one CUDA graph whose lengths and pages change."""

from __future__ import annotations

import pytest
import torch

import microsdpa
from varlen_space import Form, after_appending, appending, assert_right, call, moved

pytestmark = pytest.mark.gpu

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
FORMS = {
    "decode": Form(BF16, 128, group=4),
    "decode, D = 72": Form(FP16, 72, causal=False, keys="dense"),
    "decode, D = 256": Form(BF16, 256, group=2),
    "few queries": Form(FP16, 64, group=4, queries=6),
    "one key head for 64": Form(FP16, 128, group=64),
    "prompts": Form(FP16, 64, group=2, queries=70, keys="packed"),
    "prompts on a cache": Form(BF16, 128, group=4, queries=40),
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


@pytest.mark.parametrize("rotary", [0, 64])
@pytest.mark.parametrize("seed", range(4))
def test_new_keys_are_written_and_seen(rotary: int, seed: int) -> None:
    given = appending(Form(BF16, 64, 2, 5), seed, rotary)
    expected, there = after_appending(given), moved(given, "cuda")
    out, lse = microsdpa.sdpa_varlen(**there, return_lse=True)
    torch.testing.assert_close(there["key"].cpu(), expected["key"], rtol=1e-2, atol=1e-3)
    assert torch.equal(there["value"].cpu(), expected["value"])
    assert_right(out, lse, expected)


APPENDING = {
    "E4M3, scales of heads": (Form(BF16, 128, group=4, cache=E4M3), 0),
    "E4M3, scales of tokens, rotated": (Form(BF16, 64, 2, 5, cache=E4M3, each_token=True), 64),
    "INT8, scales of heads, rotated": (Form(FP16, 128, 4, 3, cache=torch.int8), 32),
    "INT8, scales of tokens, prompts": (Form(FP16, 64, 2, 40, cache=torch.int8, each_token=True), 0),
}


@pytest.mark.parametrize("name", APPENDING)
@pytest.mark.parametrize("seed", range(4))
def test_new_keys_are_quantized_and_seen(name: str, seed: int) -> None:
    form, rotary = APPENDING[name]
    given = appending(form, seed, rotary)
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
