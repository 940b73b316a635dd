"""What training has cost and seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from persafl_lit.engine.messages import Update


@dataclass
class Tally:
    """What training has cost and seen since the last evaluation, and in all."""

    grad_evals: int = 0
    updates: int = 0
    loss: float = 0.0
    residual: float = 0.0
    staleness: int = 0
    worst_staleness: int = 0

    def add(self, update: Update, staleness: int) -> None:
        self.grad_evals += update.evaluations
        self.updates += 1
        self.loss += update.loss
        self.residual += update.residual or 0.0
        self.staleness += staleness
        self.worst_staleness = max(self.worst_staleness, staleness)

    def take(self) -> dict[str, float]:
        """Means since the last call; the count of gradients goes on."""
        count = max(self.updates, 1)
        means = {
            "grad_evals": self.grad_evals,
            "train_loss": self.loss / count if self.updates else math.nan,
            "inner_residual": self.residual / count if self.residual else math.nan,
            "staleness_mean": self.staleness / count,
            "staleness_max": self.worst_staleness,
        }
        vars(self).update(vars(Tally(grad_evals=self.grad_evals)))
        return means
