"""The federation of quadratic clients; `data/quadratic.py` has its settings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from persafl_lit.common.seeding import rng
from persafl_lit.data.federation import SPLITS, Batch, Federation, Split


@dataclass(frozen=True)
class Quadratics(Federation):
    """f_i(w) = 1/2 (w - a_i)^T H_i (w - a_i); with `noise`, gradients carry N(0, noise^2 I)."""

    H: Tensor
    a: Tensor
    w0: Tensor
    noise: float = 0.0
    holdout: int = 0

    @property
    def clients(self) -> int:  # type: ignore[override]
        return len(self.a)

    @property
    def smoothness(self) -> float:  # type: ignore[override]
        """L, the largest curvature of any client."""
        return float(torch.linalg.eigvalsh(self.H.double()).abs().max())

    def batches(self, client: int, purpose: str, visit: int, steps: int, size: int, seed: int) -> list[Batch]:
        if self.noise == 0:
            return [Batch((self.H[client], self.a[client]), 0)] * steps
        draws = rng(seed, f"noise {purpose}", client, visit).normal(scale=self.noise, size=(steps, self.a.shape[1]))
        slopes = torch.from_numpy(draws).to(self.a)
        return [Batch((self.H[client], self.a[client], slope), 0) for slope in slopes]

    def whole(self, client: int, split: Split, size: int) -> Iterator[tuple[Any, int]]:
        yield (self.H[client], self.a[client]), 1

    def to(self, device: torch.device, dtype: torch.dtype) -> Quadratics:
        return replace(self, H=self.H.to(device, dtype), a=self.a.to(device, dtype), w0=self.w0.to(device, dtype))

    def count(self, client: int, split: Split) -> int:
        return 1

    def sizes(self) -> np.ndarray:
        return np.ones((self.clients, len(SPLITS)), dtype=int)

    def digest(self) -> str:
        arrays = (self.H, self.a, self.w0)
        return hashlib.sha256(b"".join(array.numpy().tobytes() for array in arrays)).hexdigest()
