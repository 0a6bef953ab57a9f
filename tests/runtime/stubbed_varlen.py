"""sdpa_varlen against the stub driver; test_launcher.py runs this file in a process of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from fake_cuda import integer, last, record, set_integer, tensor
from stub_harness import PRIMARY, UNCHANGED, _clean, address_of, maps_of_last, packed

from microsdpa.call.call import Call, mask_tensors, scales_of
from microsdpa.call.options import TURNED_BIT, VARLEN_OPTIONS, Options
from microsdpa.call.sequences import Sequences, rounded_queries
from microsdpa.call.validate import check
from microsdpa.emulate.abi import AppendParams, CacheParams, NormedParams, VarlenParams
from microsdpa.execution import varlen
from microsdpa.execution.choice import problem_of
from microsdpa.kernels import Grid, KernelSpec
from microsdpa.kernels.ampere.varlen import spec as kernel
from microsdpa.kernels.hopper.varlen.spec import FEWEST_LARGE
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.registry import varlen_kernel
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

__all__ = ["_clean"]
library = launcher._library
FUNCTION = 0x3000
NAMES = (
    *("query", "key", "value", "out", "query_offsets", "key_offsets", "lengths", "page_table", "slopes", "sinks"),
    *("new_key", "new_value", "rotary_cos", "rotary_sin", "q_norm", "k_norm", "key_scale", "value_scale"),
)
NORM_EPS = 1e-3
ADDRESSES = {name: 0x1000000000 * (index + 1) for index, name in enumerate(NAMES)}
KDL_INT, KDL_E4M3 = 0, 10
CODES = {torch.int32: KDL_INT, torch.int8: KDL_INT, torch.float8_e4m3fn: KDL_E4M3}
EMULATED = {"auto": "emulate", "hopper/varlen": "emulate:hopper/varlen"}


@pytest.fixture(autouse=True)
def _raw() -> Iterator[None]:
    set_integer("stub_raw_bytes", ctypes.sizeof(NormedParams))
    yield
    set_integer("stub_raw_bytes", 0)
    set_integer("stub_capturing", 0)


class Expected(NamedTuple):
    params: ctypes.Structure
    grid: Grid
    spec: KernelSpec
    problem: Problem


@dataclass
class Given:
    """A call by the shapes of its tensors; integers are int32."""

    query: tuple[int, ...] = (3, 1, 8, 64)
    key: tuple[int, ...] = (40, 16, 2, 64)
    integers: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"lengths": (3,), "page_table": (3, 7)})
    transposed: bool = False  # the cache is a view of [pages, H_kv, page, D]
    slopes: tuple[int, ...] | None = None
    sinks: bool = False
    causal: bool = True
    max_queries: int | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float | None = None
    lse: bool = False
    appends: bool = False
    rotary: int = 0
    norms: tuple[str, ...] = ()
    value_dim: int = 0
    interleaved: bool = False
    invariant: bool = False
    impl: str = "auto"
    cache: torch.dtype | None = None
    scales: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # shapes of those of an 8-bit cache

    @property
    def changes_query(self) -> bool:
        return self.rotary > 0 or len(self.norms) > 0

    def torch_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of these shapes on the CPU."""
        cache = self.key[0], *((self.key[2], self.key[1]) if self.transposed else self.key[1:3]), self.key[-1]
        if len(self.key) == 3:
            cache = self.key
        keys = [torch.zeros(cache, dtype=self.cache or torch.float16) for _ in range(2)]
        if self.transposed:
            keys = [key.transpose(1, 2) for key in keys]
        query = torch.zeros(self.query, dtype=torch.float16)
        columns = self.value_dim or self.query[-1]
        out = torch.zeros(*self.query[:-1], columns, dtype=torch.float16)
        found = {"query": query, "key": keys[0], "value": keys[1][..., :columns], "out": out}
        found |= {name: torch.zeros(shape, dtype=torch.int32) for name, shape in self.integers.items()}
        if self.slopes:
            found["slopes"] = torch.zeros(self.slopes)
        if self.sinks:
            found["sinks"] = torch.zeros(self.query[-2])
        if self.appends:
            shape = *self.query[:-2], self.key[-2], self.query[-1]
            found |= {name: torch.zeros(shape, dtype=torch.float16) for name in ("new_key", "new_value")}
            found["new_value"] = found["new_value"][..., :columns]
        if self.rotary:
            found |= {name: torch.zeros(300, self.rotary // 2) for name in ("rotary_cos", "rotary_sin")}
        found |= {name: torch.ones(self.query[-1], dtype=torch.float16) for name in self.norms}
        if self.cache:
            found |= {name: torch.ones(shape) for name, shape in zip(NAMES[16:], self.scales, strict=True)}
        return found

    def call(self, **changes: Any) -> list[Any]:
        """Arguments of launch()."""
        tensors = {
            name: tensor(
                tuple(t.shape),
                ADDRESSES[name],
                strides=t.stride(),
                code=CODES.get(t.dtype, 2),
                bits=8 * t.element_size(),
            )
            for name, t in self.torch_tensors().items()
        } | changes
        get = tensors.get
        code = VARLEN_OPTIONS[self.causal, self.interleaved, self.invariant, self.impl]
        return [
            *(get("query"), get("key"), get("value"), get("out"), self.lse, code, None),
            *(None, get("slopes"), get("sinks"), *self.window, self.softcap),
            *(None, get("key_scale"), get("value_scale")),
            *(get(name) for name in NAMES[4:8]),
            self.max_queries,
            *(get(name) for name in NAMES[10:16]),
            NORM_EPS,
        ]

    def expected(self) -> tuple[Expected, ...]:
        """What Python fills for the emulator: of the kernel that appends, if there is one, and of attention."""
        t = self.torch_tensors()
        options = Options(
            False, "lower_right" if self.causal else None, None, True, self.window, self.softcap, EMULATED[self.impl]
        )
        integers, new = ([t.get(name) for name in names] for names in (NAMES[4:8], NAMES[10:16]))
        sequences = Sequences(*integers, self.max_queries, *new, NORM_EPS, self.interleaved, self.invariant)
        masks = mask_tensors(None, t.get("slopes"), t.get("sinks"))
        inputs = t["query"], t["key"], t["value"]
        scales = scales_of(None, t.get("key_scale"), t.get("value_scale"))
        checked = check(Call(inputs, masks, scales, options, self.lse, t["out"], sequences))
        problem = problem_of(checked)
        spec = select(problem, self.impl).spec
        addresses = {name: ADDRESSES[name] for name in t}
        queries = sequences.queries(t["query"])
        *ahead, spec = varlen.kernels_of(checked, problem, spec)
        found = []
        for append in ahead:
            params = varlen.parameters(checked, problem, spec, addresses, append)
            grid = kernel.append_grid(problem, queries, self.appends, self.changes_query)
            found.append(Expected(params, grid, append, problem))
            addresses = {name: address for name, address in addresses.items() if name not in sequences.appended}
        params = varlen.parameters(checked, problem, spec, addresses)
        return *found, Expected(params, varlen_kernel(spec).grid_of(spec, problem, queries), spec, problem)


def register(given: Given, function: int = FUNCTION) -> None:
    """Register the plan that Python makes for a call, with a function in place of its kernels'."""
    expected = given.expected()
    spec = expected[-1].spec
    kernels = [(function, 1, 1, 1, one.spec.threads, 0, 1, 0, 0, 0, 0, 0, 8, 0, 0, 0) for one in expected]
    boxes = launcher.boxes_of(spec)
    launch = spec.block_m, spec.max_ctas, varlen_kernel(spec).workspace_bytes(spec), spec.cluster, *boxes
    numbers = packed(PRIMARY, 0, 1, 0, *launch, *UNCHANGED, len(kernels), *(n for one in kernels for n in one))
    library.register_plan(numbers, bytes(8 * len(kernels)), *given.call())


def latest(kind: type[ctypes.Structure] = VarlenParams, back: int = 0) -> Any:
    """The parameter of the latest launch, or one before it."""
    return kind.from_buffer_copy(bytes(last(back).raw)[: ctypes.sizeof(kind)])


CASES = {
    "decode, pages": Given(),
    "decode, pages of another order": Given(transposed=True),
    "odd pages": Given(key=(40, 12, 2, 64), integers={"lengths": (3,), "page_table": (3, 5)}),
    "packed queries on pages": Given(
        query=(50, 8, 64), integers={"query_offsets": (4,), "lengths": (3,), "page_table": (3, 9)}, max_queries=40
    ),
    "packed queries of a few sequences": Given(
        query=(5, 8, 64), integers={"query_offsets": (4,), "lengths": (3,), "page_table": (3, 9)}, max_queries=2
    ),
    "packed queries of large groups": Given(
        query=(70, 64, 64),
        key=(999, 16, 1, 64),
        max_queries=1,
        integers={"query_offsets": (71,), "lengths": (70,), "page_table": (70, 130)},
    ),
    "packed prompts": Given(
        query=(9000, 8, 64), key=(9000, 2, 64), integers={"query_offsets": (4,), "key_offsets": (4,)}, lse=True
    ),
    "dense": Given(key=(3, 99, 2, 64), integers={"lengths": (3,)}, causal=False, lse=True),
    "dense without lengths": Given(key=(3, 99, 2, 64), integers={}),
    "one sequence": Given(query=(1, 5, 8, 64), integers={"lengths": (1,), "page_table": (1, 7)}),
    "masks": Given(slopes=(3, 8), sinks=True, window=(5, -1), softcap=2.0),
    "one sequence on a wide table": Given(query=(1, 1, 8, 64), integers={"lengths": (1,), "page_table": (1, 700)}),
    "new keys": Given(appends=True),
    "parts of a fixed size": Given(invariant=True, sinks=True),
    "parts of a fixed size of one sequence": Given(
        query=(1, 5, 8, 64), integers={"lengths": (1,), "page_table": (1, 7)}, appends=True, rotary=64, invariant=True
    ),
    "parts of a fixed size of prompts": Given(
        query=(9000, 8, 64), key=(9000, 2, 64), integers={"query_offsets": (4,), "key_offsets": (4,)}, invariant=True
    ),
    "new keys, rotated": Given(appends=True, rotary=32, interleaved=True),
    "V of fewer columns": Given((3, 1, 8, 96), (40, 16, 2, 96), value_dim=64, lse=True),
    "V of fewer columns, new keys": Given((3, 40, 8, 96), (40, 16, 2, 96), value_dim=64, appends=True),
    "V of fewer columns, bulk copies": Given((3, 70, 8, 96), (40, 16, 2, 96), value_dim=64, impl="hopper/varlen"),
    "new keys, norms, rotated": Given(appends=True, rotary=32, norms=("q_norm", "k_norm")),
    "new keys, a norm of theirs": Given(appends=True, norms=("k_norm",)),
    "a norm of queries ahead": Given((3, 40, 8, 64), norms=("q_norm",)),
    "E4M3, norms": Given(cache=torch.float8_e4m3fn, scales=((2,), (2,)), appends=True, norms=("q_norm", "k_norm")),
    "new keys of many queries": Given((3, 40, 8, 64), appends=True, rotary=64),
    "new keys of packed queries, rotated": Given(
        (50, 8, 64), integers={"query_offsets": (4,), "lengths": (3,), "page_table": (3, 9)}, appends=True, rotary=32
    ),
    "rotated queries": Given(
        (1, 5, 8, 64), integers={"lengths": (1,), "page_table": (1, 7)}, rotary=64, interleaved=True
    ),
    "bulk copies, decode": Given(impl="hopper/varlen"),
    "bulk copies, prompts": Given(
        query=(9000, 8, 64),
        key=(9000, 2, 64),
        integers={"query_offsets": (4,), "key_offsets": (4,)},
        impl="hopper/varlen",
    ),
    "bulk copies, many prompts": Given(
        query=(90000, 8, 64),
        key=(90000, 2, 64),
        integers={"query_offsets": (4,), "key_offsets": (4,)},
        impl="hopper/varlen",
    ),
    "bulk copies, narrow last panels": Given((3, 70, 8, 72), (40, 16, 2, 72), lse=True, impl="hopper/varlen"),
    "bulk copies, new keys": Given((3, 70, 8, 64), transposed=True, appends=True, rotary=64, impl="hopper/varlen"),
    "slopes of heads": Given(slopes=(8,), window=(5, 9), causal=False),
    "E4M3, one scale": Given(cache=torch.float8_e4m3fn),
    "E4M3, scales of heads": Given(cache=torch.float8_e4m3fn, scales=((2,), (3, 2)), transposed=True),
    "INT8, scales of tokens": Given(cache=torch.int8, scales=((40, 16, 2), (40, 16, 2)), lse=True),
    "INT8, scales of tokens beside one of all": Given(cache=torch.int8, scales=((1,), (40, 16, 2))),
    "E4M3, new keys, rotated": Given(cache=torch.float8_e4m3fn, scales=((2,), (2,)), appends=True, rotary=32),
    "INT8, new keys": Given(cache=torch.int8, scales=((40, 16, 2), (40, 16, 2)), appends=True),
    "INT8, packed": Given(
        query=(90, 8, 64),
        key=(900, 2, 64),
        integers={"query_offsets": (4,), "key_offsets": (4,)},
        cache=torch.int8,
        scales=((900, 2), (900, 2)),
    ),
}


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_a_plan_serves_no_call_that_has_other_tiles(head_dim: int, cache: torch.dtype | None) -> None:
    """Batch size and keys decide about tiles, by tables in C++ and in Python."""
    tilings: list[kernel.Tiling] = []
    for packed_queries in (False, True):
        for batch in (1, 2, 15, 16, 30, 31, 66, 67, 132, 133):
            for keys in (16, 128, 129, 256, 257, 512, 513, 1024, 1025, 1536, 1537, 2048, 2049, 4096, 4097, 8192, 8193):
                integers = {"lengths": (batch,), "page_table": (batch, keys)}
                integers |= {"query_offsets": (batch + 1,)} if packed_queries else {}
                query = (batch, 8, head_dim) if packed_queries else (batch, 1, 8, head_dim)
                given = Given(query, (40, 1, 1, head_dim), integers, cache=cache)
                problem = replace(given.expected()[-1].problem, target="sm_90a")
                tiling = kernel.tiling_of(problem)
                if tiling not in tilings:
                    tilings.append(tiling)
                if launcher.launch(*given.call()) is None:
                    register(given, FUNCTION + tilings.index(tiling))
                    assert launcher.launch(*given.call()) is not None
                assert last().function == FUNCTION + tilings.index(tiling), (batch, keys)
    assert len(tilings) > 3


@pytest.mark.parametrize("name", CASES)
def test_the_launcher_fills_what_python_fills(name: str) -> None:
    given = CASES[name]
    register(given)
    lse = launcher.launch(*given.call())
    assert lse is not None
    expected = given.expected()
    if given.lse:
        packed_queries = "query_offsets" in given.integers
        batch, *_ = given.query
        shape = (8, batch) if packed_queries else (batch, 8, given.query[1])
        assert (tuple(lse.shape), address_of(lse)) == (shape, latest().lse)
    got, wanted = latest(), expected[-1].params
    if isinstance(wanted, NormedParams):
        compare(given, latest(NormedParams), wanted, {"cached"})
        wanted = wanted.cached.append
    if isinstance(wanted, CacheParams):
        compare(given, latest(CacheParams), wanted, {"append"})
        wanted = wanted.append.call
    if isinstance(wanted, AppendParams):  # one kernel appends, rotates and attends
        compare(given, latest(AppendParams), wanted, {"call", "rotated"})
        wanted = wanted.call
    assert tuple(last().grid) == expected[-1].grid
    divides_keys, maps = bool(wanted.part_heads), expected[-1].spec.tensor_maps
    assert bool(got.arrivals) == (divides_keys or bool(maps))
    rotated = len(expected) == 2 and given.changes_query
    assert bool(got.workspace) == (rotated or divides_keys)
    compare(given, got, wanted, {"query", "query_strides"} if rotated else set())
    if len(expected) == 2:
        before, wanted = latest(AppendParams, back=1), expected[0].params
        if isinstance(wanted, NormedParams):
            compare(given, latest(NormedParams, back=1), wanted, {"cached"})
            wanted = wanted.cached if given.cache else wanted.cached.append
        if isinstance(wanted, CacheParams):
            compare(given, latest(CacheParams, back=1), wanted, {"append"})
            wanted = wanted.append
        assert tuple(last(1).grid) == expected[0].grid
        compare(given, before, wanted, {"call", "rotated"})
        compare(given, before.call, wanted.call, set())
        assert bool(before.rotated) == rotated
        if rotated:
            assert got.query == before.rotated != 0
            *_, heads, head_dim = given.query
            assert tuple(got.query_strides)[1:] == (head_dim, heads * head_dim)


@pytest.mark.parametrize("name", ["bulk copies, decode", "bulk copies, narrow last panels"])
def test_tensor_maps_of_every_call(name: str) -> None:
    given = CASES[name]
    register(given)
    spec = given.expected()[-1].spec
    assert len(spec.tensor_maps) == (6 if "narrow" in name else 3)
    set_integer("stub_tensor_maps", len(spec.tensor_maps))
    try:
        assert launcher.launch(*given.call()) is not None
        found = maps_of_last(len(spec.tensor_maps))
    finally:
        set_integer("stub_tensor_maps", 0)
    pages, page, heads, head_dim = given.key
    patterns = {32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
    addresses = {"query": latest().query, "key": latest().key, "value": latest().value}
    rows = given.query if len(given.query) == 4 else (1, *given.query)
    for box, made in zip(spec.tensor_maps, found, strict=True):
        assert made.address == addresses[box.tensor]
        assert made.swizzle == patterns[box.swizzle]
        if box.tensor == "query":
            assert made.sizes == (head_dim, rows[2], rows[1], rows[0])
            assert made.box == (box.columns, rows[2] // heads, box.rows, 1)
            assert made.strides[0] == 2 * head_dim
        else:
            assert made.sizes == (head_dim, page, heads, pages)
            assert made.box == (box.columns, box.rows, 1, 1)


TURNED = {
    "E4M3, scales of heads": Given((3, 1, 8, 64), (3, 99, 2, 64), {}, cache=torch.float8_e4m3fn, scales=((2,), (3, 2))),
    "INT8, scales of tokens, LSE": Given(
        (3, 5, 8, 64), (3, 99, 2, 64), {}, cache=torch.int8, scales=((3, 99, 2), (3, 99, 2)), lse=True
    ),
}


@pytest.mark.parametrize("name", TURNED)
def test_operands_of_sdpa_are_read_as_those_of_sdpa_varlen(name: str) -> None:
    given = TURNED[name]
    register(given)
    assert launcher.launch(*given.call()) is not None
    expected, grid = latest(CacheParams), tuple(last().grid)

    def turned(name: str) -> Any:
        given_tensor = given.torch_tensors()[name]
        view = given_tensor.transpose(1, 2) if given_tensor.dim() > 2 else given_tensor
        shape, strides, bits = tuple(view.shape), view.stride(), 8 * view.element_size()
        return tensor(shape, ADDRESSES[name], strides=strides, code=CODES.get(view.dtype, 2), bits=bits)

    names = "query", "key", "value", "out", "key_scale", "value_scale"
    arguments = given.call(**{name: turned(name) for name in names})
    assert launcher.launch(*arguments) is None  # they are no tensors of sdpa_varlen
    arguments[5] |= TURNED_BIT
    lse = launcher.launch(*arguments)
    assert lse is not None
    if given.lse:
        assert tuple(lse.shape) == (3, 8, 5)
    compare(given, latest(CacheParams), expected, {"append"})
    compare(given, latest(), expected.append.call, set())
    assert tuple(last().grid) == grid
    for name in names:
        arguments = given.call(**{n: turned(n) for n in names} | {name: tensor((9, 64), ADDRESSES[name])})
        arguments[5] |= TURNED_BIT
        assert launcher.launch(*arguments) is None


def compare(given: Given, got: ctypes.Structure, expected: ctypes.Structure, others: set[str]) -> None:
    """Compare all members but `others` and what the launcher allocates."""
    for member, kind in type(got)._fields_:
        if member in {"lse", "workspace", "arrivals", *others}:
            continue
        one, other = getattr(got, member), getattr(expected, member)
        if issubclass(kind, ctypes.Array):
            same_size = [size > 1 for size in _sizes(given, member)]
            one, other = ([x for x, kept in zip(s, same_size, strict=True) if kept] for s in (one, other))
        if member == "softcap_log2" and given.softcap is None:
            continue  # the kernel is compiled without
        if member in ("left", "right") and other < 0:
            continue
        assert one == pytest.approx(other), member


def _sizes(given: Given, member: str) -> tuple[int, int, int]:
    """Sizes of the dimensions whose strides a member has: the stride of a dimension of size one says nothing."""
    shape = given.query if member.startswith(("query", "out", "new")) else given.key
    *batch, row, head, _ = shape
    return (batch[0] if batch else 2), head, row


def test_one_plan_serves_all_sizes_of_many_sequences() -> None:
    register(
        replace(CASES["decode, pages"], query=(140, 1, 8, 64), integers={"lengths": (140,), "page_table": (140, 33)})
    )
    grown = Given((200, 1, 8, 64), (5000, 48, 2, 64), {"lengths": (200,), "page_table": (200, 50)})
    assert launcher.launch(*grown.call()) is True
    got = latest()
    assert (got.batch, got.page_size, got.pages, got.most_keys) == (200, 48, 5000, 2400)


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 7, 9, 13, 24, 25, 48, 49, 190, 193, 700])
def test_queries_that_are_rounded_alike_share_a_plan(queries: int) -> None:
    given = CASES["decode, pages"]
    rounded = rounded_queries(queries)
    register(replace(given, query=(3, queries, 8, 64)))
    assert launcher.launch(*Given((3, rounded, 8, 64), integers=given.integers).call()) is True
    assert launcher.launch(*Given((3, rounded + 1, 8, 64), integers=given.integers).call()) is None


@pytest.mark.parametrize(
    ("batch", "pages", "other_batch", "other_pages"), [(31, 250, 32, 250), (2, 255, 2, 256), (40, 255, 40, 256)]
)
def test_tiles_of_more_rows_have_a_plan_of_their_own(
    batch: int, pages: int, other_batch: int, other_pages: int
) -> None:
    """They are for 64 key heads of all sequences, or more, or 4,096 keys: there, all lengths share a plan."""
    calls = [
        Given((b, 60, 8, 64), integers={"lengths": (b,), "page_table": (b, n)})
        for b, n in ((batch, pages), (other_batch, other_pages))
    ]
    register(calls[0])
    many = 2 * batch >= FEWEST_LARGE
    assert launcher.launch(*calls[1].call()) is (True if many else None)


def test_one_plan_serves_all_packed_queries_of_a_class() -> None:
    given = CASES["packed queries on pages"]
    register(given)
    for queries, hint in ((51, 41), (120, 33), (64, 48)):
        other = Given((queries, 8, 64), integers=given.integers, max_queries=hint)
        assert launcher.launch(*other.call()) is True
    for hint in (49, 65):
        assert launcher.launch(*Given((120, 8, 64), integers=given.integers, max_queries=hint).call()) is None


MISSES: dict[str, dict[str, Any]] = {
    "lengths of another batch": {"lengths": tensor((4,), 0x700000, code=KDL_INT, bits=32)},
    "lengths in 64 bits": {"lengths": tensor((3,), 0x700000, code=KDL_INT, bits=64)},
    "a table of another batch": {"page_table": tensor((2, 7), 0x700000, code=KDL_INT, bits=32)},
    "a table on another device": {"page_table": tensor((3, 7), 0x700000, code=KDL_INT, bits=32, device=1)},
    "a table with a stride": {"page_table": tensor((3, 7), 0x700000, code=KDL_INT, bits=32, strides=(14, 2))},
    "value of another shape": {"value": tensor((40, 16, 1, 64), 0x300000)},
    "value of another type": {"value": tensor((40, 16, 2, 64), 0x300000, code=4)},
    "key that is not aligned": {"key": tensor((40, 16, 2, 64), ADDRESSES["key"] + 8)},
    "rows of key that are not aligned": {"key": tensor((40, 16, 2, 64), 0x200000, strides=(2100, 130, 65, 1))},
    "D with a stride": {"key": tensor((40, 16, 2, 64), 0x200000, strides=(4096, 256, 128, 2))},
    "out of another shape": {"out": tensor((3, 1, 4, 64), 0x400000)},
    "out over query": {"out": tensor((3, 1, 8, 64), ADDRESSES["query"])},
    "out over the table": {"out": tensor((3, 1, 8, 64), ADDRESSES["page_table"])},
    "no table": {"page_table": None},
    "a scale": {"key_scale": tensor((), 0x700000, bits=32)},
    "8-bit keys": {name: tensor((40, 16, 2, 64), ADDRESSES[name], code=KDL_INT, bits=8) for name in ("key", "value")},
}


NARROW_MISSES: dict[str, dict[str, Any]] = {
    "no scale": {"value_scale": None},
    "a scale in 16 bits": {"key_scale": tensor((2,), 0x700000, bits=16)},
    "a scale on another device": {"key_scale": tensor((2,), 0x700000, bits=32, device=1)},
    "a scale of other heads": {"key_scale": tensor((8,), 0x700000, bits=32)},
    "scales of other sequences": {"value_scale": tensor((2, 2), 0x700000, bits=32)},
    "scales of tokens": {"value_scale": tensor((40, 16, 2), 0x700000, bits=32)},
    "scales of tokens beside those of sequences": {"key_scale": tensor((40, 16, 2), 0x700000, bits=32)},
    "values of another type": {"value": tensor((40, 16, 2, 64), 0x300000, code=KDL_INT, bits=8)},
    "keys and values of another type": {
        name: tensor((40, 16, 2, 64), ADDRESSES[name], code=KDL_INT, bits=8) for name in ("key", "value")
    },
    "keys that are not aligned": {
        name: tensor((40, 16, 2, 64), ADDRESSES[name] + 8, code=KDL_E4M3, bits=8) for name in ("key", "value")
    },
    "new keys": {name: tensor((3, 1, 2, 64), 0x800000 + i) for i, name in enumerate(("new_key", "new_value"))},
    "out over a scale": {"out": tensor((3, 1, 8, 64), ADDRESSES["key_scale"])},
}


@pytest.mark.parametrize("name", NARROW_MISSES)
def test_other_scales_and_types_miss(name: str) -> None:
    register(CASES["E4M3, scales of heads"])
    launches = record.launches
    assert launcher.launch(*CASES["E4M3, scales of heads"].call(**NARROW_MISSES[name])) is None
    assert record.launches == launches


@pytest.mark.parametrize("name", MISSES)
def test_other_arguments_miss(name: str) -> None:
    register(CASES["decode, pages"])
    launches = record.launches
    assert launcher.launch(*CASES["decode, pages"].call(**MISSES[name])) is None
    assert record.launches == launches


@pytest.mark.parametrize(
    "changes",
    [
        *({"window": (3, -1)}, {"softcap": 1.0}, {"slopes": (8,)}, {"sinks": True}, {"causal": False}),
        {"invariant": True},
    ],
)
def test_another_kind_of_mask_misses(changes: dict[str, Any]) -> None:
    register(CASES["decode, pages"])
    assert launcher.launch(*Given(**changes).call()) is None


def test_a_stream_has_counters_of_its_own_and_every_capture_too() -> None:
    given = CASES["decode, pages"]
    register(given)

    def counters() -> int:
        assert launcher.launch(*given.call()) is True
        return int(latest().arrivals)

    own = counters()
    assert own == counters() != 0
    blocks = integer("stub_blocks")
    set_integer("stub_capturing", 1)
    captured = {counters() for _ in range(300)}
    assert len(captured) == 300
    assert own not in captured
    assert integer("stub_blocks") > blocks
    set_integer("stub_capturing", 0)
    assert counters() == own
