"""Runs a sweep: hands out trials, collects their results, and skips those that the store has."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from persafl_lit import errors
from persafl_lit.common.atomic_file import write_text_atomically
from persafl_lit.common.csv_table import to_csv
from persafl_lit.common.lock import Lock
from persafl_lit.common.logs import LogSettings, quieted
from persafl_lit.errors import ConfigError, Interrupted
from persafl_lit.sweep.dashboard import Dashboard
from persafl_lit.sweep.finished import Exported
from persafl_lit.sweep.plan import Plan
from persafl_lit.sweep.results import Outcome, choose, table
from persafl_lit.sweep.run_trial import Order, TrialMessage, forget
from persafl_lit.sweep.trials import Trial, first_trials, on_other_seeds, timeline_of
from persafl_lit.tracking.messages import IMPORTED, PLANNED, PRUNED
from persafl_lit.tracking.sweep_runs import SweepRuns

logger = logging.getLogger(__name__)

TRIAL_ATTEMPTS = 3
"""How often a trial is begun, in one sweep, before transient errors count as a failure."""
STOPS_WITHIN = 60.0
"""Seconds of wall time that trials under way have to write a checkpoint."""
TRANSIENT = ("WorkerError", "TrackingError", "TakenError", "UnwritableError")
PERMANENT = tuple(
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.PersaflError) and name not in TRANSIENT
)
"""Errors that would come again."""


def fails_again(error: str) -> bool:
    """Whether a trial that ended with KIND: sentence would end so again."""
    return error.partition(":")[0] in PERMANENT


class Launcher(Protocol):
    """Who runs trials: processes of this machine, or a Ray cluster."""

    lanes: int

    def begin(self, trials: int) -> None: ...
    def free(self) -> bool: ...
    def start(self, order: Order) -> None: ...
    def events(self, wall_seconds: float) -> Iterator[tuple[str, TrialMessage]]: ...
    def stop(self, trial: str | None = None) -> None: ...
    def close(self) -> None: ...


class Supply(Protocol):
    """Where trials come from: a list, or a search that learns."""

    def total(self) -> int: ...
    def next(self) -> Trial | None:
        """None when there is none to begin now; all are done when none is under way either."""

    def waiting(self) -> Sequence[Trial]:
        """Trials to come; of a search, trials like them."""

    def settle(self, done: Callable[[Trial], bool]) -> None:
        """Leave out those that are done, in order, as far as they are known."""

    def prunes(self, trial: Trial, message: TrialMessage) -> bool:
        """At an evaluation: whether to give the trial up."""

    def ends(self, outcome: Outcome) -> None: ...


class Listed:
    """Trials that are known beforehand."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = list(reversed(trials))
        self._total = len(trials)

    def total(self) -> int:
        return self._total

    def next(self) -> Trial | None:
        return self._trials.pop() if self._trials else None

    def waiting(self) -> Sequence[Trial]:
        return self._trials[::-1]

    def settle(self, done: Callable[[Trial], bool]) -> None:
        self._trials = [trial for trial in self.waiting() if not done(trial)][::-1]

    def prunes(self, trial: Trial, message: TrialMessage) -> bool:
        return False

    def ends(self, outcome: Outcome) -> None:
        pass


