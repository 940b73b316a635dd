"""Random transforms: which datasets have them, and how evaluation reads samples without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset

RANDOM = {
    "ColorJitter",
    "AutoAugment",
    "RandAugment",
    "TrivialAugmentWide",
    "AugMix",
    "ElasticTransform",
    "GaussianBlur",
    "GaussianNoise",
}
RANDOM |= {"ScaleJitter", "CutMix", "MixUp", "JPEG"}
"""torchvision's random transforms whose names do not begin with Random."""
NESTED = ("transform", "transforms", "target_transform", "dataset", "datasets")
"""Attributes that hold transforms, or datasets with them."""


class Augmented(Dataset[Any]):
    """A Dataset of (inputs, target) with a transform of the inputs for training; evaluation reads `dataset` as it
    is."""

    def __init__(self, dataset: Any, transform: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.dataset[index]
        return self.transform(inputs), target


def has_random_transform(dataset: Any) -> bool:
    """Whether a transform of the dataset is one of torchvision's random ones; those of others show when samples are
    read twice."""
    return isinstance(dataset, Augmented) or any(map(_is_random, _inside(dataset, 6)))


def _inside(part: Any, depth: int) -> Iterator[Any]:
    yield part
    if depth == 0:
        return
    inner = (
        list(part)
        if isinstance(part, (list, tuple))
        else [vars(part)[name] for name in NESTED if name in getattr(part, "__dict__", {})]
    )
    for value in inner:
        if not isinstance(value, (str, int, float)):
            yield from _inside(value, depth - 1)


def _is_random(part: Any) -> bool:
    kind = type(part)
    return kind.__module__.startswith("torchvision.transforms") and (
        kind.__name__.startswith("Random") or kind.__name__ in RANDOM
    )


def without_random(dataset: Any) -> Any | None:
    """The dataset as evaluation reads it: a shallow copy without random transforms, or None if there is no telling
    how."""
    if isinstance(dataset, Augmented):
        return dataset.dataset
    try:
        plain = copy.copy(dataset)
        if "dataset" in vars(plain):  # a Subset
            plain.dataset = without_random(plain.dataset)
            return None if plain.dataset is None else plain
        for name in ("transform", "transforms"):
            if name in vars(plain):
                setattr(plain, name, _stripped(getattr(plain, name)))
    except Exception:  # a user's class may not be made for it
        return None
    return None if any(map(_is_random, _inside(plain, 6))) else plain


def _stripped(transform: Any) -> Any:
    """A transform without its random parts."""
    if _is_random(transform):
        return None
    if isinstance(getattr(transform, "transforms", None), (list, tuple)):
        left = copy.copy(transform)
        left.transforms = [part for part in map(_stripped, transform.transforms) if part is not None]
        return left if left.transforms else None
    if hasattr(transform, "transform") and hasattr(transform, "target_transform"):  # torchvision's pair of both
        left = copy.copy(transform)
        left.transform = _stripped(transform.transform)
        return left
    return transform
