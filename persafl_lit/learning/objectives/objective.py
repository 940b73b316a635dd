"""What a client computes: the gradient of its own cost, written with flat vectors.

An objective sees the client's loss only through `f`: `f.gradient(w, D)`, `f.hessian_vector(w, u, D)`, and `f.load(w)`,
which copies w into the live parameters. A batch D fixes the samples *and* the dropout mask, so f(.; D) is an ordinary
function: every evaluation on the same batch sees the same mask, as finite differences and inner minimisations need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from persafl_lit.common.tensors import Tensors
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

    def load(self, w: Tensor) -> Tensor:
        """Copy w into the live parameters and return them: they may be changed in place, and evaluating there costs no
        copy."""


class Step(NamedTuple):
    """Local step q of a job."""

    w: Tensor
    """w_{i,q}, the current local model."""
    read: Tensor
    """w_{i,0}, the model it downloaded."""
    batches: Sequence[Batch]
    """As many independent batches as the objective asks for; the first is D."""
    given: Tensors = MappingProxyType({})
    """What the objective's `begin` made of the server's further tensors and of the client's memory."""


class Objective(ABC):
    """One of the three local updates of Algorithm 2, or a baseline's."""

    batches: ClassVar[int] = 1
    """Independent batches per local step."""
    moves: ClassVar[bool] = False
    """Whether it evaluates gradients elsewhere than at w. If not, w is the live parameters, and evaluating elsewhere
    would change it: that is refused."""
    sends: ClassVar[tuple[str, ...]] = ()
    """Named tensors, of the model's size, that a visit sends beside `delta`; the server sends as many beside the
    model."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """Named tensors, of the model's size, that a client keeps between visits."""

    @property
    def cost(self) -> int:
        """About how many gradients a local step takes: what `delays.per_gradient` and the estimates of work count."""
        return 1

    @abstractmethod
    def gradient(self, f: LocalLoss, step: Step) -> Tensor:
        """The direction of the local step: w_{i,q+1} = w_{i,q} - eta * gradient."""

    def begin(self, read: Tensors, memory: Tensors) -> Tensors:
        """Before the first local step, from what was downloaded and what the client kept: what every step is
        `given`."""
        return {}

    def end(self, whole_gradient: Callable[[], Tensor], memory: Tensors) -> tuple[Tensors, Tensors]:
        """After the last local step: further tensors to send, and the client's new memory.

        `whole_gradient()` is grad f_i(w_{i,0}) over all of the client's data; `memory` is what it kept so far.
        """
        return {}, {}

    def residual(self, f: LocalLoss, step: Step, gradient: Tensor) -> float | None:
        """How far an inner minimisation was from its end, where there is one."""
        return None
