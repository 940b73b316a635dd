"""LightningModules that give a network its loss."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
from torch import Tensor, nn
from torch.nn import functional as F

from persafl_lit.data.federation import IGNORED


def class_dimension(scores: Tensor, labels: Tensor) -> int:
    """Where scores have their classes: last, as sequence models give them, or second, as torch's cross-entropy takes
    them."""
    return -1 if scores.shape[:-1] == labels.shape else 1


class Classifier(L.LightningModule):
    """A network with the cross-entropy loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.network(inputs)
        return scores

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return self.score_loss(self(inputs), labels)

    def score_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The loss from scores that are known already: spares evaluation a second forward pass."""
        return F.cross_entropy(scores, labels)


class TokenClassifier(Classifier):
    """Scores for each of several tokens: (n, T, classes) or torch's (n, classes, T), with labels (n, T)."""

    def score_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.movedim(class_dimension(scores, labels), 1), labels, ignore_index=IGNORED)


class Regressor(Classifier):
    """A network with the mean squared error."""

    def score_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(scores.reshape(labels.shape), labels)


CLASSIFIERS: dict[str, type[Classifier]] = {
    "classification": Classifier,
    "tokens": TokenClassifier,
    "regression": Regressor,
}
"""What a network becomes, by the federation's task."""


class QuadraticModel(L.LightningModule):
    """The vector w of a quadratic: f(w) = 1/2 (w - a)^T H (w - a), plus <noise, w> where gradients are noisy."""

    def __init__(self, w0: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w0.clone())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        H, a, *noise = batch
        away = self.w - a
        loss = 0.5 * away @ (H @ away)
        return loss + noise[0] @ self.w if noise else loss
