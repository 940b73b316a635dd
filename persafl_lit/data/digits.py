"""scikit-learn's 1,797 real 8x8 handwritten digits: inside the installed package, so they work offline in seconds."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from persafl_lit.data.partition import Partitioned

if TYPE_CHECKING:
    from persafl_lit.data.federation import Samples

MEAN, STD = 0.305, 0.376  # of all pixels, scaled to [0, 1]


@dataclass(frozen=True)
class Digits(Partitioned):
    """The embedded default data set."""

    shape: ClassVar[tuple[int, ...]] = (1, 8, 8)

    def read_labels(self) -> np.ndarray:
        return read_digits()[:, -1].astype(np.int64)

    def federation(self, clients: int | None, seed: int) -> Samples:
        import torch

        from persafl_lit.data.federation import dealt

        table = read_digits()
        pixels = table[:, :-1].reshape(-1, *self.shape) / 16.0
        inputs = torch.from_numpy((pixels - MEAN) / STD).float()
        return dealt(inputs, self.shares(table[:, -1].astype(np.int64), clients, seed))


def read_digits() -> np.ndarray:
    """Rows of 64 pixels (0 to 16) and a label. Read from scikit-learn's own file: importing scikit-learn takes two
    seconds more."""
    spec = importlib.util.find_spec("sklearn")
    path = Path((spec.submodule_search_locations or [""])[0] if spec else "") / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.concatenate([digits.data, digits.target[:, None]], axis=1)
