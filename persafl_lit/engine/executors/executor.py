"""Executors run jobs and evaluations, each a pure function of its inputs.

A job's result depends only on (the model read, the client's memory, client, visit, seed), so it may run whenever these
exist, anywhere, in any order, or twice: the run's result has the same bits. An executor has lanes that work at the same
time; it hands out what is most urgent first.
"""

from __future__ import annotations

import heapq
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from torch import Tensor

from persafl_lit.common.plugins import exits_refused
from persafl_lit.engine.executors.worker import Worker
from persafl_lit.engine.messages import CostGradient, Evaluate, Gradient, Message, Train, Update
from persafl_lit.errors import ModelError, PersaflError, first_line, located
from persafl_lit.learning.scores import Scores

POLL = 0.2
"""Wall seconds after which a wait looks whether it is still wanted."""
WINDOW = 8
"""Jobs per lane that may be done ahead of the one that the server waits for: what bounds the updates it must keep."""


@dataclass
class Evaluation:
    """The scores of some clients, each from the shared model and its own memory, as they come in."""

    clients: Sequence[int]
    rules: tuple[str, ...]
    """The fine-tuning rules it uses."""
    gradients: int = 0
    """Of the first so many clients, the gradient of their cost is measured, too."""
    found: dict[int, Scores] = field(default_factory=dict)
    failure: Exception | None = None
    _sum: Tensor | None = None
    _added: int = 0
    _early: dict[int, Tensor] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return (len(self.found) == len(self.clients) and self._added == self.gradients) or self.failure is not None

    def add(self, client: int, gradient: Tensor) -> None:
        """Gradients are summed in the order of clients, whatever order they come in: the sum has the same bits."""
        self._early[client] = gradient
        while self._added < self.gradients and (part := self._early.pop(self.clients[self._added], None)) is not None:
            self._sum = part.double() if self._sum is None else self._sum.add_(part)
            self._added += 1

    def squared_gradient(self) -> float | None:
        """|grad F(w)|^2 with F the mean of the clients' costs: what the paper's theorems bound."""
        return None if self._sum is None else float((self._sum / self.gradients).square().sum())

    def scores(self) -> tuple[Scores, ...]:
        """In the order of `clients`; a failure is raised now, when its turn has come."""
        if self.failure is not None:
            raise self.failure
        return tuple(self.found[client] for client in self.clients)


UnitResult = Update | Scores | Gradient | Exception
"""What comes of a message; what goes wrong is raised when its turn has come."""


class Unit(NamedTuple):
    """One piece of work: a job (its index in the timeline), or one client of an evaluation."""

    job: int | None
    evaluation: Evaluation | None
    message: Message
    attempts: int = 0
    """How often its worker was lost."""


