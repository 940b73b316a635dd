"""What evaluations measured: per client, and over clients under the names of the tracked metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from persafl_lit.errors import ConfigError
from persafl_lit.learning.metric_names import MEASURED

if TYPE_CHECKING:
    import lightning as L

    from persafl_lit.common.tensors import Tensors
    from persafl_lit.server.state import State


SHARED_TUNED, OWN_TUNED = "shared_tuned", "own_tuned"
"""Measured beside the common fine-tuning where there is more than one model to start from: see `evaluate_client`."""
REST = (SHARED_TUNED, OWN_TUNED)


class Value(NamedTuple):
    """A further metric on a client's validation and test data; nan where it has none."""

    val: float
    test: float
    sign: int = 0
    """+1 if higher is better, -1 if lower, 0 if unknown."""


class Measured(NamedTuple):
    """A model on a client's validation and test data. Accuracies are nan where the task has no classes."""

    val_accuracy: float
    test_accuracy: float
    val_loss: float
    test_loss: float
    further: Mapping[str, Value] = {}
    """Other metrics by name."""

    def value(self, kind: str, split: str) -> float:
        """Of accuracy, loss or another metric; nan if it was not measured."""
        if kind in MEASURED:
            return float(getattr(self, f"{split}_{kind}"))
        return float(getattr(self.further[kind], split)) if kind in self.further else math.nan

    def row(self) -> dict[str, float]:
        """Flat, for tables."""
        kinds = (*MEASURED, *self.further)
        return {f"{split}_{kind}": self.value(kind, split) for kind in kinds for split in ("val", "test")}


@dataclass(frozen=True)
class Scores:
    """One client at one moment."""

    client: int
    samples: int
    """In its test split."""
    shared: Measured
    """The shared model as it is, with the initial values of private parameters."""
    personalised: Measured
    """After fine-tuning by the rule that all methods are compared by: the model that the client keeps, else the shared
    one."""
    beside: dict[str, Measured] = field(default_factory=dict)
    """After fine-tuning by further rules."""

    def worst_loss(self) -> float:
        """nan or infinite if any loss is."""
        counted = (self.shared, self.personalised, *(self.beside[name] for name in self.beside if name not in REST))
        return max((loss for measured in counted for loss in measured[2:4]), key=_badness)

    def row(self) -> dict[str, float]:
        """Flat, for tables."""
        kinds = (*MEASURED, *self.shared.further)
        shared = {f"global_{kind}": self.shared.value(kind, "test") for kind in kinds}
        shared |= {f"global_val_{kind}": self.shared.value(kind, "val") for kind in kinds}
        beside = {
            f"{rule}_{name}": value for rule, measured in self.beside.items() for name, value in measured.row().items()
        }
        return {"client": self.client, "samples": self.samples, **self.personalised.row(), **shared, **beside}


@dataclass(frozen=True)
class Captured:
    """The server's state when an evaluation was due; training has gone on since."""

    state: State
    build: Callable[[State], L.LightningModule]


@dataclass(frozen=True)
class Point:
    """All clients at one moment of simulated time."""

    sim_time: float
    updates: int
    scores: tuple[Scores, ...]
    training: dict[str, float]
    """What training cost in all and saw since the last point."""
    held_out: tuple[Scores, ...] = ()
    """The clients that never train."""
    captured: Captured | None = field(default=None, repr=False, compare=False)
    """What was evaluated, for callbacks; a run's list of points does not keep it."""

    @property
    def model(self) -> L.LightningModule:
        """A copy of the backbone with the weights that were evaluated: shared ones, and initial values of private
        ones."""
        return self._captured().build(self._captured().state)

    @property
    def memory(self) -> dict[int, Tensors]:
        """A copy of what each client kept at that moment; clients that kept nothing are not in it."""
        kept = self._captured().state.memories
        return {client: {name: value.clone() for name, value in slot.tensors.items()} for client, slot in kept.items()}

    def _captured(self) -> Captured:
        if self.captured is None:
            raise ConfigError(
                "the model of an evaluation is there for callbacks that are told of it (on_evaluation), not afterwards"
            )
        return self.captured

    def accuracy(self) -> dict[str, float]:
        """Of the clients that train."""
        return accuracy_of(self.scores)

    def loss(self) -> dict[str, float]:
        return loss_of(self.scores)

    def beside(self) -> dict[str, dict[str, float]]:
        """Accuracies under further fine-tuning rules, of the clients that train."""
        return {rule: accuracy_of(self.scores, rule) for rule in self.scores[0].beside}

    def further(self) -> dict[str, dict[str, float]]:
        """Metrics beside accuracy and loss by name, of the clients that train."""
        return further_of(self.scores)

    def metrics(self) -> dict[str, float]:
        """Everything under the names of the tracked metrics."""
        found: dict[str, float] = {}
        for whose, scores in (("", self.scores), ("holdout.", self.held_out)):
            for rule in (None, *scores[0].beside) if scores else ():
                every = {
                    "accuracy": accuracy_of(scores, rule),
                    "loss": loss_of(scores, rule),
                    **further_of(scores, rule),
                }
                for kind, values in every.items():
                    found |= {
                        f"{whose}{f'{rule}.' if rule else ''}{kind}.{name}": value for name, value in values.items()
                    }
        return found | self.training

    def table(self) -> list[dict[str, float]]:
        return [score.row() for score in self.scores + self.held_out]


