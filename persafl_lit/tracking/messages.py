"""Messages to MLflow as plain values, the names of our tags, and simulated time as a timestamp."""

from __future__ import annotations

from typing import Any

TrackingMessage = dict[str, Any]
"""One thing to tell MLflow, as plain values: metrics, tags, a text, a table, a file or the status (see
`Store.send`)."""

NOTE = "persafl.note"
"""What a user should be told about the run."""
CHANGED = "persafl.model_changed"
"""`false` for a run that is no result."""
PRUNED = "persafl.pruned"
SELECT = "persafl.select"
"""The metric by which a sweep chooses settings: what a report of it chooses by, too."""
IMPORTED = "persafl.imported"
"""Of a trial that ran elsewhere: the file that its results are from."""
PLANNED = "persafl.planned"
"""Of the parent: how many trials the sweep has, as far as known."""


def timestamp(sim_time: float) -> int:
    """Simulated milliseconds, from 1 on: the MLflow UI takes a curve that begins at 0 for one without times, and draws
    its steps instead."""
    return max(1, round(sim_time * 1000))