class Scheduler:
    """Runs the trials of one sweep. A trial is done when its run in the store is finished."""

    def __init__(
        self,
        plan: Plan,
        launcher: Launcher,
        runs: SweepRuns,
        uri: str,
        dashboard: Dashboard,
        should_stop: Callable[[], bool],
        retry_failed: bool = False,
        finished: Mapping[str, Exported] = MappingProxyType({}),
    ) -> None:
        """`finished` are trials that ran elsewhere, by hash."""
        self._plan, self._launcher, self._runs, self._uri, self._dashboard = plan, launcher, runs, uri, dashboard
        self._should_stop, self._retry_failed, self._finished = should_stop, retry_failed, finished
        self._before = runs.children()
        self._attempts: Counter[str] = Counter()
        self._again: list[Trial] = []
        self._running: dict[str, Trial] = {}
        self._given_up: set[str] = set()
        self._run_ids: dict[str, str] = {}
        self._outcomes: dict[str, Outcome | None] = {}

    @property
    def outcomes(self) -> list[Outcome]:
        """Of the trials that are done, in the order in which they were supplied."""
        return [outcome for outcome in self._outcomes.values() if outcome is not None]

    def run(self, supply: Supply) -> None:
        """All trials, and in two stages each method's best on each task on the other seeds."""
        if self._plan.two_stages:
            groups: dict[Any, list[Trial]] = {}
            for trial in supply.waiting():
                groups.setdefault(trial.group, []).append(trial)
            self._dashboard.later = [trials for trials in groups.values() for _ in self._plan.seeds[1:]]
        self._walk(supply)
        self._dashboard.later = ()
        if self._plan.two_stages and len(self._plan.seeds) > 1:
            best = choose(self.outcomes, self._plan.select)
            if not best:
                missing = f"no finished trial has {self._plan.select.metric} and a model that changed"
                raise ConfigError(f"nothing can be chosen for the second stage: {missing}; see select.metric")
            for chosen in best:
                self._dashboard.say(
                    f"chosen by {self._plan.select.metric} on seed {self._plan.seeds[0]}: {chosen.trial.name}"
                )
            second = Listed(on_other_seeds(self._plan, [chosen.trial for chosen in best]))
            self._dashboard.total += second.total()
            self._walk(second)

    def _walk(self, supply: Supply) -> None:
        supply.settle(lambda trial: self._settled(supply, trial))
        self._say_what_is_left(supply)
        while True:
            while not self._should_stop() and self._launcher.free():
                trial = self._again.pop() if self._again else supply.next()
                if trial is None:
                    break
                if trial.hash in self._running:  # a search asks for the same again: it will hear
                    continue
                if not self._settled(supply, trial):
                    self._start(trial)
            self._dashboard.waiting = supply.waiting()
            if self._should_stop():
                self._stop(supply)
            if not self._running and not self._again:
                return
            self._handle_events(supply)

    def _say_what_is_left(self, supply: Supply) -> None:
        """Of a sweep that is begun again, before its first trial."""
        waiting = supply.waiting()
        resumed = sum(path.exists() for path in {trial.config.checkpoint_path for trial in waiting})
        if waiting and (self.outcomes or resumed) and not self._run_ids:
            rest = (
                f"; {resumed} of the others {'goes' if resumed == 1 else 'go'} on from a checkpoint" if resumed else ""
            )
            self._dashboard.say(f"{len(self.outcomes)} of {self._dashboard.total} trials are done already{rest}")

    def abandon(self) -> None:
        """End trials under way at once; the next sweep goes on from their checkpoints."""
        self._launcher.close()
        for trial in [*self._running.values(), *self._again]:
            self._runs.end(self._run_ids[trial.hash], "KILLED", "interrupted")
        for (
            hash,
            child,
        ) in (
            self._before.items()
        ):  # of an earlier start that was killed; its trial is no more in the file, or was not reached
            if child.status == "RUNNING" and hash not in self._run_ids and self._outcomes.get(hash) is None:
                self._runs.end(child.run_id, "KILLED", "interrupted")

    def _settled(self, supply: Supply, trial: Trial) -> bool:
        """Whether a trial needs no work; its outcome is recorded then."""
        self._outcomes.setdefault(trial.hash, None)
        if (known := self._known(trial)) is None:
            return False
        self._record(supply, known, before=True)
        return True

    def _known(self, trial: Trial) -> Outcome | None:
        """What is in the store about a trial that needs no work."""
        child = self._before.get(trial.hash)
        if (outcome := self._outcomes[trial.hash]) is not None:  # a search may ask for the same again
            return outcome
        if self._attempts[trial.hash]:
            return None
        if (
            child is not None
            and child.status == "FINISHED"
            and (summary := self._runs.summary(child.run_id)) is not None
        ):
            forget(trial.config.checkpoint_path)  # killed between the end of its run and its own
            return Outcome(trial, child.run_id, "finished", summary, imported=child.imported)
        if trial.hash in self._finished:
            return self._adopt(trial, self._finished[trial.hash])
        if child is None:
            return None
        if child.pruned:
            return Outcome(trial, child.run_id, "pruned")
        if child.status == "FAILED" and fails_again(child.error) and not self._retry_failed:
            return Outcome(trial, child.run_id, "failed", error=child.error)
        return None

    def _adopt(self, trial: Trial, exported: Exported) -> Outcome:
        """A trial that ran elsewhere becomes a finished run of this store: reports and the next start find it there."""
        tags = {
            IMPORTED: exported.file,
            "persafl.version": exported.version,
            "mlflow.source.git.commit": exported.commit,
        }
        summary, timeline = exported.summary(trial), timeline_of(trial.config)
        text = timeline.to_csv() if timeline is not None and len(timeline) == summary["updates"] else None
        run_id = self._runs.adopt(trial.config, trial.name, tags, summary, exported.curves, text)
        forget(trial.config.checkpoint_path)
        return Outcome(trial, run_id, "finished", summary, imported=exported.file)

    def _start(self, trial: Trial) -> None:
        run_id = self._runs.child(trial.config, trial.name)
        self._run_ids[trial.hash] = run_id
        self._attempts[trial.hash] += 1
        self._running[trial.hash] = trial
        self._dashboard.starts(trial)
        self._launcher.start(
            Order(
                trial=trial.hash,
                config=trial.config.values,
                run_id=run_id,
                uri=self._uri,
                folder=os.getcwd(),
                log=LogSettings.current(),
            )
        )

    def _handle_events(self, supply: Supply) -> None:
        for name, message in self._launcher.events(0.5):
            trial = self._running.get(name)
            if trial is None:
                continue
            run_id = self._run_ids[trial.hash]
            if "summary" in message:
                self._record(supply, Outcome(trial, run_id, "finished", message["summary"]))
            elif "failed" in message:
                self._runs.end(run_id, "FAILED", message["failed"])
                self._record(supply, Outcome(trial, run_id, "failed", error=message["failed"]))
            elif "transient" in message:
                self._try_again(supply, trial, run_id, message["transient"])
            elif "stopped" in message and (trial.hash in self._given_up or self._should_stop()):
                self._stopped(supply, trial, run_id)
            elif "stopped" in message:
                self._try_again(supply, trial, run_id, "it stopped unasked")
            elif "updates" in message:
                self._dashboard.goes_on(trial, message)
                if "point" in message and trial.hash not in self._given_up and supply.prunes(trial, message):
                    self._given_up.add(trial.hash)
                    self._launcher.stop(trial.hash)

    def _try_again(self, supply: Supply, trial: Trial, run_id: str, what: str) -> None:
        """After a transient error: another attempt goes on from the last checkpoint."""
        del self._running[trial.hash]
        self._dashboard.leaves(trial)
        if self._attempts[trial.hash] < TRIAL_ATTEMPTS:
            logger.warning("%s: %s; it is tried again", trial.name, what)
            self._again.append(trial)
            return
        error = what if what.partition(":")[0] in TRANSIENT else f"WorkerError: {what}"
        self._runs.end(run_id, "FAILED", error)
        self._record(supply, Outcome(trial, run_id, "failed", error=error))

    def _stopped(self, supply: Supply, trial: Trial, run_id: str) -> None:
        if trial.hash in self._given_up:
            forget(trial.config.checkpoint_path)
            self._runs.end(run_id, "KILLED", tags={PRUNED: "worse than the median of the others"})
            self._record(supply, Outcome(trial, run_id, "pruned"))
            return
        del self._running[trial.hash]
        self._dashboard.leaves(trial)

    def _record(self, supply: Supply, outcome: Outcome, before: bool = False) -> None:
        self._running.pop(outcome.trial.hash, None)
        self._outcomes[outcome.trial.hash] = outcome
        self._dashboard.ends(outcome, before)
        supply.ends(outcome)

    def _stop(self, supply: Supply) -> None:
        self._launcher.stop()
        give_up_at = time.monotonic() + STOPS_WITHIN
        while self._running and time.monotonic() < give_up_at:
            self._handle_events(supply)
        raise Interrupted(
            f"stopped: {len(self.outcomes)} of {self._dashboard.total} trials are done; the same command goes on"
        )


