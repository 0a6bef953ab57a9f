"""Suite backward: gradients alone, and the forward pass with them, of this library and of peers, in CUDA graphs.

A peer's call is differentiated as torch does it. This library has two rows: `sdpa`, whose gradient may be one of
torch's backward passes, and "own kernels", where it never is. A turn begins with replays of its own work, until power
and clock are those of this work alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from microsdpa import reference
from microsdpa.call.call import mask_tensors
from microsdpa.call.options import Options
from microsdpa.evidence import compare, graphs, results, statistics, timing
from microsdpa.evidence.inputs import Case, make, make_masks, masks_of
from microsdpa.evidence.peers import Call, Implementation, Microsdpa, Tensors, choose
from microsdpa.evidence.recorded import OWN_KERNELS
from microsdpa.execution import forward
from microsdpa.execution import gradients as kernels
from microsdpa.jit.signature import code_signature, signature
from microsdpa.runtime import launcher

SUITE = "backward"
DIRECTIONS = {"backward": "backward", "both": "forward and backward"}
"""What rows have for `direction`, and as a case's name."""
FLOPS = {"backward": 10, "both": 14}
"""Of a score and a column of D: two for each of five products, and for each of the forward pass's two."""
GRADIENT_FACTOR = 4
"""Times the error of plain arithmetic that a gradient may have: a backward rounds P and dS too."""
JUDGED_SCORES = 2**28
"""Scores of the heads whose gradients are held against FP64."""


