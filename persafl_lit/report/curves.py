"""Curves over simulated time and what else a run spends: their mean over seeds, and when they reach a level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from persafl_lit.report.aggregate import Measure, SettingRuns, as_float, column, in_summary
from persafl_lit.report.config_keys import NONE, text_of
from persafl_lit.report.record import Record

SHARES = (0.5, 0.8, 0.95)
FEW_POINTS = 5
"""Curves with fewer points are marked."""
USUAL_POINTS = 11
"""Evaluations of a run whose config does not say how many, unless its evaluation budget is too small for them."""


class Axis(NamedTuple):
    """What a score can be drawn against."""

    name: str
    """In file names."""
    column: str
    label: str
    unit: str = ""


TIME = Axis("time", "sim_time", "simulated time")
AXES = (TIME, Axis("updates", "updates", "server updates"), Axis("gradients", "grad_evals", "gradient evaluations"),
        Axis("bytes", "bytes", "bytes communicated", "B"))  # fmt: skip


@dataclass(frozen=True)
class MeanCurve:
    """Mean and sample standard deviation over seeds on the stretch that all of them cover."""

    x: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    """nan with fewer than two seeds."""
    grids: tuple[np.ndarray, ...]
    """Where each run was evaluated."""

    @property
    def seeds(self) -> int:
        return len(self.grids)

    @property
    def points(self) -> int:
        """Evaluations of the run that has the fewest."""
        return min(map(len, self.grids))

    @property
    def interpolated(self) -> bool:
        """Whether the runs were evaluated at different places."""
        return any(not np.array_equal(grid, self.grids[0]) for grid in self.grids)


def along(record: Record, axis: Axis) -> np.ndarray:
    """Where on an axis each evaluation is; empty if the run does not tell."""
    if axis.column != "bytes":
        return column(record, axis.column)
    updates, total = column(record, "updates"), as_float(record.bytes_communicated)
    if not len(updates) or not math.isfinite(total):
        return np.empty(0)
    sent, timeline = updates, record.timeline
    if (
        in_summary(record, "dropped") > 0 and timeline is not None and timeline.activity is not None
    ):  # a dropped update was sent, too
        moments = zip(column(record, "sim_time").tolist(), updates.tolist(), strict=True)
        sent = np.array([count + timeline.until(time, int(count)).dropped for time, count in moments])
    return total * sent / max(float(sent[-1]), 1.0)


def curve_of(record: Record, name: str, axis: Axis = TIME) -> tuple[np.ndarray, np.ndarray]:
    """(places, values) of a metric where it is known, in order; of evaluations at one place the last."""
    x, values = along(record, axis), column(record, name)
    if not len(values) or len(x) != len(values):
        return np.empty(0), np.empty(0)
    known = np.isfinite(x) & np.isfinite(values)
    order = np.argsort(x[known], kind="stable")
    x, values = x[known][order], values[known][order]
    last = np.append(np.diff(x) > 0, [True] * bool(len(x))).astype(bool)
    return x[last], values[last]


def mean_curve(trial: SettingRuns, name: str, axis: Axis = TIME) -> MeanCurve | None:
    """On the union of the runs' evaluations, linearly interpolated, as far as every run goes; None without curves."""
    curves = [(x, values) for x, values in (curve_of(record, name, axis) for record in trial.runs) if len(x)]
    if not curves:
        return None
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    union = np.unique(np.concatenate([x for x, _ in curves]))
    grid = union[(union >= start) & (union <= end)]
    if not len(grid):
        return None
    values = np.array([np.interp(grid, x, column) for x, column in curves])
    std = values.std(axis=0, ddof=1) if len(curves) > 1 else np.full(len(grid), math.nan)
    return MeanCurve(grid, values.mean(axis=0), std, tuple(x for x, _ in curves))


def thinned_from(record: Record) -> int | None:
    """How many evaluations the run would have had if its evaluation budget had allowed them; None if it did. Runs of
    0.1 tell by their config."""
    if isinstance((record.summary or {}).get("evaluations"), dict):
        told = in_summary(record, "evaluations", "thinned_from")
        return int(told) if math.isfinite(told) else None
    thinned = text_of(record.config.get("eval.every", 0)) == NONE and 0 < len(column(record, "sim_time")) < USUAL_POINTS
    return USUAL_POINTS if thinned else None


# -- levels -----------------------------------------------------------------------------------------------------------


class Reached(NamedTuple):
    """A level was not reached at the evaluation at time `after`, but at that at `by`. Both are the start for one that
    is there from the start."""

    after: float
    by: float


def time_to_reach(curve: MeanCurve, level: float, sign: int = 1) -> Reached | None:
    """Between which evaluations the curve comes to `level` or better for the first time; None if it never does.

    Where runs were evaluated at different times, these are evaluations of every run.
    """
    good = np.flatnonzero(sign * curve.mean >= sign * level)
    if not len(good):
        return None
    i = int(good[0])
    after, by = curve.x[max(i - 1, 0)], curve.x[i]
    return Reached(
        min(float(grid[grid <= after][-1]) for grid in curve.grids),
        max(float(grid[grid >= by][0]) for grid in curve.grids),
    )


def speed_up(reference: Reached | None, own: Reached | None) -> tuple[float, float] | None:
    """The least and the most by which `own` can have been sooner; None where one never arrives or is there from the
    start."""
    if reference is None or own is None or reference.by <= reference.after or own.by <= own.after:
        return None
    return reference.after / own.by, reference.by / own.after if own.after > 0 else math.inf


def untrained_and_best(curves: Sequence[MeanCurve], sign: int) -> tuple[float, float]:
    """The best score at a start, and the best at an end."""
    start, end = (sign * max(sign * float(curve.mean[i]) for curve in curves) for i in (0, -1))
    return start, end


def halfway(curves: Sequence[MeanCurve], sign: int) -> float:
    """Between the untrained model's score and the best method's. Below it times say little about training, and are not
    compared."""
    start, end = untrained_and_best(curves, sign)
    return (start + end) / 2


def thresholds(curves: Sequence[MeanCurve], measure: Measure) -> list[float]:
    """Levels worth timing: shares of the way from the untrained model's score to the best method's."""
    if not curves:
        return []
    sign = measure.sign
    start, end = untrained_and_best(curves, sign)
    levels = {_rounded(start + share * (end - start), sign) for share in SHARES if sign * end > sign * start}
    return sorted((level for level in levels if sign * level <= sign * end), key=lambda level: sign * level)


def _rounded(level: float, sign: int) -> float:
    """To three digits, never to a level that is easier to reach."""
    step = 10.0 ** (math.floor(math.log10(abs(level))) - 2) if level else 1.0
    return float(f"{sign * math.ceil(sign * level / step - 1e-6) * step:.3g}")
