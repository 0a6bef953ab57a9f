"""Masks of booleans with a summary in their memory."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

import microsdpa
from microsdpa import BlockTable
from microsdpa.call import summary
from microsdpa.call.masks import dense
from microsdpa.errors import InvalidArgument


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
