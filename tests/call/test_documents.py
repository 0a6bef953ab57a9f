"""Documents that share a sequence: what their ids become, and when that is found again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.call import documents
from microsdpa.call.masks import dense
from microsdpa.errors import InvalidArgument
from microsdpa.evidence import compare

PACKED = torch.tensor([[7, 7, 7, 2, 2, 9], [1, 1, 1, 1, 1, 1]])
APART = torch.tensor([[1, 2, 1, 3, 3, 2]])
of_mask: Callable[..., torch.Tensor] = documents.mask_of_documents


def tensors(batch: int = 2, seqlen_q: int = 6, seqlen_k: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = seqlen_q, seqlen_k, seqlen_k
    query, key, value = (torch.randn(batch, 2, length, 16, generator=generator).half() for length in lengths)
    return query, key, value


def same(of_query: torch.Tensor, of_key: torch.Tensor) -> torch.Tensor:
    return (of_query[:, :, None] == of_key[:, None])[:, None]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_documents_side_by_side_become_ranges(dtype: torch.dtype) -> None:
    query, key, _ = tensors()
    ids = PACKED.to(dtype)
    mask = of_mask(ids, query, key)
    assert (mask.dtype, mask.shape) == (torch.int32, (2, 1, 6, 2))
    assert mask[0, 0].tolist() == [[0, 3]] * 3 + [[3, 5]] * 2 + [[5, 6]]
    assert torch.equal(dense(mask, 6), same(ids, ids))


def test_documents_apart_become_booleans() -> None:
    query, key, _ = tensors()
    mask = of_mask(APART, query, key)
    assert (mask.dtype, mask.shape) == (torch.bool, (1, 1, 6, 6))
    assert torch.equal(mask, same(APART, APART))


def test_queries_and_keys_have_documents_of_their_own() -> None:
    query, key, _ = tensors(seqlen_q=3, seqlen_k=6)
    ids = torch.tensor([2, 5, 7], dtype=torch.int32), PACKED
    mask = of_mask(ids, query, key)
    assert mask.dtype == torch.int32
    assert torch.equal(dense(mask, 6), same(ids[0][None].expand(2, -1), PACKED))
    assert not dense(mask, 6)[0, 0, 1].any()  # no key is of document 5


@pytest.mark.parametrize("trial", range(20))
def test_whatever_the_ids_the_mask_is_right(trial: int) -> None:
    generator = torch.Generator().manual_seed(trial)
    s_q, s_k = (int(torch.randint(1, 40, (), generator=generator)) for _ in range(2))
    of_query, of_key = (torch.randint(-2, 4, (2, s), generator=generator) for s in (s_q, s_k))
    if trial % 2:
        of_key = of_key.sort(dim=1).values
    query, key, _ = tensors(2, s_q, s_k)
    mask = of_mask((of_query, of_key), query, key)
    assert torch.equal(dense(mask, s_k), same(of_query, of_key))
    assert mask.dtype == torch.int32 or not trial % 2


def test_ids_are_looked_at_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    find = documents.find

    def counted(*ids: torch.Tensor) -> torch.Tensor:
        looks.append(1)
        return find(*ids)

    monkeypatch.setattr(documents, "find", counted)
    query, key, _ = tensors()
    ids = PACKED.clone()
    first = of_mask(ids, query, key)
    assert of_mask(ids, query, key) is first
    assert len(looks) == 1
    ids[0, 3] = 7
    assert torch.equal(dense(of_mask(ids, query, key), 6), same(ids, ids))
    assert len(looks) == 2
    held = len(documents._known)
    del ids
    gc.collect()
    assert len(documents._known) == held - 1
    with torch.inference_mode():
        unversioned = PACKED.clone()
        of_mask(unversioned, query, key)
        unversioned[0, 0] = 9
        assert torch.equal(dense(of_mask(unversioned, query, key), 6), same(unversioned, unversioned))


def test_known_ids_are_still_checked_against_the_call() -> None:
    query, key, _ = tensors()
    ids = PACKED.clone()
    of_mask(ids, query, key)
    with pytest.raises(InvalidArgument, match=r"document_ids: expected shape \[S_q\] = \[5\] or \[B, S_q\] = \[2, 5\]"):
        of_mask(ids, query[:, :, 1:], key)
    with pytest.raises(InvalidArgument, match=r"\[B, S_q\] = \[3, 6\], got shape \[2, 6\]"):
        of_mask(ids, *tensors(batch=3)[:2])


WRONG: list[tuple[Any, str]] = [
    (PACKED.float(), "expected int32 or int64, got torch.float32"),
    (PACKED.bool(), "expected int32 or int64, got torch.bool"),
    ([1, 2], "expected integer tensors, got int"),
    ((PACKED, PACKED, PACKED), "one of queries and one of keys, got 3 of them"),
    (PACKED[:, 1:], r"got shape \[2, 5\]; one id for each token"),
    (PACKED[None], r"got shape \[1, 2, 6\]"),
    ((PACKED, PACKED[:, 1:]), r"expected shape \[S_k\] = \[6\]"),
    (PACKED.to("meta"), "expected a tensor on cpu, as query is, got meta"),
]


@pytest.mark.parametrize(("ids", "message"), WRONG)
def test_what_is_wrong_with_ids_is_said(ids: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        microsdpa.sdpa(*tensors(), document_ids=ids)


def test_one_tensor_of_ids_is_for_self_attention() -> None:
    with pytest.raises(InvalidArgument, match=r"pass \(ids of the queries, ids of the keys\)"):
        microsdpa.sdpa(*tensors(seqlen_k=7), document_ids=PACKED)


@pytest.mark.parametrize("ids", [PACKED, APART[0]])
@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right", "is_causal"])
@pytest.mark.parametrize("impl", ["auto", "emulate"])
def test_documents_are_what_the_oracle_says(ids: torch.Tensor, causal: Any, impl: str) -> None:
    inputs = tensors()
    alignment = "upper_left" if causal == "is_causal" else causal
    expected, _ = reference.oracle(*inputs, causal=alignment, document_ids=ids)
    plain = [reference.oracle(*(t[:, :, rows] for t in inputs))[0] for rows in (slice(0, 3), slice(3, 5), slice(5, 6))]
    if causal is None and ids is PACKED:
        assert torch.allclose(expected[0], torch.cat(plain, dim=2)[0])
    options: dict[str, Any] = {"is_causal": True} if causal == "is_causal" else {"causal": causal}
    out = microsdpa.sdpa(*inputs, document_ids=ids, impl=impl, **options)
    assert compare.measure(out, expected).max_abs < 2e-3


def test_ranges_for_graphs_are_what_sdpa_makes() -> None:
    query, key, value = tensors()
    ranges = microsdpa.document_ranges(PACKED)
    assert torch.equal(ranges, of_mask(PACKED, query, key))
    out = microsdpa.sdpa(query, key, value, attn_mask=ranges)
    assert torch.equal(out, microsdpa.sdpa(query, key, value, document_ids=PACKED))
    assert microsdpa.document_ranges((PACKED[0, :3], PACKED)).shape == (2, 1, 3, 2)
    with pytest.raises(InvalidArgument, match="keys of a document side by side, got some that lie apart"):
        microsdpa.document_ranges(APART)
    with pytest.raises(InvalidArgument, match=r"expected tensors \[S\] or \[B, S\]"):
        microsdpa.document_ranges([1, 2])  # type: ignore[arg-type]


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([2, 5, 7], dtype=torch.int32), PACKED.clone()


def known_pair() -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Ids of queries and of keys that a call has had, and the mask that was found for them."""
    ids = pair()
    query, key, _ = tensors(seqlen_q=3, seqlen_k=6)
    return ids, of_mask(ids, query, key)


