"""hopper/latency with 8-bit operands, in the emulator: right for every kind of scale, free of races and conflicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from microsdpa import quantize, reference, sdpa
from microsdpa.attention.quantize import Format, Granularity, Quantized, expand_scale
from microsdpa.emulate import run
from microsdpa.emulate.run import Schedule
from microsdpa.evidence import compare, verify_eight_bit
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.short_sums import lost_of_scores
from microsdpa.execution.quantized import Place, attending
from microsdpa.kernels import KernelSpec, Rejection
from microsdpa.kernels.hopper.latency.eight_bit import EightBitLatency, latency, specification
from microsdpa.kernels.problem import Operands, Problem
from microsdpa.kernels.select import select

# A case, the granularity of K's scales, the rows of their blocks, and V's granularity.
CASES: list[tuple[Case, Granularity, int, Granularity]] = [
    (Case(1, 1, 64, 512, 64), "tensor", 0, "tensor"),
    (Case(1, 4, 70, 130, 64, heads_kv=2, causal="lower_right", layout="bshd"), "head", 0, "head"),
    (Case(1, 2, 100, 70, 64, scale=-0.3, causal="upper_left"), "block", 1, "channel"),
    (Case(1, 1, 70, 500, 64, scale=3.0, kind="outliers"), "block", 64, "channel"),  # computed a second time
    (Case(1, 1, 130, 100, 64, scale=0.0), "head", 0, "channel"),
    (Case(1, 2, 70, 300, 128, causal="lower_right", dtype="bfloat16"), "block", 16, "channel"),
    (Case(1, 1, 133, 70, 128, causal="lower_right"), "head", 0, "channel"),  # rows without a key
    (Case(1, 2, 5, 33, 32, kind="mean"), "head", 0, "head"),
]


def problem_of(case: Case, key_block: int, operands: Operands) -> Problem:
    return Problem(
        *(case.batch, case.heads, case.kv_heads, case.seqlen_q, case.seqlen_k, case.head_dim, case.dtype),
        causal=case.causal,
        target="sm_90a",
        operands=operands,
        key_block=key_block,
    )


def quantized_of(
    case: Case, operands: Operands, of_key: Granularity, block: int, of_value: Granularity
) -> list[Quantized]:
    query, key, value = make(case)
    format: Format = "e4m3" if operands == "fp8" else "int8"
    of_query: Granularity = "block" if block else "head"
    return [
        quantize(query, format, of_query, block=32),
        quantize(key, format, of_key, block=max(block, 1)),
        quantize(value, "e4m3", of_value),
    ]


def attend(spec: KernelSpec, problem: Problem, case: Case, quantized: list[Quantized]) -> tuple[torch.Tensor, ...]:
    """(output, LSE) of two schedules, the same bits in both."""
    names = ("query", "key", "value")
    inputs = {name: x.values for name, x in zip(names, quantized, strict=True)}
    inputs |= {f"{name}_scale": x.scale for name, x in zip(names, quantized, strict=True)}
    query = make(case)[0]
    found = []
    for schedule in (Schedule(0, late=True), Schedule(1, late=False)):
        outputs = {"out": torch.full_like(query, torch.nan), "lse": torch.full(query.shape[:3], torch.nan)}
        places = {name: Place.of(name, tensor) for name, tensor in (inputs | outputs).items()}
        launch = attending(spec, problem, places, case.head_dim**-0.5 if case.scale is None else case.scale)
        report = run.one_kernel(
            *(spec, launch.grid, launch.filled, inputs, outputs), schedule=schedule, count_banks=True
        )
        assert report.bank_conflicts == 0
        found.append(tuple(outputs.values()))
    assert all(torch.allclose(*pair, rtol=0.0, atol=0.0, equal_nan=True) for pair in zip(*found, strict=True))
    return found[0]


def check(case: Case, quantized: list[Quantized], spec: KernelSpec | Rejection, operands: Operands, block: int) -> None:
    """P is rounded to FP16, of which a probability loses 2^-11 of itself, and the output to its type."""
    assert isinstance(spec, KernelSpec)
    out, lse = attend(spec, problem_of(case, block, operands), case, quantized)
    plain = [x.dequantize() for x in quantized]
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    lost = None
    if operands == "fp8":
        wide = [expand_scale(x.scale, x.granularity, x.block, x.values.shape) for x in quantized[:2]]
        lost = lost_of_scores((quantized[0].values, quantized[1].values), (wide[0], wide[1]), scale)
    expected, expected_lse = reference.oracle(*plain, causal=case.causal, scale=case.scale, attn_mask=lost)
    magnitude, _ = reference.oracle(
        *(plain[0], plain[1], plain[2].abs()), causal=case.causal, scale=case.scale, attn_mask=lost
    )
    bound = 2**-10 * magnitude + compare.UNIT_ROUNDOFF[out.dtype] * expected.abs() + 1e-4
    assert ((out.double() - expected).abs() <= bound).all()
    largest = float(expected_lse.where(expected_lse.isfinite(), 0.0).abs().max())
    assert compare.measure(lse, expected_lse).max_abs <= 2e-6 * max(1.0, largest)


@pytest.mark.parametrize("operands", ["fp8", "int8_fp8"])
@pytest.mark.parametrize(("case", "of_key", "block", "of_value"), CASES, ids=str)
def test_right_in_every_order(
    case: Case, of_key: Granularity, block: int, of_value: Granularity, operands: Operands
) -> None:
    quantized = quantized_of(case, operands, of_key, block, of_value)
    check(case, quantized, latency(problem_of(case, block, operands)), operands, block)


@pytest.mark.parametrize(("cluster", "rounds"), [(1, 3), (1, 4), (2, 2)])
@pytest.mark.parametrize("operands", ["fp8", "int8_fp8"])
def test_every_number_of_rounds(cluster: int, rounds: int, operands: Operands) -> None:
    case = Case(1, 1, 64, 128 * cluster * rounds - 9, 64)
    spec = specification(problem_of(case, 0, operands), EightBitLatency(cluster, rounds))
    check(case, quantized_of(case, operands, "head", 0, "channel"), spec, operands, 0)


@pytest.mark.parametrize("case", [Case(1, 2, 100, 300, 64, causal="upper_left"), Case(1, 1, 70, 200, 128)], ids=str)
def test_what_precision_makes(case: Case) -> None:
    """Queries of two values with "fp8", and a scale for every key."""
    for precision in ("fp8", "int8_fp8"):
        outcome = verify_eight_bit.check(case, precision, "cpu", "hopper/latency_8bit")
        assert not outcome.failure


def test_nan_in_a_value_reaches_its_output() -> None:
    case = Case(1, 1, 64, 128, 64)
    quantized = quantized_of(case, "fp8", "head", 0, "head")
    quantized[2].values.view(torch.uint8)[0, 0, 5, 7] = 0x7F
    spec = latency(problem_of(case, 0, "fp8"))
    assert isinstance(spec, KernelSpec)
    out, _ = attend(spec, problem_of(case, 0, "fp8"), case, quantized)
    assert out[..., 7].isnan().all()
    assert not out[..., 8].isnan().any()


@pytest.mark.parametrize("precision", ["fp8", "int8_fp8"])
def test_nan_in_a_row_of_q_or_k_is_nan_in_what_it_decides(precision: Operands) -> None:
    query, key, value = make(Case(1, 2, 70, 130, 64))
    query[0, 0, 3, 5], key[0, 1, 7, 9] = torch.nan, torch.nan
    impl = "emulate:hopper/latency_8bit"
    out, lse = sdpa(query, key, value, precision=precision, return_lse=True, impl=impl)
    expected = torch.zeros(1, 2, 70, dtype=torch.bool)
    expected[0, 0, 3], expected[0, 1] = True, True
    for found in (out.isnan().all(dim=-1), out.isnan().any(dim=-1), lse.isnan()):
        assert torch.equal(found, expected)


def test_auto_takes_it_where_its_tiles_fit_the_chip() -> None:
    problem = problem_of(Case(1, 8, 512, 512, 64), 0, "fp8")
    assert select(problem).spec.name == "hopper/latency_8bit"
    assert "more than the SMs" in dict(select(replace(problem, batch=3)).reasons)["hopper/latency_8bit"]
    refused = {
        "V is not E4M3": replace(problem, operands="int8_fp16"),
        "two INT8 values": replace(problem, operands="int8_fp8", query_terms=2),
        "do not fit the shared memory": replace(problem, seqlen_k=4096),
        "is not 32, 64 or 128": replace(problem, head_dim=48),
    }
    for reason, other in refused.items():
        found = latency(other)
        assert isinstance(found, Rejection)
        assert reason in found.reason
