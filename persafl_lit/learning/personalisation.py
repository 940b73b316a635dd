"""Fine-tuning rules: how a client makes the shared model its own before it is evaluated. Settings only; no torch is
imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from persafl_lit.common.limits import MOST_STEPS, at_most
from persafl_lit.errors import ConfigError
from persafl_lit.learning.objectives import Maml, Moreau, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from persafl_lit.data.federation import Batch
    from persafl_lit.learning.client_module import ClientModule


@dataclass(frozen=True)
class Finetune:
    """How a client makes the shared model its own before it is evaluated: not at all."""

    steps: ClassVar[int] = 0
    """Minibatches it uses."""
    full: ClassVar[bool] = False
    """Whether it also goes through all training data."""

    @property
    def adapts(self) -> bool:
        """Whether it changes anything."""
        return type(self) is not Finetune

    def personalise(
        self, client: ClientModule, w: Tensor, batches: Sequence[Batch], whole: Sequence[tuple[Batch, int]]
    ) -> Tensor:
        return w


@dataclass(frozen=True)
class Sgd(Finetune):
    """`steps` stochastic gradient steps; lr null is the run's eta. The paper's protocol, with the budget of Q local
    steps."""

    steps: int = 10  # type: ignore[misc]
    """Stochastic gradient steps."""
    lr: float | None = None
    """Step size; null is the run's eta."""

    def __post_init__(self) -> None:
        _check(steps=self.steps, lr=self.lr)

    def personalise(
        self, client: ClientModule, w: Tensor, batches: Sequence[Batch], whole: Sequence[tuple[Batch, int]]
    ) -> Tensor:
        theta = client.f.load(w)
        for batch in batches:
            theta.sub_(client.f.gradient(theta, batch), alpha=self.lr or client.eta)
        return theta


@dataclass(frozen=True)
class MamlStep(Finetune):
    """One step with the gradient over all training data: w - alpha grad f_i(w), what MAML optimises for."""

    alpha: float = 0.01
    """Size of the step."""

    full: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(alpha=self.alpha)

    def personalise(
        self, client: ClientModule, w: Tensor, batches: Sequence[Batch], whole: Sequence[tuple[Batch, int]]
    ) -> Tensor:
        return w - self.alpha * client.whole_gradient(w, whole)


@dataclass(frozen=True)
class Prox(Finetune):
    """theta_i(w): `inner_steps` stochastic steps on f_i(theta) + lam/2 |theta - w|^2, what the Moreau envelope
    optimises for."""

    inner_steps: int = 10
    """Stochastic gradient steps."""
    lam: float = 25.0
    """Weight of the pull towards the shared model."""
    lr: float | None = None
    """Step size; null is 1/(lam + L)."""

    def __post_init__(self) -> None:
        _check(inner_steps=self.inner_steps, lam=self.lam, lr=self.lr)
        if self.lr is not None and self.lr >= 2 / self.lam:
            raise ConfigError(
                f"eval.finetune.lr={self.lr:g} diverges with eval.finetune.lam={self.lam:g}: it must be below "
                f"{2 / self.lam:g}"
            )

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.inner_steps

    def personalise(
        self, client: ClientModule, w: Tensor, batches: Sequence[Batch], whole: Sequence[tuple[Batch, int]]
    ) -> Tensor:
        theta = client.f.load(w)
        lr = Moreau(lam=self.lam, inner_lr=self.lr).step_size(client.f.smoothness)
        for batch in batches:
            slope = client.f.gradient(theta, batch).add_(theta - w, alpha=self.lam)
            theta.sub_(slope, alpha=lr)
        return theta


FINETUNES: dict[str, type[Finetune]] = {"none": Finetune, "sgd": Sgd, "maml": MamlStep, "prox": Prox}


def further_rule(name: str, objective: Objective, private: bool = False, personal: bool = False) -> Finetune | None:
    """A rule of `eval.beside` that is no class: `own`, which not every method has, or `sgd-STEPS`. A personal model is
    the client's own as it is; one with private parameters is adapted as the objective says."""
    if name == "own":
        return Finetune() if personal else own_rule(objective) or (Finetune() if private else None)
    kind, _, steps = name.partition("-")
    return Sgd(int(steps)) if kind == "sgd" and steps.isdecimal() else None


def own_rule(objective: Objective) -> Finetune | None:
    """How a method's own cost personalises: MAML by one gradient step, the Moreau envelope by its proximal point. (A
    model that a client keeps is its own as it is.)"""
    if isinstance(objective, Maml):
        return MamlStep(objective.alpha or 0.01)
    if isinstance(objective, Moreau):
        return Prox(objective.inner_steps or 10, objective.lam, objective.inner_lr)
    return None


def _check(**values: float | int | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"eval.finetune.{name} must be > 0; got {value!r}")
        if "steps" in name:
            at_most(f"eval.finetune.{name}", value, MOST_STEPS)
