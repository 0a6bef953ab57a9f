"""Suite serving: sequences of many lengths in the pages of a cache, or packed, beside the peers that have such calls.

Every call of a graph has a cache of its own, as the layers of a model have, so that K and V come from DRAM; all layers
share the lengths and the page table. docs/measuring.md has the modes.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn import attention

import microsdpa
from microsdpa import reference
from microsdpa.call.sequences import Sequences, rounded_queries
from microsdpa.evidence import compare, results, statistics, timing
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers import Call
from microsdpa.evidence.peers.implementation import import_failure
from microsdpa.jit.signature import code_signature, signature
from microsdpa.kernels.ampere.varlen.spec import RowChange, appending, batch_invariant
from microsdpa.kernels.problem import CacheKind, Problem
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

SUITE = "serving"
OURS, INVARIANT = "microsdpa", "batch_invariant"
AS_IT_IS = RowChange()
APPENDS = {"new keys": AS_IT_IS, "new keys, norms, rotary": RowChange(128, weights="bfloat16")}
"""Variants that write the last key and value of each sequence in the call, and what they do to it and to queries."""
MOST_APPENDING = 8
"""Sequences of their cells at most: with more the cache takes all the time."""
LAYERS_BYTES = 300_000_000
"""What the caches of all layers take together, at least: several times a GPU's cache."""
MOST_LAYERS, FEWEST_LAYERS = 200, 2
ORACLE_KEYS = 2**16
"""Keys of all sequences up to which the FP64 oracle judges all of them; else the first sequences up to there."""


@dataclass(frozen=True)
class Cell:
    """One case of the suite.

    Attributes:
        lengths: keys of each sequence.
        queries: of each sequence; None for prompts, whose queries are their keys.
        page: keys of a page; 0 for packed keys, or for dense ones where `queries` are given.
        text: what the other fields do not say.
        cache: type of keys and values; E4M3 has a scale of all, INT8 those of every token.
        value_dim: columns of values and the output; 0 for head_dim.
    """

    lengths: tuple[int, ...]
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    queries: int | None = 1
    page: int = 16
    text: str = ""
    cache: Literal["bfloat16", "e4m3", "int8"] = "bfloat16"
    value_dim: int = 0

    def __str__(self) -> str:
        """What `--cells` looks for texts in."""
        pages = f"pages of {self.page}" if self.page else "no pages"
        return f"{self.case} {self.text or 'equal'}, {pages}, {self.cache}"

    @property
    def case(self) -> Case:
        """What rows have for a shape: the longest sequence."""
        longest = max(self.lengths)
        sizes = len(self.lengths), self.heads, self.queries or longest, longest, self.head_dim
        return Case(*sizes, dtype="bfloat16", causal="lower_right", heads_kv=self.heads_kv)

    @property
    def equal(self) -> bool:
        """Whether all sequences have one length, so that dense calls compute the same."""
        return len(set(self.lengths)) == 1 and self.queries is not None

    @property
    def layer_bytes(self) -> int:
        """Of K and V of one layer."""
        columns = self.head_dim + (self.value_dim or self.head_dim)
        return sum(self.lengths) * self.heads_kv * columns * (2 if self.cache == "bfloat16" else 1)


NARROW_SIZES = ((1, 512), (1, 4096), (1, 32768), (8, 4096), (32, 2048), (32, 8192), (64, 512), (64, 4096))
"""(sequences, keys of each) of cells with an 8-bit cache."""


def mixed(count: int, longest: int) -> tuple[int, ...]:
    """Lengths from 1 to `longest`, always the same."""
    generator = random.Random(count * longest)
    return tuple(generator.randint(1, longest) for _ in range(count))


def prompts(total: int, count: int) -> tuple[int, ...]:
    """Lengths of `count` prompts that are `total` together, always the same."""
    cuts = sorted(random.Random(count).sample(range(1, total), count - 1))
    return tuple(end - start for start, end in zip((0, *cuts), (*cuts, total), strict=True))


