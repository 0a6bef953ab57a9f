"""Random calls on CPU tensors against the FP64 oracle: masks of the lowest numbers, large scores, slopes, sinks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import microsdpa
from microsdpa import reference

TORCHS_OWN = F.scaled_dot_product_attention
CALLS_OF_A_SEED = 20


def _mask(choose: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """A mask that broadcasts to [B, H, S_q, S_k]; of numbers, some rows have nothing but the lowest, or -inf."""
    kind = choose.choice(["none", "bool", "numbers", "numbers", "wide", "wide"])
    if kind == "none":
        return None
    outer = [choose.choice([1, size]) for size in shape[:2]] if choose.random() < 0.5 else []
    sizes = [*outer, choose.choice([1, shape[2]]), shape[3]]
    hidden = torch.rand(sizes) < 0.3
    whole_rows = torch.rand(sizes[:-1]) < 0.3
    hidden |= whole_rows[..., None]
    if kind == "bool":
        return ~hidden
    mask_type = dtype if kind == "numbers" else torch.float32
    lowest = choose.choice([-torch.inf, torch.finfo(mask_type).min, -1e9 if mask_type != torch.float16 else -6e4])
    return torch.randn(sizes).masked_fill(hidden, lowest).to(mask_type)


def _call(seed: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    dtype = choose.choice([torch.float16, torch.bfloat16])
    batch, heads_kv, group = choose.randint(1, 2), choose.randint(1, 2), choose.choice([1, 1, 2])
    heads, seqlen_q, seqlen_k = heads_kv * group, choose.choice([1, 5, 24]), choose.choice([1, 9, 70])
    head_dim = choose.choice([8, 40, 64])
    query = torch.randn(batch, heads, seqlen_q, head_dim).to(dtype)
    key, value = (torch.randn(batch, heads_kv, seqlen_k, head_dim).to(dtype) for _ in range(2))
    options: dict[str, Any] = {"causal": choose.choice([None, None, "upper_left", "lower_right"])}
    options["attn_mask"] = _mask(choose, (batch, heads, seqlen_q, seqlen_k), dtype)
    if choose.random() < 0.3:
        options["window"] = (choose.choice([-1, 0, 3]), choose.choice([-1, 0, 3]))
    if choose.random() < 0.3:
        options["softcap"] = choose.choice([0.5, 30.0])
    mask = options["attn_mask"]
    numbers = mask is not None and mask.dtype != torch.bool
    if choose.random() < 0.3:
        options["alibi_slopes"] = torch.rand(heads) * (0.3 if numbers else choose.choice([1.0, 1000.0]))
    if choose.random() < 0.3:
        options["sinks"] = torch.randn(heads).to(choose.choice([dtype, torch.float32]))
    if not numbers:
        options["scale"] = choose.choice([None, 0.1, 100.0, 3000.0, -0.5, 0.0])
    return (query, key, value), options


def _expected(tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE.

    Beside a number as low as -1e9 FP32 has no room for a score: where a row has nothing else, its scores are equal.
    """
    query, key, value = tensors
    out, lse = reference.oracle(*tensors, **options)
    mask = options["attn_mask"]
    if mask is not None and mask.dtype != torch.bool and "sinks" not in options:
        shape = (*query.shape[:3], key.shape[2])
        # Where what a row sees is -inf or one of the lowest numbers, of which there is one. -6e4 and float16's lowest
        # leave FP32 a bit or two for the score, as the oracle says.
        visible = reference.oracle(*tensors, **(options | {"attn_mask": (mask > -7e4)}))[1] > -torch.inf
        lowered = (lse > -torch.inf) & ~visible & (mask.amin(dim=-1).expand(shape[:3]) < -7e4)
        level = {"attn_mask": mask > -torch.inf, "alibi_slopes": None, "softcap": None}
        equal, _ = reference.oracle(torch.zeros_like(query), key, value, **(options | level))
        out = torch.where(lowered[..., None], equal, out)
    return out, lse


@pytest.mark.parametrize("seed", range(25))
def test_a_random_call_is_the_oracles(seed: int) -> None:
    for number in range(seed * CALLS_OF_A_SEED, (seed + 1) * CALLS_OF_A_SEED):
        tensors, options = _call(number)
        query, key, value = tensors
        common = {"enable_gqa": query.shape[1] != key.shape[1], **options}
        expected, expected_lse = _expected(tensors, options)
        found, lse = microsdpa.sdpa(*tensors, **common, return_lse=True)
        assert torch.equal(found, microsdpa.sdpa(*tensors, **common)), number
        # A score is rounded to FP32, and so is what is taken off it; the output has the inputs' type.
        scores = 1.0 if options.get("scale") is None else abs(options["scale"]) * float(query.norm(dim=3).max()) * 8
        scores += float(options["alibi_slopes"].max()) * 70 if "alibi_slopes" in options else 0.0
        rounding = scores * 2.0**-21 + torch.finfo(query.dtype).eps * 2
        error = (found.double() - expected).abs().max() / value.abs().max()
        assert error <= rounding, f"{number}: {error} of {rounding} allowed, {options}"
        close = 1e-5 + scores * 2.0**-21 + expected_lse.where(expected_lse.isfinite(), 0.0).abs() * 1e-6
        apart = (lse.double() - expected_lse).abs().nan_to_num(0.0, torch.inf)  # -inf less -inf
        assert (apart <= close).all(), number
        assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf), number


