"""Metrics beside loss and accuracy: ours by name, the user's, and what a LightningModule logs when it is evaluated.

A metric compares `module(inputs)` with targets. One that has `reset`, `update` and `compute`, as torchmetrics' have, is
reset for each client and split, sees it chunk by chunk and is computed once; any other callable is averaged over
chunks, weighted by samples. nan means that a client has no value, such as an AUROC where there is one class only.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning as L
import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.functional import classification

from persafl_lit.data.federation import IGNORED, Split
from persafl_lit.errors import ModelError, PersaflError, located, shown
from persafl_lit.learning.metric_names import SIGNS
from persafl_lit.models.classifier import class_dimension

STATEFUL = ("reset", "update", "compute")
STEPS = {"val": ("validation_step", "test_step"), "test": ("test_step", "validation_step")}
"""What measures a split; the second where a module does not have the first."""
EPOCH_ENDS = {"validation_step": "on_validation_epoch_end", "test_step": "on_test_epoch_end"}
OF_A_SPLIT = re.compile(r"^(validation|valid|val|test)[_/]")

# -- ours -------------------------------------------------------------------------------------------------------------


class Whole:
    """A function of all scores and targets of a split, in double precision: it does not depend on the size of
    chunks."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        prepare: Callable[[Any, Any], tuple[Tensor, Tensor]],
        higher: bool,
        **args: Any,
    ) -> None:
        self.function, self.prepare, self.higher_is_better, self.args = function, prepare, higher, args
        self._seen: list[tuple[Tensor, Tensor]] = []

    def reset(self) -> None:
        self._seen = []

    def update(self, scores: Any, targets: Any) -> None:
        self._seen.append(self.prepare(scores, targets))

    def compute(self) -> Tensor | float:
        scores, targets = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        return self.function(scores, targets, **self.args) if len(targets) else math.nan


