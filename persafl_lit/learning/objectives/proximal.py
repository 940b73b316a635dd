"""FedProx: stay near the model that was downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from persafl_lit.errors import ConfigError
from persafl_lit.learning.objectives.objective import LocalLoss, Objective, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Proximal(Objective):
    """Gradient of f(w) + mu/2 |w - w_{i,0}|^2 (FedProx).

    grad f(w; D) + mu (w - w_{i,0})
    """

    mu: float = 0.1
    """Weight of the proximal term."""

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ConfigError(f"method.mu must be >= 0; got {self.mu!r}")

    def gradient(self, f: LocalLoss, step: Step) -> Tensor:
        gradient = f.gradient(step.w, step.batches[0])
        if self.mu == 0:
            return gradient
        return gradient.add_(step.w - step.read, alpha=self.mu)
