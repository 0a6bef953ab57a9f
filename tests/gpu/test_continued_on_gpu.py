"""sdpa(continue_from=) on a GPU: plans, graphs, and two launches in a stream, of which the second reads the first's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.errors import InvalidArgument
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make

pytestmark = pytest.mark.gpu

CASES = [
    Case(1, 8, 512, 512, 64),
    Case(2, 16, 2048, 3000, 128, heads_kv=4),
    Case(1, 16, 1024, 2048, 256),
    Case(1, 3, 70, 190, 72),
]


def parts_of(tensors: tuple[torch.Tensor, ...], at: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the keys ahead of `at`, and then of the others too."""
    query, key, value = tensors
    previous = microsdpa.sdpa(query, key[:, :, :at], value[:, :, :at], enable_gqa=True, return_lse=True)
    rest = key[:, :, at:], value[:, :, at:]
    options |= {"enable_gqa": True, "return_lse": True}
    found = microsdpa.sdpa(query, *rest, continue_from=previous, **options)  # type: ignore[arg-type]
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_launches_are_one_softmax(case: Case) -> None:
    tensors = make(case, "cuda")
    expected, expected_lse = reference.oracle(*tensors)
    allowed = 6 * compare.UNIT_ROUNDOFF[tensors[0].dtype] * float(tensors[2].abs().max())
    for _ in range(3):  # the second call of a form has a plan
        out, lse = parts_of(tensors, case.seqlen_k // 3 // 8 * 8)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=allowed)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)


def test_a_graph_goes_on_from_its_own_output() -> None:
    tensors = make(Case(1, 8, 512, 512, 64), "cuda")
    parts_of(tensors, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = parts_of(tensors, 128)
    for _ in range(3):
        graph.replay()
    expected, expected_lse = reference.oracle(*tensors)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)


def test_a_call_with_a_plan_looks_at_the_lse() -> None:
    query, key, value = make(Case(1, 8, 512, 512, 64), "cuda")
    out, lse = torch.empty_like(query), torch.full((1, 8, 512), -torch.inf, device="cuda")
    for wrong in (None, lse.half(), lse[..., :8], lse.mT.contiguous().mT, query.view(torch.float32).view(-1)[:4096]):
        microsdpa.sdpa(query, key, value, continue_from=(out, lse))
        given: Any = wrong.view(1, 8, 512) if wrong is not None and wrong.dim() == 1 else wrong
        with pytest.raises(InvalidArgument, match="continue_from"):
            microsdpa.sdpa(query, key, value, continue_from=(out, given))
