"""What hopper/throughput_8bit and hopper/throughput_8bit_qk promise of their machine code, without a GPU."""

from __future__ import annotations

import pytest
from compiled import figures

from microsdpa.kernels import KernelSpec
from microsdpa.kernels.hopper.throughput_8bit.spec import throughput
from microsdpa.kernels.hopper.throughput_8bit_qk import spec as hopper_int8
from microsdpa.kernels.problem import Causal, DType, MaskKind, Operands, Problem


@pytest.mark.parametrize(
    ("operands", "terms", "key_block"),
    [("fp8", 1, 0), ("fp8", 1, 64), ("fp8", 2, 1), ("int8_fp8", 1, 1), ("int8_fp8", 1, 0)],
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_wgmma_runs_free_and_nothing_is_spilled(head_dim: int, operands: Operands, terms: int, key_block: int) -> None:
    plain = (head_dim // 64 + terms + (key_block > 0)) % 2 == 0  # the two kinds of calls take turns
    causal: Causal | None = None if plain else "lower_right"
    dtype: DType = "float16" if plain else "bfloat16"
    problem = Problem(
        *(1, 16, 16, 4096, 4096, head_dim, dtype, causal),
        target="sm_90a",
        operands=operands,
        query_terms=terms,
        key_block=key_block,
    )
    spec = throughput(problem)
    assert isinstance(spec, KernelSpec)
    kernel = figures(spec, "sm_90a", counted=True)
    counts = kernel.instructions
    assert kernel.tensor_instructions == ({"QGMMA"} if operands == "fp8" else {"IGMMA", "QGMMA"})
    in_place = ("IN_PLACE", "false") not in spec.template_args
    assert in_place == (head_dim < 256 or terms == 1)
    assert kernel.resources.spill_store_bytes <= (0 if in_place else 24)
    assert counts["LDSM"] > 0
    assert counts["STSM"] == counts["LDSM"]  # V is transposed on its way, in registers
    assert not kernel.serialised


@pytest.mark.parametrize(
    ("operands", "seqlen", "causal", "mask"),
    [
        ("fp8", 512, None, None),
        ("int8_fp8", 512, "upper_left", MaskKind("int32", alibi=True)),
        ("fp8", 4096, "upper_left", MaskKind(left=True, softcap=True)),
        ("fp8", 16384, None, None),
        ("fp8", 16384, "lower_right", None),
        ("int8_fp8", 16384, None, MaskKind("int32", softcap=True)),
    ],
)
def test_the_same_at_other_lengths_of_wide_heads(
    operands: Operands, seqlen: int, causal: Causal | None, mask: MaskKind | None
) -> None:
    problem = Problem(
        *(1, 16, 16, seqlen, seqlen, 256, "float16", causal),
        target="sm_90a",
        operands=operands,
        key_block=int(operands == "int8_fp8"),
        mask=mask,
    )
    spec = throughput(problem)
    assert isinstance(spec, KernelSpec)
    kernel = figures(spec, "sm_90a", counted=True)
    staged = ("QUERY_STAGES", "2") in spec.template_args
    assert staged == (seqlen < 16384 or causal is not None)
    assert kernel.instructions["UTMASTG"] == (8 if staged else 0) * 2  # by one scale of V or many, twice
    assert not kernel.resources.uses_local_memory
    assert not kernel.serialised


@pytest.mark.parametrize("operands", ["fp8", "int8_fp8"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_where_few_tiles_have_two_consumers(head_dim: int, operands: Operands) -> None:
    problem = Problem(
        *(1, 4, 4, 512, 512, head_dim, "float16", "upper_left"), target="sm_90a", operands=operands, key_block=1
    )
    spec = throughput(problem)
    assert isinstance(spec, KernelSpec)
    assert ("IN_PLACE", "false") in spec.template_args
    kernel = figures(spec, "sm_90a", counted=True)
    assert not kernel.resources.uses_local_memory
    assert not kernel.serialised


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(("causal", "dtype"), [(None, "float16"), ("lower_right", "bfloat16")])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_int8_beside_16_bits_too(head_dim: int, causal: Causal | None, dtype: DType, terms: int) -> None:
    problem = Problem(
        *(1, 16, 16, 4096, 4096, head_dim, dtype, causal), target="sm_90a", operands="int8_fp16", query_terms=terms
    )
    spec = hopper_int8.throughput(problem)
    assert isinstance(spec, KernelSpec)
    kernel = figures(spec, "sm_90a", counted=True)
    assert kernel.tensor_instructions == {"HGMMA", "IGMMA"}
    assert not kernel.resources.uses_local_memory
    assert not kernel.serialised
