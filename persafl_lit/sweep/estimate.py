"""How long a sweep will take: visits and evaluations of each trial are counted, and some of each kind are timed
here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from persafl_lit.api import quiet_single_threaded_torch, work_of
from persafl_lit.config.compose import Config
from persafl_lit.engine.evaluation_plan import affordable_evaluations, evaluated_clients, evaluation_moments
from persafl_lit.engine.executors import Worker
from persafl_lit.engine.messages import Evaluate, Train
from persafl_lit.models.backbone import build_backbone
from persafl_lit.sweep.forecast import EACH, kind_of, makespan
from persafl_lit.sweep.trials import Trial

START = 10.0
"""Seconds of wall time until processes have imported everything."""
REPEATS = 5


class TimeEstimate:
    """Wall seconds of trials on this machine, one torch thread each."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._speeds: dict[str, tuple[float, float]] = {}

    def of(self, trials: Sequence[Trial], lanes: int) -> float:
        """With `lanes` at a time."""
        return START + makespan([], [self.one(trial.config) for trial in trials], lanes)

    def one(self, config: Config) -> float:
        with quiet_single_threaded_torch():
            worker = self._worker(config)
            visit, evaluation = self._seconds(config, worker)
        work = worker.work
        timeline = config.timeline(work.federation.trained())
        evaluated = evaluated_clients(work.federation, config.eval.clients, config.seed)
        affordable = affordable_evaluations(work, timeline, evaluated)
        points = len(evaluation_moments(timeline.horizon, config.eval.every, affordable))
        return EACH + len(timeline) * visit + (points + len(work.finetune) - 1) * len(evaluated) * evaluation

    def _worker(self, config: Config) -> Worker:
        key = kind_of(config, "clients", "local_steps")
        if key not in self._workers:
            federation = config.federation()
            backbone = build_backbone(config.build("model"), federation, config.seed, config.allow_code)
            self._workers[key] = Worker(work_of(config, federation, backbone))
        return self._workers[key]

    def _seconds(self, config: Config, worker: Worker) -> tuple[float, float]:
        """Of one client's visit, and of one client's evaluation by one rule."""
        key = kind_of(config, "local_steps")
        if key not in self._speeds:
            read, common = {"w": worker.start}, tuple(worker.work.finetune)[:1]
            clients = [index % worker.work.federation.trained() for index in range(REPEATS + 1)]
            visit = _usual(lambda client: worker.train(Train(client, 0, read)), clients)
            self._speeds[key] = visit, _usual(lambda client: worker.evaluate(Evaluate(client, common, read)), clients)
        return self._speeds[key]


def _usual(work: Callable[[int], Any], clients: Sequence[int]) -> float:
    """The median time of a piece of work; the first one warms up."""
    seconds = []
    for client in clients:
        start = time.perf_counter()
        work(client)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
