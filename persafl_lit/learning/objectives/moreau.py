"""The Moreau envelope: pull a personal model towards the shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from persafl_lit.common.limits import MOST_STEPS, at_most
from persafl_lit.errors import ConfigError, DivergenceError
from persafl_lit.learning.objectives.objective import LocalLoss, Objective, Step

if TYPE_CHECKING:
    from torch import Tensor

    from persafl_lit.data.federation import Batch

SMOOTHNESS = 10.0
"""L0: what we take for the loss's smoothness where it is unknown; the default inner step is 1 / (lam + L0)."""
MOST_INNER_STEPS = 10_000
"""Inner steps after which a tolerance without `inner_steps` is given up."""


@dataclass(frozen=True)
class Moreau(Objective):
    """Gradient of the Moreau envelope (PersA-FL Option C, pFedMe).

    F(w) = min_theta f(theta) + lam/2 |theta - w|^2        grad F(w) = lam (w - theta*(w))

    theta* is approached by gradient steps on ONE batch, from w anew in every local step, until |grad h| <= nu or for
    `inner_steps` steps as in the paper's experiments, whichever comes first.
    """

    lam: float = 25.0
    """Weight of the pull towards the shared model."""
    inner_steps: int | None = 10
    """Most steps of the inner minimisation; null is until `nu`."""
    nu: float | None = None
    """Norm of the inner gradient at which the inner minimisation ends; null is never."""
    inner_lr: float | None = None
    """Inner step size; null is 1/(lam + L)."""

    moves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.lam > 0:
            raise ConfigError(f"method.lam must be > 0; got {self.lam!r}")
        if self.inner_steps is not None and self.inner_steps < 1:
            raise ConfigError(f"method.inner_steps must be >= 1 or null; got {self.inner_steps}")
        at_most("method.inner_steps", self.inner_steps, MOST_STEPS)
        if self.nu is not None and not self.nu > 0:
            raise ConfigError(f"method.nu must be > 0 or null; got {self.nu!r}")
        if self.inner_steps is None and self.nu is None:
            raise ConfigError("the inner minimisation never ends: set method.inner_steps, method.nu or both")
        if self.inner_lr is not None and not self.inner_lr > 0:
            raise ConfigError(f"method.inner_lr must be > 0 or null; got {self.inner_lr!r}")
        self.check_inner_step(0.0)

    def check_inner_step(self, smoothness: float) -> None:
        """Refuse an inner step that diverges: it must stay below 2 / (lam + L), and L is at least `smoothness`."""
        limit = 2 / (self.lam + smoothness)
        if self.inner_lr is not None and self.inner_lr >= limit:
            raise ConfigError(
                f"method.inner_lr={self.inner_lr:g} diverges with method.lam={self.lam:g}: it must be below 2 "
                "/ (lam + L), "
                f"here at most {limit:g}; leave it null for 1 / (lam + L)"
            )

    def step_size(self, smoothness: float | None = None) -> float:
        """inner_lr, by default 1 / (lam + L)."""
        return self.inner_lr or 1 / (self.lam + (SMOOTHNESS if smoothness is None else smoothness))

    @property
    def cost(self) -> int:
        return self.inner_steps or 10

    def gradient(self, f: LocalLoss, step: Step) -> Tensor:
        theta = self.minimise(f, step.w, step.batches[0])
        return (step.w - theta).mul_(self.lam)

    def minimise(self, f: LocalLoss, w: Tensor, batch: Batch) -> Tensor:
        """theta near argmin h(theta) = f(theta; D) + lam/2 |theta - w|^2."""
        theta, inner_lr = f.load(w), self.step_size(f.smoothness)
        for _ in range(self.inner_steps or MOST_INNER_STEPS):
            slope = f.gradient(theta, batch).add_(theta - w, alpha=self.lam)
            if self.nu is not None and float(slope.norm()) <= self.nu:
                return theta
            theta.sub_(slope, alpha=inner_lr)
        if self.inner_steps is None:
            raise DivergenceError(
                f"|grad h| is {float(slope.norm()):.3g} after {MOST_INNER_STEPS} inner steps, not "
                f"method.nu={self.nu:g}; "
                "raise method.nu, lower method.inner_lr or set method.inner_steps"
            )
        return theta

    def residual(self, f: LocalLoss, step: Step, gradient: Tensor) -> float:
        """|grad h(theta)| at the theta that was used: since lam (theta - w) = -gradient, this is |grad f(theta) -
        gradient|."""
        theta = f.load(step.w).sub_(gradient, alpha=1 / self.lam)
        return float(f.gradient(theta, step.batches[0]).sub_(gradient).norm())
