"""Norms and rotary embedding of Q and K: what is refused, what positions mean, and what a CPU computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import microsdpa
from microsdpa import reference
from microsdpa.call.options import (
    INTERLEAVED_BIT,
    LAYER_NORM_BIT,
    OPTIONS,
    PROLOGUE_BIT,
    UNROTATED_KEY_BIT,
)
from microsdpa.call.prologue import Prologue
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.execution import forward
from microsdpa.execution.prologue import composed

D, S = 32, 12
Q, K, V = (torch.randn(2, heads, S, D, dtype=torch.float16) for heads in (4, 2, 2))
ANGLES = torch.outer(torch.arange(40.0), 10000 ** -torch.arange(0, 1, 1 / 8))
ROTARY = ANGLES.cos(), ANGLES.sin()
GQA_CODE = OPTIONS[False, None, True, "auto", None]
WEIGHT, BIAS = torch.rand(D) + 0.5, torch.randn(D)


def attend(**options: Any) -> torch.Tensor:
    found = microsdpa.sdpa(Q, K, V, enable_gqa=True, **options)
    assert isinstance(found, torch.Tensor)
    return found


def odd_address() -> torch.Tensor:
    return torch.rand(D + 1)[1:]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rotary": ROTARY[:1]}, "rotary: expected None or a pair"),
        ({"rotary": ROTARY[0]}, "rotary: expected None or a pair"),
        ({"rotary": (ROTARY[0], ROTARY[1][:, :4])}, r"rotary's sin: .* got shape \[40, 4\]"),
        ({"rotary": tuple(t[:, :4] for t in ROTARY)}, "multiple of 16 up to D"),
        ({"rotary": tuple(torch.cat([t] * 3, 1) for t in ROTARY)}, "multiple of 16 up to D"),
        ({"rotary": (ROTARY[0], ROTARY[1].half())}, "one type for both"),
        ({"rotary": tuple(t.double() for t in ROTARY)}, "float16 or torch.float32"),
        ({"rotary": tuple(t[:8] for t in ROTARY)}, "positions 0 to 11 of the queries, got tables of 8"),
        ({"rotary": ROTARY, "rotary_positions": 29}, "positions 29 to 40 of the queries, got tables of 40"),
        ({"rotary": ROTARY, "rotary_positions": -1}, "positions -1 to 10"),
        ({"rotary": ROTARY, "rotary_positions": (0, 30)}, "positions 30 to 41 of the keys"),
        ({"rotary": ROTARY, "rotary_positions": 1.5}, "rotary_positions: expected None, an integer"),
        ({"rotary": ROTARY, "rotary_positions": True}, "rotary_positions: expected None, an integer"),
        ({"rotary": ROTARY, "rotary_positions": (0, 1, 2)}, "got 3 items"),
        ({"rotary": ROTARY, "rotary_positions": (None, 0)}, "got None for the queries"),
        ({"rotary": ROTARY, "rotary_positions": torch.arange(11)}, r"\[12\] or \[2, 12\] for the queries"),
        ({"rotary": ROTARY, "rotary_positions": torch.rand(12)}, "int32 or int64"),
        ({"rotary": ROTARY, "rotary_interleaved": 1}, "rotary_interleaved: expected a bool"),
        ({"rotary_positions": 0}, "rotary_positions: expected None without rotary"),
        ({"q_norm": WEIGHT[:8]}, r"q_norm: expected shape \[32\]"),
        ({"q_norm": 1.0}, "q_norm: expected None, the weight"),
        ({"k_norm": (WEIGHT,)}, "k_norm: expected None, the weight"),
        ({"k_norm": (None, BIAS)}, "k_norm: expected None, the weight"),
        ({"q_norm": WEIGHT, "k_norm": (WEIGHT, None)}, "k_norm: expected the kind of norm"),
        ({"q_norm": (WEIGHT, BIAS), "k_norm": (WEIGHT, None)}, "a bias for both norms"),
        ({"q_norm": WEIGHT, "k_norm": WEIGHT.half()}, "one type for all weights"),
        ({"q_norm": odd_address()}, "q_norm: expected rows that start on 16 bytes"),
        ({"q_norm": WEIGHT, "norm_eps": -1.0}, "norm_eps: expected a finite number"),
        ({"q_norm": WEIGHT, "norm_eps": float("nan")}, "norm_eps: expected a finite number"),
        ({"q_norm": WEIGHT.to("meta")}, "q_norm: expected a tensor on cpu"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(microsdpa.InvalidArgument, match=told):
        attend(**options)


@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"q_scale": 1.0}])
def test_there_is_none_beside_8_bits(options: dict[str, Any]) -> None:
    with pytest.raises(microsdpa.UnsupportedProblem, match="beside 8-bit operands"):
        attend(q_norm=WEIGHT, **options)


def test_a_head_dimension_needs_chunks_of_8() -> None:
    q = torch.randn(1, 1, 4, 12, dtype=torch.float16)
    with pytest.raises(microsdpa.UnsupportedProblem, match="head_dim 16"):
        microsdpa.sdpa(q, q, q, q_norm=torch.ones(12))


def test_the_norms_are_those_of_torch() -> None:
    x, weight, bias = Q.double(), WEIGHT.double(), BIAS.double()
    found = reference.changed_rows(Q, (WEIGHT, None), 1e-3)
    torch.testing.assert_close(found, F.rms_norm(x, (D,), weight, 1e-3))
    found = reference.changed_rows(Q, (WEIGHT, BIAS), 1e-3, layer=True)
    torch.testing.assert_close(found, F.layer_norm(x, (D,), weight, bias, 1e-3))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_depends_on_the_distance_alone(interleaved: bool) -> None:
    """Scores of rotated rows are the same wherever both are counted from, and a turn keeps the length of a row."""
    products = []
    for first in (0, 7):
        q, k, _ = composed((Q, Q, Q), Prologue(ROTARY, interleaved, first), 0, torch.float64)
        torch.testing.assert_close(q.norm(dim=-1), Q.double().norm(dim=-1))
        products.append(q @ k.mT)
    torch.testing.assert_close(*products, rtol=1e-5, atol=1e-4)  # the tables are float32
    assert (products[0] - Q.double() @ Q.double().mT).abs().max() > 0.1


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_neighbours_or_half_apart(interleaved: bool) -> None:
    """A pair as a complex number is multiplied by the angle's."""
    found = reference.changed_rows(Q, angles=ROTARY, positions=torch.arange(S), interleaved=interleaved)
    x = Q[..., :16].double()
    pairs = torch.complex(x[..., 0::2], x[..., 1::2]) if interleaved else torch.complex(x[..., :8], x[..., 8:])
    turned = pairs * torch.complex(ROTARY[0][:S].double(), ROTARY[1][:S].double())
    parts = turned.real, turned.imag
    expected = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    torch.testing.assert_close(found[..., :16], expected)
    assert torch.equal(found[..., 16:], Q[..., 16:].double())


