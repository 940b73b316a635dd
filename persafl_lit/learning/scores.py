"""Fine-tune, then evaluate: personalised accuracy per client.

The fine-tuning rule is separate from the training method, so that every method gets the same personalisation budget. It sees
only training data; validation and test splits are only ever measured.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from persafl_lit.data.federation import IGNORED, SPLITS, Batch, Federation, Split
from persafl_lit.errors import ConfigError, ModelError, shown
from persafl_lit.finetune import Finetune
from persafl_lit.loss import FlatLoss, class_dimension, step_loss
from persafl_lit.metrics import Metrics, Reading
from persafl_lit.settings import MEASURED
from persafl_lit.streams import torch_seed

if TYPE_CHECKING:
    import lightning as L

    from persafl_lit.client import ClientModule
    from persafl_lit.messages import Tensors
    from persafl_lit.server import State

CHUNK = 1024
NO_METRICS = Metrics()


def evaluation_cost(federation: Federation, clients: Sequence[int], rules: Sequence[Finetune], batch_size: int) -> float:
    """Samples that one evaluation sends through the network and back; a sample that is only measured counts a third."""
    cost = 0.0
    for client in clients:
        train, val, test = (federation.count(client, split) for split in SPLITS)
        cost += sum(rule.steps * min(batch_size, train) + rule.full * train for rule in rules) + (len(rules) + 1) * (val + test) / 3
    return cost


# -- scores -----------------------------------------------------------------------------------------------------------


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
    """The shared model as it is."""
    own: Measured
    """After fine-tuning by the rule that all methods are compared by."""
    beside: dict[str, Measured] = field(default_factory=dict)
    """After fine-tuning by further rules."""

    def worst_loss(self) -> float:
        """nan or infinite if any loss is."""
        return max((loss for measured in (self.shared, self.own, *self.beside.values()) for loss in measured[2:4]), key=_badness)

    def row(self) -> dict[str, float]:
        """Flat, for tables."""
        kinds = (*MEASURED, *self.shared.further)
        shared = {f"global_{kind}": self.shared.value(kind, "test") for kind in kinds}
        shared |= {f"global_val_{kind}": self.shared.value(kind, "val") for kind in kinds}
        beside = {f"{rule}_{name}": value for rule, measured in self.beside.items() for name, value in measured.row().items()}
        return {"client": self.client, "samples": self.samples, **self.own.row(), **shared, **beside}


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
        """A copy of the backbone with the weights that were evaluated: shared ones, and initial values of private ones."""
        return self._captured().build(self._captured().state)

    @property
    def memory(self) -> dict[int, Tensors]:
        """A copy of what each client kept at that moment; clients that kept nothing are not in it."""
        kept = self._captured().state.memories
        return {client: {name: value.clone() for name, value in slot.tensors.items()} for client, slot in kept.items()}

    def _captured(self) -> Captured:
        if self.captured is None:
            raise ConfigError("the model of an evaluation is there for callbacks that are told of it (on_evaluation), not afterwards")
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
                every = {"accuracy": accuracy_of(scores, rule), "loss": loss_of(scores, rule), **further_of(scores, rule)}
                for kind, values in every.items():
                    found |= {f"{whose}{f'{rule}.' if rule else ''}{kind}.{name}": value for name, value in values.items()}
        return found | self.training

    def table(self) -> list[dict[str, float]]:
        return [score.row() for score in self.scores + self.held_out]


def accuracy_of(scores: Sequence[Scores], rule: str | None = None) -> dict[str, float]:
    """Over clients, after fine-tuning by the common rule or by a further one; `global` is the shared model as it is.

    All but `val` and `global` describe test data: `test` is the mean, `weighted` the mean over samples, `worst_decile` the mean
    of the worst tenth of clients, and `gap` how much better the best tenth does.
    """
    return _over_clients(scores, rule, "accuracy", 1)


def loss_of(scores: Sequence[Scores], rule: str | None = None) -> dict[str, float]:
    """Likewise; the worst tenth of clients has the highest losses."""
    return _over_clients(scores, rule, "loss", -1)


def signs_of(scores: Sequence[Scores]) -> dict[str, int]:
    """Metrics beside accuracy and loss, and whether higher (+1) or lower (-1) is better, if that is known (else 0)."""
    return {name: value.sign for score in scores for name, value in score.own.further.items()}


def further_of(scores: Sequence[Scores], rule: str | None = None) -> dict[str, dict[str, float]]:
    """Likewise, metrics beside accuracy and loss by name, each over the clients that have a value.

    Where it is not known which values are better, there is no `worst_decile` and no `gap`.
    """
    return {name: _over_clients(scores, rule, name, sign) for name, sign in signs_of(scores).items()}


def _over_clients(scores: Sequence[Scores], rule: str | None, kind: str, sign: int) -> dict[str, float]:
    own = [score.own if rule is None else score.beside[rule] for score in scores]
    test, val = (np.array([measured.value(kind, split) for measured in own]) for split in ("test", "val"))
    shared = np.array([score.shared.value(kind, "test") for score in scores])
    samples = np.array([score.samples for score in scores])
    if kind not in MEASURED:
        samples = samples[~np.isnan(test)]
        test, val, shared = (values[~np.isnan(values)] if not np.isnan(values).all() else values[:1] for values in (test, val, shared))
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


# -- measuring --------------------------------------------------------------------------------------------------------


def evaluate_client(
    client: ClientModule,
    federation: Federation,
    number: int,
    w: Tensor,
    rules: Mapping[str, Finetune],
    batch_size: int,
    seed: int,
    metrics: Metrics = NO_METRICS,
) -> Scores:
    """Fine-tune one client from w by each rule and measure; nothing it does changes w. The first rule is the common one."""
    shared = measure_both(client.f, federation, number, w, metrics)
    own = {}
    join = client.f.statistics is not None
    for name, rule in rules.items():
        client.backbone.train()
        batches = federation.batches(number, "finetune", 0, rule.steps, batch_size, seed) if rule.steps else []
        whole = whole_batches(federation, number, batch_size, seed, join) if rule.full else []
        version = w._version
        theta = rule.personalise(client, w, batches, whole)
        if w._version != version:
            raise ModelError(f"{type(rule).__name__}.personalise changes w in place; others read it, so return a new tensor")
        if not isinstance(theta, Tensor) or theta.shape != w.shape:
            found = f"shape {tuple(theta.shape)}" if isinstance(theta, Tensor) else type(theta).__name__
            raise ModelError(f"{type(rule).__name__}.personalise must return a tensor like w, of shape {tuple(w.shape)}; got {found}")
        own[name] = shared if theta is w else measure_both(client.f, federation, number, theta, metrics)
    client.f.losses.clear()
    common = next(iter(own))
    return Scores(number, federation.count(number, "test"), shared, own.pop(common), own)


def measure_both(f: FlatLoss, federation: Federation, client: int, w: Tensor, metrics: Metrics = NO_METRICS) -> Measured:
    """w on a client's validation and test data."""
    val_loss, val_accuracy, val = measure(f, federation, client, "val", w, metrics)
    test_loss, test_accuracy, test = measure(f, federation, client, "test", w, metrics)
    missing = (math.nan, 0)
    further = {name: Value(val.get(name, missing)[0], test.get(name, missing)[0], (val.get(name) or test[name])[1]) for name in {**val, **test}}
    return Measured(val_accuracy, test_accuracy, val_loss, test_loss, further)


