from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from microsdpa import reference
from microsdpa.evidence.inputs import Case, make


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """softmax over the visible keys of one head, row by row, with Python's sum."""
    out = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64)
    for i in range(q.shape[0]):
        keys = [j for j in range(k.shape[0]) if visible[i, j]]
        if not keys:
            continue
        scores = [float(q[i].double() @ k[j].double()) / q.shape[1] ** 0.5 for j in keys]
        weights = [torch.tensor(s - max(scores), dtype=torch.float64).exp() for s in scores]
        total = sum(weights)
        for weight, j in zip(weights, keys, strict=True):
            out[i] += weight / total * v[j].double()
    return out


@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (9, 5), (7, 7), (1, 4)])
def test_oracle_equals_attention_by_hand(causal: str | None, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = make(Case(1, 1, seqlen_q, seqlen_k, 8))
    diagonal = {None: seqlen_k, "upper_left": 0, "lower_right": seqlen_k - seqlen_q}[causal]
    visible = torch.tensor([[j <= i + diagonal for j in range(seqlen_k)] for i in range(seqlen_q)])
    out, lse = reference.oracle(q, k, v, causal=causal)
    torch.testing.assert_close(out[0, 0], by_hand(q[0, 0], k[0, 0], v[0, 0], visible), rtol=1e-12, atol=1e-12)
    dead = ~visible.any(dim=1)
    assert torch.equal(lse[0, 0] == -torch.inf, dead)
    assert (out[0, 0][dead] == 0).all()


def test_oracle_agrees_with_torch_in_fp64() -> None:
    q, k, v = (t.double() for t in make(Case(2, 6, 33, 47, 16, heads_kv=2)))
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(reference.oracle(q, k, v, scale=0.3)[0], expected, rtol=1e-12, atol=1e-12)


def test_oracle_is_the_same_when_it_works_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make(Case(3, 5, 20, 30, 32))
    whole = reference.oracle(q, k, v)
    monkeypatch.setattr(reference, "MAX_CHUNK_SCORES", 2 * 20 * 30)
    for one, other in zip(whole, reference.oracle(q, k, v), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_lse_is_the_log_of_the_denominator() -> None:
    q, k, v = make(Case(1, 2, 4, 6, 32))
    scores = q.double() @ k.double().mT / 32**0.5
    torch.testing.assert_close(reference.oracle(q, k, v)[1], scores.exp().sum(-1).log(), rtol=1e-12, atol=1e-12)


def test_eager_rounds_to_the_dtype_and_the_oracle_does_not() -> None:
    q, k, v = make(Case(1, 2, 64, 64, 64, dtype="bfloat16"))
    eager, exact = reference.eager(q, k, v)[0], reference.oracle(q, k, v)[0]
    assert eager.dtype == torch.bfloat16
    assert exact.dtype == torch.float64
    assert 1e-4 < float((eager.double() - exact).abs().max()) < 5e-2