def test_a_pair_is_known_by_its_tensors() -> None:
    ids, mask = known_pair()
    for same_ids in (ids, list(ids), (ids[0], ids[1])):
        known = documents.known_mask(same_ids)
        assert known is not None
        assert known[0] is mask
        assert known[1:] == (6, False)


@pytest.mark.parametrize("changed", [0, 1])
def test_a_pair_of_which_one_has_changed_is_not_known(changed: int) -> None:
    ids, _ = known_pair()
    ids[changed][0] = 1
    assert documents.known_mask(ids) is None


def test_other_pairs_are_not_known() -> None:
    ids, _ = known_pair()
    for other in ((ids[1], ids[0]), (ids[0], ids[1].clone()), ids[:1], (*ids, ids[0]), pair()):
        assert documents.known_mask(other) is None


def test_a_pair_whose_tensors_are_gone_is_forgotten() -> None:
    ids, _ = known_pair()
    name = id(ids[0]), id(ids[1])
    assert name in documents._known_pairs
    del ids
    gc.collect()
    assert name not in documents._known_pairs


def test_a_pair_for_one_query_is_not_known() -> None:
    """Its row would broadcast to any number of queries."""
    ids = torch.tensor([5], dtype=torch.int32), PACKED.clone()
    query, key, _ = tensors(seqlen_q=1, seqlen_k=6)
    of_mask(ids, query, key)
    assert documents.known_mask(ids) is None
