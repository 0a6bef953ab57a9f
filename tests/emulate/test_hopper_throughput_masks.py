"""hopper/throughput with masks in the emulator: every kind, alone and together, by each configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import check_in_every_order

import microsdpa
from microsdpa import BlockTable, reference
from microsdpa.call.masks import Masks
from microsdpa.emulate import run
from microsdpa.emulate.run import attention
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make, masks_of
from microsdpa.kernels.hopper.throughput.spec import fitting, specification
from microsdpa.kernels.problem import Causal

CASES = [
    (Case(1, 2, 200, 500, 64, masks=("window",)), 0),
    (Case(1, 2, 300, 500, 64, causal="lower_right", masks=("window",)), 1),
    (Case(1, 2, 300, 300, 128, causal="upper_left", masks=("window", "softcap")), 0),
    (Case(1, 3, 200, 300, 64, masks=("softcap",), scale=-1.0), 2),
    (Case(2, 2, 200, 300, 128, masks=("alibi", "sinks"), dtype="bfloat16"), 0),
    (Case(1, 4, 300, 100, 64, heads_kv=2, causal="lower_right", masks=("sinks",)), 0),  # rows without a key
    (Case(2, 2, 200, 450, 64, masks=("bool",)), 0),
    (Case(2, 2, 100, 77, 64, masks=("bool",)), 0),  # all warps of a list read rows of one tile
    (Case(1, 2, 100, 200, 128, masks=("bool",), causal="lower_right"), 0),
    (Case(2, 2, 100, 77, 64, masks=("padding",)), 0),
    (Case(1, 1, 300, 4300, 64, masks=("bool",), causal="lower_right"), 0),  # the mask is read ahead of the lists
    (Case(2, 2, 200, 450, 64, masks=("bool",), causal="lower_right", scale=-0.2), 2),
    (Case(2, 3, 150, 450, 128, masks=("padding",)), 0),
    (Case(2, 3, 300, 450, 64, masks=("padding",), causal="upper_left"), 0),
    (Case(1, 2, 150, 520, 64, masks=("blocks 50%",), causal="upper_left"), 0),  # rows that see none of their blocks
    (Case(2, 2, 260, 400, 40, masks=("left padding", "softcap", "alibi", "sinks", "window")), 1),
    (Case(1, 2, 150, 300, 160, masks=("bool", "sinks"), dtype="bfloat16"), 0),
    (Case(1, 2, 140, 200, 256, masks=("bool",), causal="lower_right"), 0),
    (Case(1, 3, 200, 304, 64, masks=("additive",)), 0),
    (Case(2, 2, 200, 304, 64, masks=("additive", "window", "softcap", "sinks"), causal="lower_right"), 0),
    (Case(2, 2, 150, 304, 128, masks=("additive",), dtype="bfloat16"), 0),
    (Case(1, 3, 150, 304, 128, masks=("additive", "alibi"), causal="upper_left", scale=0.3), 1),
    (Case(1, 3, 150, 300, 128, masks=("float32",)), 0),
    (Case(1, 2, 200, 300, 64, masks=("float32",), causal="lower_right", scale=0.0), 0),
    (Case(2, 2, 400, 400, 64, masks=("documents",), causal="lower_right"), 0),
    (Case(1, 2, 300, 300, 128, masks=("documents", "softcap", "sinks")), 0),
    (Case(2, 2, 300, 530, 64, heads_kv=1, masks=("blocks 30%",)), 0),
    (Case(1, 2, 300, 530, 128, causal="lower_right", masks=("blocks 50%", "window", "sinks")), 0),
    (Case(1, 2, 140, 304, 160, masks=("additive",)), 0),
    (Case(1, 2, 140, 304, 160, masks=("float32",), causal="lower_right"), 0),
    (Case(1, 2, 200, 304, 72, masks=("left padding, numbers",)), 1),
    # Rows that do not start on 16 bytes.
    (Case(1, 2, 140, 301, 64, masks=("additive",), dtype="bfloat16"), 0),
    (Case(2, 3, 150, 300, 128, masks=("additive", "softcap", "sinks"), causal="lower_right"), 1),
    (Case(2, 2, 100, 209, 64, masks=("additive", "alibi")), 0),
    (Case(1, 2, 140, 301, 128, masks=("float32", "window")), 0),
    (Case(2, 2, 140, 303, 64, masks=("left padding, numbers",)), 0),
]
THROUGHPUT = "emulate:hopper/throughput"
CTAS = 3
"""Fewer than there are query tiles, so that each takes several."""


@pytest.mark.parametrize(("case", "candidate"), CASES, ids=str)
def test_masks_are_right_in_every_order(case: Case, candidate: int) -> None:
    problem = replace(case.problem("sm_90a"), mask=masks_of(case).kind_in_memory)
    tiles = fitting(problem)
    spec = replace(specification(problem, tiles[candidate % len(tiles)]), max_ctas=CTAS)
    # Rows of 32-bit numbers are read two at a time in each bank: the copies' pattern is for rows of 16 bits. So are
    # some rows that begin at different places.
    unaligned = problem.mask is not None and problem.mask.unaligned
    check_in_every_order(spec, problem, case, conflicts=unaligned or "float32" in case.masks)


@pytest.mark.parametrize(
    ("dtype", "first", "columns"), [(torch.float16, 1, 302), (torch.float16, 8, 309), (torch.float32, 3, 303)]
)
def test_a_mask_that_begins_anywhere(dtype: torch.dtype, first: int, columns: int) -> None:
    query, key, value = make(Case(1, 2, 90, columns - first, 64))
    mask = torch.randn(2, 90, columns, dtype=dtype)[..., first:]
    out, lse = microsdpa.sdpa(query, key, value, attn_mask=mask, impl=THROUGHPUT, return_lse=True)
    tensors = query, key, value
    expected, plain = (of(*tensors, attn_mask=mask) for of in (reference.oracle, reference.eager))
    for got, exact, eager in zip((out, lse), expected, plain, strict=True):
        assert compare.tolerance(eager, exact, got.dtype).admits(compare.measure(got, exact))
    kind = Masks(attn_mask=mask).kind_in_memory
    assert kind is not None
    assert kind.unaligned


def test_a_mask_with_gaps_between_keys_is_not_for_bulk_copies() -> None:
    kind = Masks(attn_mask=torch.zeros(1, 1, 100, 200).mT).kind_in_memory
    assert kind is not None
    assert not kind.bulk
    assert not kind.unaligned


@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_documents_as_ranges_are_those_of_a_boolean_mask(causal: Causal | None, head_dim: int) -> None:
    case = Case(2, 2, 330, 330, head_dim)
    query, key, value = make(case)
    ids = torch.stack([torch.arange(330) // 90, (torch.arange(330) + 40) // 128])
    shown = (ids[:, :, None] == ids[:, None])[:, None]
    by_ranges, by_mask = (
        microsdpa.sdpa(query, key, value, causal=causal, impl=THROUGHPUT, return_lse=True, **given)  # type: ignore[arg-type]
        for given in ({"document_ids": ids}, {"attn_mask": shown})
    )
    for a, b in zip(by_ranges, by_mask, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=2e-3)


@pytest.mark.parametrize("softcap", [1e-3, 3.0, 5000.0, 1e30])
def test_soft_caps_of_any_size(softcap: float) -> None:
    query, key, value = make(Case(1, 2, 130, 200, 64))
    masks = Masks(softcap=softcap)
    problem = replace(Case(1, 2, 130, 200, 64).problem("sm_90a"), mask=masks.kind_in_memory)
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:3], torch.nan)
    attention(specification(problem, fitting(problem)[0]), problem, (query, key, value, out, lse), masks=masks)
    expected = reference.oracle(query, key, value, softcap=softcap)
    eager = reference.eager(query, key, value, softcap=softcap)
    for got, exact, plain in zip((out, lse), expected, eager, strict=True):
        assert compare.tolerance(plain, exact, got.dtype).admits(compare.measure(got, exact))


@pytest.mark.parametrize("head_dim", [32, 64, 128, 160, 256])
@pytest.mark.parametrize("seqlen_q", [1, 290])
def test_a_table_of_blocks_is_its_boolean_mask(head_dim: int, seqlen_q: int) -> None:
    """Blocks that are hidden, partial in some rows and whole, and keys beyond the last tile."""
    query, key, value = make(Case(2, 2, seqlen_q, 460, head_dim))
    generator = torch.Generator().manual_seed(head_dim)
    seen = torch.rand(2, 1, -(-seqlen_q // 64), 7, generator=generator) < 0.5
    mask = torch.rand(seqlen_q, 460, generator=generator) < 0.99
    mask[:, 100:300] = True
    table = BlockTable(seen, (64, 70), seqlen_q, 460, mask=mask)
    rows, keys = torch.arange(seqlen_q) // 64, torch.arange(460) // 70
    shown = seen[:, :, rows][..., keys] & mask
    by_table, by_mask = (
        microsdpa.sdpa(query, key, value, impl=THROUGHPUT, return_lse=True, **given)  # type: ignore[arg-type]
        for given in ({"block_mask": table}, {"attn_mask": shown})
    )
    for a, b in zip(by_table, by_mask, strict=True):
        assert torch.equal(a, b)


def test_a_table_costs_its_lists_and_the_bits_of_partial_tiles() -> None:
    """One launch, which reads no boolean; a bit for each score where some are hidden."""
    query, key, value = make(Case(1, 1, 256, 2048, 64))
    read = []
    for mask in (None, torch.arange(2048) % 32 != 5):
        table = BlockTable(torch.ones(4, 32, dtype=torch.bool), 64, 256, 2048, mask=mask)
        masks = Masks(attn_mask=table.memory)
        problem = replace(Case(1, 1, 256, 2048, 64).problem("sm_90a"), mask=masks.kind_in_memory)
        spec = specification(problem, fitting(problem)[0])
        assert spec.stages == (spec,)
        report = attention(spec, problem, (query, key, value, torch.empty_like(query), None), masks=masks)
        read.append(report.counters["global_read_bytes"])
    bits = 256 * 2048 / 8
    assert bits <= read[1] - read[0] < 1.1 * bits


@pytest.mark.parametrize("options", [{"causal": "lower_right"}, {"window": (90, 20)}, {"window": (50, 200)}])
def test_a_list_of_a_table_is_cut_off_where_nobody_sees(options: dict[str, Any]) -> None:
    """Tiles before a window and behind the diagonal are not visited, nor what follows an empty list."""
    query, key, value = make(Case(1, 2, 300, 700, 64))
    seen = torch.rand(1, 2, 5, 11, generator=torch.Generator().manual_seed(4)) < 0.6
    seen[:, :, 2:4, :] = torch.arange(11) > 8
    table = BlockTable(seen, 64, 300, 700)
    given = {**options, "return_lse": True, "impl": THROUGHPUT}
    found = microsdpa.sdpa(query, key, value, block_mask=table, **given)
    expected = microsdpa.sdpa(query, key, value, attn_mask=table.mask, **given)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_no_bit_depends_on_what_scratch_memory_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the last query tile that do not exist take part in the decisions of their warps."""
    query, key, value = make(Case(1, 1, 68, 700, 64))
    masks = Masks(attn_mask=torch.rand(68, 700, generator=torch.Generator().manual_seed(1)) < 0.2)
    problem = replace(Case(1, 1, 68, 700, 64).problem("sm_90a"), mask=masks.kind_in_memory)
    spec = specification(problem, fitting(problem)[0])
    outs = [torch.empty_like(query) for _ in range(2)]
    for out, scratch in zip(outs, (0, 0xFF), strict=True):
        monkeypatch.setattr(run, "SCRATCH_BYTE", scratch)
        attention(spec, problem, (query, key, value, out, None), masks=masks)
    assert torch.equal(*outs)


def test_any_numbers_may_stand_in_ranges() -> None:
    query, key, value = make(Case(1, 2, 300, 400, 64))
    generator = torch.Generator().manual_seed(3)
    ends = torch.randint(-100, 600, (1, 2, 300, 2), generator=generator, dtype=torch.int32)
    ends[:, :, 128:200] = torch.tensor([300, 200])  # rows that see nothing
    keys = torch.arange(400)
    shown = (keys >= ends[..., :1]) & (keys < ends[..., 1:])
    expected = reference.oracle(query, key, value, attn_mask=shown)
    problem = replace(Case(1, 2, 300, 400, 64).problem("sm_90a"), mask=Masks(attn_mask=ends).kind_in_memory)
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:3], torch.nan)
    spec = specification(problem, fitting(problem)[0])
    attention(spec, problem, (query, key, value, out, lse), masks=Masks(attn_mask=ends))
    eager = reference.eager(query, key, value, attn_mask=shown)
    for got, exact, plain in zip((out, lse), expected, eager, strict=True):
        assert compare.tolerance(plain, exact, got.dtype).admits(compare.measure(got, exact))
