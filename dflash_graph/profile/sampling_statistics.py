"""sampling_statistics: intervals and tests that comparisons of measured numbers need.

Everything random is drawn from a fixed seed, so that the same two documents always give the same
verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from random import Random
from statistics import median
from typing import Final

#: Standard deviations of a two-sided 95 % interval.
Z_95: Final = 1.959963984540054

_DRAWS: Final = 1000


@dataclass(frozen=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def wilson(successes: int, trials: int) -> Interval:
    """Wilson's score interval of a share; the whole of 0..1 without a trial."""
    if trials == 0:
        return Interval(0.0, 1.0)
    share, square = successes / trials, Z_95 * Z_95
    center = share + square / (2 * trials)
    half = Z_95 * sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    scale = 1 + square / trials
    low = 0.0 if successes == 0 else (center - half) / scale
    high = 1.0 if successes == trials else (center + half) / scale
    return Interval(low, high)


def sign_test(smaller: int, larger: int) -> float:
    """Two-sided probability that pairs without a difference are split at least this unevenly;
    ties are left out before.
    """
    pairs = smaller + larger
    if pairs == 0:
        return 1.0
    tail = sum(comb(pairs, count) for count in range(min(smaller, larger) + 1))
    return min(1.0, 2 * tail / 2**pairs)


def ratio_interval(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    """Bootstrap interval of the ratio of two medians, after over before; None where either was
    measured once only.
    """
    if min(len(before), len(after)) < 2 or min(before) <= 0:
        return None
    random = Random(0)
    ratios = sorted(
        median(random.choices(after, k=len(after))) / median(random.choices(before, k=len(before)))
        for _ in range(_DRAWS)
    )
    return percentiles(ratios)


def percentiles(ordered: Sequence[float]) -> Interval:
    """The middle 95 % of sorted draws."""
    cut = len(ordered) * 25 // 1000
    return Interval(ordered[cut], ordered[-1 - cut])
