"""Server optimisers: the mean update of a version is a pseudo-gradient."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from persafl_lit.errors import ConfigError
from persafl_lit.server.rules import Descent
from persafl_lit.server.state import State

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ServerMomentum(Descent):
    """FedAvgM (Hsu et al.): m <- momentum m + g, w <- w - beta m, with g = 1/buffer sum_k s(staleness_k) Delta_k.

    momentum = 0 is Descent. A version that no update entered leaves m as it is.
    """

    momentum: float = 0.9
    """Share of the last direction in the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay("momentum", self.momentum)

    def step(self, state: State) -> None:
        assert state.waiting is not None
        m = state.kept.get("momentum")  # of sums, not of means: so that momentum = 0 has Descent's bits
        state.kept["momentum"] = state.waiting if m is None else state.waiting.add(m, alpha=self.momentum)
        state.w = state.w.sub(state.kept["momentum"], alpha=self.beta / self.buffer)


@dataclass(frozen=True)
class AdaptiveDescent(Descent):
    """Algorithm 2 of Reddi et al. ("Adaptive Federated Optimization"), with g = 1/buffer sum_k s(staleness_k) Delta_k:

    m <- beta1 m + (1 - beta1) g        v <- second_moment(v, g)        w <- w - beta m / (sqrt(v) + eps)

    m begins at 0 and v at eps^2, the least that the paper allows; as in the paper, nothing is corrected for that. A
    version that no update entered leaves all three as they are.
    """

    beta: float = 0.03
    """Step size of the server."""
    beta1: float = 0.9
    """Decay of the mean of pseudo-gradients; 0 is none."""
    eps: float = 1e-3
    """The paper's tau: the larger, the less adaptive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay("beta1", self.beta1)
        if not self.eps > 0:
            raise ConfigError(f"method.eps must be > 0; got {self.eps!r}")

    @abstractmethod
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """v after a pseudo-gradient whose square is given."""

    def step(self, state: State) -> None:
        assert state.waiting is not None
        g = state.waiting / self.buffer
        m = state.kept.get("first_moment", g.new_zeros(()))
        v = state.kept.get("second_moment", g.new_full((), self.eps**2))
        m = state.kept["first_moment"] = self.beta1 * m + (1 - self.beta1) * g
        v = state.kept["second_moment"] = self.second_moment(v, g.square())
        state.w = state.w.sub(m / (v.sqrt() + self.eps), alpha=self.beta)


@dataclass(frozen=True)
class ServerAdam(AdaptiveDescent):
    """FedAdam (Reddi et al.): v <- beta2 v + (1 - beta2) g^2, and w <- w - beta m / (sqrt(v) + eps)."""

    beta2: float = 0.99
    """Decay of the mean of squares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay("beta2", self.beta2)

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class ServerYogi(ServerAdam):
    """FedYogi (Reddi et al.): v <- v - (1 - beta2) g^2 sign(v - g^2), and w <- w - beta m / (sqrt(v) + eps).

    v moves towards g^2 by a share of g^2, however far it is; Adam's moves by a share of the distance.
    """

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()


@dataclass(frozen=True)
class ServerAdagrad(AdaptiveDescent):
    """FedAdagrad (Reddi et al.): v <- v + g^2, and w <- w - beta m / (sqrt(v) + eps)."""

    beta1: float = 0.0
    """Decay of the mean of pseudo-gradients; 0 is none."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


def check_decay(key: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"method.{key} must lie in [0, 1); got {value!r}")
