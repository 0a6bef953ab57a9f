"""Calls of sdpa_varlen at random, and what their results may be, for the CPU, the emulator and the GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch

from microsdpa import reference
from microsdpa.evidence import compare

LSE_SLACK = 1e-5
"""What FP32 may cost the LSE, as a part of the largest: rounded scores, which its tolerance is from, can be exact."""
SEQUENCE_TENSORS = "query_offsets", "key_offsets", "lengths", "page_table"
SCALES = "k_scale", "v_scale"


@dataclass(frozen=True)
class Form:
    """What kernels are compiled for: the rest of a call is free.

    Attributes:
        group: query heads of a key head.
        queries: of a sequence, at most.
        window: whether there is a left end and a right end.
        cache: 8-bit type of keys and values; None for that of queries.
        each_token: whether a scale of an 8-bit cache is of every token.
        value_dim: columns of value and the output; 0 for head_dim.
    """

    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    group: int = 1
    queries: int = 1
    keys: Literal["paged", "packed", "dense"] = "paged"
    causal: bool = True
    window: tuple[bool, bool] = (False, False)
    softcap: bool = False
    alibi: bool = False
    sinks: torch.dtype | None = None
    cache: torch.dtype | None = None
    each_token: bool = False
    value_dim: int = 0


def offsets(counts: list[int]) -> torch.Tensor:
    """[B + 1], int32."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def paged(
    generator: torch.Generator, r: random.Random, form: Form, heads_kv: int, lengths: list[int]
) -> dict[str, Any]:
    """Key, value, page table and lengths: pages are shuffled, some are shared, and entries past a length are -1."""
    page, batch = r.choice([1, 3, 16, 32, 100]), len(lengths)
    width = -(-max(lengths) // page) + r.choice([0, 2])
    pages = batch * width + 3
    shape = pages, page, heads_kv, form.head_dim
    layout = r.choice(["separate", "heads first", "beside"])
    if layout == "beside":
        both = torch.randn(pages, page, heads_kv, 2 * form.head_dim, generator=generator).to(form.dtype)
        key, value = both[..., : form.head_dim], both[..., form.head_dim :]
    else:
        key, value = (torch.randn(shape, generator=generator).to(form.dtype) for _ in range(2))
        if layout == "heads first":
            key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (key, value))
    table = torch.randperm(pages, generator=generator)[: batch * width].view(batch, width).to(torch.int32)
    if r.random() < 0.3 and width:
        table[:, 0] = table[0, 0]  # a prefix that all sequences share
    for b, length in enumerate(lengths):
        table[b, -(-length // page) :] = -1
    return {"key": key, "value": value, "page_table": table, "lengths": torch.tensor(lengths, dtype=torch.int32)}


def in_one_cache(given: dict[str, Any], page: int, heads_first: bool = False) -> dict[str, Any]:
    """A call of dense keys with these in shuffled pages of one tensor, as servers have them.

    It is [pages, 2, page, H_kv, D], or with `heads_first` [pages, 2, H_kv, page, D], and full of NaN where no sequence
    has keys. Every sequence has a page more than its keys need.
    """
    dense, lengths = {name: given[name] for name in ("key", "value")}, given["lengths"].tolist()
    batch, longest, heads_kv, head_dim = dense["key"].shape
    width = -(-longest // page) + 1
    table = torch.randperm(batch * width, generator=torch.Generator().manual_seed(page)).view(batch, width)
    if heads_first:
        cache = torch.full((batch * width, 2, heads_kv, page, head_dim), torch.nan, dtype=given["query"].dtype)
        cache = cache.transpose(2, 3)
    else:
        cache = torch.full((batch * width, 2, page, heads_kv, head_dim), torch.nan, dtype=given["query"].dtype)
    for b, length in enumerate(lengths):
        place = torch.arange(length)
        for which, name in enumerate(dense):
            cache[table[b, place // page], which, place % page] = dense[name][b, :length]
    return given | {"key": cache[:, 0], "value": cache[:, 1], "page_table": table.int()}


def call(form: Form, seed: int) -> dict[str, Any]:
    """Keyword arguments of sdpa_varlen, with CPU tensors."""
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, heads_kv, longest = r.choice([1, 2, 5]), r.choice([1, 2]), r.choice([40, 300])
    heads = heads_kv * form.group

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(form.dtype)

    lengths = [r.choice([0, 1, r.randint(1, longest), longest]) for _ in range(batch)]
    given: dict[str, Any] = {}
    if r.random() < 0.5:
        counts = [r.choice([0, 1, form.queries]) for _ in range(batch - 1)] + [form.queries]
        given |= {"query": numbers(sum(counts), heads, form.head_dim), "query_offsets": offsets(counts)}
        given |= {"max_queries": r.choice([None, form.queries])}
    else:
        given |= {"query": numbers(batch, form.queries, heads, form.head_dim)}
    if form.keys == "paged":
        given |= paged(generator, r, form, heads_kv, [*lengths[:-1], max(1, lengths[-1])])
    elif form.keys == "packed":
        shape = sum(lengths) + 2, heads_kv, form.head_dim
        given |= {"key": numbers(*shape), "value": numbers(*shape), "key_offsets": offsets(lengths)}
    else:
        shape = batch, max(1, *lengths), heads_kv, form.head_dim
        given |= {"key": numbers(*shape), "value": numbers(*shape)}
        given |= {"lengths": torch.tensor(lengths, dtype=torch.int32)}
    if any(form.window):
        given["window"] = tuple(r.choice([0, 5, 40, 1000]) if end else -1 for end in form.window)
    if form.softcap:
        given["softcap"] = r.choice([0.5, 3.0])
    if form.alibi:
        shape = r.choice([(heads,), (batch, heads)])
        given["alibi_slopes"] = torch.rand(shape, generator=generator)
    if form.sinks:
        given["sinks"] = torch.randn(heads, generator=generator).to(form.sinks)
    if r.random() < 0.3:
        given["scale"] = r.choice([-0.3, 0.0, 1.0])
    if form.cache is not None:
        given |= narrowed(given, form.cache, form.each_token, r)
    return given | {"causal": form.causal, "value": of_columns(given["value"], form.value_dim)}


def of_columns(value: torch.Tensor, columns: int) -> torch.Tensor:
    """The first columns of a value, in memory whose other columns are NaN; 0 for all."""
    if not columns:
        return value
    memory = torch.full_like(value, torch.nan)
    memory[..., :columns] = value[..., :columns]
    return memory[..., :columns]


def narrowed(given: dict[str, Any], dtype: torch.dtype, each_token: bool, r: random.Random) -> dict[str, Any]:
    """Keys and values of a call in 8 bits, of the same strides, and their scales of some kind."""
    batch = len(given["query_offsets"]) - 1 if "query_offsets" in given else given["query"].shape[0]
    largest = 127.0 if dtype == torch.int8 else 448.0
    kinds = ["tokens", "mixed"] if each_token else ["call", "heads", "sequences"]
    kind, found = r.choice(kinds), {}
    for name, scale_name in (("key", "k_scale"), ("value", "v_scale")):
        numbers = given[name].float()
        heads, whole = numbers.shape[-2], float(numbers.abs().max()) / largest if numbers.numel() else 1.0
        if kind == "tokens" or (kind == "mixed" and name == "key"):
            scale = numbers.abs().amax(-1) / largest + 1e-6
            divisor = scale[..., None]
        else:
            shape = {"call": (), "sequences": (batch, heads)}.get(kind, (heads,))
            factors = torch.tensor([r.uniform(0.5, 2.0) for _ in range(int(torch.Size(shape).numel()))])
            scale, divisor = (
                factors.view(shape) * whole,
                torch.tensor(whole),
            )  # of a sequence: whatever values stand for
        values = (numbers / divisor).clamp(-largest, largest)
        values = values.round() if dtype == torch.int8 else values
        found |= {name: torch.empty_strided(numbers.shape, given[name].stride(), dtype=dtype).copy_(values)}
        found |= {scale_name: scale}
    return found


def appending(
    form: Form, seed: int, rotary: int = 0, interleaved: bool = False, norms: tuple[str, ...] = ()
) -> dict[str, Any]:
    """call() with a new key for each query, `rotary` columns that are rotated, and these norms."""
    given = call(form, seed)
    generator = torch.Generator().manual_seed(seed)
    query, key, page_table = given["query"], given["key"], given.get("page_table")
    shape = *query.shape[:-2], key.shape[-2], form.head_dim
    new = {name: torch.randn(shape, generator=generator).to(form.dtype) for name in ("new_key", "new_value")}
    new["new_value"] = of_columns(new["new_value"], form.value_dim)
    if form.cache is not None and form.each_token and given["k_scale"].dim() != given["v_scale"].dim():
        given["v_scale"] = torch.rand(key.shape[:-1], generator=generator)
    if page_table is not None:  # pages that belong to one sequence alone, for the new keys
        room = torch.arange(page_table.numel(), dtype=torch.int32).view(page_table.shape)
        given["page_table"] = torch.cat([room + 3, room + 3 + room.numel()], dim=1)
        pages = 3 + 2 * room.numel()
        for name, scale in (("key", "k_scale"), ("value", "v_scale")):
            given[name] = torch.randn(pages, *key.shape[1:], generator=generator).to(form.cache or form.dtype)
            if form.each_token:
                given[scale] = torch.rand(pages, *key.shape[1:-1], generator=generator) + 0.1
        given["value"] = of_columns(given["value"], form.value_dim)
    if rotary:
        angles = torch.rand(500, rotary // 2, generator=generator) * 6
        types = torch.float32, form.dtype
        new |= {"rotary_cos": angles.cos().to(types[seed % 2]), "rotary_sin": angles.sin().to(types[seed % 2])}
        new["rotary_interleaved"] = interleaved
    for name in norms:
        weights = torch.rand(form.head_dim, generator=generator) + 0.5
        new |= {name: weights.to(form.dtype if seed % 2 else torch.float32), "norm_eps": 1e-2}
    return given | new


def packed(given: dict[str, Any], counts: list[int]) -> dict[str, Any]:
    """A call of dense queries with the first `counts` of each sequence's, one behind the other, and their new keys."""
    found = given | {"query_offsets": offsets(counts)}
    for name in ("query", "new_key", "new_value"):
        if name in given:
            rows = [each[:count] for each, count in zip(given[name], counts, strict=True)]
            found[name] = torch.cat(rows).contiguous()
    return found


def changed(rows: torch.Tensor, start: int, given: dict[str, Any], norm: str) -> torch.Tensor:
    """Rows [S, heads, D] whose first one stands at `start`, with their norm and rotated, in FP64 and rounded once."""
    out = rows.double().clone()
    if norm in given:
        out = out / (out.square().mean(-1, keepdim=True) + given["norm_eps"]).sqrt() * given[norm].double()
    if "rotary_cos" not in given:
        return out.to(rows.dtype)
    rows, half, dtype = out.clone(), given["rotary_cos"].shape[1], rows.dtype
    for i in range(rows.shape[0]):
        cos, sin = (given[name][start + i].double() for name in ("rotary_cos", "rotary_sin"))
        for pair in range(half):
            one, other = (2 * pair, 2 * pair + 1) if given["rotary_interleaved"] else (pair, pair + half)
            x, y = rows[i, :, one], rows[i, :, other]
            out[i, :, one], out[i, :, other] = x * cos[pair] - y * sin[pair], x * sin[pair] + y * cos[pair]
    return out.to(dtype)


def after_appending(given: dict[str, Any]) -> dict[str, Any]:
    """The call that gives the same without appending: caches with the new keys, changed queries, lengths that hold."""
    names = "new_key", "new_value", "rotary_cos", "rotary_sin", "rotary_interleaved", "q_norm", "k_norm", "norm_eps"
    found = {name: value for name, value in given.items() if name not in names}
    query, key, value = (given[name].clone() for name in ("query", "key", "value"))
    found |= {name: given[name].clone() for name in SCALES if name in given}
    lengths, table = given["lengths"].clone(), given.get("page_table")
    for b in range(len(lengths)):
        first, end = (
            (0, query.shape[1]) if "query_offsets" not in given else map(int, given["query_offsets"][b : b + 2])
        )
        own = (b, slice(None)) if "query_offsets" not in given else slice(first, end)
        start = int(lengths[b])
        query[own] = changed(given["query"][own], start, given, "q_norm")
        new_key = changed(given["new_key"][own], start, given, "k_norm")
        for i in range(end - first):
            at = start + i
            page = key.shape[1]
            if at >= (page if table is None else page * table.shape[1]):
                break
            place = (b, at) if table is None else (int(table[b, at // page]), at % page)
            for cache, scale, row in ((key, "k_scale", new_key[i]), (value, "v_scale", given["new_value"][own][i])):
                cache[place] = row if scale not in given else narrow_row(row, cache, found[scale], place, b)
        lengths[b] += end - first
    return found | {"query": query, "key": key, "value": value, "lengths": lengths}


def narrow_row(
    row: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor, place: tuple[int, int], b: int
) -> torch.Tensor:
    """New rows [H_kv, D] of a token of sequence b in 8 bits; a scale of the token is written to its place."""
    largest = 127.0 if cache.dtype == torch.int8 else 448.0
    if scale.shape == cache.shape[:-1]:
        scale[place] = row.float().abs().amax(-1) / largest
        divisor = scale[place]
    else:
        divisor = scale[b] if scale.dim() == 2 else scale
    values = (row.float() / divisor[..., None]).clamp(-largest, largest)
    return values.round().to(cache.dtype) if cache.dtype == torch.int8 else values.to(cache.dtype)


def moved(given: dict[str, Any], device: str) -> dict[str, Any]:
    """A call with its tensors on another device, of the same strides."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return copy.copy_(tensor)

    return {name: move(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def assert_right(out: torch.Tensor, lse: torch.Tensor, given: dict[str, Any]) -> None:
    """Compare with FP64, within what a same-dtype eager reference costs."""
    inputs = given["query"], given["key"], given["value"]
    sequences = {name: given[name] for name in (*SEQUENCE_TENSORS, *SCALES) if name in given}
    masks = {name: given[name] for name in ("window", "softcap", "alibi_slopes", "sinks") if name in given}
    options = {"causal": given["causal"], "scale": given.get("scale"), "masks": masks}
    expected = reference.varlen(inputs, sequences, **options)
    eager = reference.varlen(inputs, sequences, exact=False, **options)
    limit = compare.tolerance(eager[0], expected[0], out.dtype)
    assert limit.admits(compare.measure(out.cpu(), expected[0]))
    finite = expected[1].isfinite()
    assert torch.equal(lse.cpu().isfinite(), finite)
    largest = float(expected[1][finite].abs().max()) if finite.any() else 0.0
    slack = LSE_SLACK * max(1.0, largest) + compare.tolerance(eager[1], expected[1], lse.dtype).max_abs
    assert float((lse.cpu().double() - expected[1])[finite].abs().max()) <= slack if finite.any() else True
