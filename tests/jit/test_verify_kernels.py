"""Every kernel that `microsdpa verify` runs on a Hopper compiles: one that spills without a reason is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from compiled import VERIFIED, VERIFIED_TARGET, check_that_they_fit

from microsdpa.evidence import verify_eight_bit, verify_quantizers
from microsdpa.evidence.cases import verify_cases
from microsdpa.evidence.verify import problem_of
from microsdpa.kernels import KernelSpec, catalogue
from microsdpa.kernels.hopper.latency import spec as hopper_latency
from microsdpa.kernels.problem import Causal, DType, Problem
from microsdpa.kernels.quantize.spec import SCHEMES
from microsdpa.kernels.select import select


def of_16_bits() -> set[KernelSpec]:
    """Those of the cases in 16 bits."""
    chosen = [select(problem_of(case, VERIFIED_TARGET), "auto").spec for case in verify_cases()]
    return {stage for spec in chosen for stage in spec.stages}


def of_8_bits() -> set[KernelSpec]:
    """Those of the cases in 8 bits."""
    every = [(case, precision) for case in verify_eight_bit.cases() for precision in SCHEMES]
    computed = [one for one in every if verify_eight_bit.computed_by("auto", *one, VERIFIED_TARGET)]
    problems = [verify_eight_bit.problem_of(*one, VERIFIED_TARGET) for one in computed]
    return {*verify_quantizers.kernels(VERIFIED_TARGET), *(select(one, "auto").spec for one in problems)}


@pytest.mark.parametrize("kernels", [of_16_bits, of_8_bits])
def test_every_verify_case_has_its_kernels(kernels: Callable[[], set[KernelSpec]]) -> None:
    found = kernels()
    assert len(found) > 50
    check_that_they_fit(found, VERIFIED_TARGET)


def test_families_that_the_catalogue_leaves_to_these_have_more_kernels_here() -> None:
    found = of_16_bits() | of_8_bits()
    counts, asked = (Counter(spec.name for spec in specs) for specs in (found, catalogue(VERIFIED_TARGET)))
    assert [family for family in VERIFIED if counts[family] < max(3, asked[family] / 3)] == []
    assert {dict(spec.template_args)["T"] for spec in found if spec.name == "ampere/mma"} == {"__half", "__nv_bfloat16"}


@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal", "cluster"),
    [  # any two of the options together
        ("float16", 64, None, 1),
        ("float16", 64, "upper_left", 2),
        ("bfloat16", 128, "upper_left", 1),
        ("bfloat16", 128, None, 2),
    ],
)
def test_latency_compiles_for_any_number_of_keys(
    dtype: DType, head_dim: int, causal: Causal | None, cluster: int
) -> None:
    sizes = [(1, 4, 4, 512, 128 * keys - 7, head_dim) for keys in range(1, 17)]
    problems = [Problem(*one, dtype, causal, target=VERIFIED_TARGET) for one in sizes]
    kernels = {hopper_latency.specification(one, hopper_latency.configuration(one, cluster)) for one in problems}
    assert len(kernels) > 2
    check_that_they_fit(kernels, VERIFIED_TARGET)
