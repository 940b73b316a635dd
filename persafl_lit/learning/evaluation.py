"""Fine-tune, then evaluate: personalised accuracy per client.

The fine-tuning rule is separate from the training method, so that every method gets the same personalisation budget. It
sees only training data; validation and test splits are only ever measured.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from persafl_lit.common.seeding import torch_seed
from persafl_lit.data.federation import IGNORED, Batch, Federation, Split
from persafl_lit.errors import ConfigError, ModelError, shown
from persafl_lit.learning.flat_loss import FlatLoss, step_loss
from persafl_lit.learning.metric_names import MEASURED
from persafl_lit.learning.metrics import Metrics, Reading
from persafl_lit.learning.personalisation import Finetune
from persafl_lit.learning.scores import OWN_TUNED, SHARED_TUNED, Measured, Scores, Value
from persafl_lit.models.classifier import class_dimension

if TYPE_CHECKING:
    from persafl_lit.learning.client_module import ClientModule

CHUNK = 1024
NO_METRICS = Metrics()


class Models(NamedTuple):
    """What one client could use, and how to load the statistics (BatchNorm's) that belong to it."""

    shared: Tensor
    """The shared model, with the initial values of private parameters."""
    own: Tensor | None = None
    """The model that the client keeps: with its private parameters, or its personal model. None if it keeps none."""
    load_statistics: Callable[[bool], None] = lambda own: None
    """Those of its own model, or of the shared one."""


def evaluate_client(
    client: ClientModule,
    federation: Federation,
    number: int,
    models: Models,
    rules: Mapping[str, Finetune],
    batch_size: int,
    seed: int,
    metrics: Metrics = NO_METRICS,
) -> Scores:
    """Fine-tune one client's model by each rule and measure; nothing it does changes that model.

    The model is the client's own where it keeps one, else the shared one; the first rule is the common one. With the
    rule `own`, the models that remain are measured as well: after the common rule the shared model beside an own one
    (`shared_tuned`), and the method's own adaptation of it (`own_tuned`).
    """
    common = next(iter(rules))
    further: dict[str, Measured] = {}
    if models.own is not None:
        models.load_statistics(False)
        shared = measure_both(client.f, federation, number, models.shared, metrics)
        if "own" in rules:
            theta = _tuned(client, federation, number, models.shared, rules[common], batch_size, seed)
            further[SHARED_TUNED] = measure_both(client.f, federation, number, theta, metrics)
    w = models.shared if models.own is None else models.own
    models.load_statistics(models.own is not None)
    start = measure_both(client.f, federation, number, w, metrics)
    measured: dict[str, Measured] = {}
    for name, rule in rules.items():
        if name == "own" and models.own is None and not rule.adapts:
            continue  # nothing is the client's own after all
        theta = _tuned(client, federation, number, w, rule, batch_size, seed)
        measured[name] = start if theta is w else measure_both(client.f, federation, number, theta, metrics)
        if name == "own" and theta is not w and rules[common].adapts:
            theta = _tuned(client, federation, number, theta.clone(), rules[common], batch_size, seed)
            further[OWN_TUNED] = measure_both(client.f, federation, number, theta, metrics)
    client.f.losses.clear()
    shared = start if models.own is None else shared
    return Scores(number, federation.count(number, "test"), shared, measured.pop(common), {**measured, **further})


def _tuned(
    client: ClientModule, federation: Federation, number: int, w: Tensor, rule: Finetune, batch_size: int, seed: int
) -> Tensor:
    """The client's model after fine-tuning w by a rule."""
    client.backbone.train()
    batches = federation.batches(number, "finetune", 0, rule.steps, batch_size, seed) if rule.steps else []
    join = client.f.statistics is not None
    whole = whole_batches(federation, number, batch_size, seed, join) if rule.full else []
    version = w._version
    theta = rule.personalise(client, w, batches, whole)
    if w._version != version:
        raise ModelError(
            f"{type(rule).__name__}.personalise changes w in place; others read it, so return a new tensor"
        )
    if not isinstance(theta, Tensor) or theta.shape != w.shape:
        found = f"shape {tuple(theta.shape)}" if isinstance(theta, Tensor) else type(theta).__name__
        raise ModelError(
            f"{type(rule).__name__}.personalise must return a tensor like w, of shape {tuple(w.shape)}; got {found}"
        )
    return theta


def measure_both(
    f: FlatLoss, federation: Federation, client: int, w: Tensor, metrics: Metrics = NO_METRICS
) -> Measured:
    """w on a client's validation and test data."""
    val_loss, val_accuracy, val = measure(f, federation, client, "val", w, metrics)
    test_loss, test_accuracy, test = measure(f, federation, client, "test", w, metrics)
    missing = (math.nan, 0)
    further = {
        name: Value(val.get(name, missing)[0], test.get(name, missing)[0], (val.get(name) or test[name])[1])
        for name in {**val, **test}
    }
    return Measured(val_accuracy, test_accuracy, val_loss, test_loss, further)


def average_statistics(
    client: ClientModule, federation: Federation, number: int, w: Tensor, batch_size: int, seed: int
) -> None:
    """The statistics (BatchNorm's) of w on a client's training data, for one that has none of its own."""
    assert client.f.statistics is not None
    client.backbone.train()
    with client.f.statistics.averaging():
        for batch, _ in whole_batches(federation, number, batch_size, seed, join=True):
            client.f.update_statistics(w, batch)


def whole_batches(
    federation: Federation, client: int, batch_size: int, seed: int, join: bool = False
) -> list[tuple[Batch, int]]:
    """All of a client's training data in batches, with the number of samples in each.

    With `join`, a last batch of one sample, which BatchNorm refuses, is joined to the one before.
    """
    chunks = list(federation.whole(client, "train", batch_size))
    if join and len(chunks) > 1 and chunks[-1][1] == 1:
        (data, count), (last, _) = chunks[-2:]
        chunks[-2:] = [(tree_map(lambda *parts: torch.cat(parts), data, last), count + 1)]
    return [
        (Batch(data, torch_seed(seed, "mask whole", client, chunk)), count)
        for chunk, (data, count) in enumerate(chunks)
    ]


def measure(
    f: FlatLoss, federation: Federation, client: int, split: Split, w: Tensor, metrics: Metrics = NO_METRICS
) -> tuple[float, float, dict[str, tuple[float, int]]]:
    """Loss, accuracy and further metrics of w on a client's split, without dropout.

    A module's own accuracy, if it logs one, counts where there is no other.
    """
    f.load(w)
    f.backbone.eval()
    loss = hits = answers = total = 0.0
    reading = metrics.begin(f.backbone, client, split)
    with torch.no_grad(), f.statistics.unchanged() if f.statistics else contextlib.nullcontext():
        for index, (data, count) in enumerate(federation.whole(client, split, CHUNK)):
            data = f.ordered(data)
            chunk_loss, chunk_hits, chunk_answers = _loss_and_hits(f.backbone, data, count, reading)
            loss, hits, answers, total = (
                loss + chunk_loss * count,
                hits + chunk_hits,
                answers + chunk_answers,
                total + count,
            )
            reading.step(data, count, index)
        found = reading.values()
    accuracy = hits / answers if answers and not math.isnan(answers) else found.get("accuracy", (math.nan,))[0]
    return loss / total, accuracy, {name: value for name, value in found.items() if name not in MEASURED}


def _loss_and_hits(backbone: nn.Module, data: Any, count: int, reading: Reading) -> tuple[float, float, float]:
    """The mean loss, and how many answers are right of how many: samples, or tokens that count. nan for a task without
    classes."""
    pair = isinstance(data, (tuple, list)) and len(data) == 2
    classes = pair and isinstance(data[1], Tensor) and not data[1].is_floating_point()
    if not classes and not reading.wants_scores:
        return float(step_loss(backbone, data)), math.nan, math.nan
    if not pair:
        raise ConfigError(
            f"metrics compare a model's outputs with targets, so batches must be (inputs, targets); got {shown(data)}"
        )
    inputs, labels = data
    try:
        scores = backbone(inputs)
    except NotImplementedError:
        if reading.wants_scores:
            raise ConfigError(
                f"metrics compare module(inputs) with targets, and {type(backbone).__name__} has no forward(inputs)"
            ) from None
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
