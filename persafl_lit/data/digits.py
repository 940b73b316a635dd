"""scikit-learn's 1,797 real 8x8 handwritten digits: inside the installed package, so they work offline in seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from persafl_lit.data.federation import SPLITS, Samples
from persafl_lit.data.partition import Partition, split

MEAN, STD = 0.305, 0.376  # of all pixels, scaled to [0, 1]


@dataclass(frozen=True)
class Digits:
    """The embedded default data set."""

    partition: str = "classes"
    classes_per_client: int = 5
    concentration: float = 0.5
    imbalance: float = 0.3
    val_share: float = 0.2
    test_share: float = 0.2

    def __post_init__(self) -> None:
        self._partition()

    def _partition(self) -> Partition:
        return Partition(self.partition, self.classes_per_client, self.concentration, self.imbalance, self.val_share, self.test_share)

    def count(self, clients: int | None) -> int:
        """How many clients there are when `clients` were asked for."""
        return 30 if clients is None else clients

    def federation(self, clients: int | None, seed: int) -> Samples:
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = digits.images[:, None] / 16.0
        inputs = torch.from_numpy((pixels - MEAN) / STD).float()
        return deal(inputs, digits.target.astype(np.int64), self._partition(), self.count(clients), seed)


def deal(inputs: torch.Tensor, labels: np.ndarray, partition: Partition, clients: int, seed: int) -> Samples:
    """A federation from samples and a partition; what no client holds is said, not lost silently."""
    parts = []
    for client, part in enumerate(partition.deal(labels, clients, seed)):
        pieces = split(part, labels, partition, client, seed)
        parts.append({name: torch.from_numpy(piece) for name, piece in zip(SPLITS, pieces, strict=True)})
    left = len(labels) - sum(len(piece) for part in parts for piece in part.values())
    notes = (f"{left} of {len(labels)} samples belong to classes that no client holds",) if left else ()
    return Samples(inputs, torch.from_numpy(labels), int(labels.max()) + 1, parts, notes)