@pytest.mark.parametrize(
    "positions", [None, 5, torch.arange(S) + 3, torch.randint(0, 40, (2, S), dtype=torch.int32), (4, 0), (3, None)]
)
def test_positions_are_rows_of_the_tables(positions: Any) -> None:
    q, k, v = (t.double() for t in (Q, K, V))
    pair = positions if isinstance(positions, tuple) else (positions, positions)
    at = [p if isinstance(p, torch.Tensor) else torch.arange(S) + (p or 0) for p in pair]
    q = reference.changed_rows(q, angles=ROTARY, positions=at[0])
    k = k if pair[1] is None and positions is not None else reference.changed_rows(k, angles=ROTARY, positions=at[1])
    expected, _ = reference.oracle(q, k, v)
    assert (attend(rotary=ROTARY, rotary_positions=positions) - expected).abs().max() < 4e-3


def test_queries_stand_where_the_mask_has_them() -> None:
    """Under a mask to the lower right the last query stands at the last key."""
    options: dict[str, Any] = {"enable_gqa": True, "causal": "lower_right", "rotary": ROTARY}
    whole = attend(causal="lower_right", rotary=ROTARY)
    last = microsdpa.sdpa(Q[:, :, -3:], K, V, **options)
    assert isinstance(last, torch.Tensor)
    torch.testing.assert_close(last, whole[:, :, -3:], rtol=0, atol=2e-3)


def test_a_gradient_reaches_inputs_and_weights() -> None:
    given = [t.detach().clone().requires_grad_() for t in (Q, K, V, WEIGHT, BIAS)]
    q, k, v, weight, bias = given
    rest: dict[str, Any] = {"rotary": ROTARY, "q_norm": (weight, bias), "k_norm": (weight, bias), "enable_gqa": True}
    out = microsdpa.sdpa(q, k, v, **rest)
    assert isinstance(out, torch.Tensor)
    out.float().square().sum().backward()
    wide = [t.detach().double().requires_grad_() for t in given]
    prologue = Prologue(ROTARY, q_norm=(wide[3], wide[4]), k_norm=(wide[3], wide[4]))
    inputs = composed((wide[0], wide[1], wide[2]), prologue, 0, torch.float64)
    F.scaled_dot_product_attention(*inputs, enable_gqa=True).square().sum().backward()
    for one, other in zip(given, wide, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).abs().max() < 0.02 * other.grad.abs().max()