@pytest.mark.parametrize("lowest", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("more", [{}, {"softcap": 20.0}, {"alibi_slopes": torch.zeros(2)}])
def test_a_row_of_the_lowest_numbers_is_an_average(lowest: float, more: dict[str, Any]) -> None:
    query, key, value = (torch.randn(1, 2, 7, 16).half() for _ in range(3))
    mask = torch.zeros(7, 7).index_fill(0, torch.tensor([3]), lowest)
    out, lse = microsdpa.sdpa(query, key, value, attn_mask=mask, return_lse=True, **more)
    torch.testing.assert_close(out[:, :, 3], value.float().mean(dim=2).half(), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse[:, :, 3], torch.full((1, 2), lowest))


@pytest.mark.parametrize("more", [{"softcap": 20.0}, {"sinks": torch.zeros(2)}, {}])
def test_nan_in_a_mask_is_nan_in_its_row(more: dict[str, Any]) -> None:
    query, key, value = (torch.randn(1, 2, 7, 16).half() for _ in range(3))
    mask = torch.zeros(7, 7)
    mask[3, 2] = torch.nan
    out, lse = microsdpa.sdpa(query, key, value, attn_mask=mask, return_lse=True, **more)
    nan = torch.arange(7) == 3
    assert torch.equal(out.isnan().all(dim=-1), nan.expand(1, 2, 7))
    assert torch.equal(out.isnan().any(dim=-1), nan.expand(1, 2, 7))
    assert torch.equal(lse.isnan(), nan.expand(1, 2, 7))


@pytest.mark.parametrize("mask_type", [None, torch.bool, torch.float32, torch.float16])
def test_enabled_cpu_tensors_get_torchs_bits_and_gradients(mask_type: torch.dtype | None) -> None:
    tensors = [torch.randn(2, 4, 40, 64).half().requires_grad_() for _ in range(3)]
    mask = None
    if mask_type is not None:
        mask = torch.rand(40, 40) < 0.6 if mask_type == torch.bool else torch.randn(40, 40).to(mask_type)
        mask[7] = False if mask_type == torch.bool else -torch.inf
    expected = TORCHS_OWN(*tensors, mask)
    assert expected.grad_fn is not None
    with microsdpa.enabled(strict=True):
        out = F.scaled_dot_product_attention(*tensors, mask)
    assert out.grad_fn is not None
    assert type(out.grad_fn) is type(expected.grad_fn)
    assert torch.equal(out, expected)


def test_masks_of_another_type_take_torchs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes float32 masks beside float16 tensors: a loop over heads here would be some times as slow."""

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("scores were computed apart from torch")

    monkeypatch.setattr("microsdpa.execution.torch_cpu.scores", refuse)
    query, key, value = (torch.randn(1, 2, 7, 16).half() for _ in range(3))
    mask = torch.randn(2, 1, 7, 7)[:1]
    out = microsdpa.sdpa(query, key, value, attn_mask=mask)
    assert torch.equal(out, TORCHS_OWN(query, key, value, mask))


def test_the_default_device_is_not_where_results_are() -> None:
    query, key, value = (torch.randn(1, 2, 20, 64).half() for _ in range(3))
    mask = torch.zeros(20, 20)
    calls: list[dict[str, Any]] = [
        {},
        {"softcap": 2.0},
        {"attn_mask": mask},
        {"causal": "lower_right", "sinks": torch.zeros(2)},
        {"impl": "emulate", "causal": "upper_left"},
        {"impl": "emulate:ampere/general", "attn_mask": mask},
        {"impl": "emulate", "precision": "int8_fp8"},
    ]
    expected = [microsdpa.sdpa(query, key, value, return_lse=True, **call) for call in calls]
    quantized = microsdpa.quantize(query, "int8", "block")
    before = torch.get_default_dtype()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        found = [microsdpa.sdpa(query, key, value, return_lse=True, **call) for call in calls]
        assert torch.equal(microsdpa.quantize(query, "int8", "block").scale, quantized.scale)
        assert torch.equal(quantized.dequantize(), microsdpa.quantize(query, "int8", "block").dequantize())
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
    for got, want in zip(found, expected, strict=True):
        for one, other in zip(got, want, strict=True):
            assert one.device.type == "cpu"
            assert torch.equal(one, other)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_enabled_meta_tensors_are_torchs(dtype: torch.dtype, requires_grad: bool) -> None:
    tensors = [torch.empty(2, 4, 8, 16, dtype=dtype, device="meta", requires_grad=requires_grad) for _ in range(3)]
    mask = torch.empty(8, 8, dtype=torch.bool, device="meta")
    with microsdpa.enabled():
        for given in ((), (mask,)):
            out = F.scaled_dot_product_attention(*tensors, *given)
            assert (out.shape, out.dtype, out.device.type) == ((2, 4, 8, 16), dtype, "meta")
            assert out.requires_grad == requires_grad
    with microsdpa.enabled(strict=True), pytest.raises(microsdpa.UnsupportedProblem, match="the tensors are on meta"):
        F.scaled_dot_product_attention(*tensors)