def supply_of(plan: Plan, folder: Path) -> Supply:
    if plan.search is None or plan.search.how == "random":
        return Listed(first_trials(plan))
    try:
        from persafl_lit.sweep.optuna_search import Adaptive
    except ImportError:
        raise ConfigError(
            "search.how=adaptive needs Optuna; install it with: pip install 'persafl_lit[search]'"
        ) from None
    return Adaptive(plan, folder)


def run_sweep(
    plan: Plan,
    launcher: Launcher,
    uri: str,
    should_stop: Callable[[], bool] = lambda: False,
    retry_failed: bool = False,
    finished: Mapping[str, Exported] = MappingProxyType({}),
    quiet: bool = False,
) -> list[Outcome]:
    """Run what is not done of a sweep, and keep its table. `uri` is the tracking store, `finished` are trials that ran
    elsewhere; `quiet` shows failures only."""
    from persafl_lit.tracking import sync
    from persafl_lit.tracking.store import open_store

    folder = sweep_folder(plan)
    with _alone(plan, folder), contextlib.closing(launcher), contextlib.ExitStack() as stack:
        supply = supply_of(plan, folder)
        stack.enter_context(quieted({"optuna": logging.ERROR}))
        store = open_store(uri)
        sync(uri)
        select = plan.select
        runs = SweepRuns(store, plan.tracking.experiment, plan.name, varied_together(plan), select.metric, select.sign)
        runs.tell(text=plan.source.text, name="sweep.yaml")
        runs.tell(tags={PLANNED: str(supply.total())})
        done = finished.keys() | {trial for trial, child in runs.children().items() if child.status == "FINISHED"}
        launcher.begin(sum(trial.hash not in done for trial in supply.waiting()))
        status = "KILLED"
        with Dashboard(plan.name, supply.total(), launcher.lanes, kind=plan.select.kind, quiet=quiet) as dashboard:
            scheduler = Scheduler(plan, launcher, runs, uri, dashboard, should_stop, retry_failed, finished)
            try:
                scheduler.run(supply)
                status = "FINISHED"
            finally:
                scheduler.abandon()
                _keep(runs, folder, scheduler.outcomes, dashboard.total)
                runs.tell(status=status, end_time=int(time.time() * 1000))
    return scheduler.outcomes


