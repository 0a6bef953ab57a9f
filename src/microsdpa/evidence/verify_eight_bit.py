"""Verification of sdpa(precision=): its quantized values bit for bit, its output against the oracle on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch.nn.functional import pad

import microsdpa
from microsdpa import reference
from microsdpa.attention.quantize import (
    RESIDUAL_STEPS,
    bound_of_heads,
    decode,
    divided,
    encode,
    expand_scale,
    mean_of_rows,
    residual,
    rotate,
    scales,
)
from microsdpa.call.tensors import check_impl
from microsdpa.emulate.run import Report, Schedule, one_kernel, scheduled
from microsdpa.errors import UnsupportedProblem
from microsdpa.evidence import compare
from microsdpa.evidence.cases import NOTE_SHAPES
from microsdpa.evidence.inputs import Case, make
from microsdpa.evidence.short_sums import allowed_of_values, lost_of_scores
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.execution.quantized import Place, QuantizedInputs, attending, quantize_query_key_value
from microsdpa.kernels import KernelSpec, emulated_target, family_named
from microsdpa.kernels.hopper.throughput_8bit.spec import LARGEST_VALUE
from microsdpa.kernels.problem import PRECISIONS, Operands, Precision, Problem
from microsdpa.kernels.quantize.spec import SCHEMES, QuantizationScheme
from microsdpa.kernels.select import select
from microsdpa.runtime import launcher

SUM_BITS = 13
"""Bits of the summed magnitudes that an 8-bit floating-point product keeps at least."""
FP32_BITS = 22
"""Bits of a score that FP32 keeps, whose products are as wgmma sums them."""
LSE_TOLERANCE = 1e-4
NO_MASKS: Mapping[str, Any] = {}


def cases() -> list[Case]:
    """Shapes of the notes, lengths around a tile, both alignments, grouped heads, layouts, kinds and types."""
    found = [Case(b, h, s, s, d) for b, h, s, d in NOTE_SHAPES]
    found += [Case(1, 2, s, s + 7, 64, causal=causal) for s in (1, 63, 65, 130) for causal in (None, "upper_left")]
    found += [Case(2, 4, 70, 133, d, heads_kv=2, causal="lower_right", layout="bshd") for d in (32, 64, 128)]
    found += [Case(1, 2, 133, 70, d, dtype="bfloat16", causal="lower_right") for d in (32, 128, 256)]
    found += [Case(2, 4, 70, 133, 256, heads_kv=2, layout="bshd")]
    return found + [Case(1, 2, 100, 200, 64, kind=kind) for kind in ("outliers", "key_bias", "mean")]


@dataclass(frozen=True)
class Outcome:
    """One case with one precision; `failure` is empty when it passed."""

    case: Case
    precision: Precision
    errors: compare.Errors
    failure: str


def specified(
    tensors: Sequence[torch.Tensor], scheme: QuantizationScheme
) -> tuple[QuantizedInputs, tuple[torch.Tensor, ...]]:
    """Quantized inputs as quantize.py makes them, and the rotated Q, K and V in FP64 that they stand for."""
    query, key, value = (tensor.float() for tensor in tensors)
    mean = mean_of_rows(key) if scheme.smooth else None
    of_head = bound_of_heads(key, mean, scheme.format) if scheme.head_scale and mean is not None else None
    if mean is not None:
        key = key - mean[:, :, None]
    if scheme.hadamard:
        query, key = rotate(query), rotate(key)
    found = []
    for x, given in ((query, None), (key, of_head)):
        scale = scales(x, scheme.format, "block", scheme.block) if given is None else given
        wide = wide_scale(scale, scheme, x)
        y = divided(x, wide)
        found.append((y, scale, wide, encode(y, scheme.format)))
    (y, q_scale, q_wide, q_values), (_, k_scale, k_wide, k_values) = found
    plain_q = decode(q_values, scheme.format).double()
    if scheme.query_terms == 2:
        rest = residual(y, q_values, scheme.format)
        plain_q += decode(rest, scheme.format).double() / RESIDUAL_STEPS[scheme.format]
        q_values = torch.cat((q_values.view(torch.uint8), rest.view(torch.uint8)), dim=-1).view(q_values.dtype)
    plain_k = decode(k_values, scheme.format).double() * k_wide
    if scheme.value is None:
        v_values, v_scale, plain_v = tensors[2], None, value.double()
    else:
        v_scale = scales(value, scheme.value, "channel", 1)
        v_values = encode(divided(value, v_scale[:, :, None]), scheme.value)
        plain_v = decode(v_values, scheme.value).double() * v_scale[:, :, None]
    quantized = QuantizedInputs(q_values, k_values, v_values, q_scale, k_scale, v_scale, mean)
    return quantized, (plain_q * q_wide, plain_k, plain_v)


def wide_scale(scale: torch.Tensor, scheme: QuantizationScheme, rows: torch.Tensor) -> torch.Tensor:
    """Scales of Q or K in a shape that multiplies with their rows."""
    return expand_scale(scale, "head" if scale.dim() == 2 else "block", scheme.block, rows.shape)


def allowed_in_place(
    plain: Sequence[torch.Tensor],
    case: Case,
    spec: KernelSpec,
    lost: torch.Tensor | None = None,
    masks: Mapping[str, Any] = NO_MASKS,
) -> torch.Tensor | None:
    """What rounding P, and sums of P V in the accumulators of wgmma, can move each output by; None of other kernels.

    lost: what is to be added to the scores, as lost_of_scores() has it.
    masks: arguments of the oracle.
    """
    arguments = dict(spec.template_args)
    if "PROMOTED_TILES" not in arguments or arguments.get("IN_PLACE") == "false":
        return None
    moved = int(arguments["PROMOTED_TILES"]) * int(arguments["BLOCK_N"]) or case.seqlen_k
    query, key, value = (x.double() for x in plain)
    each = torch.eye(case.seqlen_k, dtype=torch.float64).expand(*key.shape[:2], -1, -1)
    probability, _ = oracle(query, key, each, case, lost, masks)
    found = torch.zeros(query.shape, dtype=torch.float64)
    for b, h in product(range(case.batch), range(case.heads)):
        h_kv = h // (case.heads // case.kv_heads)
        found[b, h] = allowed_of_values(probability[b, h], value[b, h_kv], LARGEST_VALUE, moved)
    return found


def oracle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    case: Case,
    lost: torch.Tensor | None = None,
    masks: Mapping[str, Any] = NO_MASKS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in FP64 with the alignment and scale of a case, `masks`, and scores that have `lost` added.

    lost: [B, H, S_q, S_k], added ahead of a soft cap, as a product that is summed so. Key j gets a channel for it.
    """
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    if lost is not None and scale != 0.0:
        each = torch.eye(key.shape[2], dtype=torch.float64).expand(*key.shape[:2], -1, -1)
        query = torch.cat((query.double(), lost / scale), dim=-1)
        key = torch.cat((key.double(), each), dim=-1)
    columns, width = value.shape[-1], max(query.shape[-1], value.shape[-1])
    padded = (pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    out, lse = reference.oracle(*padded, causal=case.causal, scale=scale, **masks)
    return out[..., :columns], lse


def allowed(
    plain: tuple[torch.Tensor, ...],
    case: Case,
    operands: Operands,
    expected: torch.Tensor,
    spec: KernelSpec | None = None,
    lost: torch.Tensor | None = None,
    masks: Mapping[str, Any] = NO_MASKS,
) -> torch.Tensor:
    """What rounding P and the output, and dropping bits of 8-bit sums, can move each output by.

    As E4M3 a probability of largest 256 moves by a sixteenth of itself at most, or by 2^-10 where it is subnormal; the
    sum of all is at least 1. Where a kernel's sums are those of wgmma, allowed_in_place() has that part.

    lost: what the scores of `expected` have on top of the exact ones, as lost_of_scores() has it. Without it, a guess
    of what E4M3 products lose counts, which is for scores as small as those of the usual factor.
    masks: arguments of the oracle.
    """
    query, key, value = plain
    in_place = None if spec is None else allowed_in_place(plain, case, spec, lost, masks)
    magnitude, _ = oracle(query, key, value.abs(), case, lost, masks)
    output = compare.UNIT_ROUNDOFF[torch.bfloat16 if case.dtype == "bfloat16" else torch.float16]
    group = case.heads // case.kv_heads
    if operands == "int8_fp16":
        probability = output * magnitude
    elif in_place is not None:
        probability = in_place
    else:
        everything = value.abs().sum(dim=2, keepdim=True).repeat_interleave(group, dim=1)
        probability = magnitude * (2**-4 + 2**-SUM_BITS) + everything * 2**-18
    if operands == "fp8":
        largest = (query.norm(dim=-1).amax() * key.norm(dim=-1).amax()) * case.head_dim**-0.5
        bits = SUM_BITS if lost is None else FP32_BITS
        probability = probability + 2 * 2.0**-bits * largest * magnitude
    return probability + output * expected.abs() + 1e-4


def check(case: Case, precision: Precision, device: str, kernel: str = "auto") -> Outcome:
    """Quantize and attend twice, the second time into a poisoned output, by the kernel of that name."""
    tensors = make(case)
    scheme = SCHEMES[precision]
    quantized, plain = specified(tensors, scheme)
    expected, expected_lse = reference.oracle(*plain, causal=case.causal)
    query, key, value = make(case, device)
    made = quantize_query_key_value(query, key, value, scheme, device == "cpu")
    for name, wanted in vars(quantized).items():
        got = getattr(made, name)
        if wanted is not None and not torch.equal(got.cpu().contiguous().view(torch.uint8), _bytes(wanted)):
            return Outcome(case, precision, compare.measure(expected, expected), f"{name} differs from quantize()")

    options: dict[str, Any] = {"precision": precision, "causal": case.causal, "enable_gqa": True}
    options["impl"] = kernel if device == "cuda" else f"emulate:{kernel}"
    spec = microsdpa.explain(query, key, value, **options).spec
    family, lost = family_named(spec.name) if spec else None, None
    if family is not None and scheme.operands in family.short_sums:
        wide = (
            wide_scale(quantized.query_scale, scheme, plain[0]),
            wide_scale(quantized.key_scale, scheme, plain[1]),
        )
        lost = lost_of_scores((quantized.query, quantized.key), wide, case.head_dim**-0.5)
        expected, expected_lse = reference.oracle(*plain, causal=case.causal, attn_mask=lost)

    if quantized.key_mean is not None:
        mean = quantized.key_mean.repeat_interleave(case.heads // case.kv_heads, dim=1).double()
        expected_lse = expected_lse + (tensors[0].double() @ mean[..., None]).squeeze(-1) * case.head_dim**-0.5

    def run(out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        result = microsdpa.sdpa(query, key, value, return_lse=True, out=out, **options)
        assert isinstance(result, tuple)
        return result[0].cpu(), result[1].cpu()

    out, lse = run(None)
    with scheduled(Schedule(seed=1, late=False)):
        again, lse_again = run(torch.full_like(query, torch.nan))
    errors, failure = compare.measure(out, expected), ""
    lse_error = compare.measure(lse, expected_lse)
    if not ((out.double() - expected).abs() <= allowed(plain, case, scheme.operands, expected, spec, lost)).all():
        failure = f"output differs from the oracle on the dequantized values: {errors}"
    elif not lse_error.max_abs <= LSE_TOLERANCE * max(
        1.0, float(expected_lse.where(expected_lse.isfinite(), 0).abs().max())
    ):
        failure = f"LSE differs from the oracle: {lse_error}"
    elif not torch.equal(out, again) or not torch.equal(lse, lse_again):
        failure = "a second run, into a poisoned output, gave other bits"
    return Outcome(case, precision, errors, failure)


def emulated(
    spec: KernelSpec, problem: Problem, case: Case, precision: Precision, out: torch.Tensor, schedule: Schedule
) -> Report:
    """Run an attention kernel in the emulator on what `precision` makes of a case, into `out`."""
    inputs = quantize_query_key_value(*make(case), SCHEMES[precision], True)
    operands = {name: tensor for name, tensor in vars(inputs).items() if tensor is not None and name != "key_mean"}
    places = {name: Place.of(name, tensor) for name, tensor in (operands | {"out": out}).items()}
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    launch = attending(spec, problem, places, scale)
    return one_kernel(
        launch.spec, launch.grid, launch.filled, operands, {"out": out}, schedule=schedule, count_banks=True
    )


def expected(spec: KernelSpec, case: Case, precision: Precision) -> tuple[torch.Tensor, compare.Tolerance]:
    """The oracle on what the quantized operands of a case are dequantized to, and what allowed() comes to in sum."""
    _, plain = specified(make(case), SCHEMES[precision])
    found, _ = reference.oracle(*plain, causal=case.causal)
    bound = allowed(plain, case, SCHEMES[precision].operands, found, spec)
    relative = float(bound.sum() / found.abs().sum())
    return found, compare.Tolerance(float(bound.max()), float(bound.square().mean().sqrt()), relative)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def problem_of(case: Case, precision: Precision, target: str) -> Problem:
    """What sdpa(precision=) makes of a case."""
    scheme = SCHEMES[precision]
    return replace(
        case.problem(target), operands=scheme.operands, query_terms=scheme.query_terms, key_block=scheme.key_block
    )


def computed_by(kernel: str, case: Case, precision: Precision, target: str) -> bool:
    """Whether the kernel of that name computes a case on the GPU that it is for, or "auto" does on `target`."""
    family = family_named(kernel)
    if family is not None:
        return isinstance(family.specify(problem_of(case, precision, family.emulated_target)), KernelSpec)
    try:
        return bool(select(problem_of(case, precision, target), "auto"))
    except UnsupportedProblem:
        return False


def step(
    precision: str,
    progress: Progress = no_progress,
    kernel: str = "auto",
    ptx: str | None = None,
    parts: Callable[[str], list[tuple[str, Callable[[], str]]]] = lambda device: [],
) -> Step:
    """Every case with one precision, or with "all" of them, on the GPU when there is one, else in the emulator.

    With `ptx`, a target such as "sm_89", the GPU runs what its driver makes of that target's PTX. `parts` of all this
    are checked first: names, and checks that say why one fails.

    Raises:
        InvalidArgument: no 8-bit kernel is called `kernel`.
    """
    check_impl(kernel, eight_bit=True)
    reason = launcher.device_error()
    if ptx and reason:
        return Step("verify", "not run", f"PTX needs a GPU to run on: {reason}")
    launcher.use_ptx_of(ptx)
    device = "cpu" if reason else "cuda"
    everything = [(case, p) for p in PRECISIONS if precision in (p, "all") for case in cases()]
    target = emulated_target("auto") if reason else launcher.target_of_device(torch.device("cuda"))
    chosen = [(case, p) for case, p in everything if computed_by(kernel, case, p, ptx or target)]
    beside = parts(device)
    advance = progress("verify", len(chosen) + len(beside))
    found = {}
    for name, check_part in beside:
        found[name] = check_part()
        advance(name)
    outcomes = []
    for case, p in chosen:
        outcomes.append(check(case, p, device, kernel))
        advance(f"{p} {case}")
    failed = [o for o in outcomes if o.failure]
    table = [["precision", "case", "max abs error", "relative L1", "outcome"]]
    table += [
        [o.precision, str(o.case), f"{o.errors.max_abs:.2e}", f"{o.errors.rel_l1:.2e}", o.failure or "passed"]
        for o in outcomes
    ]
    where = "in the emulator, on the CPU" if reason else f"from the PTX of {ptx} on the GPU" if ptx else "on the GPU"
    summary = f"{len(outcomes) - len(failed)} of {len(outcomes)} cases with 8-bit operands passed {where}"
    if len(chosen) < len(everything):
        summary += f"; {kernel} does not compute the other {len(everything) - len(chosen)}"
    if not beside:
        return Step("verify", "failed" if failed else "passed", summary, table)
    wrong = [name for name, why in found.items() if why]
    summary += f"; {len(beside) - len(wrong)} of {len(beside)} quantizers, products and rungs on quantized values"
    lines = [["part", "outcome"], *([name, why or "passed"] for name, why in found.items())]
    sections = [("Quantizers, products and rungs on quantized values", lines)]
    return Step("verify", "failed" if failed or wrong else "passed", summary, table, sections)
