"""What timelines tell a report: the share of active clients over time, staleness, and the beginning of a schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from persafl_lit.report.aggregate import TaskRuns, as_float, in_summary, method_of
from persafl_lit.report.config_keys import NONE, number_of, text_of
from persafl_lit.report.record import Record
from persafl_lit.timeline import Activity, Timeline

WINDOWS = 60
SHOWN_CLIENTS = 8
SHOWN_VISITS = 5


def usable_timeline(record: Record) -> Timeline | None:
    timeline = record.timeline
    return timeline if timeline is not None and len(timeline) and timeline.horizon > 0 else None


def schedule_text(record: Record) -> str:
    """asynchronous(tau=10, policy=wait): the schedule's name and those of its keys that are set."""
    values = {
        key.removeprefix("schedule."): text_of(value)
        for key, value in record.config.items()
        if key.startswith("schedule.")
    }
    name = values.pop("name", "schedule")
    if values.get("tau") == NONE:  # then the policy has nothing to do
        values.pop("policy", None)
    values = {key: value for key, value in values.items() if value != NONE}
    return f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})" if values else name


def schedules_of(task: TaskRuns) -> dict[str, list[Record]]:
    """The chosen runs that have a timeline, by schedule, one run per distinct timeline; where gradients take time, also
    by method."""
    found: dict[str, dict[str, Record]] = {}
    for trial in task.chosen:
        for record in trial.runs:
            timeline = usable_timeline(record)
            if timeline is not None:
                of_method = f"{method_of(record)}, " if number_of(record.config.get("delays.per_gradient")) else ""
                found.setdefault(of_method + schedule_text(record), {}).setdefault(timeline.digest(), record)
    return {text: list(records.values()) for text, records in found.items()}


def concurrency(timelines: Sequence[Timeline], windows: int = WINDOWS) -> tuple[np.ndarray, np.ndarray]:
    """(middles of equal windows of time, mean share of active clients in each), averaged over timelines as far as all
    go."""
    edges = np.linspace(0.0, min(timeline.horizon for timeline in timelines), windows + 1)
    shares = []
    for timeline in timelines:
        times, active = timeline.concurrency()
        area = np.concatenate([[0.0], np.cumsum(np.diff(times) * active[:-1])])
        # Beyond its last change the share stays as it is.
        total = np.interp(edges, times, area) + np.maximum(edges - times[-1], 0.0) * active[-1]
        shares.append(np.diff(total) / np.diff(edges))
    return (edges[1:] + edges[:-1]) / 2, np.mean(shares, axis=0)


def buffer_of(record: Record) -> int:
    """Arrivals per model version, as the method's config says; 1 if it does not."""
    buffer = record.config.get("method.buffer", 1)
    number = as_float(record.config.get("schedule.cohort") if buffer == "cohort" else buffer)
    return int(number) if math.isfinite(number) and number >= 1 else 1


def staleness(record: Record) -> tuple[float, float]:
    """(mean, max) in model versions, from the run's summary or its timeline."""
    mean, worst = in_summary(record, "staleness", "mean"), in_summary(record, "staleness", "max")
    timeline = usable_timeline(record)
    if math.isfinite(mean) or timeline is None:
        return mean, worst
    values = timeline.staleness(buffer_of(record))
    return float(values.mean()), float(values.max())


def staleness_shares(records: Sequence[Record]) -> np.ndarray:
    """The share of arrivals with staleness 0, 1, 2, ..., over all runs that have a timeline; empty if none has."""
    values = [
        timeline.staleness(buffer_of(record)) for record in records if (timeline := usable_timeline(record)) is not None
    ]
    if not values:
        return np.empty(0)
    together = np.concatenate(values)
    return np.bincount(together) / len(together)


def beginning(timeline: Timeline, window: float, clients: int = SHOWN_CLIENTS) -> Timeline:
    """The first clients until `window`. All arrivals stay, so that the server's updates are where they were."""
    activity = timeline.activity
    if activity is None:  # only reads and arrivals are known: the whole visit is drawn as one
        activity = Activity(timeline.client, timeline.read_at, timeline.read_at, timeline.read_at, timeline.arrives)
    end = min(window, timeline.horizon)
    arrived = timeline.arrives <= end
    columns = {name: getattr(timeline, name)[arrived] for name in ("client", "visit", "reads", "read_at", "arrives")}
    seen = activity.rows((activity.client < clients) & (activity.read_at < end))
    return dataclasses.replace(timeline, clients=min(clients, timeline.clients), horizon=end, activity=seen, **columns)


def early_window(timelines: Sequence[Timeline]) -> float:
    """Long enough for a few visits of each client under the quickest of the schedules."""
    longest = max(timeline.horizon for timeline in timelines)
    return min(
        longest, SHOWN_VISITS * min(timeline.horizon * timeline.clients / len(timeline) for timeline in timelines)
    )
