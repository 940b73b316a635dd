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
from persafl_lit.errors import ConfigError, ModelError
from persafl_lit.finetune import Finetune
from persafl_lit.loss import FlatLoss, class_dimension, step_loss
from persafl_lit.streams import torch_seed

if TYPE_CHECKING:
    import lightning as L

    from persafl_lit.client import ClientModule
    from persafl_lit.messages import Tensors
    from persafl_lit.server import State

CHUNK = 1024


def evaluation_cost(federation: Federation, clients: Sequence[int], rules: Sequence[Finetune], batch_size: int) -> float:
    """Samples that one evaluation sends through the network and back; a sample that is only measured counts a third."""
    cost = 0.0
    for client in clients:
        train, val, test = (federation.count(client, split) for split in SPLITS)
        cost += sum(rule.steps * min(batch_size, train) + rule.full * train for rule in rules) + (len(rules) + 1) * (val + test) / 3
    return cost


# -- scores -----------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """A model on a client's validation and test data. Accuracies are nan where the task has no classes."""

    val_accuracy: float
    test_accuracy: float
    val_loss: float
    test_loss: float


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
        return max((loss for measured in (self.shared, self.own, *self.beside.values()) for loss in measured[2:]), key=_badness)

    def row(self) -> dict[str, float]:
        """Flat, for tables."""
        shared = {"global_accuracy": self.shared.test_accuracy, "global_loss": self.shared.test_loss}
        shared |= {"global_val_accuracy": self.shared.val_accuracy, "global_val_loss": self.shared.val_loss}
        beside = {f"{rule}_{name}": value for rule, measured in self.beside.items() for name, value in measured._asdict().items()}
        return {"client": self.client, "samples": self.samples, **self.own._asdict(), **shared, **beside}


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

    def metrics(self) -> dict[str, float]:
        """Everything under the names of the tracked metrics."""
        found: dict[str, float] = {}
        for whose, scores in (("", self.scores), ("holdout.", self.held_out)):
            for rule in (None, *scores[0].beside) if scores else ():
                for kind, values in (("accuracy", accuracy_of(scores, rule)), ("loss", loss_of(scores, rule))):
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


def _over_clients(scores: Sequence[Scores], rule: str | None, kind: str, sign: int) -> dict[str, float]:
    own = [score.own if rule is None else score.beside[rule] for score in scores]
    test = np.array([getattr(measured, f"test_{kind}") for measured in own])
    ranked, tenth = sign * np.sort(sign * test), max(1, len(test) // 10)
    worst, best = float(ranked[:tenth].mean()), float(ranked[-tenth:].mean())
    with np.errstate(over="ignore", invalid="ignore"):  # losses of a run that diverges
        std = float(test.std())
    return {
        "val": float(np.mean([getattr(measured, f"val_{kind}") for measured in own])),
        "test": float(test.mean()),
        "std": std,
        "worst_decile": worst,
        "global": float(np.mean([getattr(score.shared, f"test_{kind}") for score in scores])),
        "weighted": float(np.average(test, weights=[score.samples for score in scores])),
        "median": float(np.median(test)),
        "gap": sign * (best - worst),
    }


def _badness(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


# -- measuring --------------------------------------------------------------------------------------------------------


def evaluate_client(
    client: ClientModule, federation: Federation, number: int, w: Tensor, rules: Mapping[str, Finetune], batch_size: int, seed: int
) -> Scores:
    """Fine-tune one client from w by each rule and measure; nothing it does changes w. The first rule is the common one."""
    shared = measure_both(client.f, federation, number, w)
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
        own[name] = shared if theta is w else measure_both(client.f, federation, number, theta)
    client.f.losses.clear()
    common = next(iter(own))
    return Scores(number, federation.count(number, "test"), shared, own.pop(common), own)


def measure_both(f: FlatLoss, federation: Federation, client: int, w: Tensor) -> Measured:
    """w on a client's validation and test data."""
    (val_loss, val_accuracy), (test_loss, test_accuracy) = (measure(f, federation, client, split, w) for split in ("val", "test"))
    return Measured(val_accuracy, test_accuracy, val_loss, test_loss)


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


def measure(f: FlatLoss, federation: Federation, client: int, split: Split, w: Tensor) -> tuple[float, float]:
    """(loss, accuracy) of w on a client's split, without dropout."""
    f.at(w)
    f.backbone.eval()
    loss = hits = answers = total = 0.0
    with torch.no_grad(), f.statistics.unchanged() if f.statistics else contextlib.nullcontext():
        for data, count in federation.whole(client, split, CHUNK):
            chunk_loss, chunk_hits, chunk_answers = _loss_and_hits(f.backbone, f.ordered(data))
            loss, hits, answers, total = loss + chunk_loss * count, hits + chunk_hits, answers + chunk_answers, total + count
    return loss / total, hits / answers if answers else math.nan


def _loss_and_hits(backbone: nn.Module, data: Any) -> tuple[float, float, float]:
    """The mean loss, and how many answers are right of how many: samples, or tokens that count. nan for a task without classes."""
    if not (isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], Tensor)) or data[1].is_floating_point():
        return float(step_loss(backbone, data)), math.nan, math.nan
    inputs, labels = data
    try:
        scores = backbone(inputs)
    except NotImplementedError:
        return float(step_loss(backbone, data)), math.nan, math.nan
    score_loss: Any = getattr(backbone, "score_loss", None)
    loss = step_loss(backbone, data) if score_loss is None else score_loss(scores, labels)
    if not isinstance(scores, Tensor) or scores.dim() != labels.dim() + 1:
        return float(loss), math.nan, math.nan
    found = scores.argmax(dim=class_dimension(scores, labels))
    if found.shape != labels.shape:
        return float(loss), math.nan, math.nan
    counted = labels.numel() if labels.dim() == 1 else int((labels != IGNORED).sum())
    return float(loss), float((found == labels).sum()), float(counted)
