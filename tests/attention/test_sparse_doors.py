"""Documents, blocks and ranges through every way to call attention, on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import microsdpa
from microsdpa import BlockTable, reference
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.evidence import compare

SEQLEN = 96
SIDE_BY_SIDE, APART = torch.arange(SEQLEN) // 30, torch.arange(SEQLEN) % 3
RANGES = torch.stack([torch.arange(SEQLEN) // 2, torch.arange(SEQLEN) + 5], dim=-1).int()
BLOCKS = BlockTable(torch.tensor([[True, False], [True, True]]), 64, SEQLEN, SEQLEN)
FLEX = create_block_mask(lambda b, h, i, j: (i - j).abs() < 40, None, None, SEQLEN, SEQLEN, "cpu", BLOCK_SIZE=64)
WAYS: dict[str, dict[str, Any]] = {
    "ranges": {"attn_mask": RANGES},
    "documents": {"document_ids": SIDE_BY_SIDE},
    "documents apart": {"document_ids": APART},
    "table": {"block_mask": BLOCKS},
    "flex": {"block_mask": FLEX},
    "all": {"attn_mask": RANGES, "document_ids": SIDE_BY_SIDE, "block_mask": FLEX},
}

NAMES = {"attn_mask": "ranges of keys", "document_ids": "ranges of keys|a bool mask", "block_mask": "a table of blocks"}


def inputs(**options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, 2, SEQLEN, 32, generator=generator).half() for _ in range(3))
    return tuple(tensor.requires_grad_(**options) if options else tensor for tensor in (query, key, value))  # type: ignore[return-value]


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return compare.measure(actual.detach(), expected.detach()).max_abs


def exact(way: dict[str, Any], **options: Any) -> torch.Tensor:
    return reference.oracle(*inputs(), **way, **options)[0]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_plan_takes_them_in_every_call(way: dict[str, Any]) -> None:
    plan = microsdpa.plan(*inputs(), **way, is_causal="attn_mask" not in way)
    causal = None if "attn_mask" in way else "upper_left"
    assert off(plan(*inputs(), **way), exact(way, causal=causal)) < 2e-3
    for name in way:
        if way.keys() != {"attn_mask"}:
            with pytest.raises(InvalidArgument, match=f"{name}: expected one, as the plan has, got NoneType"):
                plan(*inputs(), **(way | {name: None}))


def test_a_plan_takes_no_more_than_it_was_made_with() -> None:
    plan = microsdpa.plan(*inputs(), attn_mask=RANGES)
    with pytest.raises(InvalidArgument, match="document_ids: expected None, as the plan has, got Tensor"):
        plan(*inputs(), document_ids=SIDE_BY_SIDE)


def test_a_plan_takes_other_documents_of_the_same_length() -> None:
    plan = microsdpa.plan(*inputs(), document_ids=SIDE_BY_SIDE)
    for ids in (APART, torch.arange(SEQLEN) // 7):
        assert off(plan(*inputs(), document_ids=ids), exact({"document_ids": ids})) < 2e-3
    with pytest.raises(InvalidArgument, match="document_ids: expected shape"):
        plan(*inputs(), document_ids=APART[1:])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_what_runs_is_explained(way: dict[str, Any]) -> None:
    found = microsdpa.explain(*inputs(), **way, impl="emulate")
    assert found.runs == "emulate:ampere/general"
    mask = dict(found.spec.template_args)["MASK"] if found.spec else ""
    expected = {"ranges": "KeyRange", "documents": "KeyRange", "table": "SummedBool", "flex": "SummedBool"}
    name = next(name for name, one in WAYS.items() if one is way)
    assert mask.removeprefix("microsdpa::") == expected.get(name, "bool")
    with pytest.raises(UnsupportedProblem, match=NAMES[next(iter(way))] if len(way) == 1 else "a bool mask"):
        microsdpa.explain(*inputs(), **way, impl="emulate:hopper/split")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("impl", ["auto", "emulate"])
def test_gradients_are_those_of_plain_operations(way: dict[str, Any], impl: str) -> None:
    given = inputs(requires_grad=True)
    out = microsdpa.sdpa(*given, **way, causal="lower_right", impl=impl)
    assert isinstance(out, torch.Tensor)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    found = torch.autograd.grad(out, given, weight.half())
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in given)
    hiding = {n: way.get(n) for n in ("attn_mask", "document_ids", "block_mask")}
    shown = reference._with_hidden(query, key, reference._Options(**hiding))
    assert shown is not None
    shown = shown & torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    scores = (query @ key.mT * 32**-0.5).masked_fill(~shown, -1e300)
    plain = (scores.softmax(dim=-1) * shown) @ value
    expected = torch.autograd.grad(plain, (query, key, value), weight.double())
    for got, want in zip(found, expected, strict=True):
        assert off(got, want) < 2e-2


@pytest.mark.parametrize("name", [name for name in WAYS if "flex" not in name and name != "all"])
def test_a_compiled_call_gives_what_an_eager_one_does(name: str) -> None:
    way = WAYS[name]

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return microsdpa.sdpa(query, key, value, **way, causal="upper_left")

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs()), call(*inputs()))


def test_compiled_documents_follow_their_tensor() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda ids, *given: microsdpa.sdpa(*given, document_ids=ids), backend="aot_eager", fullgraph=True
    )
    for ids in (SIDE_BY_SIDE, APART):
        assert off(compiled(ids, *inputs()), exact({"document_ids": ids})) < 2e-3


def test_documents_under_a_transform_and_a_tracer() -> None:
    stacked = torch.stack([SIDE_BY_SIDE, APART])
    given = inputs()
    found = torch.func.vmap(lambda ids: microsdpa.sdpa(*given, document_ids=ids))(stacked)
    for got, ids in zip(found, stacked, strict=True):
        assert off(got, exact({"document_ids": ids})) < 2e-3
    traced = torch.jit.trace(lambda ids, *t: microsdpa.sdpa(*t, document_ids=ids), (SIDE_BY_SIDE, *inputs()))
    assert off(traced(APART, *inputs()), exact({"document_ids": APART})) < 2e-3


def test_the_operator_takes_ranges() -> None:
    out, _ = torch.ops.microsdpa.attention(*inputs(), RANGES)
    assert off(out, exact({"attn_mask": RANGES})) < 2e-3


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_8_bit_operands_have_them_on_hopper(way: dict[str, Any]) -> None:
    out = microsdpa.sdpa(*inputs(), **way, precision="int8_fp8", impl="emulate:hopper/latency_8bit")
    assert off(out, exact(way)) < 0.2  # E4M3 values are off by a sixteenth of themselves at most
    with pytest.raises(UnsupportedProblem, match="knows the causal mask only"):
        microsdpa.sdpa(*inputs(), **way, precision="fp8", impl="emulate:ada/mma_8bit")


def test_torchs_function_has_no_ranges() -> None:
    with microsdpa.enabled(impl="emulate"), pytest.raises(RuntimeError, match="dtype"):
        torch.nn.functional.scaled_dot_product_attention(*inputs(), attn_mask=RANGES)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(SEQLEN, SEQLEN, dtype=torch.int32), "a shape that ends in 2, got shape"),
        (torch.tensor(3, dtype=torch.int32), "a shape that ends in 2"),
        (RANGES[1:], r"broadcasts to \[B, H, S_q, 2\] = \[2, 2, 96, 2\], got shape \[95, 2\]"),
        (RANGES.long(), "got torch.int64"),
    ],
)
def test_what_is_wrong_with_ranges_is_said(mask: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        microsdpa.sdpa(*inputs(), attn_mask=mask)