class OwnKernels(Microsdpa):
    """This library's forward pass, and its own gradients whatever torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.variant = OWN_KERNELS

    def identity(self, case: Case, tensors: Tensors) -> dict[str, object]:
        """The kernel that sums the gradients."""
        made = torch.empty_like(tensors[0]), tensors[0].new_empty(tensors[0].shape[:3], dtype=torch.float32)
        masks = masks_of(case, tensors[0].device.type)
        of = kernels.described((made[0], None), tensors, made, case.causal, case.scale, masks, ())
        problem = of.problem(launcher.target_of_device(tensors[0].device))
        spec = kernels.summing(problem, kernels.choose(problem, torch.are_deterministic_algorithms_enabled()))
        signatures = {"signature": signature(spec, problem.target)}
        signatures["code_signature"] = code_signature(spec, problem.target)
        kind = {"mask_kind": dataclasses.asdict(problem.mask)} if problem.mask else {}
        return {"kernel": spec.name, **signatures, **kind}

    def calls(self, case: Case, tensors: Tensors, weight: torch.Tensor) -> dict[str, Call]:
        """What is timed in each direction."""
        masks = masks_of(case, tensors[0].device.type)
        options = Options(False, case.causal, case.scale, True, masks.window, masks.softcap)
        given = mask_tensors(masks.attn_mask, masks.alibi_slopes, masks.sinks)

        def attend() -> Any:
            return forward.attend(tensors, given, options, True)

        def backward(result: Any) -> list[torch.Tensor]:
            rest = case.causal, case.scale, masks, ()
            return kernels.compute(kernels.described((weight, None), tensors, result, *rest))

        made = attend()
        return {"backward": lambda: backward(made), "both": lambda: backward(attend())}


def run(
    cases: Sequence[Case],
    peers: str,
    advance: Callable[[str], None] = lambda message: None,
    keep: Callable[[list[results.Row]], None] = lambda rows: None,
    until: float | None = None,
) -> list[results.Row]:
    """Rows of every case, direction and implementation, on the current CUDA device; `keep` is given those so far.

    After the time `until`, in seconds since the epoch, no case begins.
    """
    rows: list[results.Row] = []
    implementations = [OwnKernels(), Microsdpa(), *choose(peers, False)]
    for case in cases:
        if until is not None and time.time() > until:
            break
        rows += _measure(case, implementations)
        keep(rows)
        advance(str(case))
        torch.cuda.empty_cache()
    return rows


def _measure(case: Case, implementations: Sequence[Implementation]) -> list[results.Row]:
    tensors = make(case, "cuda")
    weight = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(5)).to(tensors[0])
    exact, plain = expected(case, tensors, weight)
    rows: list[results.Row] = []
    calls: dict[int, dict[str, Call]] = {}
    fields: dict[int, dict[str, object]] = {}
    for index, one in enumerate(implementations):
        fields[index] = {"impl": one.name, "version": one.version, "variant": one.variant, "op": "sdpa"}
        fields[index] |= {"inputs": case.dtype, "kind": case.kind, "mode": "graph"}
        reason = one.absence or one.refuses(case) or ("" if one.takes_masks or not case.masks else "it takes no masks")
        if not reason:
            try:
                with torch.no_grad():
                    fields[index] |= one.identity(case, tensors)
                calls[index] = _calls(one, case, tensors, weight)
                with one.context():
                    fields[index]["error"], reason = check(calls[index]["both"](), exact, plain)
            except Exception as failure:  # a row says so, and the others are measured
                torch.cuda.synchronize()
                reason = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure) else ''}"
        if reason:
            calls.pop(index, None)
            status = "wrong" if "error" in fields[index] or isinstance(one, Microsdpa) else "unavailable"
            refused = fields[index] | {"status": status, "reason": reason[:240]}
            rows += [
                results.row(case, **refused, direction=direction, case=name) for direction, name in DIRECTIONS.items()
            ]
    for direction, label in DIRECTIONS.items():
        runners = {}
        for index, found in calls.items():
            with implementations[index].context():
                runners[str(index)] = timing.GraphRunner([found[direction]])
                runners[str(index)].sustain()

        def turn_of(name: str, turn: Callable[[], list[float]]) -> list[float]:
            with implementations[int(name)].context():
                return turn()

        for name, samples in timing.interleave(runners, 0, turn_of).items():
            measured = statistics.summary(samples)
            tflops = flops(case, direction) / statistics.median(samples).value / 1e6
            named = {"tflops": tflops, "direction": direction, "case": label, "settled_ms": timing.SETTLING_US / 1e3}
            rows.append(results.row(case, **fields[int(name)], **measured, **named))
    return rows


def _calls(one: Implementation, case: Case, tensors: Tensors, weight: torch.Tensor) -> dict[str, Call]:
    """What is timed in each direction. Nodes remember their stream, which has to be the one that is captured."""
    if isinstance(one, OwnKernels):
        return one.calls(case, tensors, weight)
    side = graphs.capture_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.enable_grad(), one.context():
        leaves: Any = tuple(tensor.detach().requires_grad_() for tensor in tensors)
        attend = one.bind(case, leaves, torch.empty_like(tensors[0]))
        made = one.decode(attend())

    def backward() -> Any:
        return torch.autograd.grad(made, leaves, weight, retain_graph=True)

    def both() -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(one.decode(attend()), leaves, weight)

    return {"backward": backward, "both": both}


def flops(case: Case, direction: str) -> int:
    """Floating-point operations as they are quoted: 10 or 14 * B * H * S_q * S_k * D, halved when causal."""
    scores = case.batch * case.heads * case.seqlen_q * case.seqlen_k
    return FLOPS[direction] * scores * case.head_dim // (2 if case.causal else 1)


def expected(
    case: Case, tensors: Tensors, weight: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Gradients of the first key heads of the first batch entry: by the oracle, and by plain arithmetic.

    Other heads and entries have no part in them.
    """
    group = case.heads // case.kv_heads
    heads_kv = max(1, min(case.kv_heads, JUDGED_SCORES // (group * case.seqlen_q * case.seqlen_k)))
    heads = heads_kv * group
    query, key, value = tensors
    chosen = query[:1, :heads], key[:1, :heads_kv], value[:1, :heads_kv]
    masks = {
        name: _of_heads(name, mask, case, heads) if isinstance(mask, torch.Tensor) else mask
        for name, mask in make_masks(case, query.device.type).items()
    }

    def through(function: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in chosen]
        with torch.enable_grad():
            out = function(*leaves, causal=case.causal, scale=case.scale, **masks)[0]
            return torch.autograd.grad(out, leaves, weight[:1, :heads].to(out.dtype))

    return through(reference.oracle, torch.float64), through(reference.eager, query.dtype)


def _of_heads(name: str, tensor: torch.Tensor, case: Case, heads: int) -> torch.Tensor:
    """The part of a mask, of slopes [B, H] or of sinks [H] that the first heads of the first batch entry have."""
    if name == "sinks":
        return tensor[:heads]
    if name == "alibi_slopes" or tensor.dim() == 4:
        return tensor[:1, :heads]
    return tensor[:heads] if tensor.dim() == 3 and tensor.shape[0] == case.heads else tensor


def check(
    found: Sequence[torch.Tensor], exact: tuple[torch.Tensor, ...], plain: tuple[torch.Tensor, ...]
) -> tuple[dict[str, object], str]:
    """The error of the gradients that is the largest part of what is allowed, and what is wrong or empty.

    Four times the error of plain arithmetic is allowed, and one rounding.
    """
    worst: tuple[float, dict[str, object], str] = (-1.0, {}, "")
    for name, got, want, rough in zip(("query", "key", "value"), found, exact, plain, strict=True):
        errors = compare.measure(got[:1, : want.shape[1]], want)
        unit = compare.UNIT_ROUNDOFF[got.dtype] * float(want.abs().max())
        allowed = GRADIENT_FACTOR * float((rough.double() - want).abs().max()) + unit
        wrong = "" if errors.max_abs <= allowed else f"the gradient of {name} is off by {errors.max_abs:.3g}"
        record = compare.as_record(errors, compare.tolerance(rough, want, got.dtype))
        worst = max(worst, (errors.max_abs / allowed, record, wrong), key=lambda one: one[0])
    return worst[1], worst[2]
