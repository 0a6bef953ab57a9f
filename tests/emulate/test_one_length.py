"""hopper/varlen in calls whose sequences have one length: its tiles have the rows of all query heads of a key head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import check_in_every_order

import microsdpa
from microsdpa import reference
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make, masks_of
from microsdpa.kernels import KernelSpec
from microsdpa.kernels.hopper.varlen import spec as rules
from microsdpa.kernels.hopper.varlen.spec import FEW, _for_one_length, for_one_length, shares_of, specification
from microsdpa.kernels.problem import Causal, Problem

CASES = [
    (Case(2, 6, 20, 100, 64, heads_kv=3, causal="lower_right"), "clusters"),  # of 40 rows, whose keys 8 CTAs share
    (Case(1, 8, 5, 40, 72, heads_kv=1, dtype="bfloat16"), "clusters"),
    (Case(2, 6, 33, 200, 64, heads_kv=2, layout="bshd", causal="lower_right"), "resident"),
    (Case(1, 10, 50, 700, 64, heads_kv=1, dtype="bfloat16"), "resident"),  # three consumers, which share keys
    (Case(1, 6, 30, 333, 128, heads_kv=1, causal="lower_right", layout="bshd"), "resident"),
    (Case(3, 4, 17, 90, 80, heads_kv=1, kind="outliers"), "resident"),
    (Case(1, 8, 3, 130, 256, heads_kv=2, dtype="bfloat16", causal="lower_right"), "resident"),
    (Case(2, 2, 40, 30, 40, heads_kv=1, causal="lower_right"), "resident"),  # the first queries see no key
    (Case(1, 10, 13, 90, 80, heads_kv=2, scale=-0.3), "resident"),
    (Case(1, 14, 9, 150, 64, heads_kv=2, scale=-0.2, causal="lower_right"), "clusters"),
    (Case(1, 45, 4, 150, 128, heads_kv=1, causal="lower_right"), "resident"),  # cp.async copies queries
]


def test_whole_queries_are_copied_where_they_fill_tiles() -> None:
    """The rows of a tile are those of whole queries, of all heads of a key head; else cp.async copies them."""
    for sizes, queries, rows in (
        ((24, 28, 4, 16, 1024, 128), 18, 126),
        ((2, 45, 1, 2, 1024, 128), 2, 90),  # a sequence has one tile of rows either way
        ((2, 45, 1, 3, 1024, 128), 0, 128),
        ((4, 71, 1, 1, 4096, 64), 1, 71),
    ):
        spec = for_one_length(Problem(*sizes, "float16", target="sm_90a"))
        assert isinstance(spec, KernelSpec)
        assert (dict(spec.template_args)["QUERIES"], spec.block_m) == (str(queries), rows)
        assert [box.rows for box in spec.tensor_maps if box.tensor == "query"] == ([queries] if queries else [])


@pytest.mark.parametrize("causal", [None, "lower_right"])
@pytest.mark.parametrize(
    ("sizes", "ctas", "shares"),
    [
        ((2, 4, 2, 30, 2500), 6, (4, 1, 40, 1, 27)),  # tiles of keys are numbered: four of 40 for six CTAs
        ((1, 4, 2, 60, 1900), 7, (4, 2, 30, 3, 0)),  # twelve parts, of which five CTAs have two
        ((1, 4, 1, 60, 1300), 19, (4, 4, 21, 4, 0)),
    ],
)
def test_the_host_shares_keys_out(
    sizes: tuple[int, int, int, int, int],
    ctas: int,
    shares: tuple[int, ...],
    causal: Causal | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "L2_BYTES", int(shares[-1] > 0) << 25)
    case = Case(*(sizes[i] for i in (0, 1, 3, 4)), 64, heads_kv=sizes[2], causal=causal)
    problem = case.problem("sm_90a")
    spec = replace(_for_one_length(specification(problem, FEW)), max_ctas=ctas)
    assert tuple(shares_of(spec, problem)) == shares
    check_in_every_order(spec, problem, case, conflicts=True)


def _specification(case: Case) -> KernelSpec:
    masks = masks_of(case)
    found = for_one_length(replace(case.problem("sm_90a"), mask=masks.kind if case.masks else None))
    assert isinstance(found, KernelSpec)
    return found


@pytest.mark.parametrize(("case", "order"), CASES, ids=str)
def test_it_is_right(case: Case, order: str) -> None:
    spec = _specification(case)
    assert spec.grid_order == order
    check_in_every_order(spec, case.problem("sm_90a"), case, conflicts=True)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 6, 24, 300, 64, heads_kv=2, causal="lower_right", masks=("window", "alibi")),
        Case(1, 6, 18, 150, 128, heads_kv=2, dtype="bfloat16", masks=("softcap", "sinks")),
    ],
    ids=str,
)
def test_masks_are_its_own(case: Case) -> None:
    spec = _specification(case)
    problem = replace(case.problem("sm_90a"), mask=masks_of(case).kind)
    check_in_every_order(spec, problem, case, conflicts=True)


NAMED = "emulate:hopper/varlen"


def _admitted(got: torch.Tensor, inputs: tuple[torch.Tensor, ...], **options: Any) -> bool:
    (expected, _), (plain, _) = (of(*inputs, **options) for of in (reference.oracle, reference.eager))
    return compare.tolerance(plain, expected, got.dtype).admits(compare.measure(got, expected))


def test_a_call_may_name_it() -> None:
    inputs = make(Case(2, 6, 20, 150, 64, heads_kv=3))
    options = {"causal": "lower_right", "enable_gqa": True, "impl": NAMED}
    out, lse = microsdpa.sdpa(*inputs, **options, return_lse=True)  # type: ignore[arg-type]
    assert _admitted(out, inputs, causal="lower_right")
    assert torch.equal(microsdpa.plan(*inputs, **options)(*inputs), out)  # type: ignore[arg-type]
    assert lse.shape == out.shape[:3]
    windowed = microsdpa.sdpa(*inputs, **options, window=(40, 0))  # type: ignore[arg-type]
    assert isinstance(windowed, torch.Tensor)
    assert _admitted(windowed, inputs, causal="lower_right", window=(40, 0))
    assert "share tiles" in str(microsdpa.explain(*inputs, **options))  # type: ignore[arg-type]


def test_norms_and_rotary_embedding_come_ahead_of_it() -> None:
    inputs = make(Case(2, 6, 20, 150, 64, heads_kv=3, seed=1))
    cos, sin = torch.randn(2, 150, 32, generator=torch.Generator().manual_seed(1))
    norm = torch.ones(64, dtype=torch.float16)
    options: dict[str, Any] = {"causal": "lower_right", "rotary": (cos, sin), "q_norm": norm, "k_norm": norm}
    ours, other = (microsdpa.sdpa(*inputs, **options, enable_gqa=True, impl=i) for i in (NAMED, "emulate:ampere/mma"))
    assert isinstance(ours, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    torch.testing.assert_close(ours, other, rtol=0, atol=4e-3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attn_mask": torch.ones(20, 150, dtype=torch.bool)}, "it reads no mask tensor"),
        ({"is_causal": True}, "its queries are the last ones of their keys"),
        ({"window": (10, 10)}, "its queries are the last ones of their keys"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_it_does_not_compute_is_refused(options: dict[str, Any], reason: str) -> None:
    inputs = make(Case(2, 6, 20, 150, 64, heads_kv=3))
    with pytest.raises(microsdpa.UnsupportedProblem, match=reason):
        microsdpa.sdpa(*inputs, **options, enable_gqa=True, impl=NAMED)
