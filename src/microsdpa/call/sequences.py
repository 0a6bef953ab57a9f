"""Sequences of many lengths: the tensors that say where they lie, and the checks of a call that has them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from microsdpa.call import tensors
from microsdpa.call.cache import is_cached
from microsdpa.call.prologue import check_eps, check_table
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.kernels.ampere.varlen.spec import MOST_KEYS, MOST_WORK, SPLIT_KEYS, RowChange
from microsdpa.kernels.problem import MaskType

LARGEST_GRANULARITY = 64
"""Keys of the largest tile: larger powers of two that divide a page say no more."""


class Sequences(NamedTuple):
    """What a call with sequences of many lengths has beside query, key and value.

    Attributes:
        query_offsets: [B + 1], int32: sequence b has queries query_offsets[b] to query_offsets[b + 1] of packed Q.
        key_offsets: [B + 1], int32: the same for packed K and V.
        lengths: [B], int32: keys of each sequence that are in use.
        page_table: [B, n], int32: pages of the cache that the keys of a sequence lie in, one after the other.
        max_queries: queries that a sequence has at most; a hint for the choice of tiles.
        new_key: [queries, H_kv, D] or [B, S_q, H_kv, D], as query: keys that are written behind those in use.
        new_value: like new_key.
        rotary_cos: [positions, R / 2]: queries and new keys are rotated in their first R columns.
        rotary_sin: like rotary_cos.
        q_norm: [D]: weights of an RMS norm of queries, ahead of the rotation.
        k_norm: the same of new keys.
        norm_eps: of both norms.
        rotary_interleaved: whether pairs that are rotated are neighbours.
        batch_invariant: whether a sequence's bits may depend on nothing but the sequence.
    """

    query_offsets: torch.Tensor | None = None
    key_offsets: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    max_queries: int | None = None
    new_key: torch.Tensor | None = None
    new_value: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 1e-6
    rotary_interleaved: bool = False
    batch_invariant: bool = False

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The integers that are given, by name."""
        given = {"query_offsets": self.query_offsets, "key_offsets": self.key_offsets, "lengths": self.lengths}
        given["page_table"] = self.page_table
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    @property
    def appended(self) -> dict[str, torch.Tensor]:
        """What is written to the cache, and what changes it and queries, as far as it is given, by name."""
        given = {"new_key": self.new_key, "new_value": self.new_value}
        given |= {"rotary_cos": self.rotary_cos, "rotary_sin": self.rotary_sin}
        given |= {"q_norm": self.q_norm, "k_norm": self.k_norm}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    @property
    def change(self) -> RowChange:
        """What is done to queries and new keys."""
        found, norm = RowChange(), self.k_norm if self.q_norm is None else self.q_norm
        if self.rotary_cos is not None:
            found = RowChange(2 * self.rotary_cos.shape[1], self.rotary_interleaved, _name_of(self.rotary_cos))
        return found if norm is None else replace(found, weights=_name_of(norm))

    def granularity(self, key: torch.Tensor) -> int:
        """The largest power of two, up to 64, that divides the keys of a page; 0 without pages."""
        if self.page_table is None:
            return 0
        page = key.shape[1]
        return min(page & -page, LARGEST_GRANULARITY)

    def batch(self, query: torch.Tensor) -> int:
        """How many sequences there are."""
        return query.shape[0] if self.query_offsets is None else self.query_offsets.shape[0] - 1

    def most_keys(self, key: torch.Tensor) -> int:
        """Keys that a sequence may have, as far as the host knows; of packed K, all keys."""
        if self.page_table is not None:
            return self.page_table.shape[1] * key.shape[1]
        return key.shape[0] if self.key_offsets is not None else key.shape[1]

    def queries(self, query: torch.Tensor) -> int:
        """Queries of all sequences together."""
        return query.shape[0] if self.query_offsets is not None else query.shape[0] * query.shape[1]

    def most_queries(self, query: torch.Tensor) -> int:
        """What tiles are chosen for: the hint, or the mean of packed sequences, as rounded_queries() rounds it.

        It is a bound where there is one sequence. A hint that is less than the mean is wrong, and the mean counts.
        """
        if self.query_offsets is None:
            most = query.shape[1]
        else:
            most = -(-query.shape[0] // max(1, self.batch(query)))
            if self.max_queries is not None and self.batch(query) > 1:
                most = max(most, min(self.max_queries, query.shape[0]))
        return rounded_queries(most)


def rounded_queries(most: int) -> int:
    """A number of queries rounded up to a power of two, or to three quarters of one: most calls then share a plan."""
    rounded = 1 << max(0, most - 1).bit_length()
    fewer = rounded // 4 * 3
    return fewer if most <= fewer else rounded


def _name_of(tensor: torch.Tensor) -> MaskType:
    return tensors.DTYPES.get(tensor.dtype, "float32")


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences) -> None:
    """Check types, shapes, strides and devices of the tensors of a call.

    Raises:
        InvalidArgument: one of them cannot belong to the call.
        UnsupportedProblem: no kernel computes a call of that kind.
    """
    given = {"query": query, "key": key, "value": value}
    for name, tensor in {**given, **sequences.tensors, **sequences.appended}.items():
        _check_tensor(name, tensor, query)
    packed_query, packed_key = sequences.query_offsets is not None, sequences.key_offsets is not None
    if packed_key and sequences.page_table is not None:
        raise InvalidArgument(
            "key_offsets",
            expected="None beside page_table: the table says where keys lie",
            got="both",
            hint="pass the number of keys of each sequence as lengths",
        )
    rank = {"query": 3 if packed_query else 4, "key": 3 if packed_key else 4, "value": 3 if packed_key else 4}
    letters = {
        "query": "[queries, H, D] with query_offsets" if packed_query else "[B, S_q, H, D] without query_offsets",
        "key": "[keys, H_kv, D] with key_offsets"
        if packed_key
        else "[pages, page, H_kv, D] with page_table"
        if sequences.page_table is not None
        else "[B, S_k, H_kv, D]",
    }
    letters["value"] = letters["key"]
    cached = is_cached(query, key)
    for name, tensor in given.items():
        wanted = key.dtype if cached and name == "value" else query.dtype
        if not (cached and name == "key") and (query.dtype not in tensors.DTYPES or tensor.dtype != wanted):
            raise InvalidArgument(
                name,
                expected=f"{key.dtype}, as key has"
                if wanted != query.dtype
                else "torch.float16 or torch.bfloat16, one type for all, or key and value of 8 bits with their scales",
                got=str(tensor.dtype),
                hint="convert it, for example with .to(torch.bfloat16)",
            )
        if tensor.dim() != rank[name]:
            raise InvalidArgument(
                name,
                expected=letters[name],
                got=f"{tensor.dim()} dimensions, {list(tensor.shape)}",
                hint="a cache of another order is passed as a view, such as cache.transpose(1, 2)",
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise InvalidArgument(
                name,
                expected="a stride of 1 along D, the last dimension",
                got=f"strides {tensor.stride()}",
                hint="keep D last in memory",
            )
        if (tensor.shape[-1] != query.shape[-1] and name != "value") or tensor.shape[-1] == 0:
            raise InvalidArgument(
                name,
                expected=f"a head dimension D >= 1, that of query, {query.shape[-1]}",
                got=f"shape {list(tensor.shape)}",
                hint="query and key must have one head dimension",
            )
    if value.shape[:-1] != key.shape[:-1]:
        raise InvalidArgument(
            "value",
            expected=f"shape {list(key.shape)}, as key has, but for the last dimension",
            got=f"shape {list(value.shape)}",
            hint="there is one value for each key",
        )
    heads, heads_kv = query.shape[-2], key.shape[-2]
    if heads and (heads_kv == 0 or heads % heads_kv):
        raise InvalidArgument(
            "key",
            expected=f"a number of heads that divides query's {heads}",
            got=f"{heads_kv} heads",
            hint="each key head serves heads / heads_kv query heads",
        )
    _check_sizes(query, key, sequences)
    if sequences.appended:
        _check_appended(query, key, value, sequences)


def _check_tensor(name: str, tensor: object, query: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(
            name, expected="a torch.Tensor", got=type(tensor).__name__, hint="convert it with torch.as_tensor"
        )
    tensors.check_not_nested(**{name: tensor})
    if tensor.layout != torch.strided:
        raise InvalidArgument(name, expected="a dense tensor", got=str(tensor.layout), hint="call .to_dense()")
    assert isinstance(query, torch.Tensor)
    if tensor.device != query.device:
        raise InvalidArgument(
            name, expected=f"a tensor on {query.device}, as query is", got=str(tensor.device), hint="move it there"
        )


def _check_sizes(query: torch.Tensor, key: torch.Tensor, sequences: Sequences) -> None:
    """Check the tensors of integers, and that all fits the kernels' 32-bit numbers."""
    batch = sequences.batch(query)
    shapes = {
        "query_offsets": (batch + 1,),
        "key_offsets": (batch + 1,),
        "lengths": (batch,),
        "page_table": (batch, -1),
    }
    for name, tensor in sequences.tensors.items():
        shape = shapes[name]
        if tensor.dtype != torch.int32:
            raise InvalidArgument(
                name, expected="torch.int32", got=str(tensor.dtype), hint="convert it once with .to(torch.int32)"
            )
        fits = tensor.dim() == len(shape) and all(
            want in (-1, is_) for want, is_ in zip(shape, tensor.shape, strict=True)
        )
        if not fits or (name == "query_offsets" and batch < 0):
            words = "[B, n]" if name == "page_table" else "[B]" if name == "lengths" else "[B + 1]"
            raise InvalidArgument(
                name,
                expected=f"shape {words} for the call's {max(0, batch)} sequences",
                got=f"shape {list(tensor.shape)}",
                hint="query_offsets, or else dense query, say how many sequences there are",
            )
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise InvalidArgument(
                name,
                expected="a stride of 1 along the last dimension",
                got=f"strides {tensor.stride()}",
                hint="call .contiguous()",
            )
    if sequences.page_table is None and sequences.key_offsets is None and key.shape[0] != batch:
        raise InvalidArgument(
            "key",
            expected=f"{batch} sequences, as query has",
            got=f"shape {list(key.shape)}",
            hint="pass page_table for pages, or key_offsets for packed keys",
        )
    hint = sequences.max_queries
    if hint is not None and (isinstance(hint, bool) or not isinstance(hint, int) or hint < 1):
        raise InvalidArgument(
            "max_queries", expected="None or an integer of at least 1", got=repr(hint), hint="it is a hint: pass None"
        )
    most = sequences.most_keys(key)
    if max(most, sequences.queries(query)) > MOST_KEYS:
        raise UnsupportedProblem(
            f"{max(most, sequences.queries(query))} queries or keys exceed the {MOST_KEYS} that a kernel counts",
            nearest="a page table that is less wide, or a smaller batch",
        )
    rows = -(-sequences.queries(query) * query.shape[-2] // 16) + batch * key.shape[-2]
    if rows > MOST_WORK:
        raise UnsupportedProblem(
            f"{rows} tiles of 16 rows exceed the {MOST_WORK} that a kernel counts", nearest="a smaller batch"
        )
    parts = rows * (-(-most // SPLIT_KEYS) + 1)
    if sequences.batch_invariant and parts > MOST_WORK:
        raise UnsupportedProblem(
            f"{parts} parts of {SPLIT_KEYS} keys exceed the {MOST_WORK} that a kernel counts",
            nearest="a page table that is less wide, a smaller batch, or batch_invariant=False",
        )


def _check_appended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences) -> None:
    """Check what is written to the cache, and what changes rows before attention."""
    given = sequences.appended
    if sequences.lengths is None or sequences.key_offsets is not None:
        raise InvalidArgument(
            next(iter(given)),
            expected="lengths of a cache beside it, dense or in pages",
            got="no lengths" if sequences.lengths is None else "packed keys",
            hint="lengths say how many keys each sequence has before",
        )
    for one, other in (("new_key", "new_value"), ("rotary_cos", "rotary_sin")):
        if (one in given) != (other in given):
            raise InvalidArgument(
                other if one in given else one,
                expected="a tensor beside the other of the two",
                got="None",
                hint="pass both",
            )
    for name in ("new_key", "new_value"):
        if name not in given:
            continue
        columns = (key if name == "new_key" else value).shape[-1]
        tensor, shape = given[name], [*query.shape[:-2], key.shape[-2], columns]
        if list(tensor.shape) != shape or tensor.dtype != query.dtype or (tensor.stride(-1) != 1 and shape[-1] > 1):
            raise InvalidArgument(
                name,
                expected=f"a key for each query: shape {shape}, {query.dtype}, a stride of 1 along D",
                got=f"shape {list(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}",
                hint="new keys and values come with their queries",
            )
    if "new_key" in given:
        for name, cache in (("key", key), ("value", value)):
            if tensors.overlaps_itself(cache):
                raise InvalidArgument(
                    name,
                    expected="a cache whose elements have memory of their own, since new keys are written to it",
                    got=f"shape {list(cache.shape)} with strides {cache.stride()}",
                    hint="pass the cache itself",
                )
            if any(tensors.memory_ranges_meet(cache, other) for other in (query, given["new_key"], given["new_value"])):
                raise InvalidArgument(
                    name,
                    expected="memory that neither query nor new keys and values use",
                    got="a cache that overlaps them",
                    hint="clone what is in the cache",
                )
    if "rotary_cos" in given:
        _check_rotary(query, given["rotary_cos"], given["rotary_sin"])
    _check_norms(query, sequences)


def _check_rotary(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    for name, tensor in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_table(name, tensor, cos.shape, query)
        if tensor.dtype not in (query.dtype, torch.float32) or tensor.dtype != cos.dtype or tensor.stride(1) != 1:
            raise InvalidArgument(
                name,
                expected=f"{query.dtype} or torch.float32, one type for both, a stride of 1 along its rows",
                got=f"{tensor.dtype}, strides {tensor.stride()}",
                hint="convert it once with .to(torch.float32).contiguous()",
            )


def _check_norms(query: torch.Tensor, sequences: Sequences) -> None:
    given = {"q_norm": sequences.q_norm, "k_norm": sequences.k_norm}
    norms = {name: norm for name, norm in given.items() if norm is not None}
    if "k_norm" in norms and sequences.new_key is None:
        raise InvalidArgument(
            "k_norm",
            expected="None without new_key: keys of the cache are read as they are",
            got=f"a tensor of shape {list(norms['k_norm'].shape)}",
            hint="pass new_key and new_value, which the norm is for",
        )
    for name, norm in norms.items():
        if list(norm.shape) != [query.shape[-1]] or (norm.stride(0) != 1 and norm.shape[0] > 1):
            raise InvalidArgument(
                name,
                expected=f"shape [{query.shape[-1]}], which is [D], and a stride of 1",
                got=f"shape {list(norm.shape)}, strides {norm.stride()}",
                hint="all heads share the weights of an RMS norm",
            )
        first = next(iter(norms.values()))
        if norm.dtype not in (query.dtype, torch.float32) or norm.dtype != first.dtype:
            raise InvalidArgument(
                name,
                expected=f"{query.dtype} or torch.float32, one type for both norms",
                got=str(norm.dtype),
                hint="convert it once",
            )
    check_eps(sequences.norm_eps)