def cells() -> list[Cell]:
    """All cells, decoding first."""
    found = [
        Cell((keys,) * batch, page=page)
        for page in (16, 64)
        for batch, lengths in (
            (1, (128, 512, 1024, 2048, 4096, 32768)),
            (8, (512, 4096, 32768)),
            (64, (512, 4096, 32768)),
        )
        for keys in lengths
    ]
    found += [Cell((keys,) * 256) for keys in (512, 4096)]
    found += [Cell((4096,) * batch, 64, 1) for batch in (64, 256)] + [Cell((32768,) * 256, 64, 1)]
    found += [
        Cell(mixed(*sizes), text=f"{sizes[0]} of 1 to {sizes[1]}") for sizes in ((8, 4096), (64, 32768), (256, 4096))
    ]
    found += [Cell((4096, *(16,) * 7), text="one of 4096 among 7 of 16"), Cell((512,) * 8, 64, 1)]
    found += [Cell((32,) * 200, 8, 8), Cell((512,) * 32, 32, 32, 80), Cell((300,) * 100, 12, 12, 64)]
    narrow: tuple[Literal["e4m3", "int8"], ...] = ("e4m3", "int8")
    for cache in narrow:
        found += [Cell((keys,) * batch, cache=cache) for batch, keys in NARROW_SIZES]
    found.append(Cell(prompts(16384, 9), queries=None, page=0, text="9 prompts of 16384 tokens"))
    found.append(Cell(prompts(16384, 13), 16, 16, 64, None, 0, "13 prompts of 16384 tokens"))
    found += [Cell(prompts(16384, 9), 16, 16, dim, None, 0, "9 prompts of 16384 tokens") for dim in (32, 72, 80, 112)]
    narrow_values = {"page": 0, "text": "9 prompts of 16384 tokens, 128 columns of V", "value_dim": 128}
    found.append(Cell(prompts(16384, 9), 16, 16, 192, None, **narrow_values))  # type: ignore[arg-type]
    for heads in ((32, 8, 128), (16, 16, 64)):
        found += [Cell((keys,) * batch, *heads, 512, 64) for batch, keys in ((1, 8192), (1, 32768), (4, 8192))]
    return [*found, Cell((4096,) * 6, 32, 8, 128, 64, 64), Cell((16384,) * 3, 12, 12, 80, 384, 64)]


class Layer(NamedTuple):
    """Tensors of one layer of a model, and what its sequences share.

    query is [tokens, H, D] for prompts, else [B, S_q, H, D]. Caches are [pages, page, H_kv, D], or packed
    [tokens, H_kv, D].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sequences: Sequences
    scales: Mapping[str, torch.Tensor] = MappingProxyType(
        {}
    )  # of an 8-bit cache, by the names of sdpa_varlen's arguments


def layers(cell: Cell, device: str, most: int = MOST_LAYERS) -> list[Layer]:
    """So many layers that their caches come from DRAM."""
    count = max(FEWEST_LAYERS, min(most, LAYERS_BYTES // cell.layer_bytes + 1))
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    def integers(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    if cell.queries is None:
        tokens, offsets = sum(cell.lengths), integers([0, *accumulate(cell.lengths)])
        shared = Sequences(offsets, offsets, max_queries=max(cell.lengths))
        query_shape: tuple[int, ...] = (tokens, cell.heads, cell.head_dim)
        cache_shape: tuple[int, ...] = (tokens, cell.heads_kv, cell.head_dim)
    else:
        pages = [-(-length // cell.page) for length in cell.lengths]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).tolist()
        table = [[*(order.pop() for _ in range(own)), *[-1] * (max(pages) - own)] for own in pages]
        shared = Sequences(lengths=integers(cell.lengths), page_table=integers(table))
        query_shape = len(cell.lengths), cell.queries, cell.heads, cell.head_dim
        cache_shape = sum(pages), cell.page, cell.heads_kv, cell.head_dim
    query = numbers(*query_shape)
    if cell.cache == "bfloat16":
        value_shape = *cache_shape[:-1], cell.value_dim or cell.head_dim
        return [Layer(query, numbers(*cache_shape), numbers(*value_shape), shared) for _ in range(count)]
    found = []
    for _ in range(count):
        (key, k_scale), (value, v_scale) = (_narrowed(numbers(*cache_shape), cell.cache) for _ in range(2))
        found.append(Layer(query, key, value, shared, {"k_scale": k_scale, "v_scale": v_scale}))
    return found


def _narrowed(numbers: torch.Tensor, cache: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in 8 bits, and their scales: of every token in INT8, else one."""
    if cache == "int8":
        scale = numbers.abs().amax(-1).float() / 127.0
        return (numbers / scale[..., None]).round().to(torch.int8), scale
    scale = numbers.abs().amax().float() / 448.0
    return (numbers / scale).to(torch.float8_e4m3fn), scale


