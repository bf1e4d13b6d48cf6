"""What a handful of seeds can say: means with confidence intervals, and paired differences."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean and its two-sided 95% interval by Student's t.

    Attributes:
        values: one for each seed.
        half_width: of the interval; infinite with fewer than two values.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def half_width(self) -> float:
        n = len(self.values)
        if n < 2:
            return math.inf
        spread = float(np.std(self.values, ddof=1)) / math.sqrt(n)
        return float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)) * spread

    @property
    def interval(self) -> tuple[float, float]:
        return self.mean - self.half_width, self.mean + self.half_width

    @property
    def excludes_zero(self) -> bool:
        low, high = self.interval
        return low > 0 or high < 0


def paired_difference(ours: dict[int, float], theirs: dict[int, float]) -> Estimate:
    """`ours - theirs`, seed by seed: what differs between seeds (data order, initial weights) drops out.

    Args:
        ours, theirs: a value for each seed; seeds that only one has are left out.
    """
    return Estimate(tuple(ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())))


def verdict(difference: Estimate) -> str:
    """What a paired difference of losses means, in words."""
    n = len(difference.values)
    if n == 0:
        return "no seed has both"
    if n == 1:
        return "one seed: its noise is unknown"
    if not difference.excludes_zero:
        return "within the seeds' noise"
    return "lower loss" if difference.mean < 0 else "higher loss"
