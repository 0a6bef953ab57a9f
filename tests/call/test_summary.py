"""Masks of booleans with a summary in their memory."""

from __future__ import annotations

import copy
import gc
import pickle
import re

import pytest
import torch

import microsdpa
from microsdpa import BlockTable
from microsdpa.call import summary
from microsdpa.call.masks import dense
from microsdpa.errors import InvalidArgument
from microsdpa.jit.source import KERNELS_DIR


@pytest.mark.parametrize("keys", [1, 31, 32, 33, 64, 127, 128, 129, 4097])
def test_a_summary_says_none_some_or_all(keys: int) -> None:
    generator = torch.Generator().manual_seed(keys)
    mask = torch.rand(2, 1, 5, keys, generator=generator) < 0.5
    mask[:, :, 1], mask[:, :, 2], mask[0, 0, 3, : keys // 2] = True, False, True
    memory = summary.summed(mask)
    assert memory.dtype == torch.uint8
    assert memory.shape[3] % summary.ALIGNMENT == 0
    assert torch.equal(dense(memory, keys), mask)
    first = -(-keys // summary.ALIGNMENT) * summary.ALIGNMENT
    for granule, part in enumerate(mask.split(summary.GRANULE, dim=3)):
        expected = part.any(dim=3).int() + part.all(dim=3).int()
        assert torch.equal(memory[..., first + granule].int(), expected)
    assert first + -(-keys // summary.GRANULE) <= memory.shape[3]


@pytest.mark.parametrize("keys", [1, 63, 128, 200, 700])
@pytest.mark.parametrize("rows", [1, 130, 300])
def test_bits_and_lists_say_what_the_booleans_do(rows: int, keys: int) -> None:
    """In the orders that summary.py describes, found one by one."""
    generator = torch.Generator().manual_seed(rows + keys)
    mask = torch.rand(1, 2, rows, keys, generator=generator) < 0.5
    mask[..., 64:128], mask[:, 1, :, 128:200], mask[:, 0, 128:256] = True, False, False
    memory = summary.summed(mask)
    _, bits, at, end = summary._places(keys)
    assert end == memory.shape[3]
    for head, row, key in torch.cartesian_prod(torch.arange(2), torch.arange(0, rows, 37), torch.arange(keys)).tolist():
        group, within = divmod(key, 128)
        n, lane, e = within // 8, within % 8 // 2, within % 2
        bit = 2 * n + e
        byte = int(memory[0, head, row, bits + 16 * group + 4 * lane + bit // 8])
        assert byte >> bit % 8 & 1 == mask[0, head, row, key]
    for tile_keys in summary.TILE_KEYS:
        tiles = -(-keys // tile_keys)
        for head in range(2):
            for first in range(0, rows, 128):
                parts = [part for part in mask[0, head, first : first + 128].split(tile_keys, dim=1)]
                expected = [2 * tile + bool(part.all()) for tile, part in enumerate(parts) if part.any()] or [0]
                numbers = memory[0, head, first, at : at + 4 * (1 + tiles)].view(torch.int32).tolist()
                assert numbers[0] == len(expected)
                assert numbers[1 : 1 + len(expected)] == expected
        at += 4 * (1 + tiles)
    assert at <= end


def test_kernels_know_where_the_parts_are() -> None:
    text = (KERNELS_DIR / "common/masks.cuh").read_text(encoding="utf-8")
    written = dict(re.findall(r"\b(GRANULE|ALIGNMENT|GROUP|TILE_ROWS) = (\d+)", text))
    assert {name: int(value) for name, value in written.items()} == {name: getattr(summary, name) for name in written}
    assert len(written) == 4


def test_only_memory_that_was_made_here_is_taken() -> None:
    query = torch.randn(1, 1, 64, 32).half()
    memory = summary.summed(torch.ones(1, 1, 64, 64, dtype=torch.bool))
    assert summary.is_summed(memory)
    assert not summary.is_summed(memory.clone())
    assert not summary.is_summed(None)
    with pytest.raises(InvalidArgument, match=r"got torch.uint8; call .to\(torch.bool\) if 0 hides a key"):
        microsdpa.sdpa(query, query, query, attn_mask=memory.clone())
    held = len(summary._made)
    del memory
    gc.collect()
    assert len(summary._made) == held - 1


def test_a_table_can_be_copied_and_pickled() -> None:
    query = torch.randn(1, 1, 128, 32).half()
    table = BlockTable(torch.tensor([[True, False], [True, True]]), 64, 128, 128)
    expected = microsdpa.sdpa(query, query, query, block_mask=table)
    for other in (copy.copy(table), copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert torch.equal(microsdpa.sdpa(query, query, query, block_mask=other, impl="auto"), expected)
        assert microsdpa.explain(query, query, query, block_mask=other, impl="emulate").runs == "emulate:ampere/general"
