"""Dropout in the emulator: every kernel and tile shape keeps the same probabilities, forward and backward."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Replacement

from microsdpa import reference
from microsdpa.call import dropout
from microsdpa.call.masks import Masks
from microsdpa.emulate import run
from microsdpa.emulate.run import EmulationError, Schedule, scheduled
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make, make_masks
from microsdpa.execution import gradients
from microsdpa.kernels.backward.spec import Tiling
from microsdpa.kernels.hopper.backward import spec as hopper_backward
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select

STATE = torch.tensor([2**62 + 12345678901234567, 4 * (2**34 + 77)])
FACTOR = 4
"""Times the error of plain arithmetic that a gradient may have: a backward rounds P and dS too."""
SCHEDULES = (Schedule(0, late=True), Schedule(1, late=False))


def test_the_generator_gives_the_numbers_of_its_authors() -> None:
    """The known answers of Random123, the library of Philox's authors."""
    ones, pi = 2**32 - 1, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    for counter, key, answer in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi[:4], pi[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        found = reference.philox([torch.tensor(number) for number in counter], key)  # type: ignore[arg-type]
        assert tuple(map(int, found)) == answer


def test_the_specification_keeps_what_kernels_are_told_to() -> None:
    for p in (0.0, 1e-9, 0.1, 1 / 3, 0.5, 0.99, 1 - 1e-9, 1.0):
        assert dropout.kept_of(p) == reference.kept_of(p)
    assert dropout.kept_of(1 - 1e-9) == (1, 65536.0)
    assert dropout.kept_of(1.0) == (0, 0.0)
    assert dropout.kept_of(0.75) == (16384, 4.0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_kept_as_are_asked_for_and_none_depends_on_another(p: float) -> None:
    """Within five standard deviations: of all, of rows and columns, and of pairs of neighbours."""
    kept = reference.kept(p, STATE, torch.arange(8), 512, 384).double()
    assert abs(float(kept.mean()) - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    centred = kept - (1 - p)
    for dim, size in ((1, 512), (2, 384)):
        means = centred.sum(dim=dim) / (p * (1 - p) * size) ** 0.5
        assert float(means.abs().max()) < 6
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(8, 1), centred.roll(1, 2), centred.roll(8, 2)):
        correlation = float((centred * other).mean()) / (p * (1 - p))
        assert abs(correlation) < 5 / kept.numel() ** 0.5


def test_heads_seeds_and_offsets_have_numbers_of_their_own() -> None:
    def of(seed: int, offset: int, head: int) -> torch.Tensor:
        return reference.kept(0.5, torch.tensor([seed, offset]), torch.tensor([head]), 64, 64)

    found = [of(*one) for one in ((1, 0, 0), (2, 0, 0), (1, 4, 0), (1, 0, 1), (1 + 2**32, 0, 0), (1, 2**35, 0))]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert 0.4 < float((one == other).double().mean()) < 0.6
    assert torch.equal(reference.kept(0.5, STATE, torch.tensor([3]), 40, 70)[0, :33, :50],
                       reference.kept(0.5, STATE, torch.tensor([3]), 33, 50)[0])  # fmt: skip


FORWARD = [
    Case(2, 4, 70, 100, 64, heads_kv=2),
    Case(1, 2, 40, 90, 32, dtype="bfloat16", causal="lower_right", layout="bshd"),
    Case(1, 1, 20, 70, 256, causal="upper_left"),  # tiles of 32 keys
    Case(1, 2, 20, 70, 40, layout="unaligned"),
    Case(1, 2, 70, 100, 64, masks=("additive", "softcap", "window", "alibi", "sinks")),
    Case(2, 2, 150, 150, 32, causal="upper_left", masks=("documents",)),
]


HOPPER_FORWARD = [
    Case(1, 4, 150, 300, 64, heads_kv=2),
    Case(2, 1, 150, 200, 128, dtype="bfloat16", causal="lower_right"),
    Case(1, 1, 70, 150, 72, causal="upper_left"),
    Case(1, 1, 70, 100, 256),
    Case(1, 2, 140, 300, 64, masks=("padding", "softcap", "sinks")),
    Case(1, 1, 140, 304, 64, masks=("additive", "window", "alibi")),
]


@pytest.mark.parametrize("p", [0.2, 1.0])
@pytest.mark.parametrize("case", HOPPER_FORWARD, ids=str)
def test_hopper_throughput_keeps_what_the_specification_keeps(case: Case, p: float) -> None:
    check_forward(case, p, "hopper/throughput", "sm_90a")


@pytest.mark.parametrize("p", [0.2, 1.0])
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_the_forward_pass_keeps_what_the_specification_keeps(case: Case, p: float) -> None:
    check_forward(case, p)


def check_forward(case: Case, p: float, impl: str = "auto", target: str = "") -> None:
    tensors, masks = make(case), make_masks(case)
    given: dict[str, Any] = {"causal": case.causal, "dropout_p": p, "rng_state": STATE, **masks}
    (expected, expected_lse), (plain, _) = (f(*tensors, **given) for f in (reference.oracle, reference.eager))
    problem = Problem(
        *(case.batch, case.heads, case.kv_heads, case.seqlen_q, case.seqlen_k, case.head_dim, case.dtype),
        causal=case.causal,
        mask=Masks(**masks).kind_in_memory if target else Masks(**masks).kind,
        alignment=2 if case.layout == "unaligned" else 16,
        dropout=True,
        **({"target": target} if target else {}),  # type: ignore[arg-type]
    )
    found = []
    for schedule in SCHEDULES:
        out, lse = torch.full_like(tensors[0], torch.nan), torch.full(tensors[0].shape[:3], torch.nan)
        with scheduled(schedule):
            spec = select(problem, impl).spec
            run.attention(spec, problem, (*tensors, out, lse), masks=Masks(**masks, dropping=(p, STATE)))
        errors = compare.measure(out, expected)
        assert compare.tolerance(plain, expected, out.dtype).admits(errors), errors
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-5)
        found.append(out)
    assert torch.equal(*found)
    assert p < 1.0 or not found[0].any()


BACKWARD = [
    (Case(2, 4, 70, 100, 64, heads_kv=2, causal="upper_left"), None, ""),
    (Case(1, 2, 40, 90, 72, dtype="bfloat16"), None, ""),
    (Case(1, 2, 70, 40, 256, causal="lower_right"), None, ""),
    (Case(1, 2, 70, 100, 36, layout="unaligned"), None, ""),
    (Case(2, 4, 40, 90, 32, heads_kv=2, masks=("additive", "softcap", "window", "alibi", "sinks")), None, ""),
    (Case(1, 1, 140, 150, 64), Tiling(row_tiles=2, step=16), ""),
    (Case(2, 2, 70, 150, 64, heads_kv=1), Tiling(step=64, wgmma=True, bulk=True), "sm_90a"),
    (Case(1, 1, 140, 150, 128, causal="lower_right"), Tiling(warps=8, wgmma=True, bulk=True, ctas=1), "sm_90a"),
    (
        Case(1, 1, 70, 150, 256, causal="lower_right"),
        Tiling(block_walk=32, warps=8, ctas=1, wgmma=True, bulk=True),
        "sm_90a",
    ),
]


def described(case: Case, p: float) -> tuple[gradients.Gradient, tuple[Any, ...], tuple[Any, ...]]:
    """A call for gradients, and those in FP64 and in plain arithmetic."""
    tensors, masks = make(case), make_masks(case)
    weight = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(5)).to(tensors[0].dtype)
    names = [name for name in gradients.MASK_TENSORS if name in masks and masks[name].is_floating_point()]

    def made(function: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (*tensors, *(masks[name] for name in names))]
        given = masks | dict(zip(names, leaves[3:], strict=True))
        out, lse = function(*leaves[:3], causal=case.causal, dropout_p=p, rng_state=STATE, **given)
        return (out.detach(), lse.detach()), torch.autograd.grad(out, leaves, weight.to(dtype))

    (out, lse), exact = made(reference.oracle, torch.float64)
    _, plain = made(reference.eager, weight.dtype)
    result = out.to(weight.dtype), lse.float()
    of_masks = Masks(**masks, dropping=(p, STATE))
    return gradients.described((weight, None), tensors, result, case.causal, case.scale, of_masks), exact, plain


