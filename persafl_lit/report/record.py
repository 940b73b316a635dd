"""A run as a report sees it: read back from tracking, whatever of it is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from persafl_lit.timeline import Timeline

NEVER_CHANGED = "the model never changed"
UNCHANGED = f"no result: {NEVER_CHANGED}"


def model_changed(summary: Mapping[str, Any] | None) -> bool:
    """Whether the run that ended with this summary trained anything; what did not is no result. Runs of 0.1 tell only
    their versions."""
    told = summary or {}
    return bool(told.get("model_changed", told.get("versions") != 0))


@dataclass(frozen=True)
class Record:
    """One run. Everything but its identity may be missing: it may still be going on, or have failed."""

    run_id: str
    status: str
    """RUNNING, FINISHED, FAILED (by itself, e.g. diverged) or KILLED (interrupted, can be resumed)."""
    config: dict[str, Any]
    """The resolved config with dotted keys: method.name, method.lam, schedule.tau, data.name, seed, ..."""
    error: str | None = None
    summary: dict[str, Any] | None = None
    """What `persafl run --json` printed."""
    curves: dict[str, list[float]] = field(default_factory=dict)
    """Columns over the evaluation points: sim_time, updates, accuracy.val, accuracy.test, accuracy.worst_decile,
    grad_evals, ..."""
    clients: list[dict[str, float]] = field(default_factory=list)
    """The last evaluation, one row per client: client, samples, test_accuracy, global_accuracy, arrivals, ..."""
    timeline: Timeline | None = None
    bytes_communicated: float | None = None
    select: str | None = None
    """The metric by which the run's sweep chooses settings: accuracy.val or loss.val."""
    pruned: bool = False
    """Stopped by its sweep on purpose: KILLED, but not interrupted."""
    planned: int | None = None
    """How many trials its sweep has, as far as known, if the whole sweep was asked for."""
    trial: str = ""
    """The hash of its config."""
    version: str = ""
    """The persafl_lit that made it."""
    commit: str = ""
    target: str = ""
    """What it was found by, where a report is of several targets."""
    target_number: int = 0
    """Which one of them, from 0."""
    schedule: str = ""
    """Its schedule, where its method is run on several ones: there it counts as several methods."""

    @property
    def method(self) -> str:
        return str(self.config["method.name"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])


def note_of(record: Record) -> str:
    """What tables say of a run that trained nothing."""
    return "" if model_changed(record.summary) else UNCHANGED
