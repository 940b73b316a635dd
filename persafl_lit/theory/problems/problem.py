"""Problems whose constants are known: what a theorem needs is computed, not assumed.

Arrays have any number of leading axes (seeds, moments). `client` picks one client per row; without it a method is about
all clients, or about their mean. Constants that do not exist on all of R^d (the gradient bound of a quadratic, the
diversity of quadratics with different H_i) hold on the ball |w - centre| <= radius; a simulation reports how far it
went.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from scipy.optimize import root

from persafl_lit.theory.bounds import Option
from persafl_lit.theory.constants import Constants
from persafl_lit.timeline.timeline import Floats, Ints

BALL_ROOM = 1.5
"""Radius of the ball, relative to the farthest of the first model and the clients' optima."""


class Problem(ABC):
    """n clients in R^d, with stochastic gradients of batches of b samples."""

    w0: Floats
    b: int

    @property
    @abstractmethod
    def clients(self) -> int: ...

    @property
    def dimension(self) -> int:
        return len(self.w0)

    @property
    @abstractmethod
    def centre(self) -> Floats: ...

    @property
    @abstractmethod
    def radius(self) -> float: ...

    @property
    @abstractmethod
    def constants(self) -> Constants:
        """On the ball."""

    @property
    @abstractmethod
    def f_star(self) -> float:
        """f* = min_i min f_i."""

    # -- what a client computes on a batch ----------------------------------------------------------------------------

    @abstractmethod
    def draw(self, stream: np.random.Generator, *shape: int) -> Any:
        """Batches for clients that are not known yet: an array that `gradient` understands, with these leading axes."""

    @abstractmethod
    def gradient(self, client: Ints, w: Floats, batch: Any) -> Floats:
        """grad f_i(w; D), one client per row."""

    @abstractmethod
    def hessian_vector(self, client: Ints, w: Floats, u: Floats, batch: Any) -> Floats:
        """H_i(w; D) u, one client per row."""

    # -- the whole costs, in closed form ------------------------------------------------------------------------------

    @abstractmethod
    def values_at(self, points: Floats) -> Floats:
        """f_i at a point per client: (..., n, d) -> (..., n)."""

    @abstractmethod
    def gradients_at(self, points: Floats) -> Floats:
        """grad f_i at a point per client: (..., n, d) -> (..., n, d)."""

    @abstractmethod
    def hessians_at(self, points: Floats) -> Floats:
        """H_i at a point per client: (..., n, d) -> (..., n, d, d)."""

    def hessian_vectors_at(self, points: Floats, u: Floats) -> Floats:
        """H_i u_i at a point per client: (..., n, d) -> (..., n, d)."""
        return np.asarray((self.hessians_at(points) @ u[..., None])[..., 0])

    def each(self, w: Floats) -> Floats:
        """The same point for every client: (..., d) -> (..., n, d)."""
        return np.broadcast_to(w[..., None, :], (*w.shape[:-1], self.clients, self.dimension))

    def gradients(self, w: Floats) -> Floats:
        """grad f_i(w) of every client."""
        return self.gradients_at(self.each(w))

    def hessians(self, w: Floats) -> Floats:
        """H_i(w) of every client."""
        return self.hessians_at(self.each(w))

    def proximal(self, w: Floats, lam: float) -> Floats:
        """theta_i(w) = argmin f_i(theta) + lam/2 |theta - w|^2, by Newton's method: shape (..., n, d)."""
        w = self.each(w)
        theta = w.copy()
        for _ in range(50):
            slope = self.gradients_at(theta) + lam * (theta - w)
            theta = (
                theta
                - np.linalg.solve(self.hessians_at(theta) + lam * np.eye(self.dimension), slope[..., None])[..., 0]
            )
            if np.abs(slope).max() <= 1e-13 * max(1.0, lam):
                break
        return theta

    def cost(self, option: Option, w: Floats, *, alpha: float = 0.0, lam: float = np.inf) -> Floats:
        """F(w): the mean over clients of f_i(w), f_i(w - alpha grad f_i(w)) or min_theta f_i(theta) + lam/2 |theta -
        w|^2."""
        if option == "a":
            return np.asarray(self.values_at(self.each(w)).mean(-1))
        if option == "b":
            return np.asarray(self.values_at(self.each(w) - alpha * self.gradients(w)).mean(-1))
        theta = self.proximal(w, lam)
        return np.asarray((self.values_at(theta) + lam / 2 * ((theta - self.each(w)) ** 2).sum(-1)).mean(-1))

    def cost_gradients(self, option: Option, w: Floats, *, alpha: float = 0.0, lam: float = np.inf) -> Floats:
        """grad F_i(w) of every client: shape (..., n, d)."""
        if option == "a":
            return self.gradients(w)
        if option == "b":
            adapted = self.gradients_at(self.each(w) - alpha * self.gradients(w))
            return adapted - alpha * self.hessian_vectors_at(self.each(w), adapted)
        return lam * (self.each(w) - self.proximal(w, lam))

    def cost_gradient(self, option: Option, w: Floats, *, alpha: float = 0.0, lam: float = np.inf) -> Floats:
        """grad F(w): shape (..., d)."""
        return np.asarray(self.cost_gradients(option, w, alpha=alpha, lam=lam).mean(-2))

    def optimum(self, option: Option, *, alpha: float = 0.0, lam: float = np.inf) -> Floats:
        """Where grad F is zero."""
        return np.asarray(root(lambda w: self.cost_gradient(option, w, alpha=alpha, lam=lam), self.w0, tol=1e-12).x)


def largest_norm(matrices: Floats) -> float:
    return float(np.linalg.norm(matrices, 2, axis=(-2, -1)).max())
