"""sdpa and sdpa_varlen with 8-bit keys and values beside 16-bit queries: results, errors, a call that has a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.call.options import TURNED_BIT, VARLEN_OPTIONS
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.evidence import compare
from microsdpa.execution import forward
from varlen_space import Form, after_appending, appending, assert_right, call

E4M3 = torch.float8_e4m3fn
FORMS = {
    "E4M3, decode": Form(group=4, cache=E4M3),
    "INT8, packed": Form(torch.float16, 48, 2, 30, "packed", False, (True, True), cache=torch.int8, each_token=True),
    "INT8, dense": Form(keys="dense", queries=7, softcap=True, alibi=True, cache=torch.int8),
    "E4M3, sinks": Form(torch.float16, queries=3, sinks=torch.float32, cache=E4M3, each_token=True),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_any_call(name: str, seed: int) -> None:
    given = call(FORMS[name], seed)
    out, lse = microsdpa.sdpa_varlen(**given, return_lse=True)
    assert out.dtype == given["query"].dtype
    assert_right(out, lse, given)


def dense(dtype: torch.dtype = torch.float16, cache: torch.dtype = torch.int8, queries: int = 3) -> dict[str, Any]:
    """A call of sdpa with two key heads for eight query heads."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 8, queries, 64, generator=generator).to(dtype)
    key, value = (torch.randn(2, 2, 50, 64, generator=generator).mul(30).to(cache) for _ in range(2))
    return {"query": query, "key": key, "value": value, "enable_gqa": True}


SCALES = {
    "numbers": (0.02, 0.03),
    "of heads": (torch.tensor([0.01, 0.03]), torch.tensor([0.03, 0.01])),
    "of sequences": (torch.tensor([[0.01, 0.03], [0.02, 0.04]]), torch.full((2, 2), 0.02)),
    "of tokens": (torch.linspace(0.01, 0.04, 200).view(2, 2, 50), torch.linspace(0.001, 0.05, 200).view(2, 2, 50)),
    "of tokens and one": (torch.linspace(0.01, 0.04, 200).view(2, 2, 50), 0.02),
}


def numbers(values: torch.Tensor, scale: Any) -> torch.Tensor:
    """What 8-bit values stand for, in FP64."""
    scale = torch.as_tensor(scale).double()
    of_heads = scale[:, None, None] if scale.dim() == 1 else scale[..., None, None] if scale.dim() == 2 else scale
    return values.float().double() * (of_heads[..., None] if scale.dim() == 3 else of_heads)


@pytest.mark.parametrize("impl", ["auto", "emulate"])
@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("cache", [E4M3, torch.int8])
def test_dense_calls_compute_what_the_values_stand_for(name: str, cache: torch.dtype, impl: str) -> None:
    given, (k_scale, v_scale) = dense(torch.bfloat16, cache), SCALES[name]
    out = torch.empty_like(given["query"])
    options = {"causal": "lower_right", "return_lse": True}
    got, lse = microsdpa.sdpa(**given, **options, k_scale=k_scale, v_scale=v_scale, out=out, impl=impl)  # type: ignore[arg-type]
    assert got is out
    inputs = given["query"].double(), numbers(given["key"], k_scale), numbers(given["value"], v_scale)
    exact, exact_lse = reference.oracle(*inputs, causal="lower_right")
    eager, _ = reference.eager(*(t.bfloat16() for t in inputs), causal="lower_right")
    assert compare.tolerance(eager, exact, out.dtype).admits(compare.measure(out, exact))
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_an_output_has_the_order_of_query() -> None:
    given = dense()
    given["query"] = given["query"].transpose(1, 2).contiguous().transpose(1, 2)
    out = microsdpa.sdpa(**given, k_scale=1.0, v_scale=1.0)
    assert isinstance(out, torch.Tensor)
    assert out.stride() == given["query"].stride()


def test_explain_names_the_kernel() -> None:
    found = microsdpa.explain(**dense(), k_scale=1.0, v_scale=1.0, impl="emulate")
    assert found.runs == "emulate:ampere/varlen"
    assert "Int8Cache" in str(found)


