from __future__ import annotations

import math

import pytest
import torch

from microsdpa.evidence import statistics
from microsdpa.evidence.statistics import Interval


def normal(mean: float, count: int, seed: int, spread: float = 1.0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return (mean + spread * torch.randn(count, generator=generator, dtype=torch.float64)).tolist()


@pytest.mark.parametrize(("samples", "value"), [([3.0, 1.0, 2.0], 2.0), ([4.0, 1.0, 2.0, 3.0], 2.5), ([5.0], 5.0)])
def test_the_median_of_known_samples(samples: list[float], value: float) -> None:
    found = statistics.median(samples)
    assert found.value == value
    assert found.low <= value <= found.high
    assert statistics.median(samples) == found  # the same samples, the same interval


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        found = statistics.median(normal(100.0, 30, seed))
        covered += found.low <= 100.0 <= found.high
    assert 0.90 <= covered / 200 <= 0.99


def test_the_interval_has_the_width_that_theory_gives() -> None:
    found = statistics.median(normal(100.0, 400, 1))
    expected = 2 * 1.96 * math.sqrt(math.pi / 2) / math.sqrt(400)  # of the median of a normal sample
    assert expected / 1.6 < found.high - found.low < expected * 1.6


def test_one_outlier_moves_neither_median_nor_interval_far() -> None:
    samples = [10.0 + 0.01 * i for i in range(29)]
    assert statistics.median([*samples, 1000.0]).high < 10.4


def test_a_ratio_has_an_interval() -> None:
    found = statistics.ratio(normal(20.0, 50, 1, 0.1), normal(10.0, 50, 2, 0.1))
    assert found.low < 2.0 < found.high
    assert found.high - found.low < 0.05


def test_overlapping_intervals_are_a_tie() -> None:
    assert statistics.compare(normal(10.0, 30, 1, 0.5), normal(10.05, 30, 2, 0.5)) == "tie"
    assert statistics.compare(normal(10.0, 30, 1, 0.1), normal(12.0, 30, 2, 0.1)) == "faster"
    assert statistics.compare(normal(12.0, 30, 1, 0.1), normal(10.0, 30, 2, 0.1)) == "slower"
    assert statistics.compare([5.0] * 5, [5.0] * 5) == "tie"


def test_intervals_overlap_when_they_share_a_point() -> None:
    assert Interval(2, 1, 3).overlaps(Interval(4, 3, 5))
    assert not Interval(2, 1, 3).overlaps(Interval(4, 3.1, 5))
    assert str(Interval(2, 1, 3)) == "2.00 [1.00, 3.00]"


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [1.0, -2.0], [math.nan], [math.inf]])
def test_samples_that_are_no_times_are_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="expected positive finite numbers"):
        statistics.median(samples)
