"""MLflow: the only file that imports it. Metrics carry step = updates and timestamp = simulated milliseconds."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persafl_lit import __version__
from persafl_lit.errors import ConfigError, first_line

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import mlflow
from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException

if TYPE_CHECKING:
    from persafl_lit.config import Config, Tracking
    from persafl_lit.evaluate import Point
    from persafl_lit.timeline import Job, Timeline

STORE = Path("mlruns")
SQLITE = "sqlite:///"
BATCH = 1000  # metrics MLflow takes in one call


def store_uri(uri: str | None) -> str:
    """The tracking URI: as configured, else the environment's, else our sqlite store. Files are named in full, because
    MLflow keeps connections by URI and would take another folder's store for the same."""
    chosen = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{STORE}/mlflow.db"
    return SQLITE + str(Path(chosen.removeprefix(SQLITE)).absolute()) if chosen.startswith(SQLITE) else chosen


def prepare(tracking: Tracking) -> tuple[mlflow.MlflowClient, str]:
    """A client for the store and the id of the experiment; both are made if they do not exist yet."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    uri = store_uri(tracking.uri)
    try:
        with _one_at_a_time(uri):
            client = mlflow.MlflowClient(tracking_uri=uri)
            found = client.get_experiment_by_name(tracking.experiment)
            if found is not None:
                return client, str(found.experiment_id)
            artifacts = (STORE / "artifacts").resolve().as_uri() if uri.startswith(SQLITE) else None
            return client, str(client.create_experiment(tracking.experiment, artifact_location=artifacts))
    except Exception as error:  # drivers and servers raise their own types
        raise ConfigError(f"cannot track to tracking.uri={uri}: {first_line(error)}") from error


class Tracker:
    """One run in MLflow. Metrics are sent in batches; what a lost server did not take is kept and sent later."""

    def __init__(self, config: Config, run_id: str | None = None) -> None:
        """A new run, or the interrupted one called `run_id`."""
        self.uri = store_uri(config.tracking.uri)
        self._unsent: list[Metric] = []
        self._warned = False
        self._client, experiment = prepare(config.tracking)
        try:
            self.run_id = self._resumed(run_id) or self._new(config, experiment)
        except (MlflowException, OSError) as error:
            raise ConfigError(f"cannot track to tracking.uri={self.uri}: {first_line(error)}") from error

    def _new(self, config: Config, experiment: str) -> str:
        run = self._client.create_run(experiment, run_name=f"{config.name} seed {config.seed}")
        run_id = str(run.info.run_id)
        params = [Param(key, str(value)) for key, value in config.flat().items()]
        tags = {"persafl.version": __version__, "persafl.method": config.name, "persafl.trial": config.hash()}
        self._client.log_batch(run_id, params=params, tags=[RunTag(key, value) for key, value in tags.items()])
        self._client.log_text(run_id, config.yaml(), "config.yaml")
        return run_id

    def _resumed(self, run_id: str | None) -> str | None:
        if run_id is None:
            return None
        try:
            self._client.update_run(run_id, status=RunStatus.to_string(RunStatus.RUNNING))
        except MlflowException:
            print(f"the interrupted run {run_id} is not in {self.uri}; its metrics go to a new one", file=sys.stderr)
            return None
        return run_id

    def log_timeline(self, timeline: Timeline) -> None:
        self._patiently(lambda: self._client.log_text(self.run_id, timeline.to_csv(), "timeline.csv"))

    def on_update(self, index: int, job: Job, staleness: int, loss: float) -> None:
        pass

    def on_point(self, point: Point) -> None:
        milliseconds = round(point.sim_time * 1000)
        self._unsent += [Metric(key, value, milliseconds, point.updates) for key, value in point.metrics().items() if math.isfinite(value)]
        self._flush()

    def summarise(self, summary: dict[str, Any]) -> None:
        """What the run came to."""
        self._patiently(lambda: self._client.log_dict(self.run_id, summary, "summary.json"))

    def finish(self, failure: BaseException | None = None) -> None:
        """Send what is left and end the run: finished, failed, or killed (interrupted, resumable)."""
        if failure is not None:
            self._patiently(lambda: self._client.set_tag(self.run_id, "persafl.error", f"{type(failure).__name__}: {failure}"[:5000]))
        self._flush()
        interrupted = type(failure).__name__ in ("Interrupted", "KeyboardInterrupt")
        status = "FINISHED" if failure is None else "KILLED" if interrupted else "FAILED"
        self._patiently(lambda: self._client.set_terminated(self.run_id, status=status, end_time=int(time.time() * 1000)))
        if self._unsent:
            print(f"{len(self._unsent)} metrics of run {self.run_id} could not be sent to {self.uri}", file=sys.stderr)

    def _flush(self) -> None:
        while self._unsent and self._patiently(lambda: self._client.log_batch(self.run_id, metrics=self._unsent[:BATCH])):
            del self._unsent[:BATCH]

    def _patiently(self, call: Any) -> bool:
        """Whether the store took it; a run outlives its tracking server."""
        try:
            call()
        except (MlflowException, OSError) as error:
            if not self._warned:
                print(f"tracking to {self.uri} fails, the run goes on: {first_line(error)}", file=sys.stderr)
            self._warned = True
            return False
        return True


@contextlib.contextmanager
def _one_at_a_time(uri: str) -> Iterator[None]:
    """A sqlite store is created by one process at a time, and then in WAL mode so that many may write."""
    if not uri.startswith(SQLITE):
        yield
        return
    path = Path(uri.removeprefix(SQLITE))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new = not path.exists()
        yield
        if new:
            with contextlib.closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
