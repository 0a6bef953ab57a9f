"""Every kernel that `microsdpa verify` runs on a Hopper compiles: one that spills without a reason is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from microsdpa.evidence import verify_eight_bit, verify_quantizers
from microsdpa.evidence.cases import verify_cases
from microsdpa.evidence.verify import problem_of
from microsdpa.jit import compile_kernel
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.hopper.latency import spec as hopper_latency
from microsdpa.kernels.problem import Causal, DType, Problem
from microsdpa.kernels.quantize.spec import SCHEMES
from microsdpa.kernels.select import select

TARGET = "sm_90a"


def failures(kernels: set[KernelSpec]) -> list[str]:
    """What compiling them says, of those that it refuses."""

    def compiled(spec: KernelSpec) -> str:
        try:
            compile_kernel(spec, TARGET)
        except Exception as error:
            return f"{spec.name} {spec.template_args}: {error}"
        return ""

    with ThreadPoolExecutor(2) as executor:
        return [failure for failure in executor.map(compiled, kernels) if failure]


def test_every_verify_case_has_its_kernels() -> None:
    chosen = [select(problem_of(case, TARGET), "auto").spec for case in verify_cases()]
    kernels = {stage for spec in chosen for stage in spec.stages}
    assert len(kernels) > 50
    assert failures(kernels) == []


def test_every_verify_case_in_eight_bits_has_its_kernels() -> None:
    kernels = set(verify_quantizers.kernels(TARGET))
    every = [(case, precision) for case in verify_eight_bit.cases() for precision in SCHEMES]
    computed = [one for one in every if verify_eight_bit.computed_by("auto", *one, TARGET)]
    assert len(computed) > 50
    kernels |= {select(verify_eight_bit.problem_of(*one, TARGET), "auto").spec for one in computed}
    assert failures(kernels) == []


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
    problems = [Problem(1, 4, 4, 512, 128 * keys - 7, head_dim, dtype, causal, target=TARGET) for keys in range(1, 17)]
    kernels = {hopper_latency.specification(one, hopper_latency.configuration(one, cluster)) for one in problems}
    assert len(kernels) > 2
    assert failures(kernels) == []
