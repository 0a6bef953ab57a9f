from __future__ import annotations

from typing import Any

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make


@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(20, 33), (33, 20)])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_cpu_tensors_get_the_library_semantics(causal: str | None, seqlen_q: int, seqlen_k: int, heads_kv: int) -> None:
    case = Case(2, 4, seqlen_q, seqlen_k, 32, heads_kv=heads_kv)
    q, k, v = make(case)
    out, lse = microsdpa.sdpa(q, k, v, causal=causal, enable_gqa=heads_kv != 4, return_lse=True)
    expected, expected_lse = reference.oracle(q, k, v, causal=causal)
    allowed = compare.tolerance(reference.eager(q, k, v, causal=causal)[0], expected, q.dtype)
    assert allowed.admits(compare.measure(out, expected))
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-5)


def test_is_causal_is_upper_left() -> None:
    q, k, v = make(Case(1, 2, 12, 20, 32))
    assert torch.equal(microsdpa.sdpa(q, k, v, is_causal=True), microsdpa.sdpa(q, k, v, causal="upper_left"))
    assert not torch.equal(microsdpa.sdpa(q, k, v, is_causal=True), microsdpa.sdpa(q, k, v, causal="lower_right"))


def test_out_is_written_and_returned() -> None:
    q, k, v = make(Case(1, 2, 12, 20, 32))
    out = torch.full_like(q, torch.nan)
    assert microsdpa.sdpa(q, k, v, out=out) is out
    assert torch.equal(out, microsdpa.sdpa(q, k, v))


@pytest.mark.parametrize("shape", [(0, 2, 4, 32), (2, 0, 4, 32), (2, 2, 0, 32)])
def test_nothing_to_compute_gives_an_empty_result(shape: tuple[int, ...]) -> None:
    q = torch.empty(shape, dtype=torch.float16)
    kv = torch.empty((shape[0], shape[1], 4, 32), dtype=torch.float16)
    out, lse = microsdpa.sdpa(q, kv, kv, return_lse=True)
    assert out.shape == shape
    assert lse.shape == shape[:3]


def test_no_keys_give_zeros_and_minus_infinity() -> None:
    q = torch.randn(1, 2, 3, 32).half()
    kv = torch.empty(1, 2, 0, 32).half()
    out, lse = microsdpa.sdpa(q, kv, kv, return_lse=True, out=torch.full_like(q, torch.nan))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_explain_says_where_cpu_tensors_go() -> None:
    q, k, v = make(Case(1, 2, 12, 20, 32))
    found = microsdpa.explain(q, k, v)
    assert found.runs == "torch"
    assert "on the CPU" in str(found)


def test_an_explicit_kernel_is_never_replaced() -> None:
    q, k, v = make(Case(1, 2, 12, 20, 32))
    for call in (microsdpa.sdpa, microsdpa.explain):
        with pytest.raises(microsdpa.UnsupportedProblem, match="runs on CUDA tensors"):
            call(q, k, v, impl="ladder/01_scalar")


@pytest.mark.parametrize("scale", [0.0, -0.2])
@pytest.mark.parametrize("causal", ["upper_left", "lower_right", None])
def test_a_scale_of_zero_or_less(causal: Any, scale: float) -> None:
    """torch's own CPU attention has NaN for some of them."""
    tensors = make(Case(1, 2, 20, 33, 16))
    out = microsdpa.sdpa(*tensors, causal=causal, scale=scale)
    expected, _ = reference.oracle(*tensors, causal=causal, scale=scale)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"causal": "lower_right", "return_lse": True}], ids=str)
def test_a_large_head_is_torchs_on_the_cpu_and_refused_by_the_kernels(options: dict[str, Any]) -> None:
    """As docs/support.md says."""
    query, key, value = (torch.randn(1, 2, 5, 512).half() for _ in range(3))
    found = microsdpa.sdpa(query, key, value, **options)
    named = {name: option for name, option in options.items() if name != "return_lse"}
    expected, _ = reference.oracle(query, key, value, **named)
    plain, _ = reference.eager(query, key, value, **named)
    out = found[0] if isinstance(found, tuple) else found
    assert compare.tolerance(plain, expected, out.dtype).admits(compare.measure(out, expected))
    with pytest.raises(microsdpa.UnsupportedProblem, match="256"):
        microsdpa.sdpa(query, key, value, impl="emulate", **options)
