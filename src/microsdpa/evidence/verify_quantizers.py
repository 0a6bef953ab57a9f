"""Verification of what 8-bit attention is made of: the quantizers, both products, and every rung with 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import get_args

import torch

import microsdpa
from microsdpa import reference
from microsdpa.attention.quantize import Format, Granularity, decode, encode
from microsdpa.call.scales import FORMAT_DTYPE
from microsdpa.evidence import compare, fp8_products, survey, verify_eight_bit
from microsdpa.evidence.inputs import TORCH_DTYPE, Case, make
from microsdpa.evidence.peers.ours import WIDE_PROBABILITIES, QuantizedTensors
from microsdpa.evidence.verify_eight_bit import LSE_TOLERANCE, SUM_BITS, allowed
from microsdpa.kernels import EIGHT_BIT_FAMILIES, Family, KernelSpec
from microsdpa.kernels.problem import PRECISIONS
from microsdpa.kernels.quantize.spec import SCHEMES, fused_for, restore_lse
from microsdpa.kernels.select import select

Part = tuple[str, Callable[[], str]]
"""What is checked, and the check: why it failed, empty when it passed."""

MOST_RAW, MOST_SCALED = 0.008, 0.001
"""Largest error of Q K^T of 4 x 8 x 64 as it is, and scaled by 1/8."""
MOST_OF_16_BITS = 5e-3
"""Largest error with P in 16 bits or more on the dequantized values, beside the rounding of the output."""
GEMM_SIZES = ((1, 1, 1), (65, 63, 33), (7, 130, 200), (128, 192, 320))
SCORE_SIZES = ((1, 512, 512, 64), (3, 37, 70, 32), (2, 65, 129, 128))
RUNG_CASES = (
    Case(1, 2, 130, 200, 64),
    Case(1, 4, 70, 133, 32, heads_kv=2, causal="lower_right"),
    Case(1, 1, 133, 70, 128, dtype="bfloat16", causal="upper_left"),
)
MISSION = Case(1, 8, 512, 512, 64)


def parts(device: str) -> list[Part]:
    """Every part, on the GPU or in the emulator, where the headline shape would take minutes."""
    cases = (*RUNG_CASES, MISSION) if device == "cuda" else RUNG_CASES
    found = [*_quantizers(device), *_products(device)]
    names = [family.name for family in rungs()]
    return found + [
        (f"{rung}, quantized values, {case}", _rung(rung, case, device)) for rung in names for case in cases
    ]


def kernels(target: str) -> set[KernelSpec]:
    """What `verify --precision all` runs on a target, cases of both parts."""
    found = {fp8_products.specification(scores) for scores in (False, True)}
    for case in (*RUNG_CASES, MISSION):
        quantized = replace(case.problem(target), operands="fp8", key_block=0)
        found |= {spec for rung in rungs() if isinstance(spec := rung.specify(quantized), KernelSpec)}
    for case, precision in product(verify_eight_bit.cases(), PRECISIONS):
        if not verify_eight_bit.computed_by("auto", case, precision, target):
            continue
        problem = verify_eight_bit.problem_of(case, precision, target)
        found |= {select(problem, "auto").spec, fused_for(SCHEMES[precision], problem)}
        found.add(restore_lse(case.dtype, case.head_dim))
    return found


def compile_ahead(target: str) -> None:
    """Compile all of that in parallel: one after another takes minutes."""
    survey.compile_together((spec, target) for spec in kernels(target))


def rungs() -> list[Family]:
    """Those of the ladder that take quantized values, and Ada's kernel."""
    families = [family for family in EIGHT_BIT_FAMILIES if family.name.startswith(("ladder/", "ada/"))]
    return sorted(families, key=lambda family: family.name)


def _quantizers(device: str) -> Iterator[Part]:
    x = make(Case(2, 3, 70, 70, 32, kind="outliers"))[0]
    halves = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.float16).view(1, 1, 1024, 64)
    for format in get_args(Format):
        for granularity in get_args(Granularity):
            yield f"quantize {format} {granularity}", _same_values(x, format, granularity, device)
            yield f"quantize {format} {granularity}, every half", _same_values(halves, format, granularity, device)
        yield f"all quantized values of {format}", _round_trip(format, device)


def _same_values(x: torch.Tensor, format: Format, granularity: Granularity, device: str) -> Callable[[], str]:
    """Whether the device makes the CPU's quantized values and scales, bit for bit."""

    def check() -> str:
        here, there = (
            microsdpa.quantize(one, format, granularity, block=16, allow_nonfinite=True) for one in (x, x.to(device))
        )
        for name in ("values", "scale"):
            wanted, got = (getattr(one, name).cpu().flatten().view(torch.uint8) for one in (here, there))
            if not torch.equal(wanted, got):
                return f"{name} differ from the CPU's"
        return ""

    return check