def wrong(of: gradients.Gradient, exact: tuple[Any, ...], plain: tuple[Any, ...]) -> str:
    for (name, got), want, rough in zip(of.made.items(), exact, plain, strict=True):
        unit = compare.UNIT_ROUNDOFF[of.given["query"].dtype] * float(want.abs().max())
        allowed = FACTOR * float((rough.double() - want).abs().max()) + unit
        error = compare.measure(got, want)
        if not error.max_abs <= allowed:
            return f"{name} is off by {error.max_abs:.3g} at {error.worst}, {allowed:.3g} allowed"
    return ""


@pytest.mark.parametrize(("case", "tiling", "target"), BACKWARD, ids=str)
def test_gradients_are_those_of_what_was_kept(case: Case, tiling: Tiling | None, target: str) -> None:
    of, exact, plain = described(case, 0.3)
    found = []
    for schedule in SCHEDULES:
        for tensor in of.made.values():
            tensor.fill_(torch.nan)
        with scheduled(schedule):
            gradients.emulate(of, tiling, target)
        assert wrong(of, exact, plain) == ""
        found.append([tensor.clone() for tensor in of.made.values()])
    assert all(map(torch.equal, *found))


HOPPER_BACKWARD = [
    Case(1, 2, 150, 200, 64, heads_kv=1),
    Case(2, 1, 150, 140, 128, dtype="bfloat16", causal="lower_right"),
    Case(1, 1, 70, 150, 72, causal="upper_left"),
    Case(1, 2, 140, 100, 256, heads_kv=1, causal="upper_left"),
    Case(1, 2, 150, 140, 64, masks=("softcap", "window")),
    Case(1, 1, 100, 140, 192, causal="upper_left", masks=("softcap",)),
    Case(2, 1, 140, 150, 128, dtype="bfloat16", masks=("padding", "softcap", "sinks")),
]