class Executor(ABC):
    """Lanes that train and evaluate. Use as a context manager: leaving it stops whatever still runs."""

    def __init__(self, worker: Worker, lanes: int) -> None:
        self.worker = worker
        self.lanes = lanes
        self.pending: dict[int, Train] = {}
        """Jobs whose update has not been applied, with what they read: what a checkpoint must keep."""
        self.wall_training = self.wall_evaluating = 0.0
        self._finished: dict[int, Update | PersaflError] = {}
        self._waiting: list[tuple[int, int, Unit]] = []
        self._count = 0
        self._needed: float = 0

    # -- what the loop asks for ---------------------------------------------------------------------------------------

    def submit(self, index: int, message: Train) -> None:
        """Job `index` may start: the model and the memory that it reads exist."""
        self.pending[index] = message
        self._queue(index, Unit(index, None, message))

    def evaluate(self, messages: Sequence[Evaluate], arrivals: int, gradients: int = 0) -> Evaluation:
        """Fine-tune-then-evaluate: not before the next few updates, so that it fills gaps, but soon after them."""
        evaluation = Evaluation([message.client for message in messages], messages[0].rules, gradients)
        costs = [CostGradient(message.client, message.read, message.memory) for message in messages[:gradients]]
        units: list[Message] = [*messages, *costs]
        for unit in units:
            self._queue(arrivals + 2 * self.lanes, Unit(None, evaluation, unit))
        return evaluation

    def forget_jobs(self) -> None:
        """Jobs and evaluations that have not begun are not wanted any more."""
        self.pending.clear()
        self._waiting.clear()

    def begin(self) -> None:
        """Let the lanes start on what is there, without waiting for any of it."""
        self._hand_out()

    def result(
        self, index: int, give_up: Callable[[], bool] = lambda: False
    ) -> tuple[Train, Update | PersaflError] | None:
        """The update of job `index`, or why there is none; None if the wait was given up."""
        self._needed = index
        self._work(lambda: index in self._finished, give_up)
        if index not in self._finished:
            return None
        return self.pending[index], self._finished.pop(index)

    def forget(self, index: int) -> None:
        """The update of job `index` has been applied: no checkpoint needs what it read."""
        del self.pending[index]

    def finish(self, evaluation: Evaluation, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait for an evaluation; False if the wait was given up."""
        self._needed = float("inf")
        self._work(lambda: evaluation.done, give_up)
        return evaluation.done

    def evaluation_share(self) -> float:
        """Of the time that the lanes worked."""
        total = self.wall_training + self.wall_evaluating
        return self.wall_evaluating / total if total else 0.0

    # -- the order of work --------------------------------------------------------------------------------------------

    def _queue(self, urgency: int, unit: Unit) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (urgency, self._count, unit))

    def _work(self, until: Callable[[], bool], give_up: Callable[[], bool]) -> None:
        self._hand_out()
        while True:
            there = until() or give_up()
            for unit, result, wall_seconds in self._collect(wait=not there):
                self._keep(unit, result, wall_seconds)
            self._hand_out()
            if there:
                return

    def _hand_out(self) -> None:
        """The most urgent first, and nothing that the server will need only much later."""
        while self._waiting and self._waiting[0][0] <= self._needed + WINDOW * self.lanes and self._free():
            self._send(heapq.heappop(self._waiting)[2])

    def _keep(self, unit: Unit, result: UnitResult, wall_seconds: float) -> None:
        if unit.evaluation is None:
            assert unit.job is not None
            assert isinstance(result, (Update, PersaflError))
            self.wall_training += wall_seconds
            self._finished[unit.job] = result
            return
        self.wall_evaluating += wall_seconds
        if isinstance(result, Scores):
            unit.evaluation.found[unit.message.client] = result
        elif isinstance(result, Gradient):
            unit.evaluation.add(unit.message.client, result.sent["gradient"])
        elif isinstance(result, Exception):
            unit.evaluation.failure = result

    # -- the lanes ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _free(self) -> bool:
        """Whether a lane takes another unit."""

    @abstractmethod
    def _send(self, unit: Unit) -> None:
        """Give a unit to a free lane."""

    @abstractmethod
    def _collect(self, wait: bool) -> Iterator[tuple[Unit, UnitResult, float]]:
        """Units that are done, their results and wall seconds; with `wait`, some are waited for, but not much longer
        than POLL."""

    def close(self) -> None:  # noqa: B027
        """Stop the lanes; unfinished work is dropped."""

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Serial(Executor):
    """One unit after the other, in this process, when a result is asked for."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, 1)

    def _free(self) -> bool:
        return False

    def _send(self, unit: Unit) -> None:
        raise NotImplementedError("the only lane is the process that asks")

    def _collect(self, wait: bool) -> Iterator[tuple[Unit, UnitResult, float]]:
        if wait:
            unit = heapq.heappop(self._waiting)[2]
            yield unit, *perform(self.worker, unit.message)


def perform(worker: Worker, message: Message) -> tuple[UnitResult, float]:
    """Do one unit in this process: its result, and how many wall seconds it took."""
    start = time.perf_counter()
    try:
        with exits_refused():
            result: UnitResult = worker.perform(message)
    except PersaflError as error:
        result = error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything, also SystemExit
        if os.environ.get("PERSAFL_TRACEBACK"):
            traceback.print_exc()
        what = "trained" if isinstance(message, Train) else "evaluated"
        result = ModelError(f"client {message.client} cannot be {what}: {_culprit(worker, error)}{located(error)}")
    return result, time.perf_counter() - start


def _culprit(worker: Worker, error: BaseException) -> str:
    """The innermost of the objective, the fine-tuning rules and the model in which an error was raised."""
    work = worker.work
    parts = {id(part): type(part).__name__ for part in (work.objective, *work.finetune.values(), work.backbone)}
    inside = [
        parts[id(who)]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if id(who := frame.f_locals.get("self")) in parts
    ]
    return f"{inside[-1]} fails: " if inside else ""


def unsendable(worker: Worker, error: Exception) -> ModelError:
    """Other processes need a copy of the model, and it cannot be made."""
    model = type(worker.work.backbone).__name__
    return ModelError(
        f"{model} cannot be sent to worker processes ({type(error).__name__}: {first_line(error)}); use executor=serial"
    )
