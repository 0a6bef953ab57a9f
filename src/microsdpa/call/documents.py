"""Documents that share a sequence: from their ids to the keys that each query sees."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active, _get_tracing_state, _len_torch_dispatch_stack

from microsdpa.errors import InvalidArgument

Ids = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Ids of queries and keys: one tensor for both, or a pair."""
Sizes = tuple[int, int, int, int, int]
"""B, H, S_q and S_k of a call, and the number of its device: to compare these is faster than shapes."""
MAX_KNOWN = 256


class _Known(NamedTuple):
    """What ids were found to mean, and which they were; a changed tensor has another version."""

    tensors: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[int, ...]
    sizes: Sizes
    mask: torch.Tensor

    def is_of(self, pair: tuple[object, ...]) -> bool:
        """Whether these are the tensors, unchanged."""
        for ref, version, ids in zip(self.tensors, self.versions, pair, strict=True):
            tensor = ref()
            if tensor is None or tensor is not ids or tensor._version != version:
                return False
        return True


_known: dict[tuple[int, ...], _Known] = {}
_Found = tuple[torch.Tensor, int, bool]
"""What known_mask() gives."""
_known_alone: dict[int, tuple[weakref.ref[torch.Tensor], int, _Found]] = {}
"""Of ids that are those of queries and keys, by id(): themselves, their version, and what known_mask() gives."""
_KnownPair = tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor], int, int, _Found]
_known_pairs: dict[tuple[int, int], _KnownPair] = {}
"""The same of ids of queries and ids of keys."""