@pytest.mark.parametrize("case", HOPPER_BACKWARD, ids=str)
def test_hopper_backward_has_gradients_of_what_was_kept(case: Case) -> None:
    of, exact, plain = described(case, 0.3)
    found = []
    for deterministic in (True, True, False):
        tiling = hopper_backward.choose(of.problem("sm_90a"), deterministic)
        assert isinstance(tiling, hopper_backward.Tiling)
        for tensor in of.made.values():
            tensor.fill_(torch.nan)
        with scheduled(SCHEDULES[len(found) % 2]):
            gradients.emulate(of, tiling, "sm_90a")
        assert wrong(of, exact, plain) == ""
        found.append([tensor.clone() for tensor in of.made.values()])
    assert all(map(torch.equal, *found[:2]))


def test_no_gradient_is_left_where_all_is_dropped() -> None:
    of, _, _ = described(Case(1, 2, 40, 90, 32), 1.0)
    gradients.emulate(of)
    assert not any(tensor.any() for tensor in of.made.values())


PLAIN = Case(1, 2, 40, 90, 64)


@dataclass(frozen=True)
class Mutant(Replacement):
    """One replacement in one file, and what is said: of the forward pass where `forward`, on wgmma where `hopper`."""

    said: str
    forward: bool = False
    case: Case = PLAIN
    hopper: bool = False


