"""SCAFFOLD: correct the drift of heterogeneous clients by control variates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from persafl_lit.objectives.objective import LocalLoss, Objective, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Scaffold(Objective):
    """SCAFFOLD's local step with Option I.

    grad f(w; D) - c_i + c        and afterwards        c_i <- grad f_i(w_{i,0}) over all of the client's data
    """

    control: ClassVar[bool] = True

    def gradient(self, f: LocalLoss, step: Step) -> Tensor:
        gradient = f.gradient(step.w, step.batches[0])
        return gradient if step.correction is None else gradient.add_(step.correction)
