"""How long the rest of a sweep takes, from what its trials took so far.

seconds of a trial = EACH + gradients * (seconds per gradient) + evaluation

A trial's gradients are counted beforehand. Seconds per gradient and of evaluation are those of finished trials of its
kind, of trials of its kind that are under way, or else of all kinds.
"""

from __future__ import annotations

import heapq
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from persafl_lit.config.compose import Config
from persafl_lit.sweep.trials import Trial, timeline_of

EACH = 3.0
"""Seconds of wall time that a trial takes beside its arithmetic: data, tracking, picture."""


@dataclass(frozen=True)
class Sample:
    """What a trial took."""

    gradients: float
    seconds: float
    evaluation_share: float

    @property
    def evaluation(self) -> float:
        return self.seconds * self.evaluation_share

    @property
    def training(self) -> float:
        return self.seconds - self.evaluation


class Forecast:
    def __init__(self) -> None:
        self._finished: dict[str, list[Sample]] = {}
        self._gradients: dict[str, float] = {}
        self._kinds: dict[str, str] = {}
        self._timelines: dict[str, int] = {}

    def finished(self, trial: Trial, wall_seconds: float, evaluation_share: float) -> None:
        """`wall_seconds` are those of its summary: all its starts, without EACH."""
        self._finished.setdefault(self.kind(trial), []).append(
            Sample(self.gradients(trial), wall_seconds, evaluation_share)
        )

    def seconds(self, trials: Iterable[Trial], under_way: Iterable[tuple[Trial, float]] = ()) -> list[float] | None:
        """Of each trial from its beginning to its end; `under_way` are trials with what they will have taken by their
        own pace. None while nothing is known."""
        known = dict(self._finished)
        for trial, wall_seconds in under_way:
            if self.kind(trial) not in self._finished:
                others = [sample.evaluation_share for samples in self._finished.values() for sample in samples]
                share = statistics.fmean(others) if others else 0.0
                known[self.kind(trial)] = [
                    *known.get(self.kind(trial), ()),
                    Sample(self.gradients(trial), wall_seconds, share),
                ]
        if not known:
            return None
        paces = {kind: _pace(samples) for kind, samples in known.items()}
        usual = _pace([sample for samples in known.values() for sample in samples])
        return [
            EACH + pace * self.gradients(trial) + evaluation
            for trial in trials
            for pace, evaluation in [paces.get(self.kind(trial), usual)]
        ]

    def gradients(self, trial: Trial) -> float:
        """Of its training."""
        if trial.hash not in self._gradients:
            config = trial.config
            key = json.dumps(
                [
                    config.values[name]
                    for name in ("schedule", "delays", "clients", "seed", "horizon", "updates", "local_steps")
                ]
            )
            cost = config.gradients_per_step()
            if (key := f"{key} {cost if config.delays.get('per_gradient') else ''}") not in self._timelines:
                timeline = timeline_of(config)
                self._timelines[key] = 1 if timeline is None else len(timeline)
            self._gradients[trial.hash] = max(self._timelines[key] * config.local_steps * cost, 1.0)
        return self._gradients[trial.hash]

    def kind(self, trial: Trial) -> str:
        if trial.hash not in self._kinds:
            self._kinds[trial.hash] = kind_of(trial.config)
        return self._kinds[trial.hash]


def _pace(samples: Sequence[Sample]) -> tuple[float, float]:
    """Seconds of training per gradient, and of all evaluations of a trial."""
    pace = sum(sample.training for sample in samples) / sum(sample.gradients for sample in samples)
    return pace, statistics.fmean(sample.evaluation for sample in samples)


def makespan(under_way: Sequence[float], waiting: Iterable[float], lanes: int) -> float:
    """Until all is done, if whichever of the `lanes` is free takes the next."""
    ends = [*under_way, *[0.0] * (lanes - len(under_way))] or [0.0]
    heapq.heapify(ends)
    for seconds in waiting:
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


def kind_of(config: Config, *more: str) -> str:
    """What a gradient and an evaluation of a trial cost the same as in others."""
    values: dict[str, Any] = {
        group: config.values[group]
        for group in ("data", "model", "batch_size", "precision", "derivatives", "eval", *more)
    }
    # The method's step sizes change no time.
    return json.dumps(
        values | {"method": {key: config.method.get(key) for key in ("name", "objective", "inner_steps", "hvp")}},
        sort_keys=True,
    )
