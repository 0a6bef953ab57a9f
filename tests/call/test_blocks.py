"""Block masks: tables of blocks, BlockMasks of flex_attention, and what is wrong with them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import microsdpa
from microsdpa import BlockTable, reference
from microsdpa.call import blocks
from microsdpa.errors import InvalidArgument
from microsdpa.evidence import compare


def inputs(s_q: int, s_k: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(batch, 2, length, 16, generator=generator).half() for length in (s_q, s_k, s_k))
    return query, key, value


def sliding(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j <= i + 40) & (j >= i - 90)


def by_head(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j <= i + 64 * h) | (b + j % 3 == 1)


@pytest.mark.parametrize("mask_mod", [sliding, by_head])
@pytest.mark.parametrize(("s_q", "s_k"), [(256, 256), (130, 300), (64, 65)])
@pytest.mark.parametrize("block", [64, 128, (64, 192)])
def test_a_block_mask_means_what_its_mask_mod_says(mask_mod: Any, s_q: int, s_k: int, block: Any) -> None:
    sizes = (None, None) if mask_mod is sliding else (2, 2)
    made = create_block_mask(mask_mod, *sizes, s_q, s_k, device="cpu", BLOCK_SIZE=block)
    expected = create_mask(mask_mod, *sizes, s_q, s_k, device="cpu")
    assert torch.equal(BlockTable.of(made).mask, expected)
    query, key, value = inputs(s_q, s_k)
    exact, _ = reference.oracle(query, key, value, attn_mask=expected)
    assert torch.equal(reference.oracle(query, key, value, block_mask=made)[0], exact)
    out = microsdpa.sdpa(query, key, value, block_mask=made)
    assert compare.measure(out, exact).max_abs < 2e-3


def test_a_mask_mod_is_asked_of_partial_blocks_alone_and_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = create_block_mask(sliding, None, None, 512, 512, device="cpu", BLOCK_SIZE=64)
    expected = BlockTable.of(made).mask
    monkeypatch.setattr(blocks, "MAX_MASK_CHUNK", 512 * 10)
    assert torch.equal(BlockTable.of(made).mask, expected)
    asked: list[int] = []
    half = create_block_mask(lambda b, h, i, j: (i < 64) | (j < 100), None, None, 256, 256, "cpu", BLOCK_SIZE=64)

    def counting(b: Any, h: Any, i: Any, j: Any) -> Any:
        asked.append(1)
        return j < 100

    half.mask_mod = counting
    monkeypatch.setattr(blocks, "MAX_MASK_CHUNK", 64 * 256)
    table = BlockTable.of(half)
    assert len(asked) == 3  # the first block of queries has full ones alone
    assert table.full_counts.tolist() == [[[4, 1, 1, 1]]]
    assert table.partial_counts.tolist() == [[[0, 1, 1, 1]]]
    assert table.partial_indices[0, 0, 1].tolist() == [1, 0, 0, 0]


def test_a_plain_table_shows_whole_blocks() -> None:
    table = torch.tensor([[True, False, True], [False, False, True]])
    made = BlockTable(table, (64, 100), 100, 210)
    rows, keys = torch.arange(100) // 64, torch.arange(210) // 100
    assert torch.equal(made.mask, table[rows][:, keys][None, None])
    assert made.full_counts.tolist() == [[[2, 1]]]
    assert made.full_indices.tolist() == [[[[0, 2, 0], [2, 0, 0]]]]
    assert int(made.partial_counts.sum()) == 0
    assert made.full_counts.dtype == made.full_indices.dtype == torch.int32


def test_a_table_with_a_mask_knows_what_is_partial() -> None:
    table = torch.ones(2, 1, 2, 2, dtype=torch.bool)
    mask = torch.ones(128, 128, dtype=torch.bool)
    mask[70, 10] = False
    mask[:64, 64:] = False
    made = BlockTable(table, 64, 128, 128, mask=mask)
    assert made.full_counts.tolist() == [[[1, 1]], [[1, 1]]]
    assert made.partial_counts.tolist() == [[[0, 1]], [[0, 1]]]
    assert made.partial_indices[:, 0, 1, 0].tolist() == [0, 0]
    assert torch.equal(made.mask, mask.expand(2, 1, 128, 128))


@pytest.mark.parametrize("impl", ["auto", "emulate"])
def test_blocks_documents_masks_and_windows_hide_together(impl: str) -> None:
    query, key, value = inputs(130, 130)
    generator = torch.Generator().manual_seed(2)
    table = BlockTable(torch.rand(2, 2, 3, 3, generator=generator) < 0.6, 64, 130, 130)
    ids = torch.arange(130) // 50
    shown = torch.rand(2, 1, 130, 130, generator=generator) < 0.8
    bias = torch.randn(2, 130, 130, generator=generator).half().where(shown[0], -torch.inf)
    ranges = torch.tensor([3, 100], dtype=torch.int32)
    for mask in (None, shown, bias, ranges):
        given: dict[str, Any] = {"block_mask": table, "document_ids": ids, "attn_mask": mask}
        expected, lse = reference.oracle(query, key, value, causal="lower_right", window=(30, -1), **given)
        out, found = microsdpa.sdpa(
            query, key, value, causal="lower_right", window=(30, -1), return_lse=True, impl=impl, **given
        )
        assert compare.measure(out, expected).max_abs < 2e-3
        assert compare.measure(found, lse).max_abs < 2e-3
    expected, _ = reference.oracle(query, key, value, causal="upper_left", block_mask=table)
    assert compare.measure(microsdpa.sdpa(query, key, value, is_causal=True, block_mask=table), expected).max_abs < 2e-3
    with pytest.raises(InvalidArgument, match="None beside is_causal=True"):
        microsdpa.sdpa(query, key, value, is_causal=True, attn_mask=shown, block_mask=table)


def damaged(**changes: Any) -> BlockMask:
    made = create_block_mask(sliding, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    for name, value in changes.items():
        tensor = getattr(made, name).clone()
        tensor[value[0]] = value[1]
        setattr(made, name, tensor)
    return made


def test_a_bad_entry_is_named_and_never_used() -> None:
    for changes, message in (
        ({"kv_indices": ((0, 0, 2, 0), 4)}, r"expected kv_indices\[0, 0, 2, 0\] from 0 to 3, got 4"),
        ({"kv_indices": ((0, 0, 2, 0), -7)}, r"kv_indices\[0, 0, 2, 0\] from 0 to 3, got -7"),
        ({"kv_num_blocks": ((0, 0, 1), 5)}, r"kv_num_blocks\[0, 0, 1\] from 0 to 4, got 5"),
        ({"kv_num_blocks": ((0, 0, 1), -1)}, r"kv_num_blocks\[0, 0, 1\] from 0 to 4, got -1"),
        ({"full_kv_num_blocks": ((0, 0, 3), 99)}, r"full_kv_num_blocks\[0, 0, 3\] from 0 to 4, got 99"),
        ({"kv_indices": ((0, 0, 1, slice(0, 2)), 0)}, r"got block 0 twice in kv_indices\[0, 0, 1\]"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            BlockTable.of(damaged(**changes))  # type: ignore[arg-type]
    unused = damaged(kv_indices=((0, 0, 0, 3), 2**30))
    assert int(unused.kv_num_blocks[0, 0, 0]) < 4
    BlockTable.of(unused)
    both = damaged()
    both.full_kv_num_blocks, both.full_kv_indices = both.kv_num_blocks, both.kv_indices
    with pytest.raises(InvalidArgument, match=r"got \[0, 0, 0, 0\] in both"):
        BlockTable.of(both)


WRONG: list[tuple[tuple[Any, ...], str]] = [
    ((torch.ones(2, 2), 64, 128, 128), "table: expected a bool tensor, got torch.float32"),
    ((torch.ones(2, 3).bool(), 64, 128, 128), r"expected shape \[B, H, 2, 2\]"),
    ((torch.ones(2).bool(), 64, 128, 128), r"got shape \[2\]"),
    ((torch.ones(4, 4).bool(), 32, 128, 128), "block_size: expected .* integers of at least 64, got 32"),
    ((torch.ones(4, 4).bool(), (64, 64, 64), 128, 128), "block_size"),
    ((torch.ones(4, 4).bool(), 64.0, 128, 128), "block_size"),
    ((torch.ones(0, 4).bool(), 64, 0, 128), "seqlen_q, seqlen_k: expected integers over 0"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_is_wrong_with_a_table_is_said(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        BlockTable(*arguments)


def test_a_table_is_of_its_call() -> None:
    query, key, value = inputs(128, 128, batch=3)
    for batch, heads, s_k, message in (
        (2, 1, 128, "expected B = 1 or 3, got 2"),
        (3, 4, 128, "expected H = 1 or 2, got 4"),
        (1, 1, 192, "expected one for S_q = 128 and S_k = 128, got one for 128 and 192"),
    ):
        table = BlockTable(torch.ones(batch, heads, 2, s_k // 64, dtype=torch.bool), 64, 128, s_k)
        with pytest.raises(InvalidArgument, match=f"block_mask: {message}"):
            microsdpa.sdpa(query, key, value, block_mask=table)
    meta = BlockTable(torch.ones(2, 2, dtype=torch.bool), 64, 128, 128)
    meta.memory = meta.memory.to("meta")
    with pytest.raises(InvalidArgument, match="expected one on cpu, as query is, got meta"):
        microsdpa.sdpa(query, key, value, block_mask=meta)
    with pytest.raises(
        InvalidArgument, match=r"a BlockMask of torch.nn.attention.flex_attention or a microsdpa.BlockT"
    ):
        microsdpa.sdpa(query, key, value, block_mask=torch.ones(2, 2).bool())  # type: ignore[arg-type]


def test_a_block_mask_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    of = BlockTable.of
    monkeypatch.setattr(BlockTable, "of", lambda block_mask: looks.append(1) or of(block_mask))
    made = create_block_mask(sliding, None, None, 128, 128, device="cpu", BLOCK_SIZE=64)
    first = blocks.table_of(made)
    assert blocks.table_of(made) is first
    assert len(looks) == 1
    held = len(blocks._known)
    del made
    gc.collect()
    assert len(blocks._known) == held - 1
