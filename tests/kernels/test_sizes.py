"""Problems of extreme sizes: what is launched fits a GPU's limits and 32-bit numbers, all else is refused in words."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from microsdpa.emulate import run
from microsdpa.errors import UnsupportedProblem
from microsdpa.execution import quantized
from microsdpa.kernels import EIGHT_BIT_FAMILIES, FAMILIES, KernelSpec
from microsdpa.kernels.problem import OPERANDS, MaskKind, Problem
from microsdpa.kernels.quantize.spec import SCHEMES
from microsdpa.kernels.select import select

EXTREMES: tuple[tuple[int, int, int, int, int], ...] = (  # batch, heads, heads of keys, queries, keys
    (1, 1, 1, 2**30, 1),
    (1, 1, 1, 2**30, 2**30),
    (1, 1, 1, 1, 2**30),
    (1, 1, 1, 2**22, 1),
    (2**16, 1, 1, 64, 64),
    (2**31, 1, 1, 1, 1),
    (1, 2**31, 1, 1, 1),
    (1, 2**31 - 1, 2**31 - 1, 1, 1),
    (2**15, 2**15, 2**15, 257, 257),
    (1, 2**28, 1, 8, 1),
    (1, 2**27, 1, 15, 1),
    (1, 2**15, 1, 65, 1),
    (2**20, 2**10, 1, 256, 7),
)
TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_120")


def assert_fits(spec: KernelSpec, problem: Problem) -> None:
    for stage in spec.stages:
        x, y, z = stage.grid(problem)
        assert x <= 2147483647
        assert max(y, z) <= 65535
        if stage.grid_order == "x":
            tiles = -(-problem.seqlen_q * stage.pack // stage.block_m)
            # A persistent kernel's number of the next tile, past the last one, is still one of 32 bits.
            assert problem.batch * problem.heads // stage.pack * tiles + stage.max_ctas <= 2147483647
    assert problem.batch * problem.heads <= 2147483647
    assert problem.seqlen_q * spec.pack + spec.block_m <= 2147483647
    assert problem.seqlen_q + problem.seqlen_k + 2 * spec.block_m <= 2147483647


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", EXTREMES, ids=str)
def test_what_is_launched_fits(sizes: tuple[int, ...], target: str) -> None:
    launched, refusals = 0, []
    masks: tuple[dict[str, Any], ...] = ({}, {"causal": "upper_left"}, {"mask": MaskKind("bool", left=True)})
    for head_dim, more, impl in product((16, 64, 128, 256), masks, ("auto", *(f.name for f in FAMILIES))):
        problem = Problem(*sizes, head_dim, "float16", target=target, **more)
        try:
            spec = select(problem, impl).spec
        except UnsupportedProblem as error:
            refusals.append(error)
            continue
        launched += 1
        assert_fits(spec, problem)
    small = max(sizes[0] * sizes[1], sizes[0] * sizes[1] * sizes[3] // 16, sizes[3] + sizes[4]) < 2**30
    assert launched > 0 or not small
    assert all(refusal.reason and refusal.nearest for refusal in refusals)


@pytest.mark.parametrize("sizes", EXTREMES, ids=str)
def test_what_is_launched_with_8_bit_operands_fits(sizes: tuple[int, ...]) -> None:
    for head_dim, operands, impl in product((64, 256), OPERANDS, ("auto", *(f.name for f in EIGHT_BIT_FAMILIES))):
        problem = Problem(*sizes, head_dim, "float16", target="sm_90a", operands=operands)
        try:
            spec = select(problem, impl).spec
        except UnsupportedProblem:
            continue
        assert_fits(spec, problem)


def test_too_many_ctas_of_a_quantizer_are_refused() -> None:
    """As many tensors would have is enough: nothing is allocated on the meta device."""
    shape = (2**16, 2**15, 1, 64)
    places, _ = quantized.in_one_tensor(
        "workspace", quantized.quantized_shapes(SCHEMES["fp8"], torch.Size(shape), torch.Size(shape))
    )
    inputs = {n: quantized.Place(n, shape, (2**21, 64, 64, 1), 2) for n in ("query", "key", "value")}
    with pytest.raises(UnsupportedProblem, match="CTAs of quantize/fused exceed the 2147483647 of one launch"):
        quantized.quantizing(SCHEMES["fp8"], "float16", inputs | places, "sm_90a")


def test_a_refusal_names_the_number_and_what_would_do() -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        select(Problem(1, 2**28, 1, 8, 1, 64, "float16", target="sm_89"), "ampere/mma")
    assert str(caught.value) == (
        "ampere/mma: 2147483648 rows of the query heads of a key head exceed the 2147475456 that a kernel counts; "
        "nearest supported: fewer query heads of a key head"
    )


def test_many_queries_of_one_key_have_their_tiles() -> None:
    """The first two CTAs of 8,192: 2^19 heads that lie in L2 together, times the tiles of one, would be 2^32."""
    problem = Problem(1, 1, 1, 2**20, 1, 16, "float16", target="sm_89")
    spec = select(problem, "ampere/mma").spec
    assert spec.source == "ampere/stream/kernel.cu"
    first_two = replace(spec, max_ctas=2)
    query, key, value = (torch.randn(1, 1, rows, 16).half() for rows in (2**20, 1, 1))
    out = torch.full_like(query, torch.nan)
    run.attention(first_two, problem, (query, key, value, out, None))
    written = ~out[0, 0, :, 0].isnan()
    assert int(written.sum()) == 2 * spec.block_m
    assert (out[0, 0, written] == value[0, 0]).all()
