"""SCAFFOLD: correct the drift of heterogeneous clients by control variates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from persafl_lit.learning.objectives.objective import LocalLoss, Objective, Step

if TYPE_CHECKING:
    from torch import Tensor

    from persafl_lit.common.tensors import Tensors


@dataclass(frozen=True)
class Scaffold(Objective):
    """SCAFFOLD's local step with Option I. The client keeps its control variate c_i and sends how it changed.

    grad f(w; D) - c_i + c        and afterwards        c_i <- grad f_i(w_{i,0}) over all of the client's data
    """

    sends: ClassVar[tuple[str, ...]] = ("control",)
    keeps: ClassVar[tuple[str, ...]] = ("control",)

    def begin(self, read: Tensors, memory: Tensors) -> Tensors:
        """c - c_i; without c, which the server sends from the second round on, there is nothing to correct."""
        if "control" not in read:
            return {}
        return {"correction": read["control"] - memory["control"] if "control" in memory else read["control"]}

    def gradient(self, f: LocalLoss, step: Step) -> Tensor:
        gradient = f.gradient(step.w, step.batches[0])
        return gradient.add_(step.given["correction"]) if step.given else gradient

    def end(self, whole_gradient: Callable[[], Tensor], memory: Tensors) -> tuple[Tensors, Tensors]:
        control = whole_gradient()
        return {"control": control - memory["control"] if "control" in memory else control}, {"control": control}
