"""Masks on the CPU: the oracle against its definition, torch's own attention against the oracle, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.call.masks import Masks
from microsdpa.evidence import compare
from microsdpa.evidence.cases import MASKINGS
from microsdpa.evidence.inputs import Case, make, make_masks
from microsdpa.kernels.problem import MaskKind, Problem
from microsdpa.kernels.select import select

CASES = [Case(2, 4, 20, 33, 16, heads_kv=2, causal=causal, masks=masks) for causal, masks in MASKINGS]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_oracle_is_its_definition(case: Case) -> None:
    """One query and key at a time, in Python's own floats."""
    tensors, masks = make(case), make_masks(case)
    out, lse = reference.oracle(*tensors, causal=case.causal, **masks)
    query, key, value = (tensor.double() for tensor in tensors)
    b, h = 1, 3
    position = case.seqlen_k - case.seqlen_q if case.causal == "lower_right" else 0
    left, right = masks.get("window", (-1, -1))
    for i in (0, 7, 11, 19):
        scores = []
        for j in range(case.seqlen_k):
            x = float(query[b, h, i] @ key[b, h // 2, j]) / 4
            if "softcap" in masks:
                x = masks["softcap"] * math.tanh(x / masks["softcap"])
            if "alibi_slopes" in masks:
                x -= float(masks["alibi_slopes"][b, h]) * abs(i + position - j)
            if "attn_mask" in masks:
                element = masks["attn_mask"].expand(2, 4, case.seqlen_q, case.seqlen_k)[b, h, i, j]
                x = x if element is True or (bool(element) and element.dtype == torch.bool) else x + float(element)
                x = -math.inf if element.dtype == torch.bool and not element else x
            after, before = j - i - position, i + position - j
            if (case.causal and after > 0) or (left != -1 and before > left) or (right != -1 and after > right):
                x = -math.inf
            scores.append(x)
        weights = [math.exp(x) for x in scores]
        total = sum(weights) + (math.exp(float(masks["sinks"][h])) if "sinks" in masks else 0.0)
        assert float(lse[b, h, i]) == pytest.approx(math.log(total) if total else -math.inf, rel=1e-12)
        expected = sum(w * value[b, h // 2, j] for j, w in enumerate(weights)) / (total or 1.0)
        torch.testing.assert_close(out[b, h, i], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_tensors_get_the_masks(case: Case) -> None:
    tensors, masks = make(case), make_masks(case)
    common = {"causal": case.causal, **masks}
    out, lse = microsdpa.sdpa(*tensors, enable_gqa=True, return_lse=True, **common)
    assert torch.equal(out, microsdpa.sdpa(*tensors, enable_gqa=True, **common))
    expected, eager = reference.oracle(*tensors, **common), reference.eager(*tensors, **common)
    for got, exact, plain in zip((out, lse), expected, eager, strict=True):
        assert compare.tolerance(plain, exact, got.dtype).admits(compare.measure(got, exact))


def test_every_mask_has_a_kernel_and_the_others_say_why_not() -> None:
    kinds = [
        MaskKind("bool"),
        MaskKind("bfloat16", left=True),
        MaskKind(left=True, right=True, softcap=True, alibi=True, sinks="float32"),
    ]
    for kind in kinds:
        for head_dim, alignment in ((64, 16), (40, 2), (256, 16)):
            problem = Problem(1, 8, 8, 512, 512, head_dim, "bfloat16", mask=kind, alignment=alignment, target="sm_89")
            selection = select(problem)
            assert selection.spec.name == "ampere/general"
            assert any(f"the causal mask only, not {kind}" in rejection.reason for _, rejection in selection.rejections)


def test_masks_of_large_problems_are_for_wgmma() -> None:
    problem = Problem(4, 16, 16, 1024, 1024, 64, "float16", target="sm_90a")
    for kind in (MaskKind("bool"), MaskKind("float16", bulk=True), MaskKind(left=True, softcap=True, sinks="float32")):
        assert select(replace(problem, mask=kind)).spec.name == "hopper/throughput"
    unaligned = select(replace(problem, mask=MaskKind("float16", unaligned=True)))
    assert unaligned.spec.name == "hopper/throughput"
    assert [box.tensor for box in unaligned.spec.tensor_maps] == ["query", "key", "value", "out"]
    gaps = select(replace(problem, mask=MaskKind("float16")))
    assert gaps.spec.name == "ampere/general"
    assert "an attn_mask with gaps between keys" in dict(gaps.reasons)["hopper/throughput"]
    wide = select(replace(problem, mask=MaskKind("float16", bulk=True), head_dim=256))
    assert "leaves no room for head_dim 256" in dict(wide.reasons)["hopper/throughput"]


def test_explain_says_what_would_be_faster() -> None:
    query, key, value = make(Case(1, 2, 17, 20, 64))
    found = microsdpa.explain(query, key, value, softcap=2.0, impl="emulate")
    assert found.runs == "emulate:ampere/general"
    assert "faster     ampere/mma, for a call without softcap" in str(found)
    assert "rejected   ampere/mma: it knows the causal mask only, not softcap" in str(found)


def test_a_window_without_ends_is_none() -> None:
    query, key, value = make(Case(1, 2, 12, 20, 64))
    assert Masks(window=(-1, -1)).kind is None
    assert torch.equal(microsdpa.sdpa(query, key, value, window=(-1, -1)), microsdpa.sdpa(query, key, value))


@pytest.mark.parametrize("seqlens", [(2**30, 2**30), (1, 2**30), (2**30, 1)])
@pytest.mark.parametrize("window", [(2**40, 2**40), (0, 0), (-1, 2**31)])
@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
def test_bounds_stay_in_32_bits(seqlens: tuple[int, int], window: tuple[int, int], causal: Any) -> None:
    seqlen_q, seqlen_k = seqlens
    for bound in Masks(window=window).bounds(causal, seqlen_q, seqlen_k):
        assert bound >= -(2**31)
        assert bound + seqlen_q - 1 < 2**31


def t(*shape: int, dtype: torch.dtype = torch.float16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("mask type", {"attn_mask": [[True]]}, "attn_mask", "expected a torch.Tensor or None, got list"),
    ("mask shape", {"attn_mask": t(2, 4, 8, 7)}, "attn_mask", r"broadcasts to \[B, H, S_q, S_k\] = \[2, 4, 8, 8\]"),
    ("mask rank", {"attn_mask": t(1, 2, 4, 8, 8)}, "attn_mask", r"got shape \[1, 2, 4, 8, 8\]"),
    (
        "mask dtype",
        {"attn_mask": t(8, 8, dtype=torch.int64)},
        "attn_mask",
        "torch.bool or torch.float16 or torch.float32",
    ),
    ("other half", {"attn_mask": t(8, 8, dtype=torch.bfloat16)}, "attn_mask", "got torch.bfloat16"),
    ("mask device", {"attn_mask": t(8, 8, device="meta")}, "attn_mask", "expected a tensor on cpu"),
    ("sparse mask", {"attn_mask": t(8, 8).to_sparse()}, "attn_mask", "expected a dense tensor"),
    ("mask and causal", {"attn_mask": t(8, 8), "is_causal": True}, "attn_mask", "causal='upper_left'"),
    ("window", {"window": (-2, 0)}, "window", r"integers of at least -1, got \(-2, 0\)"),
    ("window length", {"window": (1, 2, 3)}, "window", r"expected None or \(left, right\)"),
    ("window type", {"window": 5}, "window", "got 5"),
    ("window floats", {"window": (1.0, 2)}, "window", r"got \(1.0, 2\)"),
    ("window bools", {"window": (True, 2)}, "window", r"got \(True, 2\)"),
    ("softcap", {"softcap": 0.0}, "softcap", "a finite number over 0, got 0.0"),
    ("negative softcap", {"softcap": -1}, "softcap", "got -1"),
    ("softcap NaN", {"softcap": math.nan}, "softcap", "got nan"),
    ("large softcap", {"softcap": 1e300}, "softcap", r"from 2\*\*-126 to 2\*\*127, got 1e\+300"),
    ("small softcap", {"softcap": 1e-300}, "softcap", r"from 2\*\*-126 to 2\*\*127, got 1e-300"),
    ("long softcap", {"softcap": 10**400}, "softcap", r"from 2\*\*-126 to 2\*\*127"),
    ("softcap type", {"softcap": "2"}, "softcap", "got '2'"),
    ("slopes", {"alibi_slopes": t(3, dtype=torch.float32)}, "alibi_slopes", r"\[H\] = \[4\] or \[B, H\] = \[2, 4\]"),
    ("slopes dtype", {"alibi_slopes": t(4)}, "alibi_slopes", "expected torch.float32"),
    ("sinks", {"sinks": t(2, 4)}, "sinks", r"expected shape \[H\] = \[4\]"),
    ("sinks dtype", {"sinks": t(4, dtype=torch.float64)}, "sinks", "got torch.float64"),
]


@pytest.mark.parametrize(("override", "argument", "message"), [c[1:] for c in BAD], ids=[c[0] for c in BAD])
@pytest.mark.parametrize("call", [microsdpa.sdpa, microsdpa.explain])
def test_refusal(call: Any, override: dict[str, Any], argument: str, message: str) -> None:
    with pytest.raises(microsdpa.InvalidArgument, match=message) as caught:
        call(t(2, 4, 8, 32), t(2, 4, 8, 32), t(2, 4, 8, 32), **override)
    assert caught.value.argument == argument


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_hint_keeps_the_meaning_of_a_mask_of_numbers(dtype: torch.dtype) -> None:
    """As bool, the zeros of what is added would hide keys and the rest would show them."""
    with pytest.raises(microsdpa.InvalidArgument) as caught:
        microsdpa.sdpa(t(2, 4, 8, 32), t(2, 4, 8, 32), t(2, 4, 8, 32), attn_mask=t(8, 8, dtype=dtype))
    assert caught.value.hint == "convert it, for example with .to(torch.float32)"


def test_the_hint_for_a_mask_of_integers_says_what_each_type_means() -> None:
    with pytest.raises(microsdpa.InvalidArgument) as caught:
        microsdpa.sdpa(t(2, 4, 8, 32), t(2, 4, 8, 32), t(2, 4, 8, 32), attn_mask=t(8, 8, dtype=torch.int64))
    assert caught.value.hint == "call .to(torch.bool) if 0 hides a key, or .to(torch.float32) if numbers are added"


def test_out_may_not_be_the_mask() -> None:
    out = t(2, 4, 8, 8)
    with pytest.raises(microsdpa.InvalidArgument, match="expected memory that no input uses"):
        microsdpa.sdpa(t(2, 4, 8, 8), t(2, 4, 8, 8), t(2, 4, 8, 8), attn_mask=out, out=out)


def test_no_keys_leave_the_sinks() -> None:
    query, keys, sinks = t(1, 2, 3, 32), t(1, 2, 0, 32), torch.tensor([1.0, 2.0])
    out, lse = microsdpa.sdpa(query, keys, keys, sinks=sinks, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, sinks[None, :, None].expand(1, 2, 3))