def _dense(layer: Layer, cell: Cell) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V of a layer as [B, H, S, D] views, for sequences of one length, as if its pages were in order."""
    shape = len(cell.lengths), -1, cell.heads_kv, cell.head_dim
    key, value = (cache.view(shape)[:, : cell.lengths[0]].transpose(1, 2) for cache in (layer.key, layer.value))
    return layer.query.transpose(1, 2), key, value


@dataclass(frozen=True)
class Way:
    """One way to compute a cell.

    Attributes:
        bind: the call for a layer.
        decode: its output as the query's shape.
        absent: why it does not compute a cell; empty if it does.
        dense: whether it computes on the dense view of a cache, whose output is another one.
        change: what is done to queries and the last keys ahead of attention.
        packed: whether the queries of all sequences are packed, which prompts are anyway.
    """

    name: str
    bind: Callable[[Layer, Cell], Call]
    variant: str = ""
    decode: Callable[[Any], torch.Tensor] = lambda found: found
    absent: Callable[[Cell], str] = lambda cell: ""
    dense: bool = False
    change: RowChange = AS_IT_IS
    packed: bool = False


def _ours(layer: Layer, cell: Cell) -> Call:
    given = layer.sequences.tensors
    inputs, hint = layer[:3], layer.sequences.max_queries
    given |= layer.scales
    return lambda: microsdpa.sdpa_varlen(*inputs, **given, max_queries=hint, causal=True)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4)
def _offsets_of_one_each(cell: Cell, device: torch.device) -> torch.Tensor:
    return torch.arange(len(cell.lengths) + 1, dtype=torch.int32, device=device)


def _ours_packed(layer: Layer, cell: Cell) -> Call:
    given = layer.sequences.tensors | {"query_offsets": _offsets_of_one_each(cell, layer.query.device)}
    inputs = layer.query[:, 0], layer.key, layer.value
    return lambda: microsdpa.sdpa_varlen(*inputs, **given, max_queries=1, causal=True)  # type: ignore[arg-type]


def _ours_invariant(layer: Layer, cell: Cell) -> Call:
    given = layer.sequences.tensors
    inputs = layer[:3]
    return lambda: microsdpa.sdpa_varlen(*inputs, **given, causal=True, batch_invariant=True)  # type: ignore[arg-type]


def _last_places(layer: Layer, cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
    """Page of the last key of each sequence, and its place there."""
    table, lengths = layer.sequences.page_table, layer.sequences.lengths
    assert table is not None
    assert lengths is not None
    last = (lengths - 1).long()
    return table.gather(1, (last // cell.page)[:, None])[:, 0].long(), last % cell.page


@functools.lru_cache(maxsize=4)
def _angles(cell: Cell, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [positions, R / 2], as RoPE has them; the layers of a model share them."""
    rates = 10000.0 ** (-torch.arange(0, columns, 2, device=device) / columns)
    angles = torch.arange(max(cell.lengths), device=device)[:, None] * rates
    return angles.cos(), angles.sin()


@functools.lru_cache(maxsize=4)
def _lengths_before(cell: Cell, device: torch.device) -> torch.Tensor:
    """Keys of each sequence without the last one, which layers share."""
    return torch.tensor(cell.lengths, dtype=torch.int32, device=device) - 1


def changed(layer: Layer, cell: Cell, change: RowChange) -> Layer:
    """A layer with changed queries and last keys, rounded once, in memory of its own."""
    lengths, key, place = layer.sequences.lengths, layer.key.clone(), _last_places(layer, cell)
    assert lengths is not None
    norm = (layer.query.new_ones(cell.head_dim) if change.weights else None, None)
    angles = _angles(cell, change.rotary, key.device) if change.rotary else None
    positions = (lengths - 1)[:, None]

    def rows(given: torch.Tensor) -> torch.Tensor:  # [B, 1, heads, D]
        found = reference.changed_rows(given.transpose(1, 2), norm, 1e-6, angles, positions)
        return found.transpose(1, 2).to(given.dtype)

    key[place] = rows(key[place][:, None])[:, 0]
    return layer._replace(query=rows(layer.query), key=key)