def _round_trip(format: Format, device: str) -> Callable[[], str]:
    """Whether each of the 256 values comes back from the value that it stands for."""

    def check() -> str:
        quantized = torch.arange(256, dtype=torch.uint8).view(FORMAT_DTYPE[format]).to(device)
        back, wanted = (
            encode(decode(quantized, format), format).view(torch.uint8).cpu(),
            torch.arange(256, dtype=torch.uint8),
        )
        if format == "e4m3":
            wanted[0xFF] = 0x7F  # NaN has one encoding
        if format == "int8":
            wanted[0x80] = 0x81  # -128 is never made
        return (
            ""
            if torch.equal(back, wanted)
            else f"quantized values {(back != wanted).nonzero().flatten().tolist()} do not"
        )

    return check


def _quantized(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


def _products(device: str) -> Iterator[Part]:
    for m, n, k in GEMM_SIZES:
        yield f"FP8 GEMM {m} x {n} x {k}", _gemm(m, n, k, device)
    for size in SCORE_SIZES:
        yield f"FP8 Q K^T {' x '.join(map(str, size))}", _scores(*size, device=device)
    for scale, most in ((1.0, MOST_RAW), (0.125, MOST_SCALED)):
        yield f"FP8 Q K^T 4 x 8 x 64 scaled by {scale:g}", _scores(1, 4, 8, 64, scale=scale, most=most, device=device)


def _gemm(m: int, n: int, k: int, device: str) -> Callable[[], str]:
    def check() -> str:
        a, b = _quantized(m, k, seed=0), _quantized(k, n, seed=1)
        found = fp8_products.gemm(a.to(device), b.to(device), a_scale=0.5, b_scale=0.125).cpu()
        return _beyond(found, a.double() * 0.5, b.double() * 0.125)

    return check


def _scores(
    heads: int, rows: int, keys: int, head_dim: int, *, device: str, scale: float | None = None, most: float = torch.inf
) -> Callable[[], str]:
    def check() -> str:
        query, key = _quantized(heads, rows, head_dim, seed=0), _quantized(heads, keys, head_dim, seed=1)
        factor = head_dim**-0.5 if scale is None else scale
        found = fp8_products.scores(query.to(device), key.to(device), factor).cpu()
        expected = query.double() @ key.double().mT * factor
        error = float((found.double() - expected).abs().max())
        if not error <= most:
            return f"error {error:.2g}, {most} allowed"
        return _beyond(found, query.double() * factor, key.double().mT)

    return check


def _beyond(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> str:
    """Why a product is wrong: one rounding to FP16, and SUM_BITS of the summed magnitudes, are allowed."""
    expected = a @ b
    bound = 2**-11 * expected.abs() + 2**-SUM_BITS * (a.abs() @ b.abs()) + 2**-25
    share = float(((found.double() - expected).abs() / bound).max())
    return "" if share <= 1 else f"{share:.2f} of what is allowed"


def _rung(rung: str, case: Case, device: str) -> Callable[[], str]:
    """Whether a rung's output and LSE are those of the dequantized values."""

    def check() -> str:
        made = QuantizedTensors.of(make(case))
        plain = tuple(tensor.double() for tensor in made.dequantized())
        expected, expected_lse = reference.oracle(*plain, causal=case.causal)
        dtype = TORCH_DTYPE[case.dtype]
        out = torch.full(expected.shape, torch.nan, dtype=dtype, device=device)
        _, lse = microsdpa.sdpa(
            *(quantized.to(device) for quantized in made.values),
            **{name: scale.to(device) for name, scale in made.scales.items()},
            causal=case.causal,
            enable_gqa=True,
            return_lse=True,
            out=out,
            impl=rung if device == "cuda" else f"emulate:{rung}",
        )
        error = (out.cpu().double() - expected).abs()
        if rung in WIDE_PROBABILITIES:
            bound = MOST_OF_16_BITS + compare.UNIT_ROUNDOFF[dtype] * expected.abs()
        else:
            bound = allowed(plain, case, "fp8", expected)
        if not (error <= bound).all():
            return f"error {float(error.max()):.2g}, beyond its bound"
        lse_error = compare.measure(lse.cpu(), expected_lse)
        largest = float(expected_lse.where(expected_lse.isfinite(), 0).abs().max())
        return "" if lse_error.max_abs <= LSE_TOLERANCE * max(1.0, largest) else f"LSE differs: {lse_error}"

    return check
