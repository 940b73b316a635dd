"""Quadratic clients, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from persafl_lit.common.seeding import rng
from persafl_lit.theory.bounds import Option
from persafl_lit.theory.constants import Constants
from persafl_lit.theory.problems.problem import BALL_ROOM, Problem
from persafl_lit.timeline.timeline import Floats, Ints


@dataclass(frozen=True)
class QuadraticProblem(Problem):
    """f_i(w) = 1/2 (w - a_i)^T H_i (w - a_i), gradients with N(0, sigma_g^2 / (d b) I) on top: `data=quadratic` of the
    engine."""

    H: Floats
    a: Floats
    w0: Floats
    sigma_g: float = 0.0
    b: int = 1

    @property
    def clients(self) -> int:
        return len(self.a)

    @property
    def noise(self) -> float:
        """Standard deviation of one entry of a batch's gradient: `data.noise` of the engine."""
        return self.sigma_g / float(np.sqrt(self.dimension * self.b))

    @cached_property
    def centre(self) -> Floats:
        """The optimum of f."""
        return self.optimum("a")

    @cached_property
    def radius(self) -> float:
        return BALL_ROOM * float(np.linalg.norm(np.concatenate([self.a, self.w0[None]]) - self.centre, axis=1).max())

    @cached_property
    def constants(self) -> Constants:
        """gamma_g by Minkowski: grad f_i - grad f is A_i (w - centre) + v_i, so its mean square is at most (|A| radius
        + |v|)^2."""
        mean = self.H.mean(0)
        A = self.H - mean
        v = self.gradients(self.centre)
        spread = np.sqrt(np.linalg.norm(np.einsum("nij,nik->jk", A, A) / self.clients, 2))
        norms = np.linalg.norm(self.H, 2, axis=(1, 2))
        return Constants(
            L=float(norms.max()),
            sigma_g=self.sigma_g,
            gamma_g=float(spread * self.radius + np.sqrt((v**2).sum(1).mean())),
            gamma_h=float(np.sqrt((np.linalg.norm(A, 2, axis=(1, 2)) ** 2).mean())),
            G=float((norms * self.radius + np.linalg.norm(v, axis=1)).max()),
            affine=True,
        )

    @property
    def f_star(self) -> float:
        return 0.0

    def draw(self, stream: np.random.Generator, *shape: int) -> Floats:
        return (
            stream.normal(scale=self.noise, size=(*shape, self.dimension))
            if self.noise
            else np.zeros((*shape, self.dimension))
        )

    def gradient(self, client: Ints, w: Floats, batch: Floats) -> Floats:
        H, a = self._of(client)
        return np.asarray(np.einsum("rij,rj->ri", H, w - a) + batch)

    def hessian_vector(self, client: Ints, w: Floats, u: Floats, batch: Floats) -> Floats:
        return np.asarray(np.einsum("rij,rj->ri", self._of(client)[0], u))

    def _of(self, client: Ints) -> tuple[Floats, Floats]:
        """(H, a) of one client per row. A visit asks for the same clients many times, so the last answer is kept."""
        held: tuple[Ints, Floats, Floats] | None = self.__dict__.get("_held")
        if held is None or held[0] is not client:
            held = (client, self.H[client], self.a[client])
            self.__dict__["_held"] = held
        return held[1], held[2]

    def values_at(self, points: Floats) -> Floats:
        away = points - self.a
        return np.asarray(0.5 * np.einsum("...ni,nij,...nj->...n", away, self.H, away))

    def gradients_at(self, points: Floats) -> Floats:
        return np.asarray(np.einsum("nij,...nj->...ni", self.H, points - self.a))

    def hessians_at(self, points: Floats) -> Floats:
        return np.broadcast_to(self.H, (*points.shape, self.dimension))

    def proximal(self, w: Floats, lam: float) -> Floats:
        """(H_i + lam I) theta = H_i a_i + lam w"""
        inverse = np.linalg.inv(self.H + lam * np.eye(self.dimension))
        pull = lam * w[..., None, :] + np.einsum("nij,nj->ni", self.H, self.a)
        return np.asarray(np.einsum("nij,...nj->...ni", inverse, pull))

    def optimum(
        self, option: Option, *, alpha: float = 0.0, lam: float = np.inf, weights: Floats | None = None
    ) -> Floats:
        """Where grad F is zero; with `weights`, the weighted mean of the clients' gradients."""
        slopes = self.slopes(option, alpha=alpha, lam=lam)
        share = np.full(self.clients, 1 / self.clients) if weights is None else weights
        return np.asarray(
            np.linalg.solve(np.einsum("n,nij->ij", share, slopes), np.einsum("n,nij,nj->i", share, slopes, self.a))
        )

    def cost_gradient(self, option: Option, w: Floats, *, alpha: float = 0.0, lam: float = np.inf) -> Floats:
        """Affine in w, so one product for any number of points."""
        slopes = self.slopes(option, alpha=alpha, lam=lam)
        return np.asarray(w @ slopes.mean(0).T - np.einsum("nij,nj->ni", slopes, self.a).mean(0))

    def slopes(self, option: Option, *, alpha: float = 0.0, lam: float = np.inf) -> Floats:
        """The Hessians of F_i: H, (I - alpha H) H (I - alpha H) or lam H (H + lam I)^-1; all have their optimum at
        a_i."""
        if option == "a":
            return self.H
        eye = np.eye(self.dimension)
        if option == "b":
            return (eye - alpha * self.H) @ self.H @ (eye - alpha * self.H)
        return lam * self.H @ np.linalg.inv(self.H + lam * eye)


def random_quadratics(
    clients: int,
    dimension: int,
    L: float,
    seed: int = 0,
    *,
    condition: float = 2.0,
    sigma_g: float = 1.0,
    b: int = 1,
    start: float = 2.0,
) -> QuadraticProblem:
    """As `data=quadratic` generates them, scaled so that the largest curvature is L.

    Eigenvalues of H_i are log-uniform on [1, condition] and a_i ~ N(0, I) before everything is divided; w0 lies at
    distance `start` sqrt(d). Gradients are of size L, so `sigma_g` is in units of L.
    """
    stream = rng(seed, "theory quadratics")
    bases, _ = np.linalg.qr(stream.normal(size=(clients, dimension, dimension)))
    eigenvalues = np.exp(stream.uniform(0.0, np.log(condition), size=(clients, dimension)))
    H = (bases * eigenvalues[:, None, :]) @ bases.swapaxes(1, 2)
    H *= L / np.linalg.norm(H, 2, axis=(1, 2)).max()
    H = (H + H.swapaxes(1, 2)) / 2
    return QuadraticProblem(H, stream.normal(size=(clients, dimension)), np.full(dimension, start), L * sigma_g, b)
