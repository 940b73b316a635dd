"""Logistic regression on generated data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import expit

from persafl_lit.common.seeding import rng
from persafl_lit.theory.constants import Constants
from persafl_lit.theory.problems.problem import BALL_ROOM, Problem, largest_norm
from persafl_lit.timeline.timeline import Floats, Ints


@dataclass(frozen=True)
class LogisticProblem(Problem):
    """f_i(w) = 1/m sum_j log(1 + exp(-y_ij <x_ij, w>)) + ridge/2 |w|^2; a batch is b samples drawn with replacement.

    With z_ij = y_ij x_ij the label is part of the sample, so only z (n, m, d) is kept.
    """

    z: Floats
    ridge: float
    w0: Floats
    b: int = 1

    @property
    def clients(self) -> int:
        return len(self.z)

    @property
    def centre(self) -> Floats:
        return np.zeros(self.dimension)

    @cached_property
    def radius(self) -> float:
        return BALL_ROOM * max(float(np.linalg.norm(self.w0)), float(np.linalg.norm(self.optima, axis=1).max()))

    @cached_property
    def optima(self) -> Floats:
        """The clients' own minima, by Newton's method."""
        w = np.zeros((self.clients, self.dimension))
        for _ in range(100):
            w = w - np.linalg.solve(self.hessians_at(w), self.gradients_at(w)[..., None])[..., 0]
        return w

    @cached_property
    def constants(self) -> Constants:
        """A sample's gradient is -s z with 0 < s < 1, its Hessian p (1 - p) z z^T with p (1 - p) <= 1/4; the ridge is
        the same for all.

        rho: |d/dp p (1 - p)| <= 1 / (6 sqrt(3)) per |z|.
        """
        norms = np.linalg.norm(self.z, axis=2)
        gram = np.einsum("nmi,nmj->nij", self.z, self.z) / self.z.shape[1]
        return Constants(
            L=largest_norm(gram) / 4 + self.ridge,
            sigma_g=float(np.sqrt((norms**2).mean(1).max())),
            gamma_g=float(np.sqrt((norms.mean(1) ** 2).mean())),
            rho=float((norms**3).mean(1).max() / (6 * np.sqrt(3))),
            sigma_h=float(np.sqrt(((norms**2 / 4) ** 2).mean(1).max())),
            gamma_h=float(np.sqrt((np.linalg.norm(gram, 2, axis=(1, 2)) ** 2).mean())) / 4,
            G=float(norms.mean(1).max()) + self.ridge * self.radius,
        )

    @cached_property
    def f_star(self) -> float:
        return float(self.values_at(self.optima).min())

    def draw(self, stream: np.random.Generator, *shape: int) -> Ints:
        return stream.integers(self.z.shape[1], size=(*shape, self.b))

    def gradient(self, client: Ints, w: Floats, batch: Ints) -> Floats:
        z = self.z[client[:, None], batch]
        s = expit(-np.einsum("rbi,ri->rb", z, w))
        return np.asarray(self.ridge * w - np.einsum("rb,rbi->ri", s, z) / self.b)

    def hessian_vector(self, client: Ints, w: Floats, u: Floats, batch: Ints) -> Floats:
        z = self.z[client[:, None], batch]
        s = expit(-np.einsum("rbi,ri->rb", z, w))
        along = np.einsum("rbi,ri->rb", z, u)
        return np.asarray(self.ridge * u + np.einsum("rb,rbi->ri", s * (1 - s) * along, z) / self.b)

    def values_at(self, points: Floats) -> Floats:
        return np.asarray(np.logaddexp(0.0, -self._margin(points)).mean(-1) + self.ridge / 2 * (points**2).sum(-1))

    def gradients_at(self, points: Floats) -> Floats:
        s = expit(-self._margin(points))
        return np.asarray(self.ridge * points - np.einsum("...nm,nmi->...ni", s, self.z) / self.z.shape[1])

    def hessians_at(self, points: Floats) -> Floats:
        s = expit(-self._margin(points))
        curved = np.einsum("...nm,nmi,nmj->...nij", s * (1 - s), self.z, self.z, optimize=True) / self.z.shape[1]
        return np.asarray(curved + self.ridge * np.eye(self.dimension))

    def hessian_vectors_at(self, points: Floats, u: Floats) -> Floats:
        s = expit(-self._margin(points))
        return np.asarray(
            np.einsum("...nm,nmi->...ni", s * (1 - s) * self._margin(u), self.z) / self.z.shape[1] + self.ridge * u
        )

    def _margin(self, points: Floats) -> Floats:
        return np.asarray(np.einsum("nmi,...ni->...nm", self.z, points))


def random_logistic(
    clients: int, dimension: int, L: float, seed: int = 0, *, samples: int = 20, ridge: float = 0.2, b: int = 1
) -> LogisticProblem:
    """Every client has its own separating direction; samples and ridge are scaled so that the smoothness is L, of which
    the ridge is a share."""
    stream = rng(seed, "theory logistic")
    x = stream.normal(size=(clients, samples, dimension))
    truth = np.ones(dimension) + stream.normal(size=(clients, dimension))
    flips = stream.random((clients, samples)) < expit(np.einsum("nmi,ni->nm", x, truth))
    z = x * np.where(flips, 1.0, -1.0)[..., None]
    gram = largest_norm(np.einsum("nmi,nmj->nij", z, z) / samples) / 4
    z = z * np.sqrt((1 - ridge) * L / gram)
    return LogisticProblem(z, ridge * L, np.full(dimension, -2.0 / np.sqrt(L)), b)
