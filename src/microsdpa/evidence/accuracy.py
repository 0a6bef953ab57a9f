"""Accuracy of 8-bit attention against the FP64 oracle: by kind of input, by length, and of the dequantized values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

import microsdpa
from microsdpa import reference
from microsdpa.evidence import compare, minilm, results, signatures, verify_eight_bit
from microsdpa.evidence.inputs import Case, Kind, make
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.evidence.wording import provenance
from microsdpa.kernels import emulated_target
from microsdpa.kernels.problem import PRECISIONS, Precision, target_of
from microsdpa.kernels.quantize.spec import SCHEMES
from microsdpa.runtime import launcher

KINDS: tuple[Kind, ...] = ("normal", "outliers", "key_bias")
SEEDS = 5
LENGTHS = (512, 2048, 8192, 32_768)
MISSION_ROWS = 512
GROWTH = 1.1
"""Relative error at any length over that at 512 keys, at most, or over that of exact sums there: a kernel for few keys
may not round probabilities to 8 bits. Among few keys the largest probability, which is exact, weighs more, so that
exact sums of the same quantized values show some growth too."""
SUMS = 1.02
"""Relative error at any length over that of exact sums of the same quantized values, at most."""
MOST_OF_16_BITS = 5e-3
"""Largest absolute error on the dequantized values with P in 16 bits, beside the rounding of the output."""

Gate = tuple[float, float]
"""Largest RMSE and relative L1, of the mean over the seeds."""

# Of "fp8" nothing is asked in relative L1; of "fp8_fast" no more than FlashAttention-3 has in E4M3: .0524 of normal
# inputs, .0739 of outliers, .124 of a biased key. int8_fp16 has a third of what int8_fp8 is found to have.
GATES: dict[tuple[str, str], Gate] = {
    ("fp8", "normal"): (0.0039, torch.inf),
    ("fp8", "outliers"): (0.0100, torch.inf),
    ("fp8", "key_bias"): (0.0045, torch.inf),
    ("fp8_fast", "normal"): (0.0042, 0.0524),
    ("fp8_fast", "outliers"): (0.0135, 0.0650),
    ("fp8_fast", "key_bias"): (0.0042, 0.0524),
    ("int8_fp8", "normal"): (0.0027, 0.0372),
    ("int8_fp8", "outliers"): (0.0068, 0.0420),
    ("int8_fp8", "key_bias"): (0.0027, 0.0372),
}
ADVANTAGE = 3.0


@dataclass(frozen=True)
class Measured:
    """One precision on one case.

    Attributes:
        on_quantized: beside the oracle on the dequantized values; None where that was not looked at.
    """

    precision: Precision
    case: Case
    errors: compare.Errors
    on_quantized: OnQuantized | None = None


@dataclass(frozen=True)
class OnQuantized:
    """What is left once the quantized values are taken for granted: rounding P and the output, and the sums.

    Attributes:
        errors: against the oracle on the dequantized values.
        share: largest error of an output over what verify allows it: the rounding of P and of itself, and 13 bits of
            each sum.
        exact_sums: relative L1 against the original tensors of these values, with P rounded and everything else exact.
    """

    errors: compare.Errors
    share: float
    exact_sums: float


def measure(precision: Precision, case: Case, device: str) -> Measured:
    """Quantize and attend, on the GPU or in the emulator, and compare with the oracle on the original tensors."""
    tensors = make(case, device)
    expected, _ = reference.oracle(*tensors, causal=case.causal)
    out = microsdpa.sdpa(
        *tensors,
        precision=precision,
        causal=case.causal,
        impl="auto" if device == "cuda" else "emulate",
    )
    assert isinstance(out, torch.Tensor)
    looked_at = case.seed == 0 or case.seqlen_q != MISSION_ROWS
    beside = _on_quantized(precision, case, tensors, out, expected) if looked_at else None
    return Measured(precision, case, compare.measure(out, expected), beside)


def _on_quantized(
    precision: Precision,
    case: Case,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    expected: torch.Tensor,
) -> OnQuantized:
    _, plain = verify_eight_bit.specified(tensors, SCHEMES[precision])
    of_dequantized, _ = reference.oracle(*plain, causal=case.causal)
    allowed = verify_eight_bit.allowed(plain, case, SCHEMES[precision].operands, of_dequantized)
    query, key, value = plain
    scores = query @ key.mT * case.head_dim**-0.5
    exponentials = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    # As the kernels do: the largest is 256, or 1 in 16 bits, and the sum is that of the unrounded ones.
    rounded = exponentials.half().double()
    if precision != "int8_fp16":
        rounded = (256 * exponentials.float()).to(torch.float8_e4m3fn).double() / 256
    exact_sums = rounded @ value / exponentials.sum(dim=-1, keepdim=True)
    return OnQuantized(
        errors=compare.measure(out, of_dequantized),
        share=float(((out.double() - of_dequantized).abs() / allowed).max()),
        exact_sums=compare.measure(exact_sums, expected).rel_l1,
    )


def cases(seeds: int) -> list[Case]:
    """The headline shape in every kind, and then 32 queries of every head for every number of keys."""
    mission = [Case(1, 8, 512, 512, 64, kind=kind, seed=seed) for kind in KINDS for seed in range(seeds)]
    return mission + [Case(1, 8, 32, length, 64, seed=100) for length in LENGTHS]


def gate(precision: str, kind: str, found: dict[tuple[str, str], Gate]) -> Gate:
    """What a precision may have on a kind of input."""
    if precision != "int8_fp16":
        return GATES[precision, kind]
    rmse, rel_l1 = found["int8_fp8", kind]
    return rmse / ADVANTAGE, rel_l1 / ADVANTAGE


def means(measured: Iterable[Measured]) -> dict[tuple[str, str], Gate]:
    """Mean RMSE and relative L1 over the seeds, of every precision and kind at the headline shape."""
    groups: dict[tuple[str, str], list[compare.Errors]] = {}
    for m in measured:
        if m.case.seqlen_q == MISSION_ROWS:
            groups.setdefault((m.precision, m.case.kind), []).append(m.errors)
    return {key: (fmean(e.rmse for e in g), fmean(e.rel_l1 for e in g)) for key, g in groups.items()}


def failures(measured: list[Measured]) -> list[str]:
    """Every gate that does not hold, in words."""
    found, wrong = means(measured), []
    for (precision, kind), (rmse, rel_l1) in found.items():
        most = gate(precision, kind, found)
        if not (rmse <= most[0] and rel_l1 <= most[1]):
            wrong.append(
                f"{precision}, {kind}: RMSE {rmse:.5f} of {most[0]:.5f}, rel. L1 {rel_l1:.4f} of {most[1]:.4f}"
            )
    for precision in PRECISIONS:
        lengths = [m for m in measured if m.case.seqlen_q != MISSION_ROWS and m.precision == precision]
        for m in lengths[1:]:
            beside = lengths[0].on_quantized
            first = max(lengths[0].errors.rel_l1, beside.exact_sums if beside else 0.0)
            if not m.errors.rel_l1 <= GROWTH * first:
                wrong.append(f"{precision}: relative error grows from {first} to {m.errors.rel_l1}")
    for m in measured:
        if m.on_quantized is None:
            continue
        if not m.errors.rel_l1 <= SUMS * m.on_quantized.exact_sums:
            wrong.append(
                f"{m.precision}, {m.case}: {m.errors.rel_l1} is more than exact sums' {m.on_quantized.exact_sums}"
            )
        if not m.on_quantized.share <= 1:
            wrong.append(
                f"{m.precision}, {m.case}: {m.on_quantized.share:.2f} of what rounding P and the output explains"
            )
        if m.precision == "int8_fp16" and not m.on_quantized.errors.max_abs <= MOST_OF_16_BITS + _roundoff(m):
            wrong.append(f"{m.precision}, {m.case}: {m.on_quantized.errors.max_abs} on the dequantized values")
    return wrong


def _roundoff(measured: Measured) -> float:
    """Of the largest output that a case can have."""
    value = make(measured.case)[2]
    return compare.UNIT_ROUNDOFF[value.dtype] * float(value.abs().max())


def step(progress: Progress = no_progress, seeds: int = SEEDS, output: Path | None = None, command: str = "") -> Step:
    """Measure everything, hold it against the gates, and write the result file."""
    device = "cpu" if launcher.device_error() else "cuda"
    target = target_of(torch.cuda.get_device_capability()) if device == "cuda" else emulated_target("auto")
    chosen = [(precision, case) for case in cases(seeds) for precision in PRECISIONS]
    absence = minilm.absence()
    advance = progress("accuracy", len(chosen) + (0 if absence else len(PRECISIONS) * len(minilm.TEXTS)))
    measured = []
    for precision, case in chosen:
        measured.append(measure(precision, case, device))
        advance(f"{precision} {case}")
    real: minilm.Found = ([], []) if absence else minilm.measure(device, advance=advance)
    wrong = failures(measured) + minilm.failures(real)
    rows = [as_row(m, target) for m in measured] + minilm.as_rows(real, target)
    result = results.make("accuracy", command, rows)
    where = "on the GPU" if device == "cuda" else "in the emulator, on the CPU"
    summary = "; ".join(wrong) or f"every gate holds for {', '.join(PRECISIONS)} {where}"
    summary += f"; {absence}" if absence else ""
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    sections = [("Against the dequantized values", quantized_lines(result))]
    sections += [("By the number of keys", lengths_lines(result))]
    sections += [] if absence else [(f"{minilm.NAME}, a real model on real text", minilm.table_lines(result))]
    return Step("accuracy", "failed" if wrong else "passed", summary, kinds_lines(result), sections, data=result)


def as_row(measured: Measured, target: str) -> results.Row:
    """The row of a result file."""
    case, errors = measured.case, measured.errors
    allowed = GATES.get((measured.precision, case.kind), (torch.inf, torch.inf))
    row = results.row(
        case,
        version=microsdpa.__version__,
        op="quantize+sdpa",
        dtype=measured.precision,
        inputs=case.dtype,
        kind=case.kind,
        seed=case.seed,
        mode="verify",
        target=target,
        error=compare.as_record(errors, compare.Tolerance(torch.inf, *allowed)) | {"tolerance": {}},
    )
    if beside := measured.on_quantized:
        row["on_codes"] = {"max_abs": beside.errors.max_abs, "rel_l1": beside.errors.rel_l1}
        row["on_codes"] |= {"share": beside.share, "exact_sums": beside.exact_sums}
    return row | signatures.of_precision(measured.precision, row["shape"], case.dtype, row["mask"], target)


def _is_stale(row: results.Row) -> bool:
    return signatures.is_stale(row | {"precision": row["dtype"]}, row["target"])


def _synthetic(result: results.Result) -> list[results.Row]:
    return [row for row in result["rows"] if not row.get("model")]


def kinds_lines(result: results.Result) -> list[list[str]]:
    """Mean RMSE and relative L1 by precision and kind of input."""
    rows = [row for row in _synthetic(result) if row["shape"]["s_q"] == MISSION_ROWS]
    lines = [["precision", *(f"{kind}: RMSE / rel. L1, worst RMSE" for kind in KINDS)]]
    for precision in dict.fromkeys(row["dtype"] for row in rows):
        cells = []
        for kind in KINDS:
            errors = [row["error"] for row in rows if row["dtype"] == precision and row["kind"] == kind]
            mean = [fmean(e[name] for e in errors) for name in ("rmse", "rel_l1")]
            cells.append(f"{mean[0]:.5f} / {mean[1]:.4f}, {max(e['rmse'] for e in errors):.5f}")
        stale = any(_is_stale(row) for row in rows if row["dtype"] == precision)
        lines.append([f'`precision="{precision}"`{" (stale)" if stale else ""}', *cells])
    return lines


def lengths_lines(result: results.Result) -> list[list[str]]:
    """Relative L1 by precision and number of keys."""
    rows = [row for row in _synthetic(result) if row["shape"]["s_q"] != MISSION_ROWS]
    lengths = sorted({row["shape"]["s_k"] for row in rows})
    lines = [["relative L1 with", *(f"{length:,} keys" for length in lengths)]]
    for precision in dict.fromkeys(row["dtype"] for row in rows):
        mine = {row["shape"]["s_k"]: row for row in rows if row["dtype"] == precision}
        found = [mine[length] for length in lengths]
        lines.append([f'`precision="{precision}"`', *(f"{row['error']['rel_l1']:.4f}" for row in found)])
        if all(row.get("on_codes") for row in found):
            lines.append(["the same, exact sums", *(f"{row['on_codes']['exact_sums']:.4f}" for row in found)])
    return lines


def quantized_lines(result: results.Result) -> list[list[str]]:
    """Largest absolute error on the dequantized values, and its share of the bound, by precision and kind."""
    rows = [row for row in _synthetic(result) if row["shape"]["s_q"] == MISSION_ROWS and row.get("on_codes")]
    if not rows:
        return [["precision"]]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = [["on the dequantized values", *(f"{kind}: max abs / rel. L1, share of the bound" for kind in kinds)]]
    for precision in dict.fromkeys(row["dtype"] for row in rows):
        found = {row["kind"]: row["on_codes"] for row in rows if row["dtype"] == precision}
        cells = [f"{found[k]['max_abs']:.4f} / {found[k]['rel_l1']:.4f}, {found[k]['share']:.0%}" for k in kinds]
        lines.append([f'`precision="{precision}"`', *cells])
    return lines


TABLES = {"quantized": quantized_lines, "kind": kinds_lines, "length": lengths_lines, "model": minilm.table_lines}


def markdown(result: results.Result, options: dict[str, str]) -> str:
    """A table of a page: by=kind (also without by=), by=quantized, by=length or by=model."""
    lines = TABLES[options.get("by", "kind")](result)
    if len(lines) == 1 and options.get("by") == "quantized":
        return f"*Not in the result file of `{result['command']}`: it was written before this was looked at.*\n"
    if len(lines) == 1:
        return f"*Not in the result file of `{result['command']}`: {minilm.NAME} needs `{minilm.INSTALL}`.*\n"
    ruled = [lines[0], ["---"] + ["---:"] * (len(lines[0]) - 1), *lines[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in ruled) + f"\n{provenance(result)}"