ONES = {"k_scale": 1.0, "v_scale": 1.0}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no scale of K": ({"k_scale": None}, "k_scale: expected a scale beside a torch.int8 key, got None"),
    "no scale of V": ({"v_scale": None}, "v_scale: expected a scale beside a torch.int8 key, got None"),
    "a scale of Q": ({"q_scale": 1.0}, "q_scale: expected None beside a torch.float16 query"),
    "a scale of zero": ({"k_scale": 0.0}, r"k_scale: expected scales from 2\*\*-126"),
    "a scale in words": ({"v_scale": "1"}, "v_scale: expected a number, or a float32 tensor on cpu, got str"),
    "a scale in 16 bits": ({"k_scale": torch.ones(2, dtype=torch.float16)}, "k_scale: expected a number, or a float32"),
    "a scale of query heads": ({"k_scale": torch.ones(8)}, r"k_scale: expected a scalar, \[2\], \[2, 2\] or"),
    "a scale of channels": ({"v_scale": torch.ones(2, 2, 64)}, r"v_scale: expected a scalar, \[2\], \[2, 2\] or"),
    "scales of tokens and of sequences": (
        {"k_scale": torch.ones(2, 2, 50), "v_scale": torch.ones(2, 2)},
        r"v_scale: expected a scalar, \[H_kv\]",
    ),
    "two types": ({"value": torch.zeros(2, 2, 50, 64, dtype=E4M3)}, "value: expected torch.int8, as key has"),
    "a value of 16 bits": ({"value": torch.zeros(2, 2, 50, 64).half()}, "value: expected torch.int8, as key has"),
    "key heads": ({"enable_gqa": False}, "key: expected 8 heads, as query has"),
    "out of another type": ({"out": torch.zeros(2, 8, 3, 64)}, "out: expected dtype torch.float16"),
    "out over a scale": (
        {"out": torch.zeros(3072).half().view(2, 8, 3, 64), "k_scale": "shared"},
        "out: expected memory that no input uses",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name: str) -> None:
    changes, words = WRONG[name]
    if name == "out over a scale":
        changes = changes | {"k_scale": changes["out"].view(torch.float32).flatten()[0]}
    with pytest.raises(InvalidArgument, match=words):
        microsdpa.sdpa(**dense() | ONES | changes)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mask": ({"attn_mask": torch.ones(3, 50, dtype=torch.bool)}, "attn_mask: none is read beside a torch.int8 key"),
    "the upper left": ({"is_causal": True}, "causal: beside a torch.int8 key.*'lower_right'"),
    "a window of the upper left": ({"window": (3, 0)}, "causal: beside a torch.int8 key"),
    "D = 40": ({name: torch.zeros(2, 2, 50, 40, dtype=torch.int8) for name in ("key", "value")}, "head_dim 40 is not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_argument(name: str) -> None:
    changes, words = REFUSED[name]
    given = dense() | ONES | changes
    if name == "D = 40":
        given |= {"query": given["query"][..., :40].contiguous(), "impl": "emulate"}
    with pytest.raises(UnsupportedProblem, match=words):
        microsdpa.sdpa(**given)


def test_a_cache_of_16_bits_has_no_scale() -> None:
    query = torch.zeros(1, 1, 2, 64).half()
    with pytest.raises(InvalidArgument, match="v_scale: expected None beside"):
        microsdpa.sdpa_varlen(query, query, query, v_scale=1.0)


APPENDING = {
    "E4M3": (Form(group=4, cache=E4M3), 0),
    "INT8, scales of tokens, rotated": (Form(torch.float16, 48, 2, 5, cache=torch.int8, each_token=True), 32),
}


@pytest.mark.parametrize("name", APPENDING)
@pytest.mark.parametrize("seed", range(3))
def test_new_keys_are_quantized_and_seen(name: str, seed: int) -> None:
    given = appending(APPENDING[name][0], seed, APPENDING[name][1])
    expected = after_appending(given)
    out, lse = microsdpa.sdpa_varlen(**given, return_lse=True)
    assert torch.equal(given["value"].float(), expected["value"].float())
    assert torch.allclose(given["v_scale"], expected["v_scale"])
    assert_right(out, lse, expected | {name: given[name] for name in ("key", "k_scale")})


def test_scales_of_new_keys_are_of_both() -> None:
    given = appending(Form(cache=E4M3, each_token=True), 1) | {"v_scale": 1.0}
    with pytest.raises(InvalidArgument, match=r"v_scale: expected .* beside new keys, whose own scales are written"):
        microsdpa.sdpa_varlen(**given)
    given = appending(Form(cache=E4M3, each_token=True), 1)
    given["k_scale"] = given["k_scale"][:1].expand_as(given["k_scale"])
    with pytest.raises(InvalidArgument, match=r"k_scale: expected .* in memory of its own"):
        microsdpa.sdpa_varlen(**given)


def test_an_empty_cache_gives_zeros() -> None:
    given = dense() | ONES
    given |= {name: given[name][:, :, :0] for name in ("key", "value")}
    out, lse = microsdpa.sdpa(**given, return_lse=True)
    assert not out.any()
    assert lse.isneginf().all()


def test_a_call_of_a_graph() -> None:
    given = call(FORMS["E4M3, decode"], 3)
    whole = torch.compile(microsdpa.sdpa_varlen, backend="eager", fullgraph=True)
    assert torch.equal(whole(**given), microsdpa.sdpa_varlen(**given))
    given |= {"k_scale": 0.25, "v_scale": 0.5}
    assert torch.equal(whole(**given), microsdpa.sdpa_varlen(**given))


def test_a_number_becomes_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from microsdpa.attention import varlen

    scales = []

    def launch(*given: Any) -> bool:
        scales.append(given[13:16])
        return True

    monkeypatch.setattr(varlen, "_launch", launch)
    given = call(FORMS["E4M3, decode"], 0) | {"k_scale": 0.5, "v_scale": 2}
    microsdpa.sdpa_varlen(**given)
    microsdpa.sdpa_varlen(**given)
    assert [float(scale) for scale in scales[0][1:]] == [0.5, 2.0]
    assert scales[0][0] is None
    assert all(one is other for one, other in zip(scales[0], scales[1], strict=True))


def test_a_call_of_sdpa_that_has_a_plan_is_one_foreign_call(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []

    def launch(*given: Any) -> bool:
        launches.append(given)
        return True

    monkeypatch.setattr(forward, "_launch", launch)
    given = dense() | {"k_scale": torch.full((2, 2, 50), 0.5), "v_scale": 2.0}
    out = microsdpa.sdpa(**given, causal="lower_right", window=(7, -1), softcap=3.0)
    ((query, key, value, result, lse, code, scale, *rest),) = launches
    assert query is given["query"]
    assert key is given["key"]
    assert value is given["value"]
    assert result is out
    assert (lse, code, scale) == (False, VARLEN_OPTIONS[True, False, False, "auto"] | TURNED_BIT, None)
    assert rest[:7] == [None, None, None, 7, -1, 3.0, None]
    assert rest[7] is given["k_scale"]
    assert rest[8].item() == 2.0


REFUSED_AHEAD: dict[str, dict[str, Any]] = {
    "no GQA": {"enable_gqa": False},
    "another alignment": {"is_causal": True},
    "a window without an alignment": {"window": (3, 3)},
    "an unknown impl": {"impl": "nonsense"},
    "a gradient": {"query": torch.zeros(2, 8, 3, 64).half().requires_grad_()},
}


@pytest.mark.parametrize("name", REFUSED_AHEAD)
def test_what_sdpa_refuses_is_not_launched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_launch", lambda *given: pytest.fail("launched"))
    given = dense() | {"k_scale": 0.5, "v_scale": 2.0} | REFUSED_AHEAD[name]
    with pytest.raises((InvalidArgument, UnsupportedProblem)):
        microsdpa.sdpa(**given)


def test_a_query_of_two_dimensions_is_named() -> None:
    with pytest.raises(InvalidArgument, match="query"):
        microsdpa.sdpa(**dense() | {"k_scale": 0.5, "v_scale": 2.0, "query": torch.zeros(8, 64).half()})
