"""Calls with gradients for the emulator: what they shall be, and whether they are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch

from microsdpa import reference
from microsdpa.call.masks import Masks
from microsdpa.emulate.run import Report, Schedule, scheduled
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make, make_masks
from microsdpa.execution import gradients

Grads = tuple[torch.Tensor, ...]
FACTOR = 4
"""Times the error of plain arithmetic that a gradient may have: a backward rounds P and dS too."""


@dataclass
class Expected:
    """A call, and its gradients in FP64 and in plain arithmetic: of query, key, value and the masks' numbers."""

    of: gradients.Gradient
    exact: Grads
    plain: Grads

    def wrong(self) -> str:
        """What is wrong with the gradients that were made; empty for nothing."""
        for (name, got), want, rough in zip(self.of.made.items(), self.exact, self.plain, strict=True):
            unit = compare.UNIT_ROUNDOFF[self.of.given["query"].dtype] * float(want.abs().max())
            allowed = FACTOR * float((rough.double() - want).abs().max()) + unit
            error = compare.measure(got, want)
            if not error.max_abs <= allowed:
                return f"{name} is off by {error.max_abs:.3g} at {error.worst}, {allowed:.3g} allowed"
        return ""


def expected(
    case: Case,
    masks: dict[str, Any] | None = None,
    through_lse: bool = False,
    wanted: tuple[str, ...] = gradients.MASK_TENSORS,
) -> Expected:
    """A case; of its masks' numbers, gradients are asked for of those that are `wanted`."""
    tensors = make(case)
    masks = make_masks(case) if masks is None else masks
    generator = torch.Generator().manual_seed(5)
    grad_out = torch.randn(tensors[0].shape, generator=generator).to(tensors[0].dtype)
    grad_lse = torch.randn(tensors[0].shape[:3], generator=generator) if through_lse else None
    names = [name for name in wanted if name in masks and masks[name].is_floating_point()]

    def made(function: Any, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, torch.Tensor], Grads]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (*tensors, *(masks[name] for name in names))]
        of_masks = masks | dict(zip(names, leaves[3:], strict=True))
        out, lse = function(*leaves[:3], causal=case.causal, scale=case.scale, **of_masks)
        ends = [(out, grad_out.to(dtype))] + ([] if grad_lse is None else [(lse, grad_lse.to(lse))])
        outputs, grads = zip(*ends, strict=True)
        return (out.detach(), lse.detach()), torch.autograd.grad(outputs, leaves, grads)

    (out, lse), exact = made(reference.oracle, torch.float64)
    _, plain = made(reference.eager, tensors[0].dtype)
    result = out.to(tensors[0].dtype), lse.float()
    call = case.causal, case.scale, Masks(**masks), wanted
    of = gradients.described((grad_out, grad_lse), tensors, result, *call)
    return Expected(of, exact, plain)


def check(
    wanted: Expected, tiling: gradients.AnyTiling | None = None, target: str = "", *, same_bits: bool = True
) -> list[Report]:
    """Compute the gradients in two orders of threads and copies: right, and the same bits."""
    found = []
    for schedule in (Schedule(0, late=True), Schedule(1, late=False)):
        for tensor in wanted.of.made.values():
            tensor.fill_(torch.nan)
        with scheduled(schedule):
            reports = gradients.emulate(wanted.of, tiling, target, count_banks=True)
        assert wanted.wrong() == ""
        found.append([tensor.clone() for tensor in wanted.of.made.values()])
    assert not same_bits or all(starmap(torch.equal, zip(*found, strict=True)))
    return reports
