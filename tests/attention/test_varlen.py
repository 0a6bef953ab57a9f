"""sdpa_varlen on CPU tensors, and the errors of its arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import microsdpa
from microsdpa.attention import varlen
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from varlen_space import Form, after_appending, appending, assert_right, call

FORMS = {
    "decode": Form(group=4),
    "packed": Form(torch.float16, 40, 2, 30, "packed", False, (True, True)),
    "dense": Form(keys="dense", queries=7, softcap=True, alibi=True),
    "sinks": Form(torch.float16, queries=3, sinks=torch.float32, window=(True, False)),
    "V of fewer columns": Form(torch.float16, 48, 2, 30, "packed", value_dim=32),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", range(8))
def test_any_call(name: str, seed: int) -> None:
    given = call(FORMS[name], seed)
    out, lse = microsdpa.sdpa_varlen(**given, return_lse=True)
    assert_right(out, lse, given)
    into = torch.full_like(out, torch.nan)
    assert microsdpa.sdpa_varlen(**given, out=into) is into
    assert torch.equal(into, out)


def test_equal_lengths_are_what_sdpa_computes() -> None:
    query, key, value = (torch.randn(2, s, h, 64).to(torch.bfloat16) for s, h in ((5, 4), (9, 2), (9, 2)))
    got = microsdpa.sdpa_varlen(query, key, value, causal=True)
    plain = microsdpa.sdpa(
        *(t.transpose(1, 2) for t in (query, key, value)), causal="lower_right", enable_gqa=True
    ).transpose(1, 2)
    assert torch.equal(got, plain)


@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_to_compute_gives_zeros(batch: int) -> None:
    query = torch.zeros(batch, 1, 4, 64, dtype=torch.float16)
    cache = torch.zeros(0, 16, 4, 64, dtype=torch.float16)
    table, lengths = torch.zeros(batch, 0, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    out, lse = microsdpa.sdpa_varlen(query, cache, cache, page_table=table, lengths=lengths, return_lse=True)
    assert out.shape == query.shape
    assert not out.any()
    assert lse.shape == (batch, 4, 1)
    assert lse.isneginf().all()


def test_no_packed_queries_give_an_empty_output() -> None:
    nothing, keys = torch.zeros(0, 4, 64, dtype=torch.float16), torch.zeros(3, 4, 64, dtype=torch.float16)
    offsets = torch.zeros(3, dtype=torch.int32)
    out, lse = microsdpa.sdpa_varlen(nothing, keys, keys, query_offsets=offsets, key_offsets=offsets, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 64), (4, 0))


def paged_cache(generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Two sequences of one query each on a cache of 9 pages of 16 keys; 8-bit caches have scales."""
    key, value = (torch.randn(9, 16, 2, 64, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(2, 1, 4, 64, generator=generator).to(torch.bfloat16)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if dtype.itemsize == 1 else {}
    return {"query": query, "key": key, "value": value, "causal": True, **scales}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("wrong", [-1, 9, 2**31 - 1])
def test_a_page_that_the_cache_lacks_gives_nan_and_is_not_read(wrong: int, dtype: torch.dtype) -> None:
    given = paged_cache(torch.Generator().manual_seed(0), dtype)
    lengths = torch.tensor([40, 40], dtype=torch.int32)
    tables = [torch.tensor([first, [4, 5, 6]], dtype=torch.int32) for first in ([1, wrong, 3], [1, 2, 3])]
    outs, lses = zip(
        *(microsdpa.sdpa_varlen(**given, page_table=t, lengths=lengths, return_lse=True) for t in tables), strict=True
    )
    assert outs[0][0].isnan().all()
    assert lses[0][0].isnan().all()
    assert torch.equal(outs[0][1], outs[1][1])
    assert torch.equal(lses[0][1], lses[1][1])


def test_a_page_before_a_window_may_be_anything() -> None:
    given = paged_cache(torch.Generator().manual_seed(1)) | {"window": (10, -1)}
    lengths = torch.tensor([48, 48], dtype=torch.int32)
    found = [
        microsdpa.sdpa_varlen(**given, page_table=torch.tensor([[p, p, 3], [4, 5, 6]]).int(), lengths=lengths)
        for p in (-1, 2)
    ]
    assert found[1].isfinite().all()
    assert torch.equal(*found)


def test_new_keys_on_a_page_that_the_cache_lacks_are_not_written() -> None:
    generator = torch.Generator().manual_seed(2)
    given = paged_cache(generator)
    new = {name: torch.randn(2, 1, 2, 64, generator=generator).to(torch.bfloat16) for name in ("new_key", "new_value")}
    table, lengths = torch.tensor([[1, -1], [4, 5]]).int(), torch.tensor([16, 3], dtype=torch.int32)
    before = given["key"].clone()
    out = microsdpa.sdpa_varlen(**given, **new, page_table=table, lengths=lengths)
    assert (given["key"] != before).flatten(1).any(1).nonzero().flatten().tolist() == [4]
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_lengths_and_offsets_are_brought_into_bounds() -> None:
    given = paged_cache(torch.Generator().manual_seed(3))
    table = torch.tensor([[1, 2, 3], [4, 5, 6]]).int()
    wild, tame = (
        microsdpa.sdpa_varlen(**given, page_table=table, lengths=torch.tensor(lengths).int(), return_lse=True)
        for lengths in ([-5, 10**6], [0, 48])
    )
    assert all(torch.equal(*pair) for pair in zip(wild, tame, strict=True))
    packed = torch.randn(6, 2, 64).to(HALF)
    wild, tame = (
        microsdpa.sdpa_varlen(packed, packed, packed, query_offsets=offsets, key_offsets=offsets, return_lse=True)
        for offsets in (torch.tensor([-2, 4, 1, 99]).int(), torch.tensor([0, 4, 4, 4]).int())
    )
    assert torch.equal(wild[0][:1], tame[0][:1])  # of the first sequence alone: the third one has the other rows


def decode(**changes: Any) -> dict[str, Any]:
    """A call of three sequences on pages."""
    cache = torch.zeros(9, 16, 2, 64, dtype=torch.float16)
    integers = {"lengths": torch.ones(3, dtype=torch.int32), "page_table": torch.zeros(3, 2, dtype=torch.int32)}
    query = torch.zeros(3, 1, 4, 64, dtype=torch.float16)
    return {"query": query, "key": cache, "value": cache, **integers} | changes


HALF = torch.float16
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "lengths of int64": ({"lengths": torch.ones(3, dtype=torch.int64)}, "lengths: expected torch.int32"),
    "lengths of another batch": ({"lengths": torch.ones(4, dtype=torch.int32)}, r"lengths: expected shape \[B\]"),
    "lengths in a list": ({"lengths": [1, 2, 3]}, "lengths: expected a torch.Tensor"),
    "a flat table": ({"page_table": torch.zeros(6, dtype=torch.int32)}, r"page_table: expected shape \[B, n\]"),
    "a transposed table": (
        {"page_table": torch.zeros(2, 3, dtype=torch.int32).T},
        "page_table: expected a stride of 1",
    ),
    "packed keys and pages": ({"key_offsets": torch.zeros(4, dtype=torch.int32)}, "key_offsets: expected None"),
    "packed queries of four dimensions": (
        {"query_offsets": torch.zeros(4, dtype=torch.int32)},
        r"query: expected \[queries, H, D\]",
    ),
    "no offsets": ({"query": torch.zeros(3, 4, 64, dtype=HALF)}, r"query: expected \[B, S_q, H, D\]"),
    "value of another shape": ({"value": torch.zeros(9, 16, 1, 64, dtype=HALF)}, "value: expected shape"),
    "key of another type": ({"key": torch.zeros(9, 16, 2, 64)}, "key: expected torch.float16"),
    "key of another D": ({"key": torch.zeros(9, 16, 2, 32, dtype=HALF)}, "key: expected a head dimension"),
    "heads": ({"query": torch.zeros(3, 1, 3, 64, dtype=HALF)}, "key: expected a number of heads that divides"),
    "no table": ({"page_table": None}, "key: expected 3 sequences"),
    "a hint of 0": ({"max_queries": 0}, "max_queries: expected None or an integer"),
    "causal by name": ({"causal": "lower_right"}, "causal: expected a bool"),
    "batch_invariant by number": ({"batch_invariant": 1}, "batch_invariant: expected a bool"),
    "fixed parts by another kernel": ({"batch_invariant": True, "impl": "emulate:hopper/varlen"}, "divides keys by"),
    "a window of one end": ({"window": (3,)}, "window: expected None or"),
    "a kernel of sdpa": ({"impl": "ampere/mma"}, "impl: expected for sequences of many lengths"),
    "slopes of another batch": ({"alibi_slopes": torch.zeros(2, 4)}, "alibi_slopes: expected shape"),
    "out of another shape": ({"out": torch.zeros(3, 1, 2, 64, dtype=HALF)}, "out: expected shape"),
    "a GPU's kernel": ({"impl": "ampere/varlen"}, "runs on CUDA tensors"),
    "a gradient": ({"query": torch.zeros(3, 1, 4, 64, dtype=HALF, requires_grad=True)}, "query requires grad"),
    "too wide a table": ({"page_table": torch.zeros(3, 1, dtype=torch.int32).expand(3, 2**26)}, "stride of 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name: str) -> None:
    changes, words = WRONG[name]
    with pytest.raises((InvalidArgument, UnsupportedProblem), match=words):
        microsdpa.sdpa_varlen(**decode(**changes))


def test_out_may_not_be_the_table() -> None:
    memory = torch.zeros(3, 1, 4, 64, dtype=HALF)
    table = memory.view(torch.int32).view(-1)[:6].view(3, 2)
    with pytest.raises(InvalidArgument, match="memory that no input uses"):
        microsdpa.sdpa_varlen(**decode(page_table=table, out=memory))


@pytest.mark.parametrize("impl", ["ampere/varlen", "emulate:ampere/varlen"])
def test_sdpa_does_not_take_its_kernel(impl: str) -> None:
    tensor = torch.zeros(1, 1, 4, 64, dtype=HALF)
    with pytest.raises(InvalidArgument, match="impl: expected 'auto'"):
        microsdpa.sdpa(tensor, tensor, tensor, impl=impl)


def test_rows_that_are_not_aligned_are_refused_by_the_kernel() -> None:
    cache = torch.zeros(9 * 16 * 2 * 65, dtype=HALF).as_strided((9, 16, 2, 64), (16 * 130, 130, 65, 1))
    with pytest.raises(UnsupportedProblem, match="16 bytes"):
        microsdpa.sdpa_varlen(**decode(key=cache, value=cache, impl="emulate"))


def test_a_head_dimension_that_is_no_multiple_of_8_is_refused_by_the_kernel() -> None:
    memory = torch.zeros(9, 16, 2, 64, dtype=HALF)[..., :36]
    with pytest.raises(UnsupportedProblem, match="head_dim 40"):
        microsdpa.sdpa_varlen(**decode(key=memory, value=memory, query=memory[:3, :1], impl="emulate"))


@pytest.mark.parametrize(
    ("columns", "cache", "words"),
    [(36, None, "no multiple of 8"), (72, None, "more than the 64"), (32, torch.int8, "one head dimension")],
)
def test_columns_of_v_that_no_kernel_has_are_refused(columns: int, cache: torch.dtype | None, words: str) -> None:
    memory = torch.zeros(9, 16, 2, 128, dtype=cache or HALF)
    scales = {} if cache is None else {"k_scale": 1.0, "v_scale": 1.0}
    given = decode(key=memory[..., :64], value=memory[..., :columns], impl="emulate", **scales)
    with pytest.raises(UnsupportedProblem, match=words):
        microsdpa.sdpa_varlen(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"q_norm": torch.ones(32)}, r"q_norm: expected shape \[64\]"),
        ({"q_norm": torch.ones(128)[::2]}, "q_norm: .*a stride of 1"),
        ({"q_norm": torch.ones(64).double()}, "q_norm: expected torch.bfloat16 or torch.float32"),
        ({"k_norm": torch.ones(64).bfloat16()}, "k_norm: .*one type for both norms"),
        ({"norm_eps": -1.0}, "norm_eps: expected a finite number"),
        ({"norm_eps": "small"}, "norm_eps: expected a finite number"),
        ({"new_key": None, "new_value": None}, "k_norm: expected None without new_key"),
    ],
)
def test_norms_that_are_none_are_refused(given: dict[str, Any], words: str) -> None:
    made = appending(Form(group=4), 0, norms=("q_norm", "k_norm"))
    with pytest.raises(InvalidArgument, match=words):
        microsdpa.sdpa_varlen(**made | given)


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_weights_of_norms_that_require_grad_are_refused(name: str) -> None:
    given = appending(Form(group=4), 0, norms=("q_norm", "k_norm"))
    given[name].requires_grad_()
    with pytest.raises(UnsupportedProblem, match=f"{name} requires grad"):
        microsdpa.sdpa_varlen(**given)
    with torch.no_grad():
        microsdpa.sdpa_varlen(**given)


