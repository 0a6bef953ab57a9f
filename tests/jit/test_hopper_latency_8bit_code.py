"""What hopper/latency promises of its machine code with 8-bit operands, without a GPU."""

from __future__ import annotations

import pytest
from compiled import figures

from microsdpa.kernels import KernelSpec
from microsdpa.kernels.hopper.latency.eight_bit import latency
from microsdpa.kernels.problem import Causal, MaskKind, Operands, Problem


@pytest.mark.parametrize(
    ("operands", "terms", "key_block"), [("fp8", 1, 0), ("fp8", 2, 1), ("int8_fp8", 1, 0), ("int8_fp8", 1, 1)]
)
@pytest.mark.parametrize(("heads", "length", "head_dim"), [(8, 512, 64), (4, 128, 64), (4, 768, 64), (8, 512, 128)])
def test_wgmma_runs_free_and_nothing_is_spilled(
    heads: int, length: int, head_dim: int, operands: Operands, terms: int, key_block: int
) -> None:
    causal: Causal | None = None if (length // 128 + head_dim // 64 + terms + key_block) % 2 else "lower_right"
    problem = Problem(
        *(1, heads, heads, length, length, head_dim, "float16", causal),
        target="sm_90a",
        operands=operands,
        query_terms=terms,
        key_block=key_block,
    )
    spec = latency(problem)
    assert isinstance(spec, KernelSpec)
    kernel = figures(spec, "sm_90a", counted=True)
    products = {"HGMMA", "QGMMA" if operands == "fp8" else "IGMMA"}
    assert kernel.tensor_instructions == products
    assert not kernel.resources.uses_local_memory
    assert not kernel.serialised


@pytest.mark.parametrize(
    "mask",
    [
        MaskKind("bool", per_query=True, bulk=True),
        MaskKind("float32", per_query=True),
        MaskKind("int32", left=True, right=True),
        MaskKind("float16", True, True, True, True, "float32", per_query=True, bulk=True),
    ],
    ids=str,
)
def test_masks_at_the_headline_shape_spill_nothing(mask: MaskKind) -> None:
    sizes = 1, 8, 8, 512, 512, 64, "float16"
    problem = Problem(*sizes, mask=mask, target="sm_90a", operands="fp8", query_terms=2)  # type: ignore[arg-type]
    spec = latency(problem)
    assert isinstance(spec, KernelSpec)
    kernel = figures(spec, "sm_90a", counted=True)
    assert not kernel.resources.uses_local_memory
    assert not kernel.serialised
