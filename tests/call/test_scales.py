"""What sdpa refuses of 8-bit calls, in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import microsdpa
from microsdpa.errors import InvalidArgument, UnsupportedProblem

E4M3 = torch.float8_e4m3fn


def quantized(dtype: torch.dtype = E4M3, heads: int = 2, seqlen: int = 8, head_dim: int = 32) -> torch.Tensor:
    return torch.zeros(1, heads, seqlen, head_dim, dtype=torch.uint8).view(dtype)


def half(head_dim: int = 32) -> torch.Tensor:
    return torch.zeros(1, 2, 8, head_dim, dtype=torch.float16)


def call(**changes: Any) -> object:
    arguments: dict[str, Any] = {
        "query": quantized(),
        "key": quantized(),
        "value": quantized(),
        "q_scale": 1.0,
        "k_scale": torch.ones(1, 2),
        "v_scale": torch.ones(1, 2, 32),
        "impl": "emulate",
    } | changes
    return microsdpa.sdpa(**arguments)


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (None, "a scale for 8-bit values, got None"),
        (0.0, "positive finite scales, got 0.0"),
        (-1.0, "positive finite scales, got -1.0"),
        (1e300, r"scales from 2\*\*-126 to 2\*\*127, got 1e\+300"),
        (1e-300, r"scales from 2\*\*-126 to 2\*\*127, got 1e-300"),
        (torch.tensor([[1.0, torch.nan]]), "positive finite scales, got nan"),
        (torch.tensor([[torch.inf, 1.0]]), "positive finite scales, got inf"),
        (torch.ones(1, 3), "expected a scalar, .1, 2. or .1, 2, .*got shape .1, 3."),
        (torch.ones(2), "expected a scalar, .*got shape .2."),
        (torch.ones(1, 2, 3), "got shape .1, 2, 3."),
        (torch.ones(1, 2, dtype=torch.float64), "a number, or a float32 tensor on cpu, got torch.float64 on cpu"),
        ("big", "got str"),
    ],
)
def test_bad_scales(name: str, scale: object, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: .*{words}"):
        call(**{name: scale})


@pytest.mark.parametrize("value", [E4M3, torch.float16])
def test_inference_mode_has_8_bit_values(value: torch.dtype) -> None:
    """Tensors that are made in inference mode have no version, which tells a changed scale from another."""
    with torch.inference_mode():
        inputs = half()
        scale = torch.ones(1, 2)
        operands = (
            {"query": quantized(), "key": quantized(), "value": quantized()}
            if value == E4M3
            else {"query": quantized(torch.int8), "key": quantized(torch.int8), "value": inputs, "v_scale": None}
        )
        assert scale.is_inference()
        for _ in range(2):
            call(q_scale=scale, k_scale=scale, **operands)
        with pytest.raises(InvalidArgument, match=r"k_scale: .*positive finite scales, got 0.0"):
            call(k_scale=torch.zeros(1, 2))
    call(q_scale=scale, k_scale=scale, **operands)


def test_a_scale_that_becomes_bad_is_seen() -> None:
    scale = torch.ones(1, 2)
    call(k_scale=scale)
    scale[0, 1] = 0
    with pytest.raises(InvalidArgument, match="k_scale: expected positive finite scales"):
        call(k_scale=scale)


@pytest.mark.parametrize(
    "dtypes", [(E4M3, torch.int8, E4M3), (torch.int8, torch.int8, torch.int8), (torch.uint8, torch.uint8, torch.uint8)]
)
def test_mixed_and_unknown_formats(dtypes: tuple[torch.dtype, ...]) -> None:
    with pytest.raises(InvalidArgument, match="three float8_e4m3fn tensors, or int8 query and key with"):
        call(**dict(zip(("query", "key", "value"), map(quantized, dtypes), strict=True)))


def test_quantized_values_without_scales() -> None:
    with pytest.raises(InvalidArgument, match="pass q_scale, k_scale and v_scale with 8-bit values"):
        microsdpa.sdpa(quantized(), quantized(), quantized())


def test_a_value_scale_for_a_value_of_16_bits() -> None:
    with pytest.raises(InvalidArgument, match=r"v_scale: expected None beside a torch.float16 value"):
        call(query=quantized(torch.int8), key=quantized(torch.int8), value=half())


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("options", [{"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}, {"precision": "fp8"}])
def test_what_is_no_tensor_is_refused_by_name(name: str, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {one: quantized() if "q_scale" in options else half() for one in ("query", "key", "value")}
    with pytest.raises(InvalidArgument, match=rf"^{name}: expected a torch.Tensor, got str"):
        microsdpa.sdpa(**(given | {name: "no tensor"}), **options)


@pytest.mark.parametrize("head_dim", [48, 80])
def test_a_head_dimension_that_8_bits_do_not_have(head_dim: int) -> None:
    with pytest.raises(
        UnsupportedProblem, match=rf"head_dim {head_dim} is not .* with 8-bit operands; nearest supported: head_dim"
    ):
        microsdpa.sdpa(half(head_dim), half(head_dim), half(head_dim), precision="fp8", impl="emulate")


def test_precision_and_where_it_runs() -> None:
    with pytest.raises(InvalidArgument, match="precision: expected None or one of 'fp8', 'fp8_fast', 'int8_fp8', "):
        microsdpa.sdpa(half(), half(), half(), precision="fp4")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="precision: expected no scales beside it"):
        microsdpa.sdpa(half(), half(), half(), precision="fp8", q_scale=1.0)
    with pytest.raises(UnsupportedProblem, match=r"runs on CUDA tensors .* impl='emulate'"):
        microsdpa.sdpa(half(), half(), half(), precision="fp8")
    with pytest.raises(
        InvalidArgument,
        match="for 8-bit operands 'auto', 'emulate', or one of 'hopper/latency_8bit', 'hopper/throughput_8bit'",
    ):
        microsdpa.sdpa(half(), half(), half(), precision="fp8", impl="ladder/01")
    with pytest.raises(UnsupportedProblem, match="this rung takes Q, K and V of one E4M3 term an element"):
        microsdpa.sdpa(half(), half(), half(), precision="int8_fp8", impl="emulate:ladder/10")
    with pytest.raises(UnsupportedProblem, match="requires grad"):
        microsdpa.sdpa(half().requires_grad_(), half(), half(), precision="fp8", impl="emulate")


def test_rows_off_16_bytes_and_outputs() -> None:
    wide = torch.zeros(1, 2, 8, 40, dtype=torch.float16)[..., 1:33]
    with pytest.raises(UnsupportedProblem, match=r"rows of key do not start on 16 bytes.*key.contiguous\(\)"):
        microsdpa.sdpa(half(), wide, half(), precision="fp8", impl="emulate")
    with pytest.raises(InvalidArgument, match=r"out: expected dtype torch\.float16, as query has"):
        call(out=torch.zeros(1, 2, 8, 32))
    with pytest.raises(InvalidArgument, match="out: expected shape"):
        call(out=half(64))
    out = torch.zeros(1, 2, 8, 32, dtype=torch.bfloat16)
    assert call(out=out) is out


def test_targets_without_8_bit_products() -> None:
    from microsdpa.kernels.problem import Problem
    from microsdpa.kernels.select import select

    with pytest.raises(UnsupportedProblem, match="sm_86 has no 8-bit floating-point products"):
        select(Problem(1, 1, 1, 8, 8, 32, "float16", target="sm_86", operands="fp8"), "auto")