def mask_of_documents(document_ids: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """An attn_mask that shows a query the keys of its own document.

    It is int32 [B | 1, 1, S_q, 2], the first key and one past the last, where the keys of every document are side by
    side, and else bool [B | 1, 1, S_q, S_k]. Which of the two is found once for a tensor that is not changed: the
    device is waited for. While a CUDA graph is captured, or a tracer looks on, it is always bool, and made anew.

    query is [B, H, S_q, D] and key [B, H_kv, S_k, D].

    Raises:
        InvalidArgument: the ids are none of these tensors'.
    """
    pair = tuple(document_ids) if isinstance(document_ids, (tuple, list)) else (document_ids,)
    if torch.compiler.is_compiling():
        return same_document(*check(pair, query, key))
    known = _known.get(tuple(map(id, pair)))
    sizes = query.size(0), query.size(1), query.size(2), key.size(2), query.get_device()
    if known is not None and known.sizes == sizes and known.is_of(pair) and not _is_recorded(known.mask):
        return known.mask
    of_query, of_key = check(pair, query, key)
    if _is_recorded(of_query):
        return same_document(of_query, of_key)
    mask = find(of_query, of_key)
    _remember(pair, mask, sizes)
    return mask


def known_mask(document_ids: object) -> _Found | None:
    """The mask that unchanged ids of queries and keys have, found without a check, to look for a plan with it.

    Only calls that were checked have a plan, and its key has the mask's shape and device. The mask shows neither S_k,
    which comes with it, nor that a CUDA graph would have other ids: False stands for a mask that none may hold.
    """
    known = _known_alone.get(id(document_ids))
    if known is None:
        return _known_mask_of_pair(document_ids)
    ref, version, found = known
    ids = ref()
    return found if ids is not None and ids is document_ids and ids._version == version else None


def _known_mask_of_pair(document_ids: object) -> _Found | None:
    if not isinstance(document_ids, (tuple, list)) or len(document_ids) != 2:
        return None
    of_query, of_key = document_ids
    known = _known_pairs.get((id(of_query), id(of_key)))
    if known is None:
        return None
    query_ref, key_ref, query_version, key_version, found = known
    query, key = query_ref(), key_ref()
    if query is None or query is not of_query or key is None or key is not of_key:
        return None
    return found if query._version == query_version and key._version == key_version else None


def check(pair: tuple[object, ...], query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B | 1, S_q] of the queries and [B | 1, S_k] of the keys.

    Raises:
        InvalidArgument: they are not integers of such shapes, on the device of query.
    """
    batch, seqlen_q, seqlen_k = query.shape[0], query.shape[2], key.shape[2]
    if len(pair) not in (1, 2):
        got = f"{len(pair)} of them"
        raise InvalidArgument(
            "document_ids", expected="a tensor, or one of queries and one of keys", got=got, hint=PAIR
        )
    found = []
    for ids, (letters, length) in zip(pair * (3 - len(pair)), (("S_q", seqlen_q), ("S_k", seqlen_k)), strict=True):
        if not isinstance(ids, torch.Tensor):
            got = type(ids).__name__
            raise InvalidArgument("document_ids", expected="integer tensors", got=got, hint="use torch.as_tensor")
        if ids.dtype not in (torch.int32, torch.int64):
            hint = "convert it with .to(torch.int32)"
            raise InvalidArgument("document_ids", expected="int32 or int64", got=str(ids.dtype), hint=hint)
        if ids.device != query.device:
            expected = f"a tensor on {query.device}, as query is"
            raise InvalidArgument("document_ids", expected=expected, got=str(ids.device), hint="move it there")
        if ids.dim() not in (1, 2) or ids.shape[-1] != length or (ids.dim() == 2 and ids.shape[0] not in (1, batch)):
            raise InvalidArgument(
                "document_ids",
                expected=f"shape [{letters}] = [{length}] or [B, {letters}] = [{batch}, {length}]",
                got=f"shape {list(ids.shape)}",
                hint=PAIR if len(pair) == 1 and seqlen_q != seqlen_k else "one id for each token",
            )
        found.append(ids if ids.dim() == 2 else ids[None])
    return found[0], found[1]


PAIR = "pass (ids of the queries, ids of the keys) where they are not the same tokens"


def same_document(of_query: torch.Tensor, of_key: torch.Tensor) -> torch.Tensor:
    """Bool [B | 1, 1, S_q, S_k] of ids [B | 1, S_q] and [B | 1, S_k]."""
    return (of_query[:, :, None] == of_key[:, None])[:, None]


def find(of_query: torch.Tensor, of_key: torch.Tensor) -> torch.Tensor:
    """Ranges, int32 [B | 1, 1, S_q, 2], or bool [B | 1, 1, S_q, S_k] where keys of a document lie apart."""
    batch = max(of_query.shape[0], of_key.shape[0])
    common = torch.promote_types(of_query.dtype, of_key.dtype)
    of_query, of_key = (ids.to(common).expand(batch, -1).contiguous() for ids in (of_query, of_key))
    if of_key.shape[1] == 0:
        return torch.zeros(batch, 1, of_query.shape[1], 2, dtype=torch.int32, device=of_query.device)
    ids, places = of_key.sort(dim=1, stable=True)
    low, high = (torch.searchsorted(ids, of_query, right=right) for right in (False, True))
    first, last = (places.gather(1, at.clamp(0, ids.shape[1] - 1)) for at in (low, high - 1))
    count = high - low
    ranges = torch.stack([first, first + count], dim=-1).int()
    apart = (count > 0) & (last + 1 - first != count)
    return same_document(of_query, of_key) if bool(apart.any()) else ranges[:, None]


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Whether what is done with a tensor is recorded, to be done again with other values."""
    return is_traced(tensor) or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tracer, a transform or a tensor type of its own has to see what is done with a tensor."""
    if type(tensor) is not torch.Tensor or _len_torch_dispatch_stack() or _get_tracing_state():
        return True
    return _are_functorch_transforms_active()


def _remember(pair: tuple[object, ...], mask: torch.Tensor, sizes: Sizes) -> None:
    tensors = [ids for ids in pair if isinstance(ids, torch.Tensor) and not ids.is_inference()]
    if len(tensors) != len(pair):
        return  # nobody knows when a tensor of the inference mode changes
    if len(_known) >= MAX_KNOWN:
        _known.clear()
        _known_alone.clear()
        _known_pairs.clear()
    name = tuple(map(id, pair))
    refs = tuple(weakref.ref(ids, lambda _: _known.pop(name, None)) for ids in tensors)
    _known[name] = known = _Known(refs, tuple(ids._version for ids in tensors), sizes, mask)
    seqlen_q, seqlen_k = sizes[2:4]
    if seqlen_q <= 1:  # one row would broadcast to any number of queries
        return
    found = mask, seqlen_k, False
    if len(name) == 1:
        alone = name[0]
        ref = weakref.ref(tensors[0], lambda _: _known_alone.pop(alone, None))
        _known_alone[alone] = ref, tensors[0]._version, found
    else:
        both = name[0], name[1]
        of_query, of_key = (weakref.ref(ids, lambda _: _known_pairs.pop(both, None)) for ids in tensors)
        _known_pairs[both] = of_query, of_key, known.versions[0], known.versions[1], found


def document_ranges(document_ids: Ids) -> torch.Tensor:
    """The keys of each query's document as int32 [B, 1, S_q, 2], which sdpa takes for attn_mask: first, one past last.

    It is what sdpa makes of `document_ids`, for calls that are captured in a CUDA graph or compiled: they would make
    a mask of S_q times S_k booleans every time. The device is waited for.

    Args:
        document_ids: integers [S] or [B, S], or a pair of them, of the queries and of the keys.

    Raises:
        InvalidArgument: they are no integers of such shapes, or the keys of a document lie apart.
    """
    pair = tuple(document_ids) if isinstance(document_ids, (tuple, list)) else (document_ids,)
    if not all(isinstance(ids, torch.Tensor) and ids.dim() in (1, 2) for ids in pair):
        raise InvalidArgument("document_ids", expected="tensors [S] or [B, S]", got="something else", hint=PAIR)
    batch = max(ids.shape[0] if ids.dim() == 2 else 1 for ids in pair)
    like = [ids.new_empty(batch, 1, ids.shape[-1], 1) for ids in (pair[0], pair[-1])]
    mask = find(*check(pair, *like))
    if mask.dtype == torch.bool:
        raise InvalidArgument(
            "document_ids",
            expected="keys of a document side by side",
            got="some that lie apart",
            hint="pass document_ids= to sdpa, or sort the tokens by document",
        )
    return mask
