"""Targets of users' samples: how they are found, checked and counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from persafl_lit.data.augmented import Augmented
from persafl_lit.data.federation import IGNORED, Task
from persafl_lit.data.holdings import Rows
from persafl_lit.data.in_memory import is_number, target_of
from persafl_lit.data.indexed import Sources, sample_of, seeded
from persafl_lit.errors import DataError

MANY_CLASSES = 10_000
"""More than these, and more than there are labels, is taken for a mistake unless `data.classes` says so."""


def labels_of(sources: Sources, firsts: Sequence[Any]) -> Tensor | None:
    """The targets of all samples that are read by index: as the Datasets' `targets` have them, else read once; None if
    they have no one shape."""
    found: list[Tensor] = []
    if not all(
        isinstance(first, (tuple, list)) and len(first) == 2 and not isinstance(first[1], (Mapping, tuple, list))
        for first in firsts
    ):
        return None
    for dataset, name, length in zip(sources.datasets, sources.names, sources.lengths, strict=True):
        known = _known_targets(dataset, name)
        if known is None:
            with seeded(0):
                targets = [target_of(sample_of(dataset, index, name)[1], name, index) for index in range(length)]
            if len({target.shape for target in targets}) > 1:
                return None
            known = torch.stack(targets)
        found.append(known)
    alike = len({(labels.shape[1:], labels.is_floating_point()) for labels in found}) == 1
    return torch.cat(found) if alike else None


def _known_targets(dataset: Any, name: str) -> Tensor | None:
    """A dataset's list of targets, if what it says of some samples is so."""
    values: Any
    if type(dataset) is Rows:
        return dataset.y
    if isinstance(dataset, Augmented):
        return _known_targets(dataset.dataset, name)
    if type(dataset) is Subset:
        inner = _known_targets(dataset.dataset, name)
        return None if inner is None else inner[torch.as_tensor(list(dataset.indices), dtype=torch.long)]
    values = getattr(dataset, "targets", None)
    values = getattr(dataset, "labels", None) if values is None else values
    try:
        known = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
        if known.dim() != 1 or len(known) != len(dataset):
            return None
    except (TypeError, ValueError, RuntimeError):
        return None
    known = known if known.is_floating_point() else known.long()
    with seeded(0):
        checked = np.unique(np.linspace(0, len(known) - 1, min(8, len(known))).astype(int)).tolist()
        targets = [target_of(sample_of(dataset, index, name)[1], name, index) for index in checked]
    return (
        known
        if all(target.dim() == 0 and target == known[index] for target, index in zip(targets, checked, strict=True))
        else None
    )


def check_labels(labels: Tensor | None, classes: int | None, sources: Sources) -> None:
    if labels is None or labels.is_floating_point():
        if labels is not None and not torch.isfinite(labels).all():
            raise DataError(f"{_where(~torch.isfinite(labels), sources)} has a target that is not finite")
        return
    wrong = (labels < 0) & ((labels != IGNORED) | (labels.dim() == 1))
    if classes is not None:
        wrong |= labels >= classes
    if wrong.any():
        value = int(labels[wrong][0])
        allowed = (
            f"data.classes={classes} allows 0 to {classes - 1}"
            if classes is not None
            else "labels are whole numbers from 0 on"
        )
        raise DataError(f"{_where(wrong, sources)} has the label {value}; {allowed}")


def _where(wrong: Tensor, sources: Sources) -> str:
    index = int(wrong.flatten(1).any(1).nonzero()[0, 0]) if wrong.dim() > 1 else int(wrong.nonzero()[0, 0])
    return sources.places.name(index)


def classes_of(labels: Tensor | None, classes: int | None) -> int:
    if classes is not None or labels is None:
        return classes or 0
    if labels.is_floating_point():
        return math.prod(labels.shape[1:])
    found = int(labels.max()) + 1
    if found > max(MANY_CLASSES, labels.numel()):
        raise DataError(
            f"the labels go up to {found - 1}, which makes {found:,} classes for {labels.numel():,} of them; "
            "number the classes from 0 on, or set data.classes"
        )
    return found


def infer_task(first: Any, labels: Tensor | None) -> Task:
    if labels is None:
        if not (isinstance(first, (tuple, list)) and len(first) == 2 and is_number(first[1])):
            return "classification"
        labels = target_of(first[1], "", 0)[None]
    return "regression" if labels.is_floating_point() else "tokens" if labels.dim() > 1 else "classification"
