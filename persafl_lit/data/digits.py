"""scikit-learn's 1,797 real 8x8 handwritten digits: inside the installed package, so they work offline in seconds."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from persafl_lit.data.federation import SPLITS, Samples
from persafl_lit.data.partition import Partition, split
from persafl_lit.data.pixels import Pixels

MEAN, STD = 0.305, 0.376  # of all pixels, scaled to [0, 1]


@dataclass(frozen=True)
class Partitioned(Partition):
    """A data set that is dealt to clients; the last `holdout_clients` of them never train and are only evaluated."""

    holdout_clients: int = 0

    def count(self, clients: int | None) -> int:
        """How many clients there are when `clients` were asked for."""
        return 30 if clients is None else clients


@dataclass(frozen=True)
class Digits(Partitioned):
    """The embedded default data set."""

    def federation(self, clients: int | None, seed: int) -> Samples:
        table = read_digits()
        pixels = table[:, :-1].reshape(-1, 1, 8, 8) / 16.0
        inputs = torch.from_numpy((pixels - MEAN) / STD).float()
        return deal(inputs, table[:, -1].astype(np.int64), self, self.count(clients), seed)


def read_digits() -> np.ndarray:
    """Rows of 64 pixels (0 to 16) and a label. Read from scikit-learn's own file: importing scikit-learn takes two seconds more."""
    spec = importlib.util.find_spec("sklearn")
    path = Path((spec.submodule_search_locations or [""])[0] if spec else "") / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.concatenate([digits.data, digits.target[:, None]], axis=1)


def deal(
    inputs: torch.Tensor | Pixels, labels: np.ndarray, settings: Partitioned, clients: int, seed: int, fingerprint: str | None = None
) -> Samples:
    """A federation from samples and a partition; what no client holds is said, not lost silently."""
    parts = []
    for client, part in enumerate(settings.deal(labels, clients, seed)):
        pieces = split(part, labels, settings, client, seed)
        parts.append({name: torch.from_numpy(piece) for name, piece in zip(SPLITS, pieces, strict=True)})
    left = len(labels) - sum(len(piece) for part in parts for piece in part.values())
    notes = (f"{left} of {len(labels)} samples belong to classes that no client holds",) if left else ()
    if fingerprint is None:
        assert isinstance(inputs, torch.Tensor)
        fingerprint = hashlib.sha256(inputs.numpy().tobytes()).hexdigest()
    return Samples(inputs, torch.from_numpy(labels), int(labels.max()) + 1, parts, fingerprint, settings.holdout_clients, notes)
