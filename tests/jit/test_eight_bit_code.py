"""What the 8-bit kernels promise of their machine code, without a GPU."""

from __future__ import annotations

import pytest
from compiled import Figures, figures

from microsdpa.kernels import EIGHT_BIT_FAMILIES
from microsdpa.kernels.chip import chip_of
from microsdpa.kernels.eight_bit import HEAD_DIMS
from microsdpa.kernels.problem import Causal, Operands, Problem
from microsdpa.kernels.quantize.spec import SCHEMES, fused
from microsdpa.kernels.spec import KernelSpec

TARGETS = ("sm_89", "sm_90a")
# Operands, terms of a query, and the tensor instructions on Ada and on Hopper, which has no mma.sync of E4M3 and turns
# it into FP16.
CONFIGURATIONS: list[tuple[str, Operands, int, set[str], set[str]]] = [
    ("ladder/08", "fp8", 1, set(), set()),
    ("ladder/09", "fp8", 1, {"QMMA", "HMMA"}, {"HMMA"}),
    ("ladder/10", "fp8", 1, {"QMMA"}, {"HMMA"}),
    ("ladder/11", "fp8", 1, {"QMMA"}, {"HMMA"}),
    ("ladder/11", "fp8", 2, {"QMMA"}, {"HMMA"}),
    ("ladder/11", "int8_fp8", 1, {"QMMA", "IMMA"}, {"HMMA", "IMMA"}),
    ("ladder/11", "int8_fp16", 1, {"HMMA", "IMMA"}, {"HMMA", "IMMA"}),
    ("ladder/11", "int8_fp16", 2, {"HMMA", "IMMA"}, {"HMMA", "IMMA"}),
    ("ada/mma_8bit", "fp8", 1, {"QMMA"}, {"HMMA"}),
    ("ada/mma_8bit", "fp8", 2, {"QMMA"}, {"HMMA"}),
    ("ada/mma_8bit", "int8_fp8", 1, {"QMMA", "IMMA"}, {"HMMA", "IMMA"}),
    ("ada/mma_8bit", "int8_fp16", 2, {"HMMA", "IMMA"}, {"HMMA", "IMMA"}),
    ("ladder/12", "fp8", 1, {"QMMA"}, {"HMMA"}),
    ("ladder/12", "int8_fp8", 1, {"QMMA", "IMMA"}, {"HMMA", "IMMA"}),
    ("ladder/12", "int8_fp16", 1, {"HMMA", "IMMA"}, {"HMMA", "IMMA"}),
]


def compiled(
    rung: str, operands: Operands, terms: int, target: str, head_dim: int = 64, causal: Causal | None = None
) -> Figures:
    family = next(f for f in EIGHT_BIT_FAMILIES if f.short_name == rung)
    problem = Problem(
        1, 8, 8, 512, 512, head_dim, "float16", causal, target=target, operands=operands, query_terms=terms
    )
    spec = family.specify(problem)
    assert isinstance(spec, KernelSpec)
    return figures(spec, target, counted=True)


@pytest.mark.parametrize(("rung", "operands", "terms", "ada", "hopper"), CONFIGURATIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_8_bit_tensor_cores_and_no_local_memory(
    target: str, rung: str, operands: Operands, terms: int, ada: set[str], hopper: set[str]
) -> None:
    kernel = compiled(rung, operands, terms, target)
    counts = kernel.instructions
    assert counts["STL"] == counts["LDL"] == 0
    assert kernel.resources.spill_store_bytes == kernel.resources.stack_bytes == 0
    assert kernel.tensor_instructions == (hopper if target == "sm_90a" else ada)
    assert (counts["LDGSTS"] > 0) == (rung not in ("ladder/08", "ladder/09", "ladder/10"))
    assert (counts["LDSM"] > 0) == (rung != "ladder/08")


@pytest.mark.parametrize(("rung", "operands", "terms", "ada", "hopper"), CONFIGURATIONS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("causal", [None, "lower_right"])
def test_no_local_memory_at_the_largest_head_dim(
    causal: Causal | None, target: str, rung: str, operands: Operands, terms: int, ada: set[str], hopper: set[str]
) -> None:
    kernel = compiled(rung, operands, terms, target, max(HEAD_DIMS), causal)
    assert kernel.resources.spill_store_bytes == kernel.resources.stack_bytes == 0


@pytest.mark.parametrize(("rung", "operands", "terms", "ada", "hopper"), CONFIGURATIONS)
def test_an_sm_of_ada_holds_two_ctas_at_the_mission_shape(
    rung: str, operands: Operands, terms: int, ada: set[str], hopper: set[str]
) -> None:
    kernel = compiled(rung, operands, terms, "sm_89")
    assert kernel.held.ctas >= 2


@pytest.mark.parametrize("target", [*TARGETS, "sm_120"])
@pytest.mark.parametrize("operands", SCHEMES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_persistent_launch_has_no_more_ctas_than_the_chip_holds(
    head_dim: int, operands: Operands, target: str
) -> None:
    kernel = compiled("ladder/12", operands, 1, target, head_dim)
    ctas = int(dict(kernel.spec.template_args)["CTAS"])
    assert kernel.held.ctas >= ctas
    assert kernel.spec.max_ctas == ctas * chip_of(target).sms


@pytest.mark.parametrize("operands", SCHEMES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_quantizer_does_not_spill(operands: Operands, head_dim: int) -> None:
    kernel = figures(fused(SCHEMES[operands], "float16", head_dim, clusters=False), "sm_89")
    assert kernel.resources.spill_store_bytes == kernel.resources.stack_bytes == 0