def _ours_appending(layer: Layer, cell: Cell, change: RowChange) -> Call:
    key, value, place = layer.key.clone(), layer.value.clone(), _last_places(layer, cell)
    given: dict[str, Any] = dict(layer.sequences.tensors)
    given |= {"lengths": _lengths_before(cell, key.device)}
    given |= {"new_key": key[place][:, None], "new_value": value[place][:, None]}
    if change.rotary:
        given["rotary_cos"], given["rotary_sin"] = _angles(cell, change.rotary, key.device)
    if change.weights:
        given |= dict.fromkeys(("q_norm", "k_norm"), layer.query.new_ones(cell.head_dim))
    return lambda: microsdpa.sdpa_varlen(layer.query, key, value, **given, causal=True)


def _ours_dense(layer: Layer, cell: Cell) -> Call:
    tensors = _dense(layer, cell)
    return lambda: microsdpa.sdpa(*tensors, causal="lower_right", enable_gqa=True)


def _torch_cudnn(layer: Layer, cell: Cell) -> Call:
    tensors = _dense(layer, cell)

    def call() -> torch.Tensor:
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*tensors, enable_gqa=True)

    return call


def _torch_varlen(layer: Layer, cell: Cell) -> Call:
    from torch.nn.attention.varlen import varlen_attn

    own, longest = layer.sequences, max(cell.lengths)
    where: Any = own.query_offsets, own.key_offsets, longest, longest
    groups: dict[str, Any] = {"enable_gqa": True} if cell.heads != cell.heads_kv else {}
    return lambda: varlen_attn(*layer[:3], *where, window_size=(-1, 0), **groups)


def _flash3(layer: Layer, cell: Cell) -> Call:
    from flash_attn_interface import (  # type: ignore[import-not-found]
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
    )

    query, key, value, own = layer[:4]
    if cell.queries is None:
        longest = max(cell.lengths)
        where = own.query_offsets, own.key_offsets, longest, longest
        return lambda: flash_attn_varlen_func(query, key, value, *where, causal=True)
    where_ = {"cache_seqlens": own.lengths, "page_table": own.page_table, "causal": True}
    return lambda: flash_attn_with_kvcache(query, key, value, **where_)


def _flash4(layer: Layer, cell: Cell) -> Call:
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found]

    query, key, value, own = layer[:4]
    if cell.queries is None:
        offsets = {"cu_seqlens_q": own.query_offsets, "cu_seqlens_k": own.key_offsets}
        return lambda: flash_attn_varlen_func(query, key, value, **offsets, causal=True)
    where = {"seqused_k": own.lengths, "page_table": own.page_table}
    return lambda: flash_attn_varlen_func(query, key, value, **where, causal=True)


def _flash_infer(layer: Layer, cell: Cell) -> Call:
    import flashinfer

    query, key, value, own = layer[:4]
    assert own.lengths is not None
    assert own.page_table is not None
    pages = (own.lengths + cell.page - 1) // cell.page
    starts = torch.cat([pages.new_zeros(1), pages.cumsum(0).int()])
    indices = torch.cat([row[:count] for row, count in zip(own.page_table, pages.tolist(), strict=True)])
    last = (own.lengths - 1) % cell.page + 1
    memory = torch.empty(128 * 2**20, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        memory,
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=starts,
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last,
    )
    sizes = cell.heads, cell.heads_kv, cell.head_dim, cell.page
    wrapper.plan(starts, indices, last, *sizes, q_data_type=query.dtype, kv_data_type=key.dtype)
    rows, scales = query[:, 0], {name: float(scale) for name, scale in layer.scales.items()}
    return lambda: wrapper.run(rows, (key, value), **scales)


ONE_LENGTH, ONE_QUERY, ONE_TYPE, ONE_PAGE, FEW, PACKED = NOT_COMPUTED = (
    "its sequences have one length",
    "it decodes one query a sequence",
    "its tensors have one type",
    "it is timed with pages of 16",
    f"it is timed with up to {MOST_APPENDING} sequences of a length",
    "it is timed with packed tensors",
)
"""Why a way does not compute a cell, whoever has installed it."""


def _only_equal(cell: Cell) -> str:
    return "" if cell.equal else ONE_LENGTH


def _only_packed(cell: Cell) -> str:
    return PACKED if cell.queries is not None else ""


def _only_decoding(cell: Cell) -> str:
    return ONE_QUERY if cell.queries != 1 else ONE_TYPE if cell.cache == "int8" else ""


