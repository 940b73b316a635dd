"""Plain stochastic gradients: FedAvg, FedAsync, FedBuff."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from persafl_lit.learning.objectives.objective import LocalLoss, Objective, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plain(Objective):
    """PersA-FL Option A: grad f(w; D)."""

    def gradient(self, f: LocalLoss, step: Step) -> Tensor:
        return f.gradient(step.w, step.batches[0])
