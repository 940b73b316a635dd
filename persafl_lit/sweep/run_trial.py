"""Run one trial in the current process, from its checkpoint if there is one; returns plain values."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from persafl_lit.common.lock import Lock
from persafl_lit.common.logs import LogSettings
from persafl_lit.errors import (
    CheckpointError,
    Interrupted,
    PersaflError,
    TakenError,
    TrackingError,
    UnwritableError,
    WorkerError,
    located,
)

if TYPE_CHECKING:
    from persafl_lit.engine.experiment import Experiment
    from persafl_lit.learning.scores import Point

EVERY = 0.5
"""Seconds of wall time between progress messages."""

ORPHANS = 30.0
"""Seconds of wall time within which the processes of a launcher that died have ended."""

TrialMessage = dict[str, Any]


class Order(TypedDict):
    """What a process needs to run a trial."""

    trial: str
    config: dict[str, Any]
    run_id: str
    uri: str
    folder: str
    """Where the sweep was started: relative paths mean this folder. The launcher starts its processes there."""
    log: LogSettings
    """How the process of the sweep logs."""


class Reporter:
    """A callback that passes a trial's progress on."""

    def __init__(self, tell: Callable[[TrialMessage], None]) -> None:
        self._tell = tell
        self._told_at = 0.0
        self._total = 0

    def on_run_start(self, experiment: Experiment) -> None:
        self._total = len(experiment.timeline)
        self._tell({"updates": experiment.state.arrivals, "total": self._total})
        for point in experiment.points:  # from before a resume: a search that was begun again asks for them
            self.on_evaluation(point)

    def on_update(self, experiment: Experiment) -> None:
        now = time.monotonic()
        if now - self._told_at >= EVERY:
            self._told_at = now
            self._tell({"updates": experiment.state.arrivals, "total": self._total})

    def on_evaluation(self, point: Point) -> None:
        metrics = {
            key: value
            for key, value in point.metrics().items()
            if key.count(".") == 1 and key.endswith((".val", ".test"))
        }
        self._tell({"updates": point.updates, "total": self._total, "point": metrics})


def forget(checkpoint: Path) -> None:
    """Remove what is kept of an interrupted run; a lock only if its holder is gone."""
    lock = Lock(checkpoint.with_suffix(".lock"))
    for file in checkpoint.parent.glob(f"{checkpoint.stem}.*"):
        if file != checkpoint.with_suffix(".lock"):
            file.unlink(missing_ok=True)
        elif lock.acquire():
            lock.release()


def run_trial(order: Order, tell: Callable[[TrialMessage], None], should_stop: Callable[[], bool]) -> TrialMessage:
    """Exactly one of: summary, stopped, failed (it would fail again) or transient (worth another attempt)."""
    from persafl_lit.api import run
    from persafl_lit.config.compose import compose
    from persafl_lit.engine.checkpoint import Checkpoint

    config = compose(order["config"] | {"tracking.uri": order["uri"]})

    def attempt(resume: bool) -> TrialMessage:
        result = run(
            config,
            resume=resume,
            callbacks=[Reporter(tell)],
            should_stop=should_stop,
            run_id=order["run_id"],
            wait_seconds=ORPHANS,
        )
        return {"summary": result.summary()}

    try:
        try:
            return attempt(resume=Checkpoint(config.checkpoint_path).exists())
        except (TakenError, UnwritableError):
            raise
        except CheckpointError:  # one that cannot be used is no reason to lose the trial
            forget(config.checkpoint_path)
            return attempt(resume=False)
    except Interrupted:
        return {"stopped": True}
    except (WorkerError, TrackingError, TakenError, UnwritableError) as error:
        return {"transient": f"{type(error).__name__}: {error}"}
    except PersaflError as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    except SystemExit as error:
        return {"failed": f"ModelError: code from outside has tried to end the program: {located(error)}"}
    except Exception as error:
        return {"transient": located(error)}
