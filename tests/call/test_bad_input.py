"""Every bad argument gets a typed error that names it, what was expected, what came and what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa import InvalidArgument, UnsupportedProblem
from microsdpa.runtime import launcher


def t(*shape: int, dtype: torch.dtype = torch.float16, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, **options)


Q = t(2, 4, 8, 32)
SHARED = t(2, 4, 8, 32)

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("not a tensor", {"query": [1, 2]}, "query", "expected a torch.Tensor, got list"),
    ("dtype", {"query": t(2, 4, 8, 32, dtype=torch.float32)}, "query", "got torch.float32"),
    ("mixed dtypes", {"key": t(2, 4, 8, 32, dtype=torch.bfloat16)}, "key", "expected torch.float16, as query is"),
    ("mixed devices", {"value": t(2, 4, 8, 32, device="meta")}, "value", "expected a tensor on cpu"),
    ("device", {n: t(2, 4, 8, 32, device="meta") for n in ("query", "key", "value")}, "query", "got meta"),
    ("rank", {"query": t(4, 8, 32)}, "query", "got 3 dimensions"),
    ("batch", {"key": t(3, 4, 8, 32)}, "key", "expected batch size B = 2"),
    ("D", {"key": t(2, 4, 8, 64)}, "key", "expected head dimension D = 32"),
    ("no columns of value", {"value": t(2, 4, 8, 0)}, "value", "D_v >= 1"),
    ("S_k", {"value": t(2, 4, 9, 32)}, "value", "S_k = 8"),
    ("H_kv", {"value": t(2, 2, 8, 32)}, "value", "H_kv = 4"),
    ("GQA unasked", {n: t(2, 2, 8, 32) for n in ("key", "value")}, "key", "pass enable_gqa=True"),
    (
        "indivisible",
        {n: t(2, 3, 8, 32) for n in ("key", "value")} | {"enable_gqa": True},
        "key",
        "divides query's 4, got 3 heads",
    ),
    (
        "no key heads",
        {n: t(2, 0, 8, 32) for n in ("key", "value")} | {"enable_gqa": True},
        "key",
        "divides query's 4, got 0 heads",
    ),
    ("no channels", {n: t(2, 4, 8, 0) for n in ("query", "key", "value")}, "query", "D >= 1"),
    ("stride", {"key": t(2, 4, 32, 8).transpose(2, 3)}, "key", "expected a stride of 1 along D"),
    ("sparse", {"query": torch.zeros(2, 4, 8, 32).half().to_sparse()}, "query", "expected a dense tensor"),
    ("NaN scale", {"scale": math.nan}, "scale", "expected a finite number, got nan"),
    ("infinite scale", {"scale": math.inf}, "scale", "expected a finite number, got inf"),
    ("scale of float64", {"scale": 1e300}, "scale", r"expected a number of at most 2\*\*127 in magnitude, got 1e\+300"),
    ("negative scale of float64", {"scale": -(2.0**128)}, "scale", r"2\*\*127 in magnitude"),
    ("scale of a long integer", {"scale": 10**400}, "scale", r"2\*\*127 in magnitude"),
    ("scale in the emulator", {"scale": 1e39, "impl": "emulate"}, "scale", r"2\*\*127 in magnitude"),
    ("scale beside a precision", {"scale": 1e39, "impl": "emulate", "precision": "fp8"}, "scale", r"2\*\*127"),
    ("scale type", {"scale": "1"}, "scale", "expected a float or None, got str"),
    ("scale bool", {"scale": True}, "scale", "got bool"),
    ("is_causal", {"is_causal": "yes"}, "is_causal", "expected a bool"),
    ("causal", {"causal": "bottom"}, "causal", "expected None, 'upper_left' or 'lower_right', got 'bottom'"),
    ("causal clash", {"is_causal": True, "causal": "lower_right"}, "causal", "pass causal='lower_right' alone"),
    ("enable_gqa", {"enable_gqa": 2}, "enable_gqa", "expected a bool"),
    ("impl", {"impl": "fast"}, "impl", "'emulate', or one of .*'ladder/01_scalar'.* got 'fast'"),
    ("emulated impl", {"impl": "emulate:fast"}, "impl", "got 'emulate:fast'"),
    ("impl type", {"impl": ["auto"]}, "impl", "expected 'auto'"),
    ("out type", {"out": "x"}, "out", "expected a torch.Tensor or None, got str"),
    ("out shape", {"out": t(2, 4, 9, 32)}, "out", r"expected shape \[2, 4, 8, 32\]"),
    ("out dtype", {"out": t(2, 4, 8, 32, dtype=torch.float32)}, "out", "expected dtype torch.float16"),
    ("out device", {"out": t(2, 4, 8, 32, device="meta")}, "out", "expected device cpu"),
    ("out stride", {"out": t(2, 4, 32, 8).transpose(2, 3)}, "out", "expected a stride of 1 along D"),
    ("out is query", {"query": SHARED, "out": SHARED}, "out", "expected memory that no input uses"),
    ("out expanded", {"out": t(1, 4, 8, 32).expand(2, 4, 8, 32)}, "out", "memory of their own"),
    ("out grad", {"out": t(2, 4, 8, 32, requires_grad=True)}, "out", "requires no grad"),
]


@pytest.mark.parametrize(("override", "argument", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_refusal(override: dict[str, Any], argument: str, message: str) -> None:
    arguments: dict[str, Any] = {"query": Q, "key": t(2, 4, 8, 32), "value": t(2, 4, 8, 32)} | override
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    with pytest.raises(microsdpa.InvalidArgument, match=message) as caught:
        microsdpa.sdpa(query, key, value, **arguments)
    error = caught.value
    assert error.argument == argument
    assert all((error.expected, error.got, error.hint))
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(("name", "value"), [("scale", 1e300), ("softcap", 1e300), ("softcap", 1e-300)])
@pytest.mark.parametrize("door", [microsdpa.plan, microsdpa.explain, torch.compile(microsdpa.sdpa, backend="eager")])
def test_every_door_refuses_what_float32_cannot_hold(door: Any, name: str, value: float) -> None:
    with pytest.raises(microsdpa.InvalidArgument) as caught:
        door(Q, t(2, 4, 8, 32), t(2, 4, 8, 32), **{name: value})
    assert caught.value.argument == name


@pytest.mark.parametrize("impl", ["auto", "emulate"])
@pytest.mark.parametrize("options", [{"scale": 2.0**127}, {"softcap": 2.0**127}, {"softcap": 2.0**-126}], ids=str)
def test_what_float32_holds_gives_numbers(options: dict[str, float], impl: str) -> None:
    tensors = torch.zeros(1, 1, 4, 32).half(), torch.randn(1, 1, 4, 32).half(), torch.ones(1, 1, 4, 32).half()
    found = microsdpa.sdpa(*tensors, impl=impl, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, tensors[2])


def test_missing_stride_hint_names_the_remedy() -> None:
    with pytest.raises(microsdpa.InvalidArgument) as caught:
        microsdpa.sdpa(t(2, 4, 32, 8).transpose(2, 3), Q, Q)
    assert ".contiguous()" in caught.value.hint


@pytest.mark.parametrize(
    ("version", "torch_sees_gpu", "message"),
    [
        (0, False, "no CUDA driver was found"),
        (12080, True, r"the driver supports CUDA 12\.8.*R580"),
        (13000, False, "torch sees no CUDA device"),
    ],
)
def test_a_machine_that_cannot_launch_says_why(
    monkeypatch: pytest.MonkeyPatch, version: int, torch_sees_gpu: bool, message: str
) -> None:
    monkeypatch.setattr(launcher, "driver_version", lambda: version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_sees_gpu)
    reason = launcher.device_error()
    assert reason is not None
    assert pytest.importorskip("re").search(message, reason)


def test_a_machine_that_can_launch_has_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "driver_version", lambda: 13000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert launcher.device_error() is None


def test_an_unknown_keyword_is_sdpas_error() -> None:
    query = torch.zeros(1, 1, 8, 32, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"^dropout: expected an argument of sdpa, .*did you mean dropout_p="):
        microsdpa.sdpa(query, query, query, dropout=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5, math.nan, "0.5", True, None])
@pytest.mark.parametrize("impl", ["auto", "emulate"])
def test_a_dropout_that_is_no_probability_is_named(dropout_p: Any, impl: str) -> None:
    query = torch.zeros(1, 1, 8, 32, dtype=torch.float16)
    for tensor in (query, query.clone().requires_grad_()):
        with pytest.raises(InvalidArgument, match="dropout_p: expected a probability"):
            microsdpa.sdpa(tensor, query, query, dropout_p=dropout_p, impl=impl)


def test_what_a_dropout_is_not_for_is_said() -> None:
    query = torch.zeros(1, 1, 8, 32, dtype=torch.float16)
    with pytest.raises(UnsupportedProblem, match=r"8-bit operands.*dropout_p"):
        microsdpa.sdpa(query, query, query, dropout_p=0.5, precision="fp8")
    with pytest.raises(UnsupportedProblem, match="ampere/mma: it drops no probabilities"):
        microsdpa.sdpa(query, query, query, dropout_p=0.5, impl="emulate:ampere/mma")
    with pytest.raises(InvalidArgument, match=r"query: expected a torch\.Tensor"):
        microsdpa.sdpa([1.0], query, query, dropout_p=0.5)  # type: ignore[arg-type]
    found = microsdpa.explain(query, query, query, dropout_p=0.5, impl="emulate")
    assert found.runs == "emulate:ampere/general"
    assert ("ampere/mma", "it drops no probabilities") in found.rejected


@pytest.mark.parametrize(
    "state", [None, torch.zeros(3, dtype=torch.int64), torch.zeros(2), torch.zeros(4, dtype=torch.int64)[::2]]
)
def test_an_operator_wants_a_random_state_with_its_dropout(state: Any) -> None:
    query = torch.zeros(1, 1, 8, 32, dtype=torch.float16)
    with pytest.raises(InvalidArgument, match="rng_state: expected two int64"):
        torch.ops.microsdpa.attention(query, query, query, dropout_p=0.5, rng_state=state)
