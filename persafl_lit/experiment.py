"""THE loop: walk the timeline, train each job from the model it read, apply updates in order of arrival, evaluate on a grid
of simulated time."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from persafl_lit.checkpoint import Checkpoint, pack, unpack
from persafl_lit.data.federation import Federation
from persafl_lit.errors import CheckpointError, ConfigError, DivergenceError, Interrupted, PersaflError
from persafl_lit.evaluate import Point
from persafl_lit.executors import Evaluation, Executor, Task, Update
from persafl_lit.server import Arrival, Rule, State
from persafl_lit.streams import rng
from persafl_lit.timeline import Job, Timeline

MOST_POINTS = 100_000


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
class OpenPoint:
    """A moment whose models are captured while its evaluation goes on beside the training."""

    sim_time: float
    updates: int
    training: dict[str, float]
    evaluation: Evaluation


@dataclass
class Experiment:
    """A run, ready to walk."""

    timeline: Timeline
    rule: Rule
    executor: Executor
    eta: float
    moments: Sequence[float]
    """When to evaluate, in simulated time; the last is the end."""
    evaluated: Sequence[int]
    """The clients to evaluate."""
    measure_gradient: bool = False
    """Whether evaluations also measure |grad F(w)|^2 of the method's own cost."""
    observers: Sequence[Observer] = ()
    checkpoint: Checkpoint | None = None
    """None is none, also when asked to stop."""
    checkpoint_every: int = 0
    """Updates between checkpoints; 0 is never."""
    checkpoint_seconds: float | None = None
    """Wall seconds between checkpoints; None is never."""
    skip_divergence: bool = False
    """Whether an update that is not finite is left out and counted, instead of ending the run."""
    extra: Callable[[], dict[str, Any]] = dict
    """Plain values to keep in the checkpoint, such as the tracking run's id."""
    should_stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.state = State(self.executor.worker.start)
        self.points: list[Point] = []
        self.tally = Tally()
        self.open: list[OpenPoint] = []
        self._last: Evaluation | None = None
        buffer = self.rule.arrivals_per_version
        self.staleness = self.timeline.staleness(buffer).tolist()
        # A job may start as soon as the version it reads exists: after this many arrivals.
        readable = self.timeline.reads // buffer * buffer
        self._queue = np.argsort(readable, kind="stable")
        self._readable = readable[self._queue]
        self._submitted = 0
        self._saved_at = time.monotonic()
        self._warned: set[str] = set()

    def identity(self, *parts: str) -> str:
        """A name for exactly this computation: the config's hash and what the config only points at."""
        first = self.executor.worker.start.double().cpu().numpy().tobytes()
        seen = json.dumps([*parts, self.timeline.digest(), hashlib.sha256(first).hexdigest()])
        return hashlib.sha256(seen.encode()).hexdigest()

    def restore(self, content: dict[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        try:
            self.state, pending, self.points, captured = unpack(content)
            self.tally = Tally(**content["tally"])
            fits = self.state.w.shape == self.executor.worker.start.shape and 0 <= self.state.arrivals <= len(self.timeline)
        except (KeyError, TypeError, ValueError, AttributeError):
            fits = False
        if not fits:
            raise CheckpointError("the checkpoint does not hold what this version writes; delete it to start anew")
        for index, task in pending.items():
            self.executor.submit(index, task)
        for sim_time, updates, training, models in captured:
            self._open_point(sim_time, updates, training, models)
        self._submitted = int(np.searchsorted(self._readable, self.state.arrivals, side="right"))

    def begin(self) -> None:
        """Hand out the first jobs."""
        self._submit_readable()
        self.executor.begin()

    def run(self, identity: str) -> None:
        """Algorithm 1: whenever an update arrives, apply it."""
        self.begin()
        for point in self.points:
            self._announce(point)
        try:
            self._walk(identity)
        except DivergenceError:
            self._close_points(wait=True)  # what was captured before counts, whoever has got how far with it
            raise
        self._capture_before(math.inf)
        while self.open:
            self.executor.finish(self.open[0].evaluation, self.should_stop)
            self.heed_stop(identity)
            self._close_points(wait=False)

    def _walk(self, identity: str) -> None:
        for index in range(self.state.arrivals, len(self.timeline)):
            job = self.timeline[index]
            self._capture_before(job.arrives)
            while (arrived := self.executor.result(index, self.should_stop)) is None:
                self.heed_stop(identity)
            self._receive(index, job, *arrived)
            self._submit_readable()
            self._close_points(wait=False)
            self.heed_stop(identity)
            if self.checkpoint and self._checkpoint_is_due():
                self.save(identity)

    def _checkpoint_is_due(self) -> bool:
        if self.checkpoint_every and self.state.arrivals % self.checkpoint_every == 0:
            return True
        return self.checkpoint_seconds is not None and time.monotonic() - self._saved_at >= self.checkpoint_seconds

    def heed_stop(self, identity: str) -> None:
        """If asked to, write a checkpoint and stop."""
        if not self.should_stop():
            return
        where = f"stopped after update {self.state.arrivals} of {len(self.timeline)}"
        if self.checkpoint is None:
            raise Interrupted(f"{where}, without a checkpoint")
        self.save(identity)
        raise Interrupted(f"{where}; the same command with --resume continues")

    def save(self, identity: str) -> None:
        assert self.checkpoint is not None
        captured = [(point.sim_time, point.updates, point.training, list(point.evaluation.models)) for point in self.open]
        content = pack(self.state, self.executor.pending, self.points, captured)
        self.checkpoint.save(identity, {**content, "tally": asdict(self.tally), "extra": self.extra()})
        self._saved_at = time.monotonic()

    def _submit_readable(self) -> None:
        """Hand out every job whose model exists by now."""
        until = int(np.searchsorted(self._readable, self.state.arrivals, side="right"))
        for index in self._queue[self._submitted : until].tolist():
            job = self.timeline[index]
            read, correction = self.rule.read(self.state, job.client)
            self.executor.submit(index, Task(job.client, job.visit, read, correction))
        self._submitted = max(self._submitted, until)

    def _receive(self, index: int, job: Job, task: Task, update: Update | PersaflError) -> None:
        if isinstance(update, PersaflError) and not isinstance(update, DivergenceError):
            raise update
        state, staleness = self.state, self.staleness[index]
        before, at_stake = self.rule.model_of(state, job.client), state.in_waiting
        loss = update.report.loss if isinstance(update, Update) else math.nan
        if isinstance(update, Update) and math.isfinite(loss) and all(vector is None or is_finite(vector) for vector in update[:2]):
            self.rule.apply(state, Arrival(job.client, task.read, update.delta, staleness, update.control))
            self.tally.add(update, staleness)
            at_stake += 1
        else:
            self._diverges(index, job, f" has loss {loss:.4g}; {self._advice()}" if isinstance(update, Update) else f": {update}")
            self.tally.grad_evals += update.report.evaluations if isinstance(update, Update) else 0
            self.rule.arrive(state)
            state.skipped += 1
        if not is_finite(self.rule.model_of(state, job.client)):
            self._diverges(index, job, f" makes the model infinite; {self._advice()}")
            self.rule.put_back(state, job.client, before)
            state.skipped += at_stake
        for observer in self.observers:
            observer.on_update(index, job, staleness, loss)

    def _diverges(self, index: int, job: Job, how: str) -> None:
        """End the run, or say once that what diverges is left out."""
        where = f"update {index} (client {job.client}, simulated time {job.arrives:.4g}, eta={self.eta:g}){how}"
        if not self.skip_divergence:
            raise DivergenceError(f"the run diverges: {where}")
        self._say_once("update", f"{where}: it is skipped, and so will others be (on_divergence=skip); they are counted")

    def _say_once(self, about: str, sentence: str) -> None:
        if about not in self._warned:
            print(f"persafl: {sentence}", file=sys.stderr)
        self._warned.add(about)

    def _advice(self) -> str:
        return "lower eta or the method's own step sizes; what was recorded until then is kept"

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _capture_before(self, moment: float) -> None:
        """Every evaluation that is due before `moment`; an update at the very moment of an evaluation counts."""
        while (count := len(self.points) + len(self.open)) < len(self.moments) and self.moments[count] < moment:
            models = [self.rule.model_of(self.state, client) for client in self.evaluated]
            self._open_point(self.moments[count], self.state.arrivals, self.tally.take() | {"skipped": self.state.skipped}, models)

    def _open_point(self, sim_time: float, updates: int, training: dict[str, float], models: Sequence[Tensor]) -> None:
        """Models are never changed in place, so they may be evaluated later; ones that are evaluated already are not again."""
        last = len(self.points) + len(self.open) + 1 == len(self.moments)
        rules = len(self.executor.worker.work.finetune) if last else 1
        known = self._last
        if known is None or known.rules != rules or any(now is not then for now, then in zip(models, known.models, strict=True)):
            gradients = sum(client < self.timeline.clients for client in self.evaluated) if self.measure_gradient else 0
            self._last = known = self.executor.evaluate(self.evaluated, models, rules, updates, gradients)
        self.open.append(OpenPoint(sim_time, updates, training, known))

    def _close_points(self, wait: bool) -> None:
        """Record the evaluations that are done, in their order."""
        while self.open and (self.open[0].evaluation.done or (wait and self.executor.finish(self.open[0].evaluation, self.should_stop))):
            self._record(self.open.pop(0))

    def _record(self, captured: OpenPoint) -> None:
        scores = captured.evaluation.scores()
        for client, score in zip(self.evaluated, scores, strict=True):
            if not math.isfinite(score.worst_loss()):
                sentence = (
                    f"the evaluation after update {captured.updates} diverges: client {client} has loss {score.own.test_loss:.4g} "
                    f"after fine-tuning and {score.shared.test_loss:.4g} before; lower eval.finetune's step size or eta={self.eta:g}"
                )
                if not self.skip_divergence:
                    raise DivergenceError(sentence)
                self._say_once("evaluation", f"{sentence}. The run goes on (on_divergence=skip); its mean losses are not finite")
        trained = sum(client < self.timeline.clients for client in self.evaluated)
        squared = captured.evaluation.squared_gradient()
        training = captured.training if squared is None else captured.training | {"grad_norm_sq": squared}
        point = Point(captured.sim_time, captured.updates, scores[:trained], training, scores[trained:])
        self.points.append(point)
        self._announce(point)

    def _announce(self, point: Point) -> None:
        for observer in self.observers:
            observer.on_point(point)


def is_finite(vector: Tensor) -> bool:
    """Whether all values are finite, in one pass: nan and infinities show in the extremes (`torch.isfinite` takes 20 times longer)."""
    least, most = torch.aminmax(vector)
    return math.isfinite(float(least)) and math.isfinite(float(most))


def evaluation_moments(horizon: float, every: float | None, affordable: float = math.inf) -> list[float]:
    """0, every, 2 every, ... and the end. Without `every`: up to ten steps, as many as `affordable` evaluations allow."""
    step = every or horizon / max(1, min(10, int(min(affordable, 11.0)) - 1)) or 1.0
    if horizon / step > MOST_POINTS:
        raise ConfigError(f"eval.every={step:g} makes more than {MOST_POINTS} evaluations by simulated time {horizon:g}; raise it")
    grid = [k * step for k in range(math.ceil(horizon / step - 1e-9))] or [0.0]
    return [*grid, horizon] if horizon > grid[-1] else grid


def evaluated_clients(federation: Federation, most: int | None, seed: int) -> list[int]:
    """All clients, or `most` of those that train and `most` of the held-out ones, drawn by the seed."""
    trained = federation.trained()
    groups = (range(trained), range(trained, federation.clients))
    if most is None:
        return [client for group in groups for client in group]
    stream = rng(seed, "evaluated clients")
    return [int(client) for group in groups for client in sorted(stream.permutation(np.asarray(group, dtype=int))[:most])]
