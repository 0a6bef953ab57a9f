"""What the ladder promises of its machine code, on every target and without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled import Figures, figures

from microsdpa.kernels import EIGHT_BIT_FAMILIES, FAMILIES, KernelSpec
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_120")
RUNGS = [family.short_name for family in FAMILIES if family.name.startswith("ladder/")]
# CTAs that one SM holds of each rung at the headline shape, at least: on sm_80, sm_89, sm_90a and sm_120.
CTAS = {
    "ladder/01": (5, 5, 5, 5),
    "ladder/02": (3, 1, 3, 1),
    "ladder/03": (2, 1, 3, 1),
    "ladder/04": (3, 2, 3, 2),
    "ladder/05": (2, 2, 2, 2),
    "ladder/06": (2, 2, 2, 2),
    "ladder/07": (1, 2, 1, 2),
}


def compiled(rung: str, target: str, head_dim: int = 64) -> Figures:
    problem = Problem(1, 8, 8, 512, 512, head_dim, "float16", target=target)
    return figures(select(problem, rung).spec, target, counted=True)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("target", TARGETS)
def test_tensor_cores_from_rung_02_on_and_no_local_memory(rung: str, target: str) -> None:
    kernel = compiled(rung, target)
    counts = kernel.instructions
    assert counts["STL"] == counts["LDL"] == 0
    assert kernel.tensor_instructions == (set() if rung == "ladder/01" else {"HMMA"})
    if rung >= "ladder/03":
        assert counts["LDGSTS"] > 0
    if rung >= "ladder/04":
        assert counts["LDSM"] > 0


@pytest.mark.parametrize("target", TARGETS)
def test_an_sm_holds_what_the_design_counts_on(target: str) -> None:
    for rung in RUNGS:
        assert compiled(rung, target).held.ctas >= CTAS[rung][TARGETS.index(target)], rung


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_a_persistent_launch_has_no_more_ctas_than_the_chip_holds(target: str, head_dim: int) -> None:
    kernel = compiled("ladder/06", target, head_dim)
    assert kernel.held.ctas >= int(dict(kernel.spec.template_args)["CTAS"])


def test_the_page_about_the_l4_has_the_compilers_figures() -> None:
    """58 SMs of sm_89; registers may differ by a few between versions of the compiler, what fits an SM may not."""
    page = (Path(__file__).parents[2] / "docs/roofline-l4.md").read_text()
    fp8 = Problem(1, 8, 8, 512, 512, 64, "float16", None, target="sm_89", operands="fp8", query_terms=1)
    eight_bit = [family.specify(fp8) for family in EIGHT_BIT_FAMILIES if family.name.startswith(("ladder/", "ada/"))]
    kernels = [figures(spec, "sm_89") for spec in eight_bit if isinstance(spec, KernelSpec)]
    assert len(kernels) == len(eight_bit)
    for kernel in [*(compiled(rung, "sm_89") for rung in RUNGS), *kernels]:
        spec, found = kernel.spec, kernel.held
        line = next(line for line in page.splitlines() if line.startswith(f"| {spec.name.removeprefix('ladder/')} |"))
        threads, registers, shared, ctas, share, grid, busiest, balance = (c.strip() for c in line.split("|")[2:-1])
        tiles = 8 * 512 // spec.block_m
        rows = -(-tiles // 58) * spec.block_m
        assert (int(threads), int(busiest)) == (spec.threads, rows)
        assert abs(int(registers) - kernel.resources.registers) <= 16
        assert float(shared) == round((kernel.resources.shared_bytes + spec.shared_bytes) / 1024, 1)
        assert (ctas, share) == (f"{found.ctas} ({found.limit})", f"{found.fraction:.0%}")
        assert (grid, balance) == (f"{tiles} x {spec.block_m}", f"{4096 / 58 / rows:.0%}")
