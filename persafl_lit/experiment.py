"""THE loop: walk the timeline, train each job from the model it read, apply updates in order of arrival, evaluate on a grid
of simulated time."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from persafl_lit.checkpoint import Checkpoint, pack, unpack
from persafl_lit.errors import ConfigError, DivergenceError, PersaflError
from persafl_lit.evaluate import Point, Scores
from persafl_lit.executors import Serial, Task, Update
from persafl_lit.server import Arrival, Rule, State
from persafl_lit.timeline import Job, Timeline

MOST_POINTS = 100_000


class Interrupted(PersaflError):
    """Asked to stop; a checkpoint has been written."""

    exit_code = 130


class Observer(Protocol):
    """Someone who watches a run: a progress bar, a tracker."""

    def on_update(self, index: int, job: Job, staleness: int, loss: float) -> None:
        """An update has been applied."""

    def on_point(self, point: Point) -> None:
        """An evaluation is done (on resuming: was done before)."""


@dataclass
class Tally:
    """What training has cost and seen since the last evaluation, and in all."""

    grad_evals: int = 0
    updates: int = 0
    loss: float = 0.0
    residual: float = 0.0
    staleness: int = 0
    worst_staleness: int = 0

    def add(self, update: Update, staleness: int) -> None:
        self.grad_evals += update.report.evaluations
        self.updates += 1
        self.loss += update.report.loss
        self.residual += update.report.residual or 0.0
        self.staleness += staleness
        self.worst_staleness = max(self.worst_staleness, staleness)

    def take(self) -> dict[str, float]:
        """Means since the last call; the count of gradients goes on."""
        count = max(self.updates, 1)
        means = {
            "grad_evals": self.grad_evals,
            "train_loss": self.loss / count if self.updates else math.nan,
            "inner_residual": self.residual / count if self.residual else math.nan,
            "staleness_mean": self.staleness / count,
            "staleness_max": self.worst_staleness,
        }
        self.__init__(grad_evals=self.grad_evals)  # type: ignore[misc]
        return means


@dataclass
class Experiment:
    """A run, ready to walk. `checkpoint_every` counts updates; 0 writes checkpoints only when asked to stop."""

    timeline: Timeline
    rule: Rule
    executor: Serial
    eta: float
    eval_every: float | None = None
    observers: Sequence[Observer] = ()
    checkpoint: Checkpoint | None = None
    checkpoint_every: int = 0
    extra: dict[str, Any] | None = None
    """Plain values to keep in the checkpoint, such as the tracking run's id."""
    should_stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.state = State(self.executor.worker.start)
        self.points: list[Point] = []
        self.tally = Tally()
        self._evaluated: tuple[list[Tensor], tuple[Scores, ...]] | None = None
        buffer = self.rule.arrivals_per_version
        self.staleness = self.timeline.staleness(buffer).tolist()
        # A job may start as soon as the version it reads exists: after this many arrivals.
        readable = self.timeline.reads // buffer * buffer
        self._queue = np.argsort(readable, kind="stable")
        self._readable = readable[self._queue]
        self._submitted = 0
        self.moments = evaluation_moments(self.timeline.horizon, self.eval_every)

    def identity(self, *parts: str) -> str:
        """A name for exactly this computation: the config's hash and what the config only points at."""
        first = self.executor.worker.start.double().cpu().numpy().tobytes()
        seen = json.dumps([*parts, self.timeline.digest(), hashlib.sha256(first).hexdigest()])
        return hashlib.sha256(seen.encode()).hexdigest()

    def restore(self, content: dict[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self.state, pending, self.points = unpack(content)
        self.tally = Tally(**content["tally"])
        for index, task in pending.items():
            self.executor.submit(index, task)
        self._submitted = int(np.searchsorted(self._readable, self.state.arrivals, side="right"))
        for point in self.points:
            for observer in self.observers:
                observer.on_point(point)

    def run(self, identity: str) -> None:
        """Algorithm 1: whenever an update arrives, apply it."""
        self._submit_readable()
        for index in range(self.state.arrivals, len(self.timeline)):
            job = self.timeline[index]
            self._evaluate_before(job.arrives)
            try:
                task, update = self.executor.result(index)
            except DivergenceError as error:
                raise DivergenceError(f"{self._place(index, job)}: {error}") from None
            self._receive(index, job, task, update)
            self._submit_readable()
            stop = self.should_stop()
            if self.checkpoint and (stop or (self.checkpoint_every and (index + 1) % self.checkpoint_every == 0)):
                self.save(identity)
            if stop:
                raise Interrupted(f"stopped after update {index + 1} of {len(self.timeline)}; the same command with --resume continues")
        self._evaluate_before(math.inf)

    def save(self, identity: str) -> None:
        assert self.checkpoint is not None
        content = pack(self.state, self.executor.pending, self.points)
        self.checkpoint.save(identity, {**content, "tally": asdict(self.tally), "extra": self.extra or {}})

    def _submit_readable(self) -> None:
        """Hand out every job whose model exists by now."""
        until = int(np.searchsorted(self._readable, self.state.arrivals, side="right"))
        for index in self._queue[self._submitted : until].tolist():
            job = self.timeline[index]
            read, correction = self.rule.read(self.state, job.client)
            self.executor.submit(index, Task(job.client, job.visit, read, correction))
        self._submitted = max(self._submitted, until)

    def _receive(self, index: int, job: Job, task: Task, update: Update) -> None:
        if not (math.isfinite(update.report.loss) and bool(torch.isfinite(update.delta).all())):
            raise DivergenceError(f"{self._place(index, job)} has loss {update.report.loss:.4g}; {self._advice()}")
        staleness = self.staleness[index]
        self.rule.apply(self.state, Arrival(job.client, task.read, update.delta, staleness, update.control))
        if not bool(torch.isfinite(self.rule.model_of(self.state, job.client)).all()):
            raise DivergenceError(f"{self._place(index, job)} makes the model infinite; {self._advice()}")
        self.tally.add(update, staleness)
        for observer in self.observers:
            observer.on_update(index, job, staleness, update.report.loss)

    def _place(self, index: int, job: Job) -> str:
        return f"the run diverges: update {index} (client {job.client}, simulated time {job.arrives:.4g}, eta={self.eta:g})"

    def _advice(self) -> str:
        return "lower eta or the method's own step sizes; what was recorded until then is kept"

    def _evaluate_before(self, moment: float) -> None:
        """Every evaluation that is due before `moment`; an update at the very moment of an evaluation counts."""
        while len(self.points) < len(self.moments) and self.moments[len(self.points)] < moment:
            trained, scores = self.timeline.clients, self._scores()
            point = Point(self.moments[len(self.points)], self.state.arrivals, scores[:trained], self.tally.take(), scores[trained:])
            self.points.append(point)
            for observer in self.observers:
                observer.on_point(point)

    def _scores(self) -> tuple[Scores, ...]:
        """Every client's, held-out ones included; models that have not changed since the last time are not evaluated again."""
        everyone = self.executor.worker.federation.clients
        models = [self.rule.model_of(self.state, client) for client in range(everyone)]
        if self._evaluated is None or any(now is not then for now, then in zip(models, self._evaluated[0], strict=True)):
            self._evaluated = models, self.executor.evaluate(models)
            for client, score in enumerate(self._evaluated[1]):
                if not math.isfinite(score.test_loss + score.val_loss + score.global_loss):
                    raise DivergenceError(
                        f"the evaluation after update {self.state.arrivals} diverges: client {client} has loss {score.test_loss:.4g} "
                        f"after fine-tuning and {score.global_loss:.4g} before; lower eval.finetune's step size or eta={self.eta:g}"
                    )
        return self._evaluated[1]


def evaluation_moments(horizon: float, every: float | None) -> list[float]:
    """0, every, 2 every, ... and the end."""
    step = every or horizon / 10 or 1.0
    if horizon / step > MOST_POINTS:
        raise ConfigError(f"eval.every={step:g} makes more than {MOST_POINTS} evaluations by simulated time {horizon:g}; raise it")
    grid = [k * step for k in range(math.ceil(horizon / step - 1e-9))] or [0.0]
    return [*grid, horizon] if horizon > grid[-1] else grid
