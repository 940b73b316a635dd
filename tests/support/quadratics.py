"""Random quadratics and a loss over them, for tests with closed forms."""

from __future__ import annotations

import lightning as L
import numpy as np
import torch
from torch import nn

from persafl_lit.data.federation import Batch
from persafl_lit.learning.flat_loss import FlatLoss
from persafl_lit.models.classifier import QuadraticModel


def random_quadratics(clients: int, dimension: int, seed: int = 0):
    """H (n, d, d) with eigenvalues in [0.5, 5], and a (n, d)."""
    stream = np.random.default_rng(seed)
    H = []
    for _ in range(clients):
        basis, _ = np.linalg.qr(stream.normal(size=(dimension, dimension)))
        H.append((basis * stream.uniform(0.5, 5.0, dimension)) @ basis.T)
    return np.array(H), stream.normal(size=(clients, dimension))


def loss_and_batch(H: np.ndarray, a: np.ndarray, smoothness: float | None = None):
    """f of one client in float64, and the batch that is all of its data."""
    f = FlatLoss(QuadraticModel(torch.zeros(len(a), dtype=torch.float64)), smoothness=smoothness)
    return f, Batch((torch.from_numpy(H), torch.from_numpy(a)), 0)


def save(path, H, a, **more) -> str:
    np.savez(path, H=H, a=a, **more)
    return str(path)


class Parts(L.LightningModule):
    """A quadratic of [shared, private], with the private parameter first; `common` has the first values of w0."""

    def __init__(self, w0: np.ndarray, common: int) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.from_numpy(w0[common:].copy()))
        self.common = nn.Parameter(torch.from_numpy(w0[:common].copy()))

    def training_step(self, batch, batch_idx):
        H, a = batch
        away = torch.cat([self.common, self.own]) - a
        return 0.5 * away @ (H @ away)
