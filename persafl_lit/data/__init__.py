"""What the clients hold. Adding a data set: a small file here, a line in the table, a YAML in conf/data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from persafl_lit.data.arrays import Arrays
from persafl_lit.data.custom import CustomData
from persafl_lit.data.digits import Digits
from persafl_lit.data.folder import Folder
from persafl_lit.data.images import Cifar10, FashionMnist, Mnist
from persafl_lit.data.leaf import Leaf
from persafl_lit.data.quadratic import Quadratic
from persafl_lit.data.synthetic import Synthetic

if TYPE_CHECKING:
    from persafl_lit.data.augmented import Augmented
    from persafl_lit.data.federation import SPLITS, Batch, Federation, Samples
    from persafl_lit.data.quadratic_federation import Quadratics

DEALT: dict[str, Any] = {"digits": Digits, "mnist": Mnist, "fashion_mnist": FashionMnist, "cifar10": Cifar10}
"""Samples with labels, dealt to clients; who holds what is known without torch."""
USER_DATASETS: dict[str, Any] = {"arrays": Arrays, "folder": Folder, "leaf": Leaf, "custom": CustomData}
"""Data of users'."""
DATASETS: dict[str, Any] = {**DEALT, "synthetic": Synthetic, **USER_DATASETS, "quadratic": Quadratic}
_LAZY = {
    "SPLITS": "federation",
    "Augmented": "augmented",
    "Batch": "federation",
    "Federation": "federation",
    "Samples": "federation",
    "Quadratics": "quadratic_federation",
}

__all__ = [
    "DATASETS",
    "DEALT",
    "GIVEN",
    "SPLITS",
    "Arrays",
    "Augmented",
    "Batch",
    "Cifar10",
    "CustomData",
    "Digits",
    "FashionMnist",
    "Federation",
    "Folder",
    "Leaf",
    "Mnist",
    "Quadratic",
    "Quadratics",
    "Samples",
    "Synthetic",
]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is used: settings do without."""
    if name not in _LAZY:
        raise AttributeError(f"module 'persafl_lit.data' has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(f"persafl_lit.data.{_LAZY[name]}"), name))
