"""The comparator: how far an output is from the oracle, and how far it may be.

The tolerance is never picked by hand: it is twice the error of the same-dtype eager reference, plus one rounding.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

UNIT_ROUNDOFF = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float8_e4m3fn: 2.0**-4,
}


@dataclass(frozen=True)
class Errors:
    """Distance of an output from the oracle.

    Attributes:
        max_abs: largest absolute difference; infinite when NaN or infinities stand in other places than the oracle's.
        rmse: root of the mean squared difference.
        rel_l1: sum of absolute differences over the sum of the oracle's absolute values.
        cosine: cosine similarity of the two, flattened.
        worst: coordinate of the largest difference, or of the first misplaced NaN or infinity.
    """

    max_abs: float
    rmse: float
    rel_l1: float
    cosine: float
    worst: tuple[int, ...]


@dataclass(frozen=True)
class Tolerance:
    """What an output may differ from the oracle by, in each measure."""

    max_abs: float
    rmse: float
    rel_l1: float

    def admits(self, errors: Errors) -> bool:
        """Whether `errors` are within the tolerance; NaN never is."""
        return errors.max_abs <= self.max_abs and errors.rmse <= self.rmse and errors.rel_l1 <= self.rel_l1


def measure(actual: torch.Tensor, expected: torch.Tensor) -> Errors:
    """Compare `actual` with the oracle's `expected`, of one shape; positions of NaN and infinity come first."""
    if actual.shape != expected.shape:
        raise ValueError(f"actual: expected shape {list(expected.shape)}, got {list(actual.shape)}")
    if actual.numel() == 0:
        return Errors(0.0, 0.0, 0.0, 1.0, ())
    a, e = actual.double(), expected.double()
    misplaced = (a.isnan() != e.isnan()) | (a.isposinf() != e.isposinf()) | (a.isneginf() != e.isneginf())
    if misplaced.any():
        nan = math.nan
        return Errors(math.inf, nan, nan, nan, _coordinate(int(misplaced.flatten().int().argmax()), actual.shape))
    finite = e.isfinite()
    a, e = a.where(finite, 0.0), e.where(finite, 0.0)
    difference = (a - e).abs()
    total = float(e.abs().sum())
    norms = float(a.norm() * e.norm())
    absolute = float(difference.sum())
    return Errors(
        max_abs=float(difference.max()),
        rmse=float((difference.square().sum() / finite.sum().clamp(min=1)).sqrt()),
        rel_l1=absolute / total if total else (math.inf if absolute else 0.0),
        cosine=float((a * e).sum()) / norms if norms else (1.0 if float(a.norm()) == float(e.norm()) else 0.0),
        worst=_coordinate(int(difference.argmax()), actual.shape),
    )


def tolerance(reference: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> Tolerance:
    """Twice the error of the same-dtype eager `reference`, plus one rounding to `dtype` of the oracle's values.

    Raises:
        ValueError: the reference has NaN or infinities where the oracle has none, so it bounds nothing.
    """
    errors = measure(reference, expected)
    if not math.isfinite(errors.max_abs):
        raise ValueError(f"reference: not finite at {errors.worst}, where the oracle is")
    finite = expected.double().where(expected.isfinite(), 0.0)
    roundoff = UNIT_ROUNDOFF[dtype]
    rms = float((finite.square().sum() / expected.isfinite().sum().clamp(min=1)).sqrt())
    return Tolerance(
        max_abs=2 * errors.max_abs + roundoff * float(finite.abs().max()) if finite.numel() else 0.0,
        rmse=2 * errors.rmse + roundoff * rms,
        rel_l1=2 * errors.rel_l1 + roundoff,
    )


def as_record(errors: Errors, allowed: Tolerance) -> dict[str, object]:
    """The `error` object of a result file."""
    record: dict[str, object] = {k: v for k, v in asdict(errors).items() if k != "worst"}
    # JSON has no NaN or infinity.
    record = {k: v if isinstance(v, float) and math.isfinite(v) else None for k, v in record.items()}
    return record | {"worst": list(errors.worst), "tolerance": asdict(allowed)}


def _coordinate(flat: int, shape: torch.Size) -> tuple[int, ...]:
    coordinate: list[int] = []
    for size in reversed(shape):
        coordinate.append(flat % size)
        flat //= size
    return tuple(reversed(coordinate))
