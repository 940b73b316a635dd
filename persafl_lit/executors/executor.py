"""Who does the work: jobs and evaluations, each a pure function of its inputs.

A job's result depends only on (the model read, client, visit, seed), so it may run whenever that model exists, anywhere, in
any order, or twice: the run's result has the same bits. An executor has lanes that work at the same time; it hands out what is
most urgent first.
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

from persafl_lit.client import Report
from persafl_lit.errors import ModelError, PersaflError, first_line, located
from persafl_lit.evaluate import Scores
from persafl_lit.executors.worker import COST_GRADIENT, Task, Update, Worker

POLL = 0.2
"""Wall seconds after which a wait looks whether it is still wanted."""
WINDOW = 8
"""Jobs per lane that may be done ahead of the one that the server waits for: what bounds the updates it must keep."""


@dataclass
class Evaluation:
    """The scores of some clients, each from its model, as they come in."""

    clients: Sequence[int]
    models: Sequence[Tensor]
    rules: int
    """How many fine-tuning rules it uses."""
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


class Unit(NamedTuple):
    """One piece of work: a job (its index in the timeline), or one client of an evaluation."""

    job: int | None
    evaluation: Evaluation | None
    task: Task
    attempts: int = 0
    """How often its worker was lost."""


class Outcome(NamedTuple):
    """What came of a unit, and how long it took. An update's vectors may travel apart from its report."""

    value: Update | Report | Scores | Exception
    wall_seconds: float


class Executor(ABC):
    """Lanes that train and evaluate. Use as a context manager: leaving it stops whatever still runs."""

    def __init__(self, worker: Worker, lanes: int) -> None:
        self.worker = worker
        self.lanes = lanes
        self.pending: dict[int, Task] = {}
        """Jobs whose update has not been handed over, with the models they read: what a checkpoint must keep."""
        self.wall_training = self.wall_evaluating = 0.0
        self._finished: dict[int, Update | PersaflError] = {}
        self._waiting: list[tuple[int, int, Unit]] = []
        self._count = 0
        self._needed: float = 0

    # -- what the loop asks for ---------------------------------------------------------------------------------------

    def submit(self, index: int, task: Task) -> None:
        """Job `index` may start: the model it reads exists."""
        self.pending[index] = task
        self._queue(index, Unit(index, None, task))

    def evaluate(self, clients: Sequence[int], models: Sequence[Tensor], rules: int, arrivals: int, gradients: int = 0) -> Evaluation:
        """Fine-tune-then-evaluate: not before the next few updates, so that it fills gaps, but soon after them."""
        evaluation = Evaluation(clients, models, rules, gradients)
        for client, w in zip(clients, models, strict=True):
            self._queue(arrivals + 2 * self.lanes, Unit(None, evaluation, Task(client, 0, w, rules=rules)))
        for client, w in zip(clients[:gradients], models[:gradients], strict=True):
            self._queue(arrivals + 2 * self.lanes, Unit(None, evaluation, Task(client, 0, w, rules=COST_GRADIENT)))
        return evaluation

    def begin(self) -> None:
        """Let the lanes start on what is there, without waiting for any of it."""
        self._hand_out()

    def result(self, index: int, give_up: Callable[[], bool] = lambda: False) -> tuple[Task, Update | PersaflError] | None:
        """The update of job `index`, or why there is none; None if the wait was given up."""
        self._needed = index
        self._work(lambda: index in self._finished, give_up)
        if index not in self._finished:
            return None
        return self.pending.pop(index), self._finished.pop(index)

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
            for unit, outcome in self._collect(wait=not there):
                self._keep(unit, outcome)
            self._hand_out()
            if there:
                return

    def _hand_out(self) -> None:
        """The most urgent first, and nothing that the server will need only much later."""
        while self._waiting and self._waiting[0][0] <= self._needed + WINDOW * self.lanes and self._free():
            self._send(heapq.heappop(self._waiting)[2])

    def _keep(self, unit: Unit, outcome: Outcome) -> None:
        value = outcome.value
        if unit.evaluation is None:
            assert unit.job is not None
            assert isinstance(value, (Update, PersaflError))
            self.wall_training += outcome.wall_seconds
            self._finished[unit.job] = value
            return
        self.wall_evaluating += outcome.wall_seconds
        if isinstance(value, Scores):
            unit.evaluation.found[unit.task.client] = value
        elif isinstance(value, Update):
            unit.evaluation.add(unit.task.client, value.delta)
        elif isinstance(value, Exception):
            unit.evaluation.failure = value

    # -- the lanes ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _free(self) -> bool:
        """Whether a lane takes another unit."""

    @abstractmethod
    def _send(self, unit: Unit) -> None:
        """Give a unit to a free lane."""

    @abstractmethod
    def _collect(self, wait: bool) -> Iterator[tuple[Unit, Outcome]]:
        """Units that are done; with `wait`, some are waited for, but not much longer than POLL."""

    def close(self) -> None:  # noqa: B027
        """Stop the lanes; unfinished work is dropped."""

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Serial(Executor):
    """One unit after the other, in this process, when a result is asked for."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, 1)

    def _free(self) -> bool:
        return False

    def _send(self, unit: Unit) -> None:
        raise NotImplementedError("the only lane is the process that asks")

    def _collect(self, wait: bool) -> Iterator[tuple[Unit, Outcome]]:
        if wait:
            unit = heapq.heappop(self._waiting)[2]
            yield unit, perform(self.worker, unit.task)


def perform(worker: Worker, task: Task) -> Outcome:
    """Do one unit, here and now. What goes wrong is part of the outcome: it is raised when its turn has come."""
    start = time.perf_counter()
    try:
        work = worker.train if task.rules == 0 else worker.cost_gradient if task.rules == COST_GRADIENT else worker.evaluate
        value: Update | Report | Scores | Exception = work(task)
    except PersaflError as error:
        value = error
    except Exception as error:
        if os.environ.get("PERSAFL_TRACEBACK"):
            traceback.print_exc()
        value = ModelError(f"client {task.client} cannot be {'evaluated' if task.rules else 'trained'}: {located(error)}")
    return Outcome(value, time.perf_counter() - start)


def unsendable(worker: Worker, error: Exception) -> ModelError:
    """Other processes need a copy of the model, and it cannot be made."""
    model = type(worker.work.backbone).__name__
    return ModelError(f"{model} cannot be sent to worker processes ({type(error).__name__}: {first_line(error)}); use executor=serial")