def average_statistics(client: ClientModule, federation: Federation, number: int, w: Tensor, batch_size: int, seed: int) -> None:
    """The statistics (BatchNorm's) of w on a client's training data, for one that has none of its own."""
    assert client.f.statistics is not None
    client.backbone.train()
    with client.f.statistics.averaging():
        for batch, _ in whole_batches(federation, number, batch_size, seed, join=True):
            client.f.update_statistics(w, batch)


def whole_batches(federation: Federation, client: int, batch_size: int, seed: int, join: bool = False) -> list[tuple[Batch, int]]:
    """All of a client's training data in batches, with the number of samples in each.

    With `join`, a last batch of one sample, which BatchNorm refuses, is joined to the one before.
    """
    chunks = list(federation.whole(client, "train", batch_size))
    if join and len(chunks) > 1 and chunks[-1][1] == 1:
        (data, count), (last, _) = chunks[-2:]
        chunks[-2:] = [(tree_map(lambda *parts: torch.cat(parts), data, last), count + 1)]
    return [(Batch(data, torch_seed(seed, "mask whole", client, chunk)), count) for chunk, (data, count) in enumerate(chunks)]


def measure(
    f: FlatLoss, federation: Federation, client: int, split: Split, w: Tensor, metrics: Metrics = NO_METRICS
) -> tuple[float, float, dict[str, tuple[float, int]]]:
    """Loss, accuracy and further metrics of w on a client's split, without dropout.

    A module's own accuracy, if it logs one, counts where there is no other.
    """
    f.at(w)
    f.backbone.eval()
    loss = hits = answers = total = 0.0
    reading = metrics.begin(f.backbone, client, split)
    with torch.no_grad(), f.statistics.unchanged() if f.statistics else contextlib.nullcontext():
        for index, (data, count) in enumerate(federation.whole(client, split, CHUNK)):
            data = f.ordered(data)
            chunk_loss, chunk_hits, chunk_answers = _loss_and_hits(f.backbone, data, count, reading)
            loss, hits, answers, total = loss + chunk_loss * count, hits + chunk_hits, answers + chunk_answers, total + count
            reading.step(data, count, index)
        found = reading.values()
    accuracy = hits / answers if answers and not math.isnan(answers) else found.get("accuracy", (math.nan,))[0]
    return loss / total, accuracy, {name: value for name, value in found.items() if name not in MEASURED}


def _loss_and_hits(backbone: nn.Module, data: Any, count: int, reading: Reading) -> tuple[float, float, float]:
    """The mean loss, and how many answers are right of how many: samples, or tokens that count. nan for a task without classes."""
    pair = isinstance(data, (tuple, list)) and len(data) == 2
    classes = pair and isinstance(data[1], Tensor) and not data[1].is_floating_point()
    if not classes and not reading.wants_scores:
        return float(step_loss(backbone, data)), math.nan, math.nan
    if not pair:
        raise ConfigError(f"metrics compare a model's outputs with targets, so batches must be (inputs, targets); got {shown(data)}")
    inputs, labels = data
    try:
        scores = backbone(inputs)
    except NotImplementedError:
        if reading.wants_scores:
            raise ConfigError(f"metrics compare module(inputs) with targets, and {type(backbone).__name__} has no forward(inputs)") from None
        return float(step_loss(backbone, data)), math.nan, math.nan
    reading.see(scores, labels, count)
    score_loss: Any = getattr(backbone, "score_loss", None)
    loss = step_loss(backbone, data) if score_loss is None else score_loss(scores, labels)
    if not classes or not isinstance(scores, Tensor) or scores.dim() != labels.dim() + 1:
        return float(loss), math.nan, math.nan
    found = scores.argmax(dim=class_dimension(scores, labels))
    if found.shape != labels.shape:
        return float(loss), math.nan, math.nan
    counted = labels.numel() if labels.dim() == 1 else int((labels != IGNORED).sum())
    return float(loss), float((found == labels).sum()), float(counted)
