"""Prepared calls on CPU tensors; tests/runtime has their launches, tests/gpu the real ones."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa.evidence.cases import MASKINGS
from microsdpa.evidence.inputs import Case, make, make_masks
from microsdpa.evidence.peers import Microsdpa

CASE = Case(2, 4, 12, 20, 32)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"causal": "lower_right", "scale": 0.5},
    {"return_lse": True},
    {"impl": "emulate"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_plan_computes_what_sdpa_does(options: dict[str, Any]) -> None:
    plan = microsdpa.plan(*make(CASE), **options)
    tensors = make(Case(2, 4, 12, 20, 32, seed=7))
    expected = microsdpa.sdpa(*tensors, **options)
    found = plan(*tensors)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_grouped_heads_and_a_given_output() -> None:
    q, k, v = make(Case(1, 4, 12, 20, 32, heads_kv=2))
    plan = microsdpa.plan(q, k, v, enable_gqa=True)
    out = torch.empty_like(q)
    assert plan(q, k, v, out=out) is out
    assert torch.equal(out, microsdpa.sdpa(q, k, v, enable_gqa=True))


def test_nothing_to_compute() -> None:
    q, kv = torch.empty(1, 2, 3, 32).half(), torch.empty(1, 2, 0, 32).half()
    assert not microsdpa.plan(q, kv, kv)(q, kv, kv).any()


def test_a_plan_says_what_runs() -> None:
    plan = microsdpa.plan(*make(CASE), impl="emulate")
    assert plan.explanation.runs.startswith("emulate:")


@pytest.mark.parametrize("impl", ["auto", "emulate"])
@pytest.mark.parametrize(("causal", "masks"), MASKINGS)
def test_a_plan_with_masks_computes_what_sdpa_does(impl: str, causal: Any, masks: Any) -> None:
    case = Case(2, 4, 12, 20, 32, causal=causal, masks=masks)
    options = {"causal": causal, "return_lse": True, "impl": impl}
    plan = microsdpa.plan(*make(case), **options, **make_masks(case))
    other = dataclasses.replace(case, seed=5)
    tensors, given = make(other), make_masks(other)
    expected = microsdpa.sdpa(*tensors, **options, **given)
    arrays = {name: mask for name, mask in given.items() if isinstance(mask, torch.Tensor)}
    out = torch.empty_like(tensors[0])
    found = plan(*tensors, out=out, **arrays)
    assert found[0] is out
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert impl == "auto" or plan.explanation.runs == "emulate:ampere/mma"


WRONG_MASKS: list[tuple[str, dict[str, Any], str]] = [
    ("attn_mask", {"attn_mask": None}, "a torch.Tensor, got NoneType"),
    ("attn_mask", {"attn_mask": torch.ones(1, 20).bool()}, r"shape \(12, 20\), as the plan has"),
    ("attn_mask", {"attn_mask": torch.ones(12, 20).half()}, "dtype torch.bool"),
    ("attn_mask", {"attn_mask": torch.ones(20, 12).bool().T}, r"strides \(20, 1\)"),
    ("sinks", {"sinks": torch.zeros(4).half()}, "None, as the plan has"),
]


@pytest.mark.parametrize(("argument", "masks", "words"), WRONG_MASKS)
def test_masks_of_another_layout_are_refused(argument: str, masks: dict[str, Any], words: str) -> None:
    tensors, mask = make(CASE), torch.ones(12, 20).bool()
    plan = microsdpa.plan(*tensors, attn_mask=mask, window=(5, -1))
    with pytest.raises(microsdpa.InvalidArgument, match=words) as caught:
        plan(*tensors, **({"attn_mask": mask} | masks))
    assert caught.value.argument == argument


def test_masks_are_checked_when_the_plan_is_made() -> None:
    tensors, mask = make(CASE), torch.ones(12, 20).half()
    with pytest.raises(microsdpa.InvalidArgument, match="softcap"):
        microsdpa.plan(*tensors, softcap=0.0)
    with pytest.raises(microsdpa.InvalidArgument, match="beside is_causal=True"):
        microsdpa.plan(*tensors, attn_mask=mask, is_causal=True)
    with pytest.raises(microsdpa.UnsupportedProblem, match="attn_mask requires grad"):
        microsdpa.plan(*tensors, attn_mask=mask.requires_grad_())
    with pytest.raises(microsdpa.UnsupportedProblem, match="knows the causal mask only"):
        microsdpa.plan(*tensors, window=(3, 3), precision="fp8", impl="emulate:ada/mma_8bit")
    plan = microsdpa.plan(*tensors, attn_mask=mask.detach())
    with pytest.raises(microsdpa.UnsupportedProblem, match="attn_mask requires grad"):
        plan(*tensors, attn_mask=mask)
    with pytest.raises(microsdpa.InvalidArgument, match="out"):
        plan(*tensors, attn_mask=mask.detach(), out=tensors[0])


def wrong(**changes: Any) -> dict[str, Any]:
    q, k, v = make(CASE)
    return {"query": q, "key": k, "value": v, "out": torch.empty_like(q)} | changes


WRONG = [
    (
        "query",
        wrong(query=torch.zeros(2, 4, 13, 32).half()),
        r"shape \(2, 4, 12, 32\), as the plan has, got",
    ),
    ("key", wrong(key=torch.zeros(2, 4, 20, 32).bfloat16()), "dtype torch.float16"),
    ("value", wrong(value=torch.zeros(2, 20, 4, 32).half().transpose(1, 2)), r"strides \(2560, 640, 32, 1\)"),
    ("value", wrong(value=torch.zeros(2, 4, 20, 32, device="meta").half()), "device cpu"),
    ("key", wrong(key=None), "a torch.Tensor, got NoneType"),
    ("key", wrong(key=torch.zeros(2, 4, 20, 32).half().to_sparse()), "a dense tensor"),
    ("out", wrong(out=torch.zeros(2, 12, 4, 32).half().transpose(1, 2)), r"strides \(1536, 384, 32, 1\)"),
    ("out", wrong(out=[]), "a torch.Tensor, got list"),
]


@pytest.mark.parametrize(("argument", "tensors", "words"), WRONG)
def test_tensors_of_another_layout_are_refused(argument: str, tensors: dict[str, Any], words: str) -> None:
    plan = microsdpa.plan(*make(CASE))
    with pytest.raises(microsdpa.InvalidArgument, match=words) as caught:
        plan(**tensors)
    assert caught.value.argument == argument
    assert "make another plan" in caught.value.hint


def test_a_plan_does_not_admit_what_sdpa_refuses() -> None:
    q, k, v = make(CASE)
    plan = microsdpa.plan(q, k, v)
    with pytest.raises(microsdpa.InvalidArgument, match="memory that no input uses"):
        plan(q, k, v, out=q)
    with pytest.raises(microsdpa.UnsupportedProblem, match="requires grad"):
        plan(q.requires_grad_(), k, v)


def test_arguments_are_checked_when_the_plan_is_made() -> None:
    q, k, v = make(CASE)
    with pytest.raises(microsdpa.InvalidArgument, match="impl"):
        microsdpa.plan(q, k, v, impl="fastest")
    with pytest.raises(microsdpa.InvalidArgument, match="out"):
        microsdpa.plan(q, k, v, out=q)
    with pytest.raises(microsdpa.UnsupportedProblem, match="runs on CUDA tensors"):
        microsdpa.plan(q, k, v, impl="ladder/01_scalar")


def test_a_plan_for_an_output_of_its_own_layout_wants_it() -> None:
    q, k, v = make(CASE)
    out = torch.empty(2, 12, 4, 32).half().transpose(1, 2)
    plan = microsdpa.plan(q, k, v, out=out)
    assert torch.equal(plan(q, k, v, out=out), microsdpa.sdpa(q, k, v))
    with pytest.raises(microsdpa.InvalidArgument, match=r"strides \(1536, 32, 128, 1\), as the plan was made with"):
        plan(q, k, v)


def test_the_stride_of_a_dimension_of_size_one_does_not_matter() -> None:
    q, k, v = make(Case(1, 4, 1, 20, 32))
    plan = microsdpa.plan(q, k, v)
    other = q.as_strided(q.shape, (7, 32, 5, 1))
    assert torch.equal(plan(other, k, v), plan(q, k, v))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("write_out", [False, True])
def test_benchmarks_call_the_library_in_four_ways(write_out: bool, prepared: bool) -> None:
    case = Case(1, 4, 12, 20, 32, heads_kv=2, causal="lower_right", scale=0.3)
    tensors = make(case)
    out = torch.empty_like(tensors[0])
    ours = Microsdpa("auto", write_out, prepared)
    result = ours.decode(ours.bind(case, tensors, out)())
    assert torch.equal(result, microsdpa.sdpa(*tensors, causal="lower_right", scale=0.3, enable_gqa=True))
    assert (result is out) is write_out
    assert ours.variant == {(0, 0): "", (1, 0): "out=", (0, 1): "plan", (1, 1): "plan out="}[write_out, prepared]


def test_a_plan_is_a_plan() -> None:
    tensor = torch.zeros(1, 2, 4, 32).half()
    assert isinstance(microsdpa.plan(tensor, tensor, tensor), microsdpa.Plan)
    mask = torch.ones(4, 4).bool()
    assert isinstance(microsdpa.plan(tensor, tensor, tensor, attn_mask=mask), microsdpa.Plan)
    assert not isinstance(microsdpa.sdpa, microsdpa.Plan)


@pytest.mark.parametrize("options", [{"impl": "emulate"}, {"impl": "emulate", "precision": "fp8"}], ids=str)
def test_explain_takes_the_options_of_sdpa(options: dict[str, Any]) -> None:
    tensor = torch.zeros(1, 2, 4, 32).half()
    expected = microsdpa.explain(tensor, tensor, tensor, **options)
    found = microsdpa.explain(tensor, tensor, tensor, return_lse=True, out=torch.empty_like(tensor), **options)
    assert found == expected
    with pytest.raises(microsdpa.InvalidArgument, match="out: expected memory that no input uses"):
        microsdpa.explain(tensor, tensor, tensor, out=tensor, **options)


def test_sdpa_and_its_overloads_explain_and_plan_have_one_signature() -> None:
    """Names, types and defaults; each has them in full, so that editors and help() show them."""
    functions = [*typing.get_overloads(microsdpa.sdpa)] if hasattr(typing, "get_overloads") else []
    functions += [microsdpa.sdpa, microsdpa.explain, microsdpa.plan]
    of_sdpa = dict(inspect.signature(microsdpa.sdpa).parameters)
    of_sdpa.pop("unknown")  # sdpa says of names that it does not have what it calls them
    assert len(functions) >= 3
    for function in functions:
        parameters = dict(inspect.signature(function).parameters)
        parameters.pop("unknown", None)
        # A plan draws no random numbers, and writes to no tensor that it reads.
        missing = {"dropout_p", "continue_from"} if function is microsdpa.plan else set()
        assert set(parameters) == set(of_sdpa) - missing, function
        for name, found in parameters.items():
            if name != "return_lse":  # which overloads are told apart by
                assert (found.annotation, found.default, found.kind) == (
                    of_sdpa[name].annotation,
                    of_sdpa[name].default,
                    of_sdpa[name].kind,
                ), (function, name)


def test_an_output_whose_rows_are_off_16_bytes_changes_what_explain_says() -> None:
    tensor = torch.zeros(1, 2, 4, 32).half()
    out = torch.empty(1, 2, 4, 33).half()[..., 1:]
    found = [microsdpa.explain(tensor, tensor, tensor, out=given, impl="emulate").runs for given in (None, out)]
    assert found == ["emulate:ampere/mma", "emulate:ampere/general"]