DROPOUT, KERNEL = "common/dropout.cuh", "backward/kernel.cu"
THROUGHPUT, HOPPER = "hopper/throughput/", "hopper/backward/"
LONG = Case(1, 2, 150, 140, 64)
MUTANTS = [
    Mutant("a round less", DROPOUT, "round < 10", "round < 9", "off", forward=True),
    Mutant("the offset of another call", DROPOUT, "offset / 4)", "offset / 8)", "off", forward=True),
    Mutant("the seed's upper half", DROPOUT, "(seed >> 32)", "(seed >> 40)", "off", forward=True),
    Mutant(
        *("numbers of the other half of a square", DROPOUT, "second ? own.words[first + 1] : own.words[first]"),
        *("second ? own.words[first] : own.words[first + 1]", "off", True, Case(1, 1, 20, 70, 256)),
    ),
    Mutant(
        *("the sum without what is dropped", "ampere/general/kernel.cu", "*= given.dropout.scale;", "*= 1.0f;"),
        *("off", True),
    ),
    Mutant(
        "the neighbour's numbers are not fetched",
        DROPOUT,
        "even_words[i] = odd ? theirs : mine",
        "even_words[i] = mine",
        "grad_(key|value) is off",
    ),
    Mutant("dV of all probabilities", KERNEL, "            drop(s, kept);\n", "", "grad_value is off"),
    Mutant("dV is not scaled", KERNEL, "factor = given.dropout.scale;", "factor = 1.0f;", "grad_value is off"),
    Mutant(
        *("dS of all probabilities", KERNEL, "kept.has(t, n, e) ? dp[t][n][e] * given.dropout.scale : 0.0f"),
        *("dp[t][n][e] * given.dropout.scale", "grad_query is off"),
    ),
    Mutant(
        *("the mask's gradient", "backward/mask.cu", "kept.has(0, n, e) ? ", "true ? ", "grad_mask is off"),
        case=Case(1, 2, 40, 90, 32, masks=("float32",)),
    ),
    *(
        Mutant(*what, said, forward, LONG, hopper=True)
        for *what, said, forward in (
            (
                "keys in another order",
                DROPOUT,
                "<0xdd99>(kept[n], kept[2 + n])",
                "<0xdd99>(kept[2 + n], kept[n])",
                "off",
                True,
            ),
            (
                "numbers of other queries",
                THROUGHPUT + "policies.cuh",
                "row = work.first_row + tile_row",
                "row = tile_row",
                "off",
                True,
            ),
            (
                "O is not scaled",
                THROUGHPUT + "consumer.cuh",
                "inverse[half] *= drop.scale",
                "inverse[half] *= 1.0f",
                "off",
                True,
            ),
            ("a larger number keeps", DROPOUT, "(kept == 0 ? 0 : kept - 1)", "(kept / 2)", "off", True),
            ("flags of other queries", DROPOUT, " - 2 * (i % 2)", " - 2 * (1 - i % 2)", "grad_query is off", False),
            (
                "flags of the turn before",
                HOPPER + "consumer.cuh",
                "    at.advance(walk);\n    drop.draw",
                "    drop.draw",
                "is off",
                False,
            ),
            (
                "dV not scaled",
                HOPPER + "consumer.cuh",
                "factor = drop.scale;",
                "factor = 1.0f;",
                "grad_value is off",
                False,
            ),
            (
                "dP not scaled",
                HOPPER + "products.cuh",
                "? 0.0f : scale;",
                "? 0.0f : 1.0f;",
                "grad_query is off",
                False,
            ),
            (
                "dV of all",
                HOPPER + "products.cuh",
                "    drop.next.drop(to);\n",
                "",
                "grad_value is off",
                False,
            ),
        )
    ),
    Mutant(
        *("dV of all, heads over 128", HOPPER + "products.cuh", "p[i] < 0.0f ? 0.0f : p[i]", "fabsf(p[i])"),
        *("grad_value is off", False, Case(1, 1, 140, 70, 192), True),
    ),
]


def verdict(mutant: Mutant, schedule: Schedule, **options: Any) -> str:
    case = mutant.case
    try:
        with scheduled(schedule):
            if not mutant.forward:
                of, exact, plain = described(case, 0.3)
                target = "sm_90a" if mutant.hopper else ""
                chosen = hopper_backward.choose(of.problem(target)) if mutant.hopper else None
                gradients.emulate(of, chosen, target, **options)  # type: ignore[arg-type]
                return wrong(of, exact, plain)
            tensors = make(case)
            expected, _ = reference.oracle(*tensors, dropout_p=0.3, rng_state=STATE)
            out = torch.full_like(tensors[0], torch.nan)
            problem = Problem(
                case.batch, case.heads, case.heads, case.seqlen_q, case.seqlen_k, case.head_dim, "float16"
            )
            problem = Problem(**(vars(problem) | {"dropout": True} | ({"target": "sm_90a"} if mutant.hopper else {})))
            operands = *tensors, out, None
            spec = select(problem, "hopper/throughput" if mutant.hopper else "auto").spec
            run.attention(spec, problem, operands, masks=Masks(dropping=(0.3, STATE)), **options)
            error = compare.measure(out, expected)
            return "" if error.max_abs < 0.005 else f"the output is off by {error.max_abs}"
    except EmulationError as error:
        return error.problem


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutation_is_caught(tmp_path: Path, mutant: Mutant) -> None:
    root = mutant.tree(tmp_path)
    assert verdict(mutant, SCHEDULES[0]) == ""
    assert re.search(mutant.said, verdict(mutant, SCHEDULES[0], root=root))