def sweep_folder(plan: Plan) -> Path:
    """The folder of a sweep's table and of its processes' stderr."""
    return Path("mlruns/sweeps") / plan.name


def varied_together(plan: Plan) -> list[tuple[str, ...]]:
    """The keys that each block varies: what the UI can put side by side. Each set once."""
    sets = (tuple(key for key in block.varied if key != "method") for block in plan.blocks)
    return list(dict.fromkeys(keys for keys in sets if keys))


def _keep(runs: SweepRuns, folder: Path, outcomes: Sequence[Outcome], planned: int) -> None:
    runs.tell(tags={PLANNED: str(planned)})
    rows = table(outcomes)
    if not rows:
        return
    try:
        write_text_atomically(folder / "trials.csv", to_csv(rows))
    except OSError as error:  # the store has it, too
        logger.warning(
            "%s is not up to date: %s; the same command writes it anew", folder / "trials.csv", error.strerror
        )
    runs.tell(text=to_csv(rows), name="trials.csv")
    runs.tell(table={column: [row[column] for row in rows] for column in rows[0]}, name="trials.json")
    counts = Counter(outcome.status for outcome in outcomes)
    now = int(time.time() * 1000)
    runs.tell(
        metrics=[[f"trials.{status}", counts[status], now, len(rows)] for status in ("finished", "failed", "pruned")]
    )


@contextlib.contextmanager
def _alone(plan: Plan, folder: Path) -> Iterator[None]:
    """One launcher per sweep and folder."""
    lock = Lock(folder / "lock")
    if not lock.acquire():
        raise ConfigError(
            f"the sweep {plan.name} is under way already (process {lock.holder() or 'unknown'}); wait for it or stop it"
        )
    try:
        yield
    finally:
        lock.release()
