"""Documents, ranges and tables of blocks on a GPU: eager, planned, captured in CUDA graphs, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import microsdpa
from microsdpa import BlockTable, reference
from microsdpa.errors import InvalidArgument
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make

pytestmark = pytest.mark.gpu

SHAPES = [(2, 4, 300, 64), (1, 16, 1000, 128), (2, 3, 130, 40), (4, 8, 5, 64)]


def sorted_ids(seqlen: int, length: int = 37) -> torch.Tensor:
    return (torch.arange(seqlen) // length).cuda()


def table(seqlen: int, block: int = 64, seed: int = 1) -> BlockTable:
    blocks = -(-seqlen // block)
    seen = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(seed)) < 0.5
    return BlockTable((seen | torch.eye(blocks, dtype=torch.bool)).cuda(), block, seqlen, seqlen)


def is_right(out: torch.Tensor, inputs: Any, **given: Any) -> bool:
    expected, eager = (f(*inputs, **given)[0] for f in (reference.oracle, reference.eager))
    return compare.tolerance(eager, expected, out.dtype).admits(compare.measure(out, expected))


@pytest.mark.parametrize(("batch", "heads", "seqlen", "head_dim"), SHAPES)
@pytest.mark.parametrize("causal", [None, "lower_right"])
@pytest.mark.parametrize("way", ["side by side", "apart", "table", "flex", "all"])
def test_what_is_shown_is_what_counts(
    batch: int, heads: int, seqlen: int, head_dim: int, causal: Any, way: str
) -> None:
    inputs = make(Case(batch, heads, seqlen, seqlen, head_dim), "cuda")
    flex = create_block_mask(lambda b, h, i, j: (i - j).abs() < 70, None, None, seqlen, seqlen, "cuda", BLOCK_SIZE=64)
    given: dict[str, Any] = {
        "side by side": {"document_ids": sorted_ids(seqlen)},
        "apart": {"document_ids": torch.arange(seqlen, device="cuda") % 3},
        "table": {"block_mask": table(seqlen)},
        "flex": {"block_mask": flex},
        "all": {"document_ids": sorted_ids(seqlen, 90), "block_mask": table(seqlen)},
    }[way]
    out = microsdpa.sdpa(*inputs, **given, causal=causal)
    assert isinstance(out, torch.Tensor)
    assert is_right(out, inputs, **given, causal=causal)
    assert torch.equal(microsdpa.sdpa(*inputs, **given, causal=causal), out)
    assert torch.equal(microsdpa.plan(*inputs, **given, causal=causal)(*inputs, **given), out)


def captured(call: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return graph, out


def test_captured_documents_follow_their_tensor() -> None:
    inputs = make(Case(2, 4, 300, 300, 64), "cuda")
    ids = sorted_ids(300)
    for warm in (sorted_ids(300), torch.arange(300, device="cuda") % 3):  # plans for ranges, and for booleans
        microsdpa.sdpa(*inputs, document_ids=warm)
    microsdpa.sdpa(*inputs, document_ids=ids)
    graph, out = captured(lambda: microsdpa.sdpa(*inputs, document_ids=ids))
    for other in (ids.clone(), torch.arange(300, device="cuda") % 5, sorted_ids(300, 11)):
        ids.copy_(other)
        graph.replay()
        assert is_right(out, inputs, document_ids=other)


def test_a_table_in_a_graph_keeps_its_summary_and_a_new_block_mask_is_refused() -> None:
    inputs = make(Case(2, 8, 1000, 1000, 64), "cuda")
    blocks = table(1000)
    expected = microsdpa.sdpa(*inputs, block_mask=blocks)
    graph, out = captured(lambda: microsdpa.sdpa(*inputs, block_mask=blocks))
    graph.replay()
    assert torch.equal(out, expected)
    flex = create_block_mask(lambda b, h, i, j: i >= j, None, None, 1000, 1000, "cuda")
    with pytest.raises(InvalidArgument, match="one that was looked at before the capture"):
        captured(lambda: microsdpa.sdpa(*inputs, block_mask=flex))


@pytest.mark.parametrize("way", ["documents", "table"])
def test_gradients_are_those_of_a_boolean_mask(way: str) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in make(Case(2, 4, 300, 300, 64), "cuda"))
    given: dict[str, Any] = {"document_ids": sorted_ids(300)} if way == "documents" else {"block_mask": table(300)}
    ids = sorted_ids(300)
    shown = ids[:, None] == ids if way == "documents" else table(300).mask
    found, expected = (
        torch.autograd.grad(microsdpa.sdpa(query, key, value, **options).float().square().sum(), (query, key, value))
        for options in (given, {"attn_mask": shown})
    )
    for got, want in zip(found, expected, strict=True):
        assert torch.allclose(got, want, rtol=1e-2, atol=1e-2)


def test_a_bad_entry_on_the_gpu_is_named() -> None:
    inputs = make(Case(1, 2, 256, 256, 64), "cuda")
    flex = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, "cuda", BLOCK_SIZE=64)
    flex.kv_indices[0, 0, 2, 0] = 2**30
    with pytest.raises(InvalidArgument, match=r"kv_indices\[0, 0, 2, 0\] from 0 to 3, got 1073741824"):
        microsdpa.sdpa(*inputs, block_mask=flex)
