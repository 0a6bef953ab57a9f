"""What samples allow to be said: medians and ratios with bootstrap intervals, and when two times are a tie."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 20_251_120

Verdict = Literal["faster", "slower", "tie"]


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its 95% interval."""

    value: float
    low: float
    high: float

    def overlaps(self, other: Interval) -> bool:
        """Whether the two intervals share a point."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        """Such as "9.27 [9.25, 9.31]"."""
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def _check(samples: Sequence[float]) -> torch.Tensor:
    if not samples or any(not math.isfinite(sample) or sample <= 0 for sample in samples):
        raise ValueError(f"samples: expected positive finite numbers, got {list(samples)[:5]}")
    return torch.tensor(samples, dtype=torch.float64)


def _median(rows: torch.Tensor) -> torch.Tensor:
    """Median along the last dimension; of an even count the mean of the middle two."""
    ordered = rows.sort(dim=-1).values
    count = rows.shape[-1]
    return (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2


@functools.lru_cache(maxsize=16)
def _counts(count: int, salt: int) -> torch.Tensor:
    """How often each resampling takes each of `count` samples: the same in every process."""
    generator = torch.Generator().manual_seed(SEED + salt)
    picks = torch.randint(count, (RESAMPLES, count), generator=generator)
    return torch.zeros(RESAMPLES, count, dtype=torch.int32).scatter_add_(
        1, picks, torch.ones_like(picks, dtype=torch.int32)
    )


def _resampled_medians(samples: Sequence[float], salt: int) -> torch.Tensor:
    """The median of each resampling. The samples are ordered once: where its middle lies is counted."""
    ordered, order = _check(samples).sort()
    count = len(samples)
    up_to = _counts(count, salt)[:, order].cumsum(1, dtype=torch.int32)  # how many it has of the samples up to each
    low, high = ((up_to <= middle).sum(1) for middle in ((count - 1) // 2, count // 2))
    return (ordered[low] + ordered[high]) / 2


def _percentiles(estimates: torch.Tensor) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = estimates.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def median(samples: Sequence[float]) -> Interval:
    """Median with its percentile-bootstrap interval. The same samples give the same interval.

    Raises:
        ValueError: there are no samples, or one is no positive finite number.
    """
    return _median_of(tuple(samples))


@functools.lru_cache(maxsize=4096)
def _median_of(samples: tuple[float, ...]) -> Interval:
    """Once for each samples: a table compares those of one kernel with those of many others."""
    low, high = _percentiles(_resampled_medians(samples, 0))
    return Interval(float(_median(_check(samples))), low, high)


def summary(samples: Sequence[float]) -> dict[str, object]:
    """The fields of a result's row that say what samples, in microseconds, are."""
    interval = median(samples)
    return {
        "median_us": interval.value,
        "min_us": min(samples),
        "samples_us": [round(sample, 4) for sample in samples],
        "interval_us": [round(interval.low, 4), round(interval.high, 4)],
    }


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Ratio of the medians with its interval; the two sides are resampled independently."""
    estimates = _resampled_medians(numerator, 1) / _resampled_medians(denominator, 2)
    low, high = _percentiles(estimates)
    return Interval(float(_median(_check(numerator)) / _median(_check(denominator))), low, high)


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
    """Whether `ours` are faster, slower, or, when the intervals of the medians overlap, a tie."""
    mine, other = median(ours), median(theirs)
    if mine.overlaps(other):
        return "tie"
    return "faster" if mine.value < other.value else "slower"