def test_v_of_fewer_columns_gives_an_output_of_as_many() -> None:
    given = call(FORMS["V of fewer columns"], 1)
    assert microsdpa.sdpa_varlen(**given).shape[-1] == 32
    with pytest.raises(InvalidArgument, match="query and value have"):
        microsdpa.sdpa_varlen(**given, out=torch.empty_like(given["query"]))


APPENDING: dict[str, tuple[Any, ...]] = {
    "decode": (Form(group=4), 0, False),
    "decode, rotated": (Form(group=4), 64, False),
    "several tokens, a part rotated in pairs": (Form(torch.float16, 64, 2, 5), 32, True),
    "rows, rotated": (Form(torch.float16, 64, 2, 3, keys="dense"), 64, False),
    "norms, rotated": (Form(group=4), 64, False, ("q_norm", "k_norm")),
    "a norm of queries, rotated in pairs": (Form(torch.float16, 64, 2, 5), 32, True, ("q_norm",)),
    "a norm of new keys": (Form(torch.float16, 72, 2, 3, keys="dense"), 0, False, ("k_norm",)),
}


@pytest.mark.parametrize("name", APPENDING)
@pytest.mark.parametrize("seed", range(6))
def test_new_keys_are_written_and_seen(name: str, seed: int) -> None:
    given = appending(APPENDING[name][0], seed, *APPENDING[name][1:])
    expected = after_appending(given)
    out, lse = microsdpa.sdpa_varlen(**given, return_lse=True)
    torch.testing.assert_close(given["key"], expected["key"], rtol=1e-2, atol=1e-3)
    assert torch.equal(given["value"], expected["value"])
    assert_right(out, lse, expected)


