"""Means, slopes in log-log coordinates and their 95 % intervals over seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from persafl_lit.timeline.timeline import Floats

FIT_CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def mean(samples: Floats) -> Estimate:
    """Of one number per seed, by Student's t."""
    value, count = float(samples.mean()), len(samples)
    half = (
        float(student.ppf((1 + FIT_CONFIDENCE) / 2, count - 1) * samples.std(ddof=1) / np.sqrt(count))
        if count > 1
        else float("nan")
    )
    return Estimate(value, value - half, value + half)


def jackknife(statistic: Callable[[Floats], float], samples: Floats) -> Estimate:
    """Of anything computed from an array with a leading axis of seeds: leave one seed out at a time."""
    count = len(samples)
    value = statistic(samples)
    without = np.array([statistic(np.delete(samples, seed, axis=0)) for seed in range(count)])
    half = float(
        student.ppf((1 + FIT_CONFIDENCE) / 2, count - 1)
        * np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    )
    return Estimate(float(value), float(value) - half, float(value) + half)


def slope(x: Floats, y: Floats) -> float:
    """Of the least-squares line through (log x, log y); nan where a y is not positive."""
    if not (np.asarray(y) > 0).all():
        return float("nan")
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def slope_of_means(x: Floats, samples: Floats) -> Estimate:
    """The slope of the mean over seeds of `samples` (seeds, len(x))."""
    return jackknife(lambda some: slope(x, some.mean(0)), samples)


def with_interval(estimate: Estimate) -> str:
    """The value and its interval as text."""
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
