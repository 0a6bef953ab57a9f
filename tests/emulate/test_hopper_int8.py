"""hopper/throughput_8bit_qk in the emulator: right for one and two terms of Q, free of races and of bank conflicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from microsdpa import quantize, reference
from microsdpa.attention.quantize import RESIDUAL_STEPS, Granularity, expand_scale, residual
from microsdpa.emulate import run
from microsdpa.emulate.run import Schedule
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make
from microsdpa.execution.quantized import Place, attending
from microsdpa.kernels.hopper.throughput_8bit_qk.spec import Tiles, specification, throughput, tiles_for
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

CTAS = 3
"""Fewer than there are query tiles, so that each takes several."""

# A case, the granularity of K's scales and the rows of their blocks, and terms of a query.
CASES: list[tuple[Case, Granularity, int, int]] = [
    (Case(1, 3, 256, 384, 64), "block", 1, 2),
    (Case(2, 4, 170, 350, 64, heads_kv=2, causal="lower_right", layout="bshd"), "block", 16, 1),
    (Case(1, 7, 130, 60, 64, scale=-2.0, kind="mean"), "head", 0, 2),  # query tiles of one tile of keys
    (Case(1, 3, 130, 300, 128, scale=0.3, kind="outliers"), "block", 1, 2),
    (Case(1, 3, 300, 170, 128, causal="lower_right", dtype="bfloat16"), "block", 1, 2),  # rows without a key
    (Case(1, 3, 300, 260, 128, scale=0.0, causal="upper_left"), "head", 0, 1),
]


def problem_of(case: Case, key_block: int, terms: int) -> Problem:
    return Problem(
        *(case.batch, case.heads, case.kv_heads, case.seqlen_q, case.seqlen_k, case.head_dim, case.dtype),
        causal=case.causal,
        target="sm_90a",
        operands="int8_fp16",
        query_terms=terms,
        key_block=key_block,
    )


def check(case: Case, granularity: Granularity, block: int, terms: int, tiles: Tiles | None = None) -> None:
    query, key, value = make(case)
    q, k = quantize(query, "int8", "block", block=32), quantize(key, "int8", granularity, block=max(block, 1))
    quantized, plain_q = q.values, q.dequantize()
    if terms == 2:
        wide = expand_scale(q.scale, "block", 32, q.values.shape)
        rest = residual(query.float() / wide, q.values, "int8")
        plain_q += rest.float() * wide / RESIDUAL_STEPS["int8"]
        quantized = torch.cat((quantized, rest), dim=-1)
    problem = problem_of(case, block, terms)
    spec = replace(specification(problem, tiles or tiles_for(problem)), max_ctas=CTAS)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    inputs = {"query": quantized, "key": k.values, "value": value, "query_scale": q.scale, "key_scale": k.scale}
    found = []
    for schedule in (Schedule(0, late=True), Schedule(1, late=False)):
        outputs = {"out": torch.full_like(query, torch.nan), "lse": torch.full(query.shape[:3], torch.nan)}
        places = {name: Place.of(name, tensor) for name, tensor in (inputs | outputs).items()}
        launch = attending(spec, problem, places, scale)
        report = run.one_kernel(
            *(spec, launch.grid, launch.filled, inputs, outputs), schedule=schedule, count_banks=True
        )
        assert report.bank_conflicts == 0
        found.append(tuple(outputs.values()))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    out, lse = found[0]
    plain = plain_q, k.dequantize(), value.float()
    expected, expected_lse = reference.oracle(*plain, causal=case.causal, scale=case.scale)
    magnitude, _ = reference.oracle(plain[0], plain[1], plain[2].abs(), causal=case.causal, scale=case.scale)
    roundoff = compare.UNIT_ROUNDOFF[out.dtype]  # of every probability, and of the output
    assert ((out.double() - expected).abs() <= 2 * roundoff * magnitude + roundoff * expected.abs() + 1e-4).all()
    largest = float(expected_lse.where(expected_lse.isfinite(), 0.0).abs().max())
    assert compare.measure(lse, expected_lse).max_abs <= 2e-6 * max(1.0, largest)


@pytest.mark.parametrize(("case", "granularity", "block", "terms"), CASES, ids=str)
def test_right_in_every_order(case: Case, granularity: Granularity, block: int, terms: int) -> None:
    check(case, granularity, block, terms)


@pytest.mark.parametrize("tiles", [Tiles(96), Tiles(64)], ids=str)
def test_other_tiles(tiles: Tiles) -> None:
    check(Case(1, 4, 300, 450, 64, heads_kv=2, causal="lower_right"), "head", 0, 2, tiles)


def test_what_it_refuses() -> None:
    problem = problem_of(Case(1, 8, 512, 512, 64), 1, 2)
    refused = throughput(replace(problem, head_dim=32)), throughput(replace(problem, operands="int8_fp8"))
    assert [getattr(r, "reason", "") for r in refused] == [
        "head_dim 32 is not 64 or 128",
        "V is not of 16 bits beside INT8",
    ]


def test_auto_takes_it_where_it_fills_the_chip() -> None:
    few, many = (problem_of(Case(b, 8, 512, 512, 64), 1, 2) for b in (1, 32))
    assert select(few, "auto").spec.name == "ada/mma_8bit"
    assert "hopper/throughput_8bit_qk" in dict(select(few, "auto").reasons)
    assert select(many, "auto").spec.name == "hopper/throughput_8bit_qk"
