"""Curves over simulated time: their mean over seeds, and when they reach a level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from persafl_lit.report.aggregate import Measure, Trial, column
from persafl_lit.report.record import Record

SHARES = (0.5, 0.8, 0.95)


@dataclass(frozen=True)
class MeanCurve:
    """Mean and sample standard deviation over seeds on the times that all of them cover."""

    times: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    """nan with fewer than two seeds."""
    seeds: int
    interpolated: bool
    """Whether the runs were evaluated at different times."""


def curve_of(record: Record, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(times, values) of a metric where it is known, in order of time."""
    times, values = column(record, "sim_time"), column(record, name)
    if not len(values):
        return np.empty(0), np.empty(0)
    known = np.isfinite(times) & np.isfinite(values)
    order = np.argsort(times[known], kind="stable")
    return times[known][order], values[known][order]


def mean_curve(trial: Trial, name: str) -> MeanCurve | None:
    """On the union of the runs' evaluation times, linearly interpolated, as far as every run goes; None without curves."""
    curves = [(times, values) for times, values in (curve_of(record, name) for record in trial.runs) if len(times)]
    if not curves:
        return None
    start, end = max(times[0] for times, _ in curves), min(times[-1] for times, _ in curves)
    union = np.unique(np.concatenate([times for times, _ in curves]))
    grid = union[(union >= start) & (union <= end)]
    if not len(grid):
        return None
    values = np.array([np.interp(grid, times, column) for times, column in curves])
    std = values.std(axis=0, ddof=1) if len(curves) > 1 else np.full(len(grid), math.nan)
    differ = any(not np.array_equal(times, curves[0][0]) for times, _ in curves)
    return MeanCurve(grid, values.mean(axis=0), std, len(curves), differ)


def time_to_reach(times: np.ndarray, values: np.ndarray, level: float, sign: int = 1) -> float | None:
    """The first time at which the curve, linear between its points, is at `level` or better; None if it never is."""
    good = np.flatnonzero(sign * values >= sign * level)
    if not len(good):
        return None
    i = int(good[0])
    if i == 0:
        return float(times[0])
    share = (level - values[i - 1]) / (values[i] - values[i - 1])
    return float(times[i - 1] + share * (times[i] - times[i - 1]))


def thresholds(curves: Sequence[MeanCurve], measure: Measure, reference: MeanCurve | None = None) -> list[float]:
    """Levels worth timing: shares of the best final mean accuracy that some curve does not have from its start.

    Where fewer than two remain, and for a loss: shares of the way from the worst start to the best end.
    If the reference gets to none of them on its way, also its own best, so that others can be compared with it.
    """
    if not curves:
        return []
    sign = measure.sign
    start = sign * min(sign * float(curve.mean[0]) for curve in curves)
    end = sign * max(sign * float(curve.mean[-1]) for curve in curves)
    levels = [share * end for share in SHARES if share * end > start] if sign > 0 else []
    if len(levels) < 2:
        levels = [start + share * (end - start) for share in SHARES if sign * end > sign * start]
    levels = [_rounded(level, sign) for level in levels]
    if reference is not None and not any(time_to_reach(reference.times, reference.mean, level, sign) for level in levels):
        own = _rounded(sign * float(np.max(sign * reference.mean)), sign)
        levels += [own] if sign * own > sign * float(reference.mean[0]) else []
    return sorted(set(levels), key=lambda level: sign * level)


def _rounded(level: float, sign: int) -> float:
    """To three digits, never to a level that is harder to reach."""
    step = 10.0 ** (math.floor(math.log10(abs(level))) - 2) if level else 1.0
    return float(f"{sign * math.floor(sign * level / step + 1e-6) * step:.3g}")
