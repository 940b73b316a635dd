"""THE loop: walk the timeline, train each job from the model it read, apply updates in order of arrival, evaluate on a
grid of simulated time."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from persafl_lit.common.tensors import Tensors
from persafl_lit.engine.checkpoint import (
    NOT_OURS,
    Checkpoint,
    Memories,
    Reads,
    pack_job,
    pack_point,
    pack_state,
    unpack_job,
    unpack_point,
    unpack_state,
)
from persafl_lit.engine.executors import Evaluation, Executor
from persafl_lit.engine.listeners import Listeners, culprit
from persafl_lit.engine.memory_file import MemoryFile
from persafl_lit.engine.messages import Evaluate, Train, Update
from persafl_lit.engine.tally import Tally
from persafl_lit.errors import (
    CallbackError,
    CheckpointError,
    ConfigError,
    DataError,
    DivergenceError,
    Interrupted,
    ModelError,
    PersaflError,
    located,
    shown,
)
from persafl_lit.learning.scores import Captured, Point, Scores
from persafl_lit.server.rules import Rule
from persafl_lit.server.state import Slot, State
from persafl_lit.timeline import Job, Timeline

if TYPE_CHECKING:
    import lightning as L

logger = logging.getLogger(__name__)


@dataclass
class OpenPoint:
    """A moment whose state is captured while its evaluation goes on beside the training."""

    sim_time: float
    training: dict[str, float]
    state: State
    evaluation: Evaluation


@dataclass
class Experiment:
    """A run, ready to walk. Callbacks are given it: they may read `timeline`, `state` and `points`, and call `stop`."""

    fabric: Fabric
    """Device and precision of the run, its callbacks and its loggers."""
    timeline: Timeline
    rule: Rule
    executor: Executor
    eta: float
    moments: Sequence[float]
    """When to evaluate, in simulated time; the last is the end."""
    evaluated: Sequence[int]
    """The clients to evaluate."""
    build_model: Callable[[State], L.LightningModule]
    """A copy of the backbone with the weights of a state, for callbacks."""
    measure_gradient: bool = False
    """Whether evaluations also measure |grad F(w)|^2 of the method's own cost."""
    checkpoint: Checkpoint | None = None
    """If None, nothing is saved, even on interrupt."""
    checkpoint_every: int = 0
    """Updates between checkpoints; 0 is never."""
    checkpoint_seconds: float | None = None
    """Wall seconds between checkpoints; if None, none is written by time."""
    skip_divergence: bool = False
    """Whether an update that is not finite is left out and counted, instead of ending the run."""
    memory_file: MemoryFile = field(default_factory=lambda: MemoryFile(math.inf, Path()))
    """Where clients' memories are kept."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The config under dotted keys."""
    should_stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        worker = self.executor.worker
        self.state = State(worker.start, kept=dict(worker.published))
        self.rule.check_size(worker.start.numel())
        self.points: list[Point] = []
        self.tally = Tally()
        self.open: list[OpenPoint] = []
        self.wall_before = 0.0
        """Wall seconds of the run before it was resumed."""
        self._wall_start = time.monotonic()
        self._last: tuple[Evaluation, State] | None = None
        self._telling: Point | None = None
        """The point of which callbacks are being told."""
        self._stopped: Point | None = None
        """The point at which a callback has asked the run to end."""
        self._ended = False
        """Whether the run has been cut there."""
        self._told: tuple[list[str], bool] = [], False
        """Of the oldest open point: callbacks that know of it though another one failed, and whether one of them asked
        to stop."""
        self._identity = ""
        buffer = self.rule.arrivals_per_version
        self.staleness = self.timeline.staleness(buffer).tolist()
        # A job may start as soon as what it reads exists: the version of the model, and its client's memory.
        readable = self.timeline.reads // buffer * buffer
        if worker.keeps:
            readable = np.maximum(readable, self.timeline.last_visits())
        self._queue = np.argsort(readable, kind="stable")
        self._readable = readable[self._queue]
        self._submitted = 0
        self._saved_at = time.monotonic()
        self._warned: set[str] = set()
        self.listeners = Listeners(self.fabric)

    def identify(self, *parts: str) -> str:
        """A name for exactly this computation: the config's hash and what the config only points at."""
        seen = json.dumps([*parts, self.timeline.digest(), self.executor.worker.digest])
        self._identity = hashlib.sha256(seen.encode()).hexdigest()
        return self._identity

    @property
    def model_changed(self) -> bool:
        """Whether any update has become part of a version of the shared model; where nothing is shared, of a client's
        own."""
        versions = self.state.arrivals // self.rule.arrivals_per_version
        if self.state.latest and torch.equal(self.state.w, self.executor.worker.start):
            return not self.executor.worker.transfer_bytes  # the rule still waits for everybody's first update
        return self.state.arrivals > self.state.skipped and (versions > 0 or not self.executor.worker.transfer_bytes)

    def wall_seconds(self) -> float:
        return self.wall_before + time.monotonic() - self._wall_start

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def restore(self) -> bool:
        """Go on where a checkpoint was written; False if there is none."""
        assert self.checkpoint is not None
        content = self.checkpoint.load(self._identity, self.memory_file.keep)
        if content is None:
            return False
        try:
            memories = content["memories"]
            self.state = unpack_state(content["state"], memories)
            self.points = [unpack_point(point) for point in content["points"]]
            self.tally = Tally(**content["tally"])
            self.wall_before += float(content["wall_seconds"])
            pending = {index: unpack_job(job, content["reads"], memories) for index, job in content["pending"].items()}
            captured = [
                (time, training, unpack_state(state, memories)) for time, training, state in content["captured"]
            ]
            ended, states = content["ended"], dict(content["callbacks"])
            self._told = list(content["told"][0]), bool(content["told"][1])
            fits = self.state.w.shape == self.executor.worker.start.shape and 0 <= self.state.arrivals <= len(
                self.timeline
            )
        except (LookupError, TypeError, ValueError, AttributeError):
            fits = False
        if not fits:
            raise CheckpointError(NOT_OURS)
        self.listeners.load(states)
        if ended:
            self._end_at(self.points[-1])
        for index, job in pending.items():
            self.executor.submit(index, job)
        for sim_time, training, state in captured:
            self._open_point(sim_time, training, state)
        self._submitted = int(np.searchsorted(self._readable, self.state.arrivals, side="right"))
        return True

    def save(self, rescue: bool = False) -> None:
        """Write a checkpoint. With `rescue`, after a callback has failed: without states that callbacks cannot give."""
        assert self.checkpoint is not None
        memories: Memories = {}
        reads: Reads = {}
        content = {
            "state": pack_state(self.state, memories),
            "pending": {index: pack_job(job, reads, memories) for index, job in self.executor.pending.items()},
            "reads": reads,
            "points": [pack_point(point) for point in self.points],
            "captured": [[point.sim_time, point.training, pack_state(point.state, memories)] for point in self.open],
            "tally": asdict(self.tally),
            "wall_seconds": self.wall_seconds(),
            "ended": self._ended,
            "told": list(self._told),
            "callbacks": self.listeners.states(rescue),
        }
        self.checkpoint.save(self._identity, content, memories)
        self._saved_at = time.monotonic()
        logger.debug("checkpoint after update %d", self.state.arrivals)
        self.call("on_checkpoint")

    # -- callbacks ----------------------------------------------------------------------------------------------------

    def call(self, hook: str, **about: Any) -> None:
        """Tell every callback; the error of one that fails names it."""
        self.listeners.tell(hook, {"experiment": self, **about})

    def tell_error(self, error: BaseException) -> None:
        self.listeners.tell_error({"experiment": self, "error": error})

    def stop(self, point: Point) -> None:
        """End the run as of this point, which callbacks are being told of: its model, memories and counts are the
        run's."""
        if point is not self._telling:
            raise ConfigError("experiment.stop takes the point that on_evaluation is being told of")
        self._stopped = point

    @property
    def stopped(self) -> bool:
        """Whether a callback has asked the run to end."""
        return self._stopped is not None

    def _end_at(self, point: Point) -> None:
        """Forget what came after the point."""
        self._stopped, self._ended = point, True
        if point.captured is not None:
            self.state = point.captured.state
        self.executor.forget_jobs()
        self.open.clear()
        self.points = [
            known for known in self.points if known.updates <= point.updates and known.sim_time <= point.sim_time
        ]
        self.moments = [known.sim_time for known in self.points]
        self.timeline = self.timeline.until(point.sim_time, point.updates)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Hand out the first jobs."""
        self._submit_readable()
        self.executor.begin()

    def run(self) -> None:
        """Algorithm 1: whenever an update arrives, apply it."""
        self.begin()
        self.call("on_run_start")
        self.listeners.start_loggers(self.settings, self.points)
        try:
            self._walk()
        except (DivergenceError, ModelError):
            self._close_points(wait=True)  # evaluations captured before count, however far they are
            if not self.stopped:
                raise
        self._capture_before(math.inf)
        while self.open and not self.stopped:
            self.executor.finish(self.open[0].evaluation, self.should_stop)
            self.stop_if_asked()
            self._close_points(wait=False)
        if self._stopped is not None:
            self._end_at(self._stopped)
            self._evaluate_by_all_rules()

    def _walk(self) -> None:
        for index in range(self.state.arrivals, len(self.timeline)):
            job = self.timeline[index]
            self._capture_before(job.arrives)
            while (arrived := self.executor.result(index, self.should_stop)) is None:
                self.stop_if_asked()
            loss = self._receive(index, job, *arrived)
            self.executor.forget(index)
            # before callbacks are called: a checkpoint that is written because one fails must be whole
            self._submit_readable()
            self.call("on_update", job=job, staleness=self.staleness[index], loss=loss)
            self._close_points(wait=False)
            if self.stopped:
                return
            self.stop_if_asked()
            if self.checkpoint and self._checkpoint_is_due():
                self.save()

    def _checkpoint_is_due(self) -> bool:
        if self.checkpoint_every and self.state.arrivals % self.checkpoint_every == 0:
            return True
        return self.checkpoint_seconds is not None and time.monotonic() - self._saved_at >= self.checkpoint_seconds

    def stop_if_asked(self) -> None:
        """If asked to, write a checkpoint and stop."""
        if not self.should_stop():
            return
        where = f"stopped after update {self.state.arrivals} of {len(self.timeline)}"
        if self.checkpoint is None:
            raise Interrupted(f"{where}, without a checkpoint")
        self.save()
        raise Interrupted(f"{where}; the same command with --resume continues")

    def _submit_readable(self) -> None:
        """Hand out every job whose model and memory exist by now."""
        until = int(np.searchsorted(self._readable, self.state.arrivals, side="right"))
        for index in self._queue[self._submitted : until].tolist():
            job = self.timeline[index]
            slot = self.state.memory(job.client)
            self.executor.submit(
                index, Train(job.client, job.visit, self.rule.read(self.state), slot.tensors, slot.visit)
            )
        self._submitted = max(self._submitted, until)

    def _receive(self, index: int, job: Job, message: Train, update: Update | PersaflError) -> float:
        """Apply an update, or leave it out if it is not finite; returns its loss."""
        if isinstance(update, PersaflError) and not isinstance(update, DivergenceError):
            raise update
        state, staleness = self.state, self.staleness[index]
        w, kept, latest, at_stake = state.w, dict(state.kept), dict(state.latest), state.in_waiting
        state.sender = job.client, job.visit
        loss = update.loss if isinstance(update, Update) else math.nan
        memory: Tensors = {}
        if (
            isinstance(update, Update)
            and math.isfinite(loss)
            and all(map(is_finite, (*update.sent.values(), *update.memory.values())))
        ):
            self._apply(index, message.read, update.sent, staleness)
            self.tally.add(update, staleness)
            memory = update.memory
            at_stake += 1
        else:
            self._diverges(index, job, self._what_diverges(update))
            self.tally.grad_evals += update.evaluations if isinstance(update, Update) else 0
            self.rule.arrive(state)
            state.skipped += 1
        if not is_finite(state.w):
            self._diverges(index, job, f" makes the model infinite; {self._advice()}")
            # As if this arrival, and the buffer that it completed, had not entered; other clients' memories stay as
            # they are.
            state.w, state.kept, state.latest = w, kept, latest
            state.waiting, state.in_waiting, state.arrivals = None, 0, state.arrivals - 1
            self.rule.arrive(state)
            state.skipped += at_stake
        elif memory:
            state.memories[job.client] = Slot(job.visit, self.memory_file.keep(memory))
        return loss

    def _apply(self, index: int, read: Tensors, sent: Tensors, staleness: int) -> None:
        """Let the rule apply an update; errors of a user's rule name it."""
        state, w, rule = self.state, self.state.w, type(self.rule).__name__
        version = w._version
        try:
            self.rule.apply(state, read, sent, staleness)
        except (PersaflError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a rule of the user's may raise anything
            raise ModelError(f"the rule {rule} fails at update {index}: {located(error)}") from error
        if w._version != version:
            raise ModelError(
                f"the rule {rule} changes state.w in place, which jobs under way still read; assign a new tensor to it"
            )
        if not isinstance(state.w, Tensor) or state.w.shape != w.shape:
            raise ModelError(
                f"the rule {rule} leaves {shown(state.w)} in state.w at update {index}; it must be a tensor "
                f"of shape {tuple(w.shape)}"
            )
        if state.arrivals != index + 1:
            raise ModelError(
                f"the rule {rule} must call self.arrive(state) once in apply; after update {index} there are "
                f"{state.arrivals} arrivals"
            )

    def _diverges(self, index: int, job: Job, how: str) -> None:
        """End the run, or say once that what diverges is left out."""
        where = f"update {index} (client {job.client}, simulated time {job.arrives:.4g}, eta={self.eta:g}){how}"
        if (found := self._not_finite(job.client)) is not None:
            where = f"{where}; {found}"
        if not self.skip_divergence:
            raise DivergenceError(f"the run diverges: {where}") if found is None else DataError(found)
        self._say_once(
            "update", f"{where}: it is skipped, and so will others be (on_divergence=skip); they are counted"
        )

    def _not_finite(self, client: int) -> str | None:
        """What of a client's data can have no finite loss."""
        found = self.executor.worker.work.federation.not_finite(client)
        return None if found is None else f"{found} holds a value that is not finite"

    def _say_once(self, about: str, sentence: str) -> None:
        if about not in self._warned:
            logger.warning("%s", sentence)
        self._warned.add(about)

    def _what_diverges(self, update: Update | PersaflError) -> str:
        if not isinstance(update, Update):
            return f": {update}"
        kept = [name for name, value in update.memory.items() if not is_finite(value)]
        if kept and math.isfinite(update.loss) and all(map(is_finite, update.sent.values())):
            return f" leaves what the client keeps ({kept[0]}) infinite; {self._advice()}"
        return f" has loss {update.loss:.4g}; {self._advice()}"

    def _advice(self) -> str:
        return "lower eta or the method's own step sizes; what was recorded until then is kept"

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _capture_before(self, moment: float) -> None:
        """Every evaluation that is due before `moment`; an update at the very moment of an evaluation counts."""
        while (count := len(self.points) + len(self.open)) < len(self.moments) and self.moments[count] < moment:
            training = self.tally.take() | {"skipped": self.state.skipped}
            self._open_point(self.moments[count], training, self.state.snapshot())

    def _open_point(self, sim_time: float, training: dict[str, float], state: State) -> None:
        """Tensors are never changed in place, so a state may be evaluated later; one that is evaluated already is not
        again."""
        last = len(self.points) + len(self.open) + 1 == len(self.moments)
        rules = self._rules() if last else self._rules()[:1]
        if self._last is None or self._last[0].rules != rules or not self._alike(state, self._last[1]):
            self._last = self._evaluate(state, rules), state
        self.open.append(OpenPoint(sim_time, training, state, self._last[0]))

    def _alike(self, state: State, other: State) -> bool:
        """Whether the evaluated clients would be evaluated from the same model and memory."""
        same = all(tensor is other.model.get(name) for name, tensor in state.model.items())
        return same and all(state.memory(client).visit == other.memory(client).visit for client in self.evaluated)

    def _rules(self) -> tuple[str, ...]:
        return tuple(self.executor.worker.work.finetune)

    def _evaluate(self, state: State, rules: tuple[str, ...]) -> Evaluation:
        read = state.model
        slots = {client: state.memory(client) for client in self.evaluated}
        messages = [Evaluate(client, rules, read, slot.tensors) for client, slot in slots.items()]
        return self.executor.evaluate(messages, state.arrivals, self._trained() if self.measure_gradient else 0)

    def _trained(self) -> int:
        """Of the evaluated clients, how many train: the first ones."""
        return sum(client < self.timeline.clients for client in self.evaluated)

    def _close_points(self, wait: bool) -> None:
        """Record the evaluations that are done, in their order."""
        while self.open and not self.stopped:
            evaluation = self.open[0].evaluation
            if not (evaluation.done or (wait and self.executor.finish(evaluation, self.should_stop))):
                return
            self._record(self.open[0])
            self.open.pop(
                0
            )  # not before everybody has been told: a point at which a callback fails is evaluated again on resuming

    def _record(self, captured: OpenPoint) -> None:
        updates, evaluation = captured.state.arrivals, captured.evaluation
        scores = self._finite_scores(evaluation, updates)
        squared = evaluation.squared_gradient()
        training = captured.training if squared is None else captured.training | {"grad_norm_sq": squared}
        point = Point(captured.sim_time, updates, scores[: self._trained()], training, scores[self._trained() :])
        self._announce(replace(point, captured=Captured(captured.state, self.build_model)))
        self.points.append(point)

    def _finite_scores(self, evaluation: Evaluation, updates: int) -> tuple[Scores, ...]:
        scores = evaluation.scores()
        for client, score in zip(self.evaluated, scores, strict=True):
            if not math.isfinite(score.worst_loss()):
                sentence = (
                    f"the evaluation after update {updates} diverges: client {client} has loss "
                    f"{score.personalised.test_loss:.4g} "
                    f"after fine-tuning and {score.shared.test_loss:.4g} before; lower eval.finetune's step "
                    f"size or eta={self.eta:g}"
                )
                found = self._not_finite(client)
                sentence = sentence if found is None else f"{sentence}; {found}"
                if not self.skip_divergence:
                    raise DivergenceError(sentence) if found is None else DataError(found)
                self._say_once(
                    "evaluation", f"{sentence}. The run goes on (on_divergence=skip); its mean losses are not finite"
                )
        return scores

    def _evaluate_by_all_rules(self) -> None:
        """The last point of a run has further fine-tuning rules; one that became the last by `stop` gets them now."""
        last = self.points[-1]
        if len(self._rules()) == 1 or last.scores[0].beside:
            return
        evaluation = self._evaluate(self.state, self._rules())
        while not self.executor.finish(evaluation, self.should_stop):
            self.stop_if_asked()
        scores = self._finite_scores(evaluation, last.updates)
        self.points[-1] = replace(last, scores=scores[: self._trained()], held_out=scores[self._trained() :])
        self.listeners.log(self.points[-1], last.metrics())

    def _announce(self, point: Point) -> None:
        """Tell loggers and callbacks, but no callback that was told before another one failed and the run was
        resumed."""
        self.listeners.log(point)
        already, stop = self._told
        waiting = [(callback, key) for callback, key in self.listeners.named() if key not in already]
        self._telling, self._stopped = point, point if stop else None
        try:
            self.listeners.tell(
                "on_evaluation", {"experiment": self, "point": point}, [callback for callback, _ in waiting]
            )
        except CallbackError as error:
            failed = [callback is culprit(error.__cause__) for callback, _ in waiting].index(True)
            self._told = [*already, *(key for _, key in waiting[:failed])], self.stopped
            raise
        finally:
            self._telling = None
        self._told = [], False


def is_finite(vector: Tensor) -> bool:
    """Whether all values are finite, in one pass: nan and infinities show in the extremes (`torch.isfinite` takes 20
    times longer)."""
    if not vector.numel():
        return True
    least, most = torch.aminmax(vector)
    return math.isfinite(float(least)) and math.isfinite(float(most))