def _classes(scores: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """(n, classes) and (n,): samples, or tokens that count."""
    if (
        not (isinstance(scores, Tensor) and isinstance(labels, Tensor))
        or labels.is_floating_point()
        or scores.dim() != labels.dim() + 1
    ):
        raise ValueError(f"it compares class scores with whole-number labels; got {_kind(scores)} and {_kind(labels)}")
    scores, labels = scores.movedim(class_dimension(scores, labels), -1).flatten(0, -2).double(), labels.flatten()
    counted = labels != IGNORED
    return scores[counted], labels[counted]


def _values(found: Any, targets: Any) -> tuple[Tensor, Tensor]:
    if not (isinstance(found, Tensor) and isinstance(targets, Tensor)) or found.numel() != targets.numel():
        raise ValueError(f"it compares as many outputs as targets; got {_kind(found)} and {_kind(targets)}")
    return found.flatten().double(), targets.flatten().double()


def _kind(value: Any) -> str:
    return (
        f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else shown(value)
    )


def _f1(scores: Tensor, labels: Tensor, average: Any = "macro") -> Tensor:
    return classification.multiclass_f1_score(scores, labels, scores.shape[1], average=average)


def _precision(scores: Tensor, labels: Tensor, average: Any = "macro") -> Tensor:
    return classification.multiclass_precision(scores, labels, scores.shape[1], average=average)


def _recall(scores: Tensor, labels: Tensor, average: Any = "macro") -> Tensor:
    return classification.multiclass_recall(scores, labels, scores.shape[1], average=average)


def _auroc(scores: Tensor, labels: Tensor) -> Tensor:
    """One class against the others, mean over the classes that the client has."""
    shares, there = scores.softmax(1), labels.unique()
    if len(there) < 2:
        return torch.tensor(math.nan)
    return torch.stack(
        [classification.binary_auroc(shares[:, label], (labels == label).long()) for label in there]
    ).mean()


def _ece(scores: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    return classification.multiclass_calibration_error(
        scores.softmax(1), labels, scores.shape[1], n_bins=bins, norm="l1"
    )


def _top(scores: Tensor, labels: Tensor, k: int = 5) -> Tensor:
    return classification.multiclass_accuracy(
        scores, labels, scores.shape[1], top_k=min(k, scores.shape[1]), average="micro"
    )


def _perplexity(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels).exp()


f1 = functools.partial(Whole, _f1, _classes, True)
precision = functools.partial(Whole, _precision, _classes, True)
recall = functools.partial(Whole, _recall, _classes, True)
auroc = functools.partial(Whole, _auroc, _classes, True)
ece = functools.partial(Whole, _ece, _classes, False)
top5 = functools.partial(Whole, _top, _classes, True)
perplexity = functools.partial(Whole, _perplexity, _classes, False)
mae = functools.partial(Whole, F.l1_loss, _values, False)
mse = functools.partial(Whole, F.mse_loss, _values, False)


# -- measuring --------------------------------------------------------------------------------------------------------


class Metrics:
    """What is measured beside loss and accuracy, whatever the model logs."""

    def __init__(self, given: Mapping[str, Any] | None = None, directions: Mapping[str, str] | None = None) -> None:
        self.given = given or {}
        """Metrics by name."""
        self.directions = directions or {}
        """`higher` or `lower` by name, where metrics do not say."""

    def begin(self, backbone: nn.Module, client: int, split: Split) -> Reading:
        return Reading(self, backbone, client, split)

    def sign(self, name: str, metric: Any) -> int:
        return SIGNS[self.directions[name]] if name in self.directions else sign_of(metric)


def sign_of(metric: Any) -> int:
    """+1 if higher is better, -1 if lower, 0 if unknown."""
    higher = getattr(metric, "higher_is_better", None)
    return 0 if higher is None else 1 if higher else -1


class Reading:
    """All metrics of one client on one split."""

    def __init__(self, metrics: Metrics, backbone: nn.Module, client: int, split: Split) -> None:
        self._metrics, self._backbone, self._client, self._split = metrics, backbone, client, split
        self._step = next((step for step in STEPS[split] if overridden(backbone, step)), None)
        self._means: dict[str, Mean] = {}
        self._objects: dict[str, Any] = {}
        own = [part for part in backbone.modules() if isinstance(part, torchmetrics.Metric)] if self._step else ()
        for metric in (*metrics.given.values(), *own):
            if _is_stateful(metric):
                metric.reset()

    @property
    def wants_scores(self) -> bool:
        return bool(self._metrics.given)

    def see(self, scores: Any, targets: Any, count: int) -> None:
        """A chunk of so many samples: what the module gives, and what it should."""
        for name, metric in self._metrics.given.items():
            with self._naming(name):
                if _is_stateful(metric):
                    metric.update(scores, targets)
                else:
                    self._add(name, metric(scores, targets), count)

    def step(self, data: Any, count: int, index: int) -> None:
        """Let the module log what it logs of a chunk."""
        if self._step:
            self._call(self._step, count, data, index)

    def values(self) -> dict[str, tuple[float, int]]:
        """By name, the value and whether higher (+1) or lower (-1) is better."""
        if self._step:
            self._call(EPOCH_ENDS[self._step], 1)
        found = {}
        for name, metric in self._metrics.given.items():
            with self._naming(name):
                value = self._number(name, metric.compute()) if _is_stateful(metric) else self._means.pop(name).value
            found[name] = value, self._metrics.sign(name, metric)
        for name, metric in self._objects.items():
            with self._naming(name):
                found[name] = self._number(name, metric.compute()), self._metrics.sign(name, metric)
                metric.reset()
        return {name: (mean.value, self._metrics.sign(name, None)) for name, mean in self._means.items()} | found

    # -- what a module logs -------------------------------------------------------------------------------------------

    def _call(self, hook: str, count: int, *args: Any) -> None:
        backbone: Any = self._backbone

        def log(name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
            name = re.sub(r"\W", "_", OF_A_SPLIT.sub("", name))
            if name in self._metrics.given:
                raise ModelError(
                    f"{type(backbone).__name__}.{hook} logs {name!r}, which is also a metric of the run; give "
                    "one another name"
                )
            if _is_stateful(value):
                self._objects[name] = value
            else:
                self._add(name, value, batch_size or count)

        def log_dict(values: Any, *args: Any, **kwargs: Any) -> None:
            for name, value in values.items():
                log(name, value, *args, **kwargs)

        before = {name: vars(backbone)[name] for name in ("log", "log_dict") if name in vars(backbone)}
        backbone.log, backbone.log_dict = log, log_dict
        try:
            with (
                self._naming(f"{type(backbone).__name__}.{hook}", "")
                if hook in EPOCH_ENDS
                else contextlib.nullcontext()
            ):
                getattr(backbone, hook)(*args)
        finally:
            for name in ("log", "log_dict"):
                vars(backbone).pop(name, None)
            vars(backbone).update(before)

    # -- numbers and errors -------------------------------------------------------------------------------------------

    def _add(self, name: str, value: Any, count: int) -> None:
        self._means.setdefault(name, Mean()).add(self._number(name, value), count)

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, (Tensor, np.ndarray)):
            if math.prod(value.shape) != 1:
                raise ModelError(
                    f"{self._where(name)} must be one number; got a {type(value).__name__} of shape "
                    f"{tuple(value.shape)}"
                )
            value = value.item()
        if not isinstance(value, numbers.Real):
            raise ModelError(f"{self._where(name)} must be one number; got {shown(value)}")
        return float(value)

    def _where(self, name: str) -> str:
        return f"the metric {name} of client {self._client} on its {self._split} data"

    @contextlib.contextmanager
    def _naming(self, name: str, what: str = "the metric ") -> Iterator[None]:
        try:
            yield
        except (PersaflError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's code may raise anything
            raise ModelError(
                f"{what}{name} fails for client {self._client} on its {self._split} data: {located(error)}"
            ) from error


class Mean:
    """A mean weighted by samples."""

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def add(self, value: float, count: int) -> None:
        self.total, self.weight = self.total + value * count, self.weight + count

    @property
    def value(self) -> float:
        return self.total / self.weight


def overridden(backbone: nn.Module, hook: str) -> bool:
    """Whether a LightningModule of the user's defines a hook."""
    return isinstance(backbone, L.LightningModule) and getattr(type(backbone), hook) is not getattr(
        L.LightningModule, hook
    )


def _is_stateful(metric: Any) -> bool:
    return not isinstance(metric, type) and all(callable(getattr(metric, name, None)) for name in STATEFUL)
