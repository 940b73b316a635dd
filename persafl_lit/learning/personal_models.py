"""A second model that a client keeps and trains beside the shared one (`method.personal`). Settings only; no torch is
imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from persafl_lit.common.limits import MOST_STEPS, at_most
from persafl_lit.errors import ConfigError
from persafl_lit.learning.objectives import Maml, Moreau, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from persafl_lit.common.tensors import Tensors
    from persafl_lit.data.federation import Batch

    Slope = Callable[[Tensor, Batch], Tensor]
    """grad f_i(.; D), a new tensor."""


@dataclass(frozen=True)
class PersonalModel:
    """No model beside the shared one.

    A client's personal model is a vector `personal` of its memory, as long as the shared model; it starts at the run's
    first weights and never leaves the client.
    """

    keeps: ClassVar[bool] = False

    def gradients(self, local_steps: int) -> int:
        """That a visit takes beside those of the objective."""
        return 0

    def batches(self, local_steps: int) -> int:
        """Minibatches of its own, after the local steps."""
        return 0

    @classmethod
    def check(cls, objective: type[Objective]) -> None:
        """Refuse an objective beside which it means nothing."""

    def start(self, first: Tensor) -> Tensors:
        """What a client begins with, from the run's first weights."""
        return {}

    def step(self, slope: Slope, w: Tensor, batch: Batch, kept: Tensors, eta: float, number: int) -> Tensors:
        """Beside local step `number` of a visit, which begins at w and uses the same batch: what is kept then."""
        return kept

    def finish(self, slope: Slope, read: Tensor, batches: Sequence[Batch], kept: Tensors, eta: float) -> Tensors:
        """After the last local step: what is kept then."""
        return kept

    def model(self, w: Tensor, kept: Tensors) -> Tensor:
        """What the client would use, given the shared model w."""
        return w


@dataclass(frozen=True)
class Ditto(PersonalModel):
    """A personal model that is pulled towards the shared one (Li et al. 2021, Algorithm 1).

    v_i <- v_i - eta (grad f_i(v_i; D) + lam (v_i - w))        with w the model that the client read
    """

    lam: float = 1.0
    """Weight of the pull towards the shared model."""
    personal_steps: int | None = None
    """Steps of the personal model in a visit; null is local_steps."""
    personal_eta: float | None = None
    """Their size; null is eta, or 1/lam where that is smaller."""

    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.lam >= 0:
            raise ConfigError(f"method.lam must be >= 0; got {self.lam!r}")
        if self.personal_steps is not None and self.personal_steps < 0:
            raise ConfigError(f"method.personal_steps must be >= 0 or null; got {self.personal_steps}")
        at_most("method.personal_steps", self.personal_steps, MOST_STEPS)
        if self.personal_eta is not None and not self.personal_eta > 0:
            raise ConfigError(f"method.personal_eta must be > 0 or null; got {self.personal_eta!r}")
        if self.personal_eta is not None and self.personal_eta * self.lam >= 2:
            raise ConfigError(
                f"method.personal_eta={self.personal_eta:g} diverges with method.lam={self.lam:g}: it must be below "
                f"{2 / self.lam:g}"
            )

    def gradients(self, local_steps: int) -> int:
        return self.batches(local_steps)

    def batches(self, local_steps: int) -> int:
        return local_steps if self.personal_steps is None else self.personal_steps

    @classmethod
    def check(cls, objective: type[Objective]) -> None:
        if issubclass(objective, Moreau):
            raise ConfigError(
                "method.personal=ditto does not go with the Moreau envelope, whose proximal point is a personal model "
                "pulled towards the shared one already; use plain, proximal or maml"
            )

    def start(self, first: Tensor) -> Tensors:
        return {"personal": first}

    def step_size(self, eta: float) -> float:
        return self.personal_eta or min(eta, 1 / self.lam if self.lam else eta)

    def finish(self, slope: Slope, read: Tensor, batches: Sequence[Batch], kept: Tensors, eta: float) -> Tensors:
        v, size = kept["personal"], self.step_size(eta)
        for batch in batches:
            v = v - size * slope(v, batch).add_(v - read, alpha=self.lam)
        return {**kept, "personal": v}

    def model(self, w: Tensor, kept: Tensors) -> Tensor:
        return kept["personal"]


@dataclass(frozen=True)
class Apfl(PersonalModel):
    """A personal model that is mixed with the shared one, by a weight that adapts (Deng et al. 2020, Algorithm 1).

    In each local step, with the mixture m_i = a_i v_i + (1 - a_i) w_i and the batch of the step
        v_i <- v_i - eta a_i grad f_i(m_i; D)
    and in the first one of a visit also
        a_i <- a_i - eta <v_i - w_i, grad f_i(m_i; D)>, kept within [0, 1].
    """

    mixture: float = 0.5
    """The first weight a_i of the personal model, in [0, 1]; 0 is the shared model, 1 training alone."""
    adapt_mixture: bool = True
    """Whether each client's weight adapts."""

    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.mixture <= 1:
            raise ConfigError(f"method.mixture must lie in [0, 1]; got {self.mixture!r}")

    def gradients(self, local_steps: int) -> int:
        return local_steps

    @classmethod
    def check(cls, objective: type[Objective]) -> None:
        if issubclass(objective, (Maml, Moreau)):
            raise ConfigError(
                "method.personal=apfl mixes the shared model itself, and that of the objectives maml and moreau is "
                "made to be adapted first; use plain or proximal"
            )

    def start(self, first: Tensor) -> Tensors:
        return {"personal": first, "mixture": first.new_full((1,), self.mixture)}

    def step(self, slope: Slope, w: Tensor, batch: Batch, kept: Tensors, eta: float, number: int) -> Tensors:
        v, a = kept["personal"], kept["mixture"]
        gradient = slope(self.model(w, kept), batch)
        moved = {"personal": v - eta * a * gradient}
        if self.adapt_mixture and number == 0:
            moved["mixture"] = (a - eta * ((v - w) @ gradient)).clamp(0, 1)
        return {**kept, **moved}

    def model(self, w: Tensor, kept: Tensors) -> Tensor:
        return kept["mixture"] * kept["personal"] + (1 - kept["mixture"]) * w


PERSONAL_MODELS: dict[str, type[PersonalModel]] = {"none": PersonalModel, "ditto": Ditto, "apfl": Apfl}
