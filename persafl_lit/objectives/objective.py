"""What a client computes: the gradient of its own cost, written with flat vectors.

An objective sees the client's loss only through `f`: `f.gradient(w, D)`, `f.hessian_vector(w, u, D)` and a place to stand,
`f.at(w)`. A batch D fixes the samples *and* the dropout mask, so f(.; D) is an ordinary function: every evaluation on the
same batch sees the same mask, as finite differences and inner minimisations need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from persafl_lit.data.federation import Batch


class LocalLoss(Protocol):
    """f_i(w; D) of one client, as objectives see it."""

    evaluations: int
    """Gradients computed so far."""
    smoothness: float | None
    """L, where the data set knows it."""

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """grad f(w; D), in a buffer that the next evaluation overwrites: clone what must last."""

    def hessian_vector(self, w: Tensor, u: Tensor, batch: Batch) -> Tensor:
        """H(w; D) u; counts as two evaluations."""

    def at(self, w: Tensor) -> Tensor:
        """Stand at w: a vector with w's values that may be changed in place, where evaluating costs no copy."""


class Step(NamedTuple):
    """Local step q of a job."""

    w: Tensor
    """w_{i,q}, where the client stands."""
    read: Tensor
    """w_{i,0}, the model it downloaded."""
    batches: Sequence[Batch]
    """As many independent batches as the objective asks for; the first is D."""
    correction: Tensor | None = None
    """SCAFFOLD's c - c_i, from the server."""


class Objective(ABC):
    """One of the three local updates of Algorithm 2, or a baseline's."""

    batches: ClassVar[int] = 1
    """Independent batches per local step."""
    moves: ClassVar[bool] = False
    """Whether it evaluates gradients elsewhere than at w."""
    control: ClassVar[bool] = False
    """Whether the client also sends grad f_i(w_{i,0}) over all its data (SCAFFOLD, Option I)."""

    @property
    def cost(self) -> int:
        """About how many gradients a local step takes: what `delays.per_gradient` and the estimates of work count."""
        return 1

    @abstractmethod
    def gradient(self, f: LocalLoss, step: Step) -> Tensor:
        """The direction of the local step: w_{i,q+1} = w_{i,q} - eta * gradient."""

    def residual(self, f: LocalLoss, step: Step, gradient: Tensor) -> float | None:
        """How far an inner minimisation was from its end, where there is one."""
        return None
