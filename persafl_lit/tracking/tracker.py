"""One run in MLflow, told in the background: a run neither waits for its tracking server nor dies with it."""

from __future__ import annotations

import itertools
import json
import logging
import math
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persafl_lit import __version__
from persafl_lit.common.process_memory import gc_paused
from persafl_lit.errors import Interrupted, TrackingError, first_line
from persafl_lit.tracking.artifacts import log_result
from persafl_lit.tracking.environment import environment, git_commit
from persafl_lit.tracking.location import SQLITE, store_uri
from persafl_lit.tracking.messages import TrackingMessage, timestamp
from persafl_lit.tracking.outbox import keep, sync, waiting

if TYPE_CHECKING:
    from persafl_lit.config.compose import Config
    from persafl_lit.engine.experiment import Experiment
    from persafl_lit.engine.result import Result
    from persafl_lit.learning.scores import Point
    from persafl_lit.tracking.store import Store

logger = logging.getLogger(__name__)

OPENS_WITHIN = 20.0
"""Seconds of wall time in which a store that works is open, MLflow's import included."""
UNLOCKED_WITHIN = 120.0
"""Seconds in which another process is expected to unlock the database."""
HURRY = 2.5
"""Seconds that the end of a run waits for a store when the user has asked to stop."""
TOGETHER = 30
"""Evaluations whose metrics are sent in one request when a store is slower than the run."""
REQUEST = 15.0
"""Seconds that a request which is under way may take."""
PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds between attempts to send; the last one again and again."""


class Tracker:
    """A callback that sends what a run says from a thread of its own, in order; what a lost server does not take waits.

    Metrics carry step = updates and timestamp = simulated milliseconds, so that the MLflow UI can put either on the x
    axis.
    """

    def __init__(
        self,
        config: Config,
        run_id: str | None = None,
        tags: dict[str, str] | None = None,
        must_end: Callable[[], bool] = lambda: False,
    ) -> None:
        """A new run, or the interrupted one called `run_id`. When `must_end()` turns true, nothing waits much longer
        for the store."""
        self.uri = store_uri(config.tracking.uri)
        _check_folder(self.uri)
        self._config = config
        self._tags = tags or {}
        self._messages: deque[TrackingMessage] = deque()
        self._changed = threading.Condition()
        self._opened = threading.Event()
        self._failure: TrackingError | None = None
        self._give_up_at = math.inf
        self._must_end = must_end
        self._hurried_at = math.inf
        self._opens_until = time.monotonic() + OPENS_WITHIN
        self._closing = False
        self._finished = False
        self._planned = 0
        self._warned = False
        self._run_id = run_id
        self._staging = tempfile.TemporaryDirectory(prefix="persafl-")
        self.staging = Path(self._staging.name)
        """A folder for files on their way into the store."""
        self._thread = threading.Thread(target=self._deliver, daemon=True, name="tracking")

    def wait_until_open(self, experiment: Experiment) -> None:
        """Until the store has been opened, or has refused, or the user asks to stop."""
        while not self._opened.wait(0.2):
            experiment.stop_if_asked()

    def state_dict(self) -> dict[str, Any]:
        """The run's id. A checkpoint waits for a store that is being opened, but not for one that hangs."""
        while self._thread.ident and not self._opened.wait(0.1) and self._is_worth_waiting(self._opens_until):
            pass
        return {"run_id": self._run_id} if self._run_id else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The interrupted run goes on, unless another one was named."""
        self._run_id = self._run_id or state["run_id"]

    def _is_worth_waiting(self, until: float) -> bool:
        now = time.monotonic()
        if self._must_end():
            self._hurried_at = min(self._hurried_at, now)
        return now < min(until, self._hurried_at + HURRY)

    @property
    def run_id(self) -> str:
        """Known once the store is open."""
        self._opened.wait()
        if self._failure is not None:
            raise self._failure
        assert self._run_id is not None
        return self._run_id

    # -- what a run says ----------------------------------------------------------------------------------------------

    def say(self, **message: Any) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def metrics(self, values: dict[str, float], point: Point) -> None:
        """Finite ones, at a point."""
        rows = [
            [key, value, timestamp(point.sim_time), point.updates]
            for key, value in values.items()
            if math.isfinite(value)
        ]
        self.say(metrics=rows)

    def start(self) -> None:
        """Open the store, and send what there is, in the background."""
        self._opens_until = time.monotonic() + OPENS_WITHIN
        self._thread.start()

    def on_run_start(self, experiment: Experiment) -> None:
        """What is known before the first update; of a run that is resumed also its points, which may not have been
        sent."""
        self.start()
        self.say(tags={"persafl.first_weights": experiment.executor.worker.digest})
        self.say(text=self._config.yaml(), name="config.yaml")
        self.say(text=json.dumps(environment(), indent=2), name="environment.json")
        self.say(text=experiment.timeline.to_csv(), name="timeline.csv")
        self._planned = len(experiment.timeline)
        for point in experiment.points:
            self.metrics(point.metrics(), point)

    def on_update(self) -> None:
        """A store that cannot be used ends the run now, not at its end."""
        if self._failure is not None:
            raise self._failure

    def on_evaluation(self, point: Point) -> None:
        self.metrics(point.metrics(), point)

    def on_run_end(self, result: Result) -> None:
        self.metrics(
            result.points[-1].metrics(), result.points[-1]
        )  # one that became the last by `stop` has more of them now
        if len(result.timeline) < self._planned:  # stopped early: what was planned after that did not happen
            self.say(text=result.timeline.to_csv(), name="timeline.csv")
        log_result(self, result)
        self.finish("FINISHED")

    def on_run_error(self, error: BaseException) -> None:
        if isinstance(error, (Interrupted, KeyboardInterrupt)):
            self.finish("KILLED", str(error) or "interrupted")
        else:
            self.finish("FAILED", f"{type(error).__name__}: {error}")

    def finish(self, status: str, error: str | None = None) -> None:
        """End the run, FINISHED, FAILED or KILLED, and wait until all is sent; what is not by then is kept in a
        file."""
        if self._finished or not self._thread.ident:
            return
        self._finished = True
        if status == "KILLED":
            self._must_end = lambda: True
        self.say(tags={"persafl.error": error or ""})
        self.say(status=status, end_time=int(time.time() * 1000))
        with self._changed:
            self._closing, self._give_up_at = True, time.monotonic() + self._config.tracking.patience
            self._changed.notify()
        try:
            while self._thread.is_alive() and self._is_worth_waiting(self._give_up_at + REQUEST):
                self._thread.join(0.1)
        finally:  # also when the user does not want to wait any longer
            lost = self._keep_unsent()
            self._staging.cleanup()
        if lost and status == "FINISHED":
            raise TrackingError(f"{lost}; make room, and the same command with --resume tells all of it again")
        if self._failure is not None and status == "FINISHED":
            raise self._failure

    def _keep_unsent(self) -> str | None:
        """A sentence if something could not even be kept."""
        if self._messages and self._failure is None and (run_id := self._run_id) is not None:
            try:
                file = keep(self.uri, run_id, list(self._messages))
            except OSError as error:
                lost = (
                    f"{len(self._messages)} records of run {run_id} were not taken by {self.uri} and could not be "
                    f"kept: {error.strerror}"
                )
                logger.error("%s", lost)
                return lost
            logger.warning(
                "%s did not take %d records of run %s; they are kept in %s, and the next run or `persafl sync` sends "
                "them",
                self.uri,
                len(self._messages),
                run_id,
                file,
            )
        return None

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        try:
            store = self._open_when_free()
        except Exception as error:  # MLflow, its drivers and its servers raise their own types
            self._failure = TrackingError(f"cannot track to tracking.uri={self.uri}: {first_line(error)}")
            return
        finally:
            self._opened.set()
        self._send_what_was_kept()
        failures, most = 0, TOGETHER
        while batch := self._next(most):
            if time.monotonic() > self._give_up_at:
                return
            try:
                store.send(self.run_id, _as_one(batch))
            except Exception as error:  # as above; nothing here may end the run
                if store.refuses(error) and len(batch) > 1:
                    most = 1  # which one of them it refuses will show
                    continue
                if store.refuses(error):
                    logger.warning("%s refuses a record of run %s: %s", self.uri, self.run_id, first_line(error))
                else:
                    self._say_once(error)
                    self._pause(PAUSES[min(failures, len(PAUSES) - 1)])
                    failures += 1
                    continue
            failures = 0
            for _ in batch:
                self._messages.popleft()

    def _send_what_was_kept(self) -> None:
        """Of earlier runs, now that the store is there; errors in it do not concern this run."""
        try:
            if waiting(self.uri):
                sync(self.uri)
        except Exception as error:  # as below
            logger.warning("what earlier runs could not send has to wait: %s", first_line(error))

    def _open_when_free(self) -> Store:
        """A database that another process has locked is waited for; whatever else is wrong stops the run now, not at
        its end."""
        give_up_at = time.monotonic() + UNLOCKED_WITHIN
        while True:
            try:
                return self._open()
            except Exception as error:  # as above
                from persafl_lit.tracking.store import Store

                if not Store.is_locked(error) or time.monotonic() > min(give_up_at, self._give_up_at):
                    raise
                self._say_once(error)
                self._pause(1.0)

    def _open(self) -> Store:
        with gc_paused():
            from persafl_lit.tracking.store import Store, load_mlflow, load_sqlite

            load_mlflow()
            if self.uri.startswith(SQLITE):
                load_sqlite()
        store = Store(self.uri)
        config = self._config
        if self._run_id is not None and not store.reopen(self._run_id):
            logger.warning("the interrupted run %s is not in %s; its metrics go to a new one", self._run_id, self.uri)
            self._run_id = None
        if self._run_id is None:
            self._run_id = new_run(store, config, config.label(), self._tags)
        logger.debug("tracking to %s as run %s", self.uri, self._run_id)
        self._messages.appendleft(
            {"params": config.flat()}
        )  # of an interrupted run, too: it may have been killed before they were sent
        return store

    def _next(self, most: int) -> list[TrackingMessage]:
        """The oldest message, with up to `most` in all if they are metrics; none when the run is over and all is
        sent."""
        with self._changed:
            while not self._messages:
                if self._closing:
                    return []
                self._changed.wait()
            metrics = itertools.takewhile(lambda message: "metrics" in message, itertools.islice(self._messages, most))
            return list(metrics) or [self._messages[0]]

    def _pause(self, wall_seconds: float) -> None:
        """Wait before the next attempt; the end of the run cuts it short."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing, min(wall_seconds, max(0.0, self._give_up_at - time.monotonic()))
            )
        if self._closing:
            time.sleep(min(wall_seconds, 0.2))

    def _say_once(self, error: Exception) -> None:
        if not self._warned:
            why = "database is locked" if "database is locked" in str(error) else first_line(error)
            logger.warning("tracking to %s fails, the run goes on and tries again: %s", self.uri, why)
        self._warned = True


def _check_folder(uri: str) -> None:
    """Raise now if the folder cannot exist; other errors of a store show when it is opened, beside the run."""
    if uri.startswith(SQLITE):
        try:
            Path(uri.removeprefix(SQLITE)).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrackingError(f"cannot track to tracking.uri={uri}: {error}") from None


def new_run(store: Store, config: Config, name: str, tags: dict[str, str]) -> str:
    """A run of this config in the store; its parameters are still to be told."""
    known = {
        "persafl.version": __version__,
        "persafl.method": config.name,
        "persafl.trial": config.hash(),
        **git_commit(),
        **tags,
    }
    if plugins := config.plugins():
        known["persafl.plugins"] = ", ".join(plugins)
    return store.create(config.tracking.experiment, name, known)


def _as_one(messages: list[TrackingMessage]) -> TrackingMessage:
    """Metrics that have piled up make one request."""
    return (
        messages[0] if len(messages) == 1 else {"metrics": [row for message in messages for row in message["metrics"]]}
    )