def accuracy_of(scores: Sequence[Scores], rule: str | None = None) -> dict[str, float]:
    """Over clients, after fine-tuning by the common rule or by a further one; `global` is the shared model as it is.

    All but `val` and `global` describe test data: `test` is the mean, `weighted` the mean over samples, `worst_decile`
    the mean of the worst tenth of clients, and `gap` how much better the best tenth does.
    """
    return _over_clients(scores, rule, "accuracy", 1)


def loss_of(scores: Sequence[Scores], rule: str | None = None) -> dict[str, float]:
    """Likewise; the worst tenth of clients has the highest losses."""
    return _over_clients(scores, rule, "loss", -1)


def models_of(scores: Sequence[Scores], keeps_model: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Which model was measured: `shared` or the method's `own`, `as_is` or `tuned` (after the common fine-tuning), each
    on validation and test data, as far as it was measured.

    In accuracy, or in loss where a task has no classes. `keeps_model` says whether clients keep a model, which then is
    the one that the common rule fine-tunes.
    """
    kind = "loss" if np.isnan([score.shared.test_accuracy for score in scores]).all() else "accuracy"
    measured: dict[tuple[str, str], Sequence[Measured]] = {("shared", "as_is"): [score.shared for score in scores]}
    measured["own" if keeps_model else "shared", "tuned"] = [score.personalised for score in scores]
    further = {"own": ("own", "as_is"), SHARED_TUNED: ("shared", "tuned"), OWN_TUNED: ("own", "tuned")}
    for name, place in further.items():
        if name in scores[0].beside:
            measured[place] = [score.beside[name] for score in scores]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (model, state), values in sorted(measured.items(), reverse=True):
        splits = {split: float(np.mean([one.value(kind, split) for one in values])) for split in ("val", "test")}
        found.setdefault(model, {})[state] = splits
    return {model: dict(sorted(states.items())) for model, states in found.items()}


def signs_of(scores: Sequence[Scores]) -> dict[str, int]:
    """Metrics beside accuracy and loss, and whether higher (+1) or lower (-1) is better, if that is known (else 0)."""
    return {name: value.sign for score in scores for name, value in score.personalised.further.items()}


def further_of(scores: Sequence[Scores], rule: str | None = None) -> dict[str, dict[str, float]]:
    """Likewise, metrics beside accuracy and loss by name, each over the clients that have a value.

    Where it is not known which values are better, there is no `worst_decile` and no `gap`.
    """
    return {name: _over_clients(scores, rule, name, sign) for name, sign in signs_of(scores).items()}


def _over_clients(scores: Sequence[Scores], rule: str | None, kind: str, sign: int) -> dict[str, float]:
    tuned = [score.personalised if rule is None else score.beside[rule] for score in scores]
    test, val = (np.array([measured.value(kind, split) for measured in tuned]) for split in ("test", "val"))
    shared = np.array([score.shared.value(kind, "test") for score in scores])
    samples = np.array([score.samples for score in scores])
    if kind not in MEASURED:
        samples = samples[~np.isnan(test)]
        test, val, shared = (
            values[~np.isnan(values)] if not np.isnan(values).all() else values[:1] for values in (test, val, shared)
        )
        samples = samples if len(samples) else np.ones(1)
    ranked, tenth = sign * np.sort(sign * test), max(1, len(test) // 10)
    worst, best = (float(ranked[:tenth].mean()), float(ranked[-tenth:].mean())) if sign else (math.nan, math.nan)
    with np.errstate(over="ignore", invalid="ignore"):  # losses of a run that diverges
        std = float(test.std())
    return {
        "val": float(val.mean()),
        "test": float(test.mean()),
        "std": std,
        "worst_decile": worst,
        "global": float(shared.mean()),
        "weighted": float(np.average(test, weights=samples)),
        "median": float(np.median(test)),
        "gap": sign * (best - worst),
    }


def _badness(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss
