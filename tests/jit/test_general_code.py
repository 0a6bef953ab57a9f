"""What the general kernel compiles to: it must run for every call, and keep its registers with masks of numbers."""

from __future__ import annotations

import pytest
from compiled import figures

from microsdpa.kernels.problem import MaskKind, Problem
from microsdpa.kernels.select import select

KINDS = [
    MaskKind("float32", left=True, right=True),
    MaskKind("float16", right=True, alibi=True, sinks="float32"),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_masks_of_numbers_do_not_spill(head_dim: int, kind: MaskKind) -> None:
    problem = Problem(1, 2, 2, 60, 100, head_dim, "float16", mask=kind, target="sm_90a")
    spec = select(problem, "ampere/general").spec
    assert not figures(spec, problem.target).resources.uses_local_memory


RANGES = MaskKind("int32", left=True, right=True)


@pytest.mark.parametrize("kind", [MaskKind("bool"), RANGES, MaskKind("uint8")], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_two_tiles_of_queries_a_warp_do_not_spill(head_dim: int, kind: MaskKind, target: str) -> None:
    problem = Problem(4, 32, 32, 1024, 1024, head_dim, "float16", mask=kind, target=target)
    spec = select(problem, "ampere/general").spec
    assert ("ROW_TILES", "2") in spec.template_args
    # A table of blocks may spill a few addresses: what it hides is worth more.
    allowed = 16 if kind.tensor == "uint8" and head_dim > 64 else 0
    assert figures(spec, problem.target).resources.spill_store_bytes <= allowed


@pytest.mark.parametrize("kind", [MaskKind("bool"), RANGES, *KINDS], ids=str)
@pytest.mark.parametrize(("head_dim", "target"), [(64, "sm_80"), (64, "sm_89"), (128, "sm_90a")])
def test_masks_in_decoding_do_not_spill(head_dim: int, target: str, kind: MaskKind) -> None:
    problem = Problem(4, 32, 8, 1, 4096, head_dim, "float16", mask=kind, target=target)
    spec = select(problem).spec
    assert spec.name == "ampere/mma"
    assert not figures(spec, problem.target).resources.uses_local_memory


def test_it_is_never_refused_for_a_spill() -> None:
    """NVRTC of another version, or a target that this was not compiled for, may want a register more."""
    assert select(Problem(1, 2, 2, 60, 100, 256, "float16", mask=KINDS[0], target="sm_89")).spec.local_memory