def _decoding_of_one_page(cell: Cell) -> str:
    return _only_decoding(cell) or _only_one_type(cell) or ("" if cell.page == 16 else ONE_PAGE)


def _few_of_one_page(cell: Cell) -> str:
    few = len(cell.lengths) <= MOST_APPENDING and cell.equal and cell.heads_kv > 1
    return _decoding_of_one_page(cell) or ("" if few else FEW)


def _only_one_type(cell: Cell) -> str:
    return "" if cell.cache == "bfloat16" else ONE_TYPE


def _equal_of_one_type(cell: Cell) -> str:
    return _only_equal(cell) or _only_one_type(cell)


def _first(found: Any) -> torch.Tensor:
    output: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return output


def _one_of_each(found: torch.Tensor) -> torch.Tensor:
    return found[:, None]


def _rows_first(found: torch.Tensor) -> torch.Tensor:
    return found.transpose(1, 2)


def _needs(module: str, package: str, further: Callable[[Cell], str] = lambda cell: "") -> Callable[[Cell], str]:
    return lambda cell: further(cell) or import_failure(module, package)


def _no_queries_of_many(cell: Cell) -> str:
    causal = cell.queries is not None and cell.queries > 1
    return _equal_of_one_type(cell) or ("its causal mask is aligned to the upper left" if causal else "")


WAYS: tuple[Way, ...] = (
    Way(OURS, _ours),
    Way(OURS, _ours_packed, "packed queries", _one_of_each, _decoding_of_one_page, packed=True),
    Way(OURS, _ours_invariant, INVARIANT, absent=_decoding_of_one_page),
    *(
        Way(OURS, functools.partial(_ours_appending, change=change), name, absent=_few_of_one_page, change=change)
        for name, change in APPENDS.items()
    ),
    Way(OURS, _ours_dense, "dense", _rows_first, _equal_of_one_type, dense=True),
    Way("torch cuDNN", _torch_cudnn, "dense", _rows_first, _no_queries_of_many, dense=True),
    Way("torch varlen_attn", _torch_varlen, absent=_only_packed),
    Way("FlashAttention-3", _flash3, "", _first, _needs("flash_attn_interface", "flash-attn-3", _only_one_type)),
    Way("FlashAttention-4", _flash4, "", _first, _needs("flash_attn.cute", "flash-attn-4", _only_one_type)),
    Way(
        "FlashInfer",
        _flash_infer,
        "",
        _one_of_each,
        _needs("flashinfer", "flashinfer-python", _only_decoding),
    ),
)


def problem_of(cell: Cell, target: str, packed: bool = False) -> Problem:
    """What this library's kernel is chosen for."""
    case = cell.case
    return Problem(
        *(case.batch, case.heads, case.kv_heads, rounded_queries(case.seqlen_q), case.seqlen_k, case.head_dim),
        "bfloat16",
        causal="lower_right",
        target=target,
        varlen=min(cell.page & -cell.page, 64),
        cache=None if cell.cache == "bfloat16" else CacheKind(cell.cache, cell.cache == "int8"),
        value_dim=cell.value_dim,
        packed_queries=packed or cell.queries is None,
    )


class Expected(NamedTuple):
    """What the oracle gives for a layer's first `rows` rows, or sequences, and what errors are tolerated."""

    rows: int
    exact: torch.Tensor
    tolerance: compare.Tolerance


def expected(cell: Cell, layer: Layer, dense: bool) -> Expected:
    """Of many keys the first sequences are judged; `dense` takes pages in the order of memory."""
    count, keys = 0, 0
    while count < len(cell.lengths) and (count == 0 or keys + cell.lengths[count] <= ORACLE_KEYS):
        keys += cell.lengths[count]
        count += 1
    own = layer.sequences
    rows = count
    if cell.queries is None:
        ends = own.query_offsets[: count + 1]  # type: ignore[index]
        rows = int(ends[-1])
        given = {"query_offsets": ends, "key_offsets": ends}
    else:
        given = {name: tensor[:count] for name, tensor in own.tensors.items()}
        if dense:
            width = own.page_table.shape[1]  # type: ignore[union-attr]
            pages = torch.arange(count * width, dtype=torch.int32, device=layer.query.device)
            given["page_table"] = pages.view(count, width)
    inputs = layer.query[:rows], layer.key, layer.value
    given |= layer.scales
    exact = reference.varlen(inputs, given, causal=True)[0]
    plain = reference.varlen(inputs, given, exact=False, causal=True)[0]
    return Expected(rows, exact, compare.tolerance(plain, exact, layer.query.dtype))


