"""MAML: the gradient of the loss after one adaptation step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from persafl_lit.errors import ConfigError
from persafl_lit.learning.objectives.objective import LocalLoss, Objective, Step

if TYPE_CHECKING:
    from torch import Tensor

    from persafl_lit.data.federation import Batch

HessianVector = Literal["exact", "finite_difference", "first_order", "as_printed"]
SHORT = 1e-5
HESSIAN_VECTORS = ("exact", "finite_difference", "first_order", "as_printed")


@dataclass(frozen=True)
class Maml(Objective):
    """Gradient of F(w) = f(w - alpha grad f(w)) (PersA-FL Option B, Per-FedAvg), on three independent batches.

    (I - alpha H(w; D'')) grad f(w - alpha grad f(w; D'); D)

    The product H u comes by differentiation (`exact`), by a central difference (`finite_difference`)

        H u = (grad f(w + d u) - grad f(w - d u)) / 2d        with d = delta / |u|,

    or is left out (`first_order`). `as_printed` divides by d instead, as the paper's appendix prints it: twice the
    product.
    """

    alpha: float = 0.01
    """Size of the adaptation step; 0 is a plain gradient."""
    hvp: HessianVector = "exact"
    """How the Hessian-vector product is computed; the paper's experiments use `finite_difference`."""
    delta: float | None = None
    """The length |d u| of the finite difference; null is 1e-5."""

    batches: ClassVar[int] = 3
    moves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ConfigError(f"method.alpha must be >= 0; got {self.alpha!r}")
        if self.hvp not in HESSIAN_VECTORS:
            raise ConfigError(f"method.hvp must be one of {', '.join(HESSIAN_VECTORS)}; got {self.hvp!r}")
        if self.delta is not None and not self.delta > 0:
            raise ConfigError(f"method.delta must be > 0 or null; got {self.delta!r}")

    @property
    def differences(self) -> bool:
        """Whether the product comes by differences of gradients."""
        return self.hvp in ("finite_difference", "as_printed")

    @property
    def cost(self) -> int:
        return 1 if self.alpha == 0 else 2 if self.hvp == "first_order" else 4

    def gradient(self, f: LocalLoss, step: Step) -> Tensor:
        w, (D, D1, D2) = step.w, step.batches
        if self.alpha == 0:
            return f.gradient(w, D)
        adaptation = f.gradient(w, D1)
        adapted = f.load(w).sub_(adaptation, alpha=self.alpha)
        gradient = f.gradient(adapted, D)
        if self.hvp == "first_order":
            return gradient
        gradient = gradient.clone()
        return gradient.sub_(self.hessian_vector(f, w, gradient, D2), alpha=self.alpha)

    def hessian_vector(self, f: LocalLoss, w: Tensor, u: Tensor, batch: Batch) -> Tensor:
        """H(w; D'') u in the chosen way."""
        if self.hvp == "exact":
            return f.hessian_vector(w, u, batch)
        length = float(u.norm())
        if length == 0:
            return u
        d = (self.delta or SHORT) / length
        product = self._difference(f, w, u, batch, d)
        # ReLU and max-pooling have kinks; a difference that crosses one adds its jump over 2d, which can throw a run
        # off. MAML
        # needs alpha |H u| <= |u|: beyond that, a ten times shorter difference tells a spike (it goes) from curvature
        # (it stays).
        if self.alpha * float(product.norm()) > length:
            shorter = self._difference(f, w, u, batch, d / 10)
            if float(shorter.norm()) < float(product.norm()) / 2:
                return shorter
        return product

    def _difference(self, f: LocalLoss, w: Tensor, u: Tensor, batch: Batch, d: float) -> Tensor:
        ahead = f.gradient(f.load(w).add_(u, alpha=d), batch).clone()
        behind = f.gradient(f.load(w).sub_(u, alpha=d), batch)
        return ahead.sub_(behind).div_(d if self.hvp == "as_printed" else 2 * d)