def test_a_call_that_has_a_plan_is_one_foreign_call_and_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    operators: list[str] = []

    def launch(*given: Any) -> bool:
        launches.append(given)
        return True

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators.append(str(operator))
            return operator(*args, **(kwargs or {}))

    monkeypatch.setattr(varlen, "_launch", launch)
    given = decode()
    with Watched():
        out = microsdpa.sdpa_varlen(**given, causal=True)
    assert operators == ["aten.empty_like.default"]
    ((query, key, value, result, lse, *rest),) = launches
    assert query is given["query"]
    assert key is given["key"]
    assert value is given["value"]
    assert result is out
    assert lse is False
    assert rest[-3] is given["lengths"]
    assert rest[-2] is given["page_table"]


def test_explain_varlen_takes_the_arguments_of_sdpa_varlen() -> None:
    doors = [inspect.signature(door).parameters for door in (microsdpa.sdpa_varlen, microsdpa.explain_varlen)]
    assert list(doors[0].items()) == list(doors[1].items())


@pytest.mark.parametrize("queries", [1, 20])
def test_explain_varlen_names_the_kernels_of_a_call_and_their_reason(queries: int) -> None:
    given = appending(Form(group=4, queries=queries), 0)
    found = microsdpa.explain_varlen(**given, impl="emulate")
    assert found.runs == "emulate:ampere/varlen"
    assert found.spec is not None
    assert found.spec.name == "ampere/varlen"
    assert ("hopper/varlen", "sm_89 has no wgmma, which is sm_90a's") in found.rejected
    assert (found.appender is None) == (queries == 1)  # few new keys are written by the kernel of attention
    assert ("appends    " in str(found)) == (queries > 1)
    assert microsdpa.explain_varlen(**given).runs == "torch"


def test_explain_varlen_refuses_what_sdpa_varlen_refuses() -> None:
    given = decode()
    with pytest.raises(InvalidArgument, match="page_table"):
        microsdpa.explain_varlen(**given | {"page_table": given["page_table"].long()})
    with pytest.raises(InvalidArgument, match="causal: expected a bool"):
        microsdpa.explain_varlen(**given, causal=1)
