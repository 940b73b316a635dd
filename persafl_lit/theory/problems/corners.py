"""Smoothed corners: the third derivative matters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtr

from persafl_lit.theory.constants import Constants
from persafl_lit.theory.problems.problem import Problem
from persafl_lit.timeline.timeline import Floats, Ints


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