def judged(way: Way, cell: Cell, layer: Layer, right: Expected) -> tuple[dict[str, object], str]:
    """The error of a way on a layer against the oracle, and why it is wrong or empty."""
    errors = compare.measure(way.decode(way.bind(layer, cell)())[: right.rows], right.exact)
    wrong = "" if right.tolerance.admits(errors) else f"off by {errors.max_abs:.3g}"
    return compare.as_record(errors, right.tolerance), wrong


def fields_of(way: Way, cell: Cell, target: str) -> dict[str, Any]:
    """What the rows of a way and a cell share."""
    fields: dict[str, Any] = {"impl": way.name, "variant": way.variant, "case": cell.text, "page": cell.page}
    inputs = "bfloat16" if cell.cache == "bfloat16" else f"bfloat16, {cell.cache} cache"
    fields |= {"inputs": inputs, "dtype": "bfloat16", "op": "sdpa", "lengths": list(cell.lengths)}
    if way.name != OURS:
        return fields | {"version": torch.__version__ if way.name.startswith("torch") else "installed"}
    fields |= {"version": microsdpa.__version__, "requested": "auto"}
    fields |= {"value_dim": cell.value_dim} if cell.value_dim else {}
    problem = problem_of(cell, target, way.packed)
    if way.dense:
        problem = cell.case.problem(target)
    else:
        fields |= {"varlen": problem.varlen, "rounded_queries": problem.seqlen_q}
        fields |= {"packed_queries": True} if problem.packed_queries else {}
        fields |= {"cache_kind": asdict(problem.cache)} if problem.cache else {}
    spec = select(problem).spec
    if way.variant == INVARIANT:
        spec, fields["batch_invariant"] = batch_invariant(problem), True
    if way.variant in APPENDS:
        spec, fields["row_change"] = appending(spec, problem, way.change), asdict(way.change)
    return fields | {
        "kernel": spec.name,
        "signature": signature(spec, target),
        "code_signature": code_signature(spec, target),
    }


def run(
    chosen: Sequence[Cell],
    modes: Sequence[str],
    advance: Callable[[str], None] = lambda message: None,
    keep: Callable[[list[results.Row]], None] = lambda rows: None,
) -> list[results.Row]:
    """Rows of these cells on the current CUDA device; `keep` is given the rows so far after every cell."""
    found = ((_measure(cell, modes), str(cell)) for cell in chosen)
    return results.gathered(found, advance, keep)


def _measure(cell: Cell, modes: Sequence[str]) -> list[results.Row]:
    rows, calls, fields = [], {}, {}
    own_layers, target = layers(cell, "cuda"), launcher.target_of_device()

    @functools.cache
    def right(dense: bool, change: RowChange) -> Expected:
        layer = own_layers[0]
        return expected(cell, changed(layer, cell, change) if change.changes_query else layer, dense)

    for way in WAYS:
        if way.absent(cell) in NOT_COMPUTED:
            continue
        name = " ".join(filter(None, (way.name, way.variant)))
        fields[name] = fields_of(way, cell, target)
        reason, status = way.absent(cell), "unavailable"
        if not reason:
            try:
                fields[name]["error"], reason = judged(way, cell, own_layers[0], right(way.dense, way.change))
                status = "wrong"
                calls[name] = [way.bind(layer, cell) for layer in own_layers]
            except Exception as failure:  # a row says so, and the others are measured
                torch.cuda.synchronize()
                status = "wrong" if way.name == OURS else "unavailable"
                reason = f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"[:240]
        if reason:
            calls.pop(name, None)
            rows += [results.row(cell.case, **fields[name], mode=mode, status=status, reason=reason) for mode in modes]
    for mode in modes:
        runners = {}
        for name, bound in calls.items():
            try:
                runners[name] = timing.prepare(mode, bound)
            except Exception as failure:
                torch.cuda.synchronize()
                reason = f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"[:240]
                rows.append(results.row(cell.case, **fields[name], mode=mode, status="unavailable", reason=reason))
        for name, samples in timing.interleave(runners, 0, lambda _, turn: turn()).items():
            rows.append(results.row(cell.case, **fields[name], mode=mode, **statistics.summary(samples)))
    return rows
