from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

import microsdpa
from microsdpa.evidence import verify
from microsdpa.evidence.cases import needs_gpu, verify_cases
from microsdpa.evidence.inputs import Case, Masking, make


def test_tensors_are_independent_and_reproducible() -> None:
    case = Case(1, 2, 64, 64, 32, seed=3)
    q, k, v = make(case)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), make(case), strict=True))
    assert not any(torch.equal(a, b) for a, b in ((q, k), (k, v), (q, v), (q, make(case, salt=1)[0])))
    correlation = torch.corrcoef(torch.stack([t.flatten().float() for t in (q, k, v)]))
    assert float((correlation - torch.eye(3)).abs().max()) < 0.1


def test_kinds_have_their_statistics() -> None:
    shape = (4, 8, 256, 256, 64)
    normal, mean, outliers = (make(Case(*shape, kind=kind))[0].float() for kind in ("normal", "mean", "outliers"))
    assert abs(float(normal.mean())) < 0.01
    assert abs(float(mean.mean()) - 0.5) < 0.01
    assert float(normal.abs().max()) < 7
    assert float(outliers.abs().max()) > 20
    assert 1e-4 < float((outliers.abs() > 8).float().mean()) < 1e-3


def test_layouts_hold_the_same_values() -> None:
    plain = make(Case(2, 3, 5, 7, 32))
    for layout, aligned in (("bshd", True), ("unaligned", False)):
        for a, b in zip(plain, make(Case(2, 3, 5, 7, 32, layout=layout)), strict=True):  # type: ignore[arg-type]
            assert torch.equal(a, b)
            assert b.stride(3) == 1
            assert not b.is_contiguous()
            assert (b.data_ptr() % 16 == 0) == aligned


def test_the_cases_cover_what_verify_promises() -> None:
    cases = verify_cases()
    assert len(set(map(str, cases))) == len(cases)
    notes = {(c.batch, c.heads, c.seqlen_q, c.head_dim, c.seed) for c in cases}
    for shape in ((1, 2, 64, 64), (1, 4, 128, 64), (1, 8, 512, 64), (2, 2, 64, 64)):
        assert {(*shape, seed) for seed in (0, 1, 2)} <= notes
    assert {1, 7, 63, 65, 127, 513, 1000} <= {c.seqlen_q for c in cases if c.seqlen_q == c.seqlen_k}
    assert {c.seqlen_q > c.seqlen_k for c in cases if c.seqlen_q != c.seqlen_k} == {True, False}
    assert {c.head_dim for c in cases} == {32, 40, 64, 128, 256}
    assert {name for c in cases for name in c.masks} == set(get_args(Masking))
    assert {c.causal for c in cases} == {None, "upper_left", "lower_right"}
    assert {(c.heads, c.kv_heads) for c in cases} >= {(8, 2), (8, 1)}
    assert {c.layout for c in cases} == {"bhsd", "bshd", "unaligned"}
    assert {c.kind for c in cases} == {"normal", "mean", "outliers"}
    assert {c.dtype for c in cases} == {"float16", "bfloat16"}
    assert any(c.batch * c.heads > 65_535 for c in cases)
    assert any(c.scale == 100.0 for c in cases)
    assert any(c.causal == "lower_right" and c.seqlen_q > c.seqlen_k for c in cases)


def test_few_cases_need_a_gpu_and_say_why() -> None:
    reasons = {str(case): needs_gpu(case) for case in verify_cases()}
    assert sum(map(bool, reasons.values())) == 2
    assert all("65,535 heads" in why for why in reasons.values() if why)


def test_verify_passes_here() -> None:
    assert verify.check(Case(1, 2, 33, 17, 64, causal="lower_right"), "cpu", "auto").passed


WRONG = {
    "one wrong element": lambda out, lse: (out.index_put((torch.tensor([0]),) * 4, torch.tensor(9.0).half()), lse),
    "one NaN": lambda out, lse: (out.index_put((torch.tensor([0]),) * 4, torch.tensor(torch.nan).half()), lse),
    "a slightly wrong scale": lambda out, lse: (out * 1.01, lse),
    "all zeros": lambda out, lse: (torch.zeros_like(out), lse),
    "wrong LSE": lambda out, lse: (out, lse + 0.05),
    "LSE in base 2": lambda out, lse: (out, lse * 1.4427),
}


@pytest.mark.parametrize("damage", WRONG.values(), ids=WRONG.keys())
def test_verify_fails_on_a_wrong_answer(monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    right = microsdpa.sdpa

    def wrong(*tensors: torch.Tensor, out: torch.Tensor | None = None, **options: Any) -> Any:
        result, lse = damage(*right(*tensors, **options))
        return (result if out is None else out.copy_(result)), lse

    monkeypatch.setattr(microsdpa, "sdpa", wrong)
    outcome = verify.check(Case(1, 2, 64, 64, 64), "cpu", "auto")
    assert "differs from the oracle" in outcome.failure


@pytest.mark.parametrize("fault", ["unwritten", "unrepeatable"])
def test_verify_fails_on_an_output_that_is_not_written_or_not_repeated(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    right = microsdpa.sdpa

    def wrong(*tensors: torch.Tensor, out: torch.Tensor | None = None, **options: Any) -> Any:
        result, lse = right(*tensors, **options)  # type: ignore[misc]
        if out is not None and fault == "unrepeatable":
            out.copy_(result)
            out[0, 0, 0, 0] += 0.001
        return (result if out is None else out), lse

    monkeypatch.setattr(microsdpa, "sdpa", wrong)
    assert "gave other bits" in verify.check(Case(1, 2, 64, 64, 64), "cpu", "auto").failure
