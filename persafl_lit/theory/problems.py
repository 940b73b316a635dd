"""Problems whose constants are known: what a theorem needs is computed, not assumed.

Arrays have any number of leading axes (seeds, moments). `client` picks one client per row; without it a method is about
all clients, or about their mean. Constants that do not exist on all of R^d (the gradient bound of a quadratic, the
diversity of quadratics with different H_i) hold on the ball |w - centre| <= radius; a simulation reports how far it
went.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import root
from scipy.special import expit, ndtr

from persafl_lit.common.seeding import rng
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


# -- quadratics -------------------------------------------------------------------------------------------------------


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


# -- corners ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corners(Problem):
    """Costs in one dimension whose gradients have corners, rounded on the scale `width`; gradients carry N(0, sigma_g^2
    / b).

    f_i'(w) = L E c(w - a_i + width Z)    with Z ~ N(0, 1), c(x) = x on [0, reach], left x on [-reach, 0] and constant
    beyond

    The corner that matters is at the optimum a_i. Everything is in closed form: such a function, seen through more
    Gaussian noise, is one of the same kind with a larger width. Its gradient is bounded by L reach, the slope of its
    curvature by L / (width sqrt(2 pi)).
    """

    a: Floats
    w0: Floats
    L: float
    width: float
    left: float = 0.2
    reach: float = 20.0
    sigma_g: float = 0.0
    b: int = 1

    @property
    def clients(self) -> int:
        return len(self.a)

    @property
    def centre(self) -> Floats:
        return np.zeros(1)

    @property
    def radius(self) -> float:
        """The constants hold everywhere."""
        return np.inf

    @cached_property
    def constants(self) -> Constants:
        """gamma_g and gamma_h are largest somewhere between the corners: looked up on a grid, with what a cell can
        add."""
        rho = self.L / (self.width * np.sqrt(2 * np.pi))
        gamma_g = gamma_h = 0.0
        if np.ptp(self.a):
            margin = self.reach + 9 * self.width
            grid = np.linspace(self.a.min() - margin, self.a.max() + margin, 100_001)[:, None]
            step = float(grid[1, 0] - grid[0, 0])
            gamma_g = float(np.sqrt(self.gradients(grid)[..., 0].var(-1).max())) + self.L * step
            gamma_h = float(np.sqrt(self.hessians(grid)[..., 0, 0].var(-1).max())) + float(rho) * step
        return Constants(
            L=self.L, sigma_g=self.sigma_g, gamma_g=gamma_g, rho=float(rho), gamma_h=gamma_h, G=self.L * self.reach
        )

    @cached_property
    def f_star(self) -> float:
        """All f_i are shifts of one function, least where its slope is zero."""
        low, high = -self.reach, self.reach
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if self.slope(np.array(middle)) < 0 else (low, middle)
        return float(self.values_at(self.a[:, None] + low)[0])

    def draw(self, stream: np.random.Generator, *shape: int) -> Floats:
        return stream.normal(scale=self.sigma_g / np.sqrt(self.b), size=(*shape, 1))

    def gradient(self, client: Ints, w: Floats, batch: Floats) -> Floats:
        return self.slope(w - self.a[client][:, None]) + batch

    def hessian_vector(self, client: Ints, w: Floats, u: Floats, batch: Floats) -> Floats:
        return self.curvature(w - self.a[client][:, None]) * u

    def values_at(self, points: Floats) -> Floats:
        x, s, r = points[..., 0] - self.a, self.width, self.reach
        right = _ramp_integral(x, s) - _ramp_integral(x - r, s)
        return self.L * (right + self.left * (_ramp_integral(x + r, s) - _ramp_integral(x, s) - r * x))

    def gradients_at(self, points: Floats) -> Floats:
        return self.slope(points[..., 0] - self.a)[..., None]

    def hessians_at(self, points: Floats) -> Floats:
        return self.curvature(points[..., 0] - self.a)[..., None, None]

    def slope(self, x: Floats, noise: float = 0.0) -> Floats:
        """E f'(x + noise Z): the gradient as seen from a point that is known up to Gaussian noise."""
        s, r = float(np.hypot(self.width, noise)), self.reach
        here = _ramp(x, s)
        return self.L * (here - _ramp(x - r, s) + self.left * (_ramp(x + r, s) - here - r))

    def curvature(self, x: Floats) -> Floats:
        here = ndtr(x / self.width)
        return np.asarray(
            self.L
            * (here - ndtr((x - self.reach) / self.width) + self.left * (ndtr((x + self.reach) / self.width) - here))
        )

    def expected_maml(self, w: Floats, alpha: float, noise: float = 1.0) -> Floats:
        """E of Option B's gradient over its three batches, mean over clients: the inner step is w - alpha (f'(w) +
        noise)."""
        x = w - self.a
        inner = x - alpha * self.slope(x)
        grown = 1 - alpha * self.curvature(x)
        return np.asarray((grown * self.slope(inner, alpha * noise * self.sigma_g / np.sqrt(self.b))).mean(-1))

    def maml_floor(self, alpha: float, noise: float = 1.0) -> float:
        """|grad F(w)|^2 where the expected step of Option B is zero: what is left of the average as T grows and eta
        shrinks."""
        low, high = float(self.a.min()) - self.reach / 2, float(self.a.max()) + self.reach / 2
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if self.expected_maml(np.array([middle]), alpha, noise) < 0 else (low, middle)
        return float(self.cost_gradient("b", np.array([low]), alpha=alpha)[0] ** 2)

    def moreau_floor(self, lam: float) -> float:
        """The same for Option C with exact inner minima (nu = 0).

        With noise e on the gradient, lam (w - theta~) = e + F'(w - e / lam): the expected step is F' seen through the
        noise e / lam.
        """
        e = np.linspace(-8.0, 8.0, 4001)
        weights = _normal(e) / _normal(e).sum()
        shift = e * self.sigma_g / np.sqrt(self.b) / lam
        low, high = float(self.a.min()) - self.reach / 2, float(self.a.max()) + self.reach / 2
        for _ in range(60):
            middle = (low + high) / 2
            step = weights @ self.cost_gradient("c", (middle - shift)[:, None], lam=lam)[:, 0]
            low, high = (middle, high) if step < 0 else (low, middle)
        return float(self.cost_gradient("c", np.array([low]), lam=lam)[0] ** 2)


def _ramp(x: Floats, s: float) -> Floats:
    """E max(x + s Z, 0)"""
    return np.asarray(x * ndtr(x / s) + s * _normal(x / s))


def _ramp_integral(x: Floats, s: float) -> Floats:
    """The integral of `_ramp` from -infinity: 1/2 E max(x + s Z, 0)^2"""
    return np.asarray(0.5 * ((x**2 + s**2) * ndtr(x / s) + s * x * _normal(x / s)))


def _normal(x: Floats) -> Floats:
    return np.asarray(np.exp(-0.5 * x**2) / np.sqrt(2 * np.pi))


# -- logistic regression ----------------------------------------------------------------------------------------------


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
