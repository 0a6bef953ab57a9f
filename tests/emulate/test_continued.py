"""sdpa(continue_from=): partial attention, whose kernels merge with an output and an LSE of other keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import microsdpa
from microsdpa import reference
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make

Pair = tuple[torch.Tensor, torch.Tensor]
KERNELS = ["emulate:hopper/throughput", "emulate:ampere/general"]
CASES = [
    (Case(1, 4, 70, 200, 64, heads_kv=2), 133),
    (Case(1, 4, 70, 200, 64, heads_kv=2, dtype="bfloat16"), 133),
    (Case(2, 2, 130, 150, 128, dtype="bfloat16"), 64),
    (Case(1, 1, 65, 140, 256), 1),
]


def first_part(tensors: tuple[torch.Tensor, ...], at: int, **options: Any) -> Pair:
    query, key, value = tensors
    found = microsdpa.sdpa(query, key[:, :, :at], value[:, :, :at], enable_gqa=True, return_lse=True, **options)
    assert isinstance(found, tuple)
    return found


def second_part(tensors: tuple[torch.Tensor, ...], at: int, previous: Pair, **options: Any) -> Pair:
    query, key, value = tensors
    rest = key[:, :, at:], value[:, :, at:]
    found = microsdpa.sdpa(query, *rest, enable_gqa=True, return_lse=True, continue_from=previous, **options)
    assert isinstance(found, tuple)
    assert found[0] is previous[0]
    assert found[1] is previous[1]
    return found


def check(found: Pair, tensors: tuple[torch.Tensor, ...], **options: Any) -> None:
    """The output is that of the oracle for all keys at once, but for roundings of two outputs."""
    expected, lse = reference.oracle(*tensors, **options)
    allowed = 6 * compare.UNIT_ROUNDOFF[found[0].dtype] * float(tensors[2].abs().max())
    torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=allowed)
    torch.testing.assert_close(found[1].double(), lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("case", "at"), CASES)
@pytest.mark.parametrize("impl", [*KERNELS, "auto"])
def test_two_parts_are_one_softmax(impl: str, case: Case, at: int) -> None:
    query, key, value = tensors = make(case)
    check(second_part(tensors, at, first_part(tensors, at), impl=impl), tensors)
    turned = query, torch.cat([key[:, :, at:], key[:, :, :at]], 2), torch.cat([value[:, :, at:], value[:, :, :at]], 2)
    rest = key.shape[2] - at
    check(second_part(turned, rest, first_part(turned, rest), impl=impl), tensors)


@pytest.mark.parametrize("impl", [*KERNELS, "auto"])
def test_masks_speak_of_the_keys_of_the_call(impl: str) -> None:
    tensors = make(Case(1, 2, 70, 192, 64))
    generator = torch.Generator().manual_seed(3)
    shown = torch.rand(1, 2, 70, 192, generator=generator) < 0.4
    shown[:, :, 3] = False
    at, sinks = 96, torch.tensor([0.5, -1.0])
    previous = first_part(tensors, at, attn_mask=shown[..., :at])
    found = second_part(tensors, at, previous, attn_mask=shown[..., at:], sinks=sinks, impl=impl)
    check(found, tensors, attn_mask=shown, sinks=sinks)
    previous = first_part(tensors, at)
    causal = torch.ones(70, 96, dtype=torch.bool).tril(26)
    expected = torch.cat([torch.ones(70, 96, dtype=torch.bool), causal], 1)
    check(second_part(tensors, at, previous, causal="lower_right", impl=impl), tensors, attn_mask=expected)
    numbers = torch.randn(70, 192, generator=generator).half()
    previous = first_part(tensors, at, attn_mask=numbers[:, :at], softcap=5.0)
    found = second_part(tensors, at, previous, attn_mask=numbers[:, at:], softcap=5.0, impl=impl)
    check(found, tensors, attn_mask=numbers, softcap=5.0)


@pytest.mark.parametrize("impl", [*KERNELS, "auto"])
def test_rows_that_have_seen_nothing_and_rows_that_see_nothing(impl: str) -> None:
    tensors = make(Case(1, 2, 70, 90, 64))
    nothing = torch.full((1, 2, 70, 64), torch.nan, dtype=torch.float16), torch.full((1, 2, 70), -torch.inf)
    check(second_part(tensors, 0, nothing, impl=impl), tensors)
    previous = first_part(tensors, 90)
    output, lse = previous[0].clone(), previous[1].clone()
    hidden = torch.ones(70, 90, dtype=torch.bool)
    hidden[5:40] = False
    merged = microsdpa.sdpa(*tensors, attn_mask=hidden, continue_from=previous, impl=impl)
    assert isinstance(merged, torch.Tensor)
    assert torch.equal(merged[:, :, 5:40], output[:, :, 5:40])
    torch.testing.assert_close(previous[1][:, :, 5:40], lse[:, :, 5:40], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(previous[1][:, :, :5], lse[:, :, :5] + torch.tensor(2.0).log())


@pytest.mark.parametrize("impl", [*KERNELS, "auto"])
def test_nan_in_what_was_seen_stays_in_its_row(impl: str) -> None:
    tensors = make(Case(1, 2, 70, 90, 64))
    previous = first_part(tensors, 40)
    previous[1][0, 1, 7] = torch.nan
    previous[0][0, 0, 9, 3] = torch.nan
    out, lse = second_part(tensors, 40, previous, impl=impl)
    expected = torch.zeros(1, 2, 70, 64, dtype=torch.bool)
    expected[0, 1, 7], expected[0, 0, 9, 3] = True, True
    assert torch.equal(out.isnan(), expected)
    assert torch.equal(lse.isnan(), expected.all(dim=-1))


def test_an_output_may_have_any_strides() -> None:
    tensors = make(Case(2, 3, 70, 90, 64))
    out, lse = first_part(tensors, 40)
    by_token = torch.empty(2, 70, 3, 64, dtype=torch.float16).transpose(1, 2)
    by_token.copy_(out)
    for impl in KERNELS:
        again = by_token.clone(memory_format=torch.preserve_format)
        check(second_part(tensors, 40, (again, lse.clone()), impl=impl), tensors)


def test_no_keys_leave_the_output_as_it_is() -> None:
    tensors = make(Case(1, 2, 16, 90, 64))
    out, lse = first_part(tensors, 90)
    before, sums = out.clone(), lse.clone()
    found = second_part(tensors, 90, (out, lse))
    assert torch.equal(found[0], before)
    assert torch.equal(found[1], sums)
    sinks = torch.tensor([0.5, 2.0])
    check(second_part(tensors, 90, (out, lse), sinks=sinks), tensors, sinks=sinks)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 120])
def test_padded_columns_are_not_read(head_dim: int) -> None:
    query, key, value = tensors = make(Case(1, 2, 70, 90, head_dim))
    for impl in KERNELS:
        check(second_part(tensors, 40, first_part(tensors, 40), impl=impl), tensors)
    out, lse = first_part(tensors, 40)
    given: dict[str, Any] = {"continue_from": (out, lse)}
    with pytest.raises(UnsupportedProblem, match="goes on from outputs of head_dim columns"):
        microsdpa.sdpa(query, key, value[..., :-1], continue_from=(out[..., :-1], lse), impl=KERNELS[0])
    with pytest.raises(UnsupportedProblem, match="does not go on from an output of other keys"):
        microsdpa.sdpa(query, key, value, **given, impl="emulate:hopper/latency")
    assert microsdpa.explain(query, key, value, **given, impl="emulate").runs == "emulate:ampere/general"


def wrong() -> dict[str, tuple[dict[str, Any], str]]:
    """Arguments beside a call of (1, 2, 8, 16), and what is said of them."""
    out, lse = torch.zeros(1, 2, 8, 16, dtype=torch.float16), torch.zeros(1, 2, 8)
    both = {"continue_from": (out, lse)}
    return {
        "one tensor": ({"continue_from": out}, r"continue_from: expected \(output, LSE\), got Tensor"),
        "another shape": ({"continue_from": (out[:, :1], lse)}, r"continue_from: expected shape \[1, 2, 8, 16\]"),
        "another dtype": ({"continue_from": (out.float(), lse)}, "continue_from: expected dtype torch.float16"),
        "LSE in 16 bits": ({"continue_from": (out, lse.half())}, "an LSE of dtype torch.float32, got torch.float16"),
        "LSE of a shape": ({"continue_from": (out, lse[..., :4])}, r"an LSE of shape \[1, 2, 8\], got \[1, 2, 4\]"),
        "LSE with strides": ({"continue_from": (out, torch.zeros(1, 8, 2).mT)}, "an LSE that is contiguous"),
        "no LSE": ({"continue_from": (out, None)}, "an LSE in the second place, got NoneType"),
        "out too": (both | {"out": torch.empty_like(out)}, "out: expected None beside continue_from"),
        "LSE in the output": (
            {"continue_from": (out, out.view(-1).view(torch.float32)[:16].view(1, 2, 8))},
            "an LSE in memory of its own",
        ),
        "precision": (both | {"precision": "fp8"}, "no continue_from beside 8-bit operands"),
        "dropout": (both | {"dropout_p": 0.5}, "no continue_from beside dropout"),
        "norms": (both | {"q_norm": torch.ones(16).half()}, "no continue_from beside norms and rotary embedding"),
    }


@pytest.mark.parametrize("name", wrong())
@pytest.mark.parametrize("function", [microsdpa.sdpa, microsdpa.explain])
def test_what_it_is_not_is_said(name: str, function: Any) -> None:
    query = torch.randn(1, 2, 8, 16).half()
    given, message = wrong()[name]
    with pytest.raises((InvalidArgument, UnsupportedProblem), match=message):
        function(query, query.clone(), query.clone(), **given)


def test_gradients_graphs_and_transforms_are_refused() -> None:
    query = torch.randn(1, 2, 8, 16).half()
    previous = torch.zeros_like(query), torch.zeros(1, 2, 8)
    with pytest.raises(UnsupportedProblem, match="query requires grad"):
        microsdpa.sdpa(query.clone().requires_grad_(), query, query, continue_from=previous)
    with pytest.raises(InvalidArgument, match="continue_from: expected a tensor that requires no grad"):
        microsdpa.sdpa(query, query, query, continue_from=(previous[0].clone().requires_grad_(), previous[1]))
    with torch.no_grad():
        microsdpa.sdpa(query.clone().requires_grad_(), query, query, continue_from=previous)
    with pytest.raises(Exception, match="do not see calls with continue_from"):
        torch.compile(microsdpa.sdpa, fullgraph=True)(query, query, query, continue_from=previous)
    with pytest.raises(UnsupportedProblem, match="do not see calls with continue_from"):
        torch.func.vmap(lambda q: microsdpa.sdpa(q, q, q, continue_from=previous))(query[None])