def test_compiled_it_is_one_operator() -> None:
    graphs = []

    def look(graph: Any, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return microsdpa.sdpa(q, k, v, enable_gqa=True, rotary=ROTARY, q_norm=WEIGHT, is_causal=True)

    found = torch.compile(call, backend=look, fullgraph=True)(Q, K, V)
    assert torch.equal(found, attend(rotary=ROTARY, q_norm=WEIGHT, is_causal=True))
    assert [name for name in graphs[0] if "getitem" not in name] == ["microsdpa.attention_prologued"]


def test_a_plan_keeps_tables_and_weights() -> None:
    options: dict[str, Any] = {"enable_gqa": True, "rotary": ROTARY, "q_norm": WEIGHT, "rotary_positions": 2}
    plan = microsdpa.plan(Q, K, V, **options)
    assert torch.equal(plan(Q, K, V), attend(rotary=ROTARY, q_norm=WEIGHT, rotary_positions=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["[B, S, 3, H, D]", "[B, S, H + 2 H_kv, D]"])
def test_packed_tensors_are_views(layout: str) -> None:
    """Q, K and V of one projection are not copied, and the output is written as the next projection reads it."""
    heads, heads_kv = (4, 4) if layout == "[B, S, 3, H, D]" else (4, 2)
    packed = torch.randn(2, S, heads + 2 * heads_kv, D, dtype=torch.float16)
    q, k, v = (t.transpose(1, 2) for t in packed.split([heads, heads_kv, heads_kv], dim=2))
    assert {t.untyped_storage().data_ptr() for t in (q, k, v)} == {packed.untyped_storage().data_ptr()}
    rest: dict[str, Any] = {"rotary": ROTARY, "k_norm": WEIGHT, "enable_gqa": True}
    expected = microsdpa.sdpa(*(t.contiguous() for t in (q, k, v)), **rest)
    flat = torch.empty(2, S, heads * D, dtype=torch.float16)
    for impl in ("auto", "emulate:ampere/general"):
        found = microsdpa.sdpa(q, k, v, out=flat.view(2, S, heads, D).transpose(1, 2), impl=impl, **rest)
        assert isinstance(found, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert found.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert (flat.view(2, S, heads, D).transpose(1, 2) - expected).abs().max() < 4e-3


def test_a_call_that_has_a_plan_is_one_foreign_call(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(forward, "_launch", lambda *given: launches.append(given) or True)
    weight, positions, code = torch.ones(D), torch.arange(S), GQA_CODE | PROLOGUE_BIT
    given: dict[str, Any] = {"rotary": ROTARY, "q_norm": weight, "k_norm": weight, "norm_eps": 0.25}
    out = attend(**given)
    attend(rotary=ROTARY, rotary_positions=(positions, None), rotary_interleaved=True)
    attend(q_norm=(weight, None), window=(3, 4), scale=0.5)
    plain, one, layer = launches
    assert plain[3] is out
    assert plain[5:] == (code, None, *ROTARY, None, None, weight, None, weight, None, 0, 0, 0.25)
    assert one[5:] == (code | INTERLEAVED_BIT | UNROTATED_KEY_BIT, None, *ROTARY, positions, *[None] * 5, 0, 0, 1e-6)
    norms = *[None] * 4, weight, None, None, None
    masks = None, None, None, 3, 4, None
    assert layer[5:] == (code | LAYER_NORM_BIT, 0.5, *norms, 0, 0, 1e-6, *masks)


@pytest.mark.parametrize(
    "given",
    [
        {"rotary": torch.stack(ROTARY)},
        {"rotary": ROTARY, "rotary_interleaved": 1},
        {"rotary": ROTARY, "impl": "nonsense"},
        {"rotary": ROTARY, "is_causal": True, "attn_mask": torch.ones(S, S, dtype=torch.bool)},
    ],
)
def test_what_is_refused_is_not_launched(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_launch", lambda *given: pytest.fail("launched"))
    with pytest.raises((InvalidArgument, UnsupportedProblem)):
        attend(**given)


def test_a_gradient_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(forward, "_launch", lambda *given: codes.append(given[5]))
    weight = torch.ones(D).requires_grad_()
    attend(q_norm=weight).sum().backward()
    assert weight.grad is not None
    assert not any(code & PROLOGUE_BIT for code in codes)  # torch's norm, and then attention
