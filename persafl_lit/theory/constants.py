"""The constants of the assumptions, and those that the lemmas derive from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from persafl_lit.errors import ConfigError


@dataclass(frozen=True)
class Constants:
    """Assumptions 2 to 6. `sigma_g` and `sigma_h` are of a single sample; a batch of b divides their squares by b."""

    L: float
    """Smoothness: |grad f_i(w) - grad f_i(u)| <= L |w - u|."""
    sigma_g: float = 0.0
    """E |grad l_i(w, xi) - grad f_i(w)|^2 <= sigma_g^2."""
    gamma_g: float = 0.0
    """1/n sum_i |grad f_i(w) - grad f(w)|^2 <= gamma_g^2."""
    rho: float = 0.0
    """|H_i(w) - H_i(u)| <= rho |w - u|."""
    sigma_h: float = 0.0
    """E |H_i(w, xi) - H_i(w)|^2 <= sigma_h^2."""
    gamma_h: float = 0.0
    """1/n sum_i |H_i(w) - H(w)|^2 <= gamma_h^2."""
    G: float = math.inf
    """|grad f_i(w)| <= G."""
    affine: bool = False
    """Whether every stochastic gradient is affine in w with a fixed slope (quadratics with additive noise)."""

    def __post_init__(self) -> None:
        if not (self.L > 0 and math.isfinite(self.L)):
            raise ConfigError(f"L must be > 0; got {self.L!r}")
        for name in ("sigma_g", "gamma_g", "rho", "sigma_h", "gamma_h", "G"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be >= 0; got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Personal:
    """Smoothness, bias, variance, diversity and gradient bound of a personalised cost F, for batches of b."""

    L: float
    mu: float
    sigma: float
    gamma: float
    G: float = math.inf


def plain(c: Constants, b: float = 1) -> Personal:
    """Option A: F = f, an unbiased gradient with variance sigma_a^2 = sigma_g^2 / b."""
    return Personal(c.L, 0.0, c.sigma_g / math.sqrt(b), c.gamma_g, c.G)


def maml(c: Constants, alpha: float, b: float = 1) -> Personal:
    """Option B, Lemmas 4.2 to 4.4 of Fallah et al. as the paper states them, and its lemma on the gradient.

    L_b = L (1 + alpha L)^2 + alpha rho G                 mu_b = alpha L (1 + alpha L) sigma_g / sqrt(b)
    gamma_b^2 = 12 (1 + alpha L)^2 (1 + alpha^2 L^2) gamma_g^2 + 12 alpha^2 G^2 gamma_h^2        G_b = (1 + alpha L) G
    sigma_b^2 = 3 (1 + alpha L)^2 s + 3 alpha^2 G^2 sigma_h^2 / b + 3 alpha^2 sigma_h^2 / b s
                with s = (1 + alpha^2 L^2) sigma_g^2 / b
    """
    if not alpha >= 0:
        raise ConfigError(f"alpha must be >= 0; got {alpha!r}")
    grown = 1 + alpha * c.L
    adapted = (1 + (alpha * c.L) ** 2) * c.sigma_g**2 / b
    hessian = alpha**2 * c.sigma_h**2 / b
    variance = 3 * grown**2 * adapted + 3 * _product(c.G**2, hessian) + 3 * hessian * adapted
    diversity = 12 * grown**2 * (1 + (alpha * c.L) ** 2) * c.gamma_g**2 + 12 * _product(c.G**2, alpha**2 * c.gamma_h**2)
    return Personal(
        c.L * grown**2 + _product(c.G, alpha * c.rho),
        alpha * c.L * grown * c.sigma_g / math.sqrt(b),
        math.sqrt(variance),
        math.sqrt(diversity),
        grown * c.G,
    )


def moreau(c: Constants, lam: float, nu: float = 0.0, b: float = 1) -> Personal:
    """Option C, the paper's three lemmas on the Moreau envelope, with kappa = lam / L.

    L_c = lam / (kappa - 1) = lam L / (lam - L)           mu_c = lam / (lam - L) nu
    sigma_c^2 = 2 lam^2 / (lam - L)^2 (sigma_g^2 / b + nu^2)        gamma_c^2 = 16 lam^2 / (lam^2 - 48 L^2) gamma_g^2

    The lemma's mu_c needs affine gradients: its proof takes |E [grad f(theta) - grad f(theta~)]| <= L |E [theta -
    theta~]|, which holds for no other cost. Elsewhere theta~ depends on the batch, and what does follow is

        mu_c = nu + L / lam sigma_c                       for noise that is added to the gradient,

    with three times the second term where the batch changes the gradient's slope as well (`moreau_bias`).
    """
    if not lam > c.L:
        raise ConfigError(f"lam={lam:g} must exceed L={c.L:g}: below it the inner problem is not strongly convex")
    share = lam / (lam - c.L)
    sigma = math.sqrt(2 * share**2 * (c.sigma_g**2 / b + nu**2))
    gamma = math.sqrt(16 * lam**2 / (lam**2 - 48 * c.L**2)) * c.gamma_g if lam**2 > 48 * c.L**2 else math.inf
    return Personal(share * c.L, share * nu if c.affine else moreau_bias(c, lam, nu, b), sigma, gamma, c.G)


def moreau_bias(c: Constants, lam: float, nu: float = 0.0, b: float = 1) -> float:
    """A bound on the bias of Option C's gradient that holds for any cost.

    grad F~ - grad F = [grad f~(theta~) - grad f(theta~)] + [grad f(theta~) - grad f(theta)] - grad h~(theta~), where
    theta minimises h and lam |theta~ - theta| = |grad F~ - grad F|. The last term is at most nu and the middle one at
    most L / lam sigma_c in the mean. The first would have mean zero at theta; between theta and theta~ both gradients
    move by at most L |theta~ - theta|, which is needed only where the noise depends on w: 2 L / lam sigma_c more.
    """
    sigma = math.sqrt(2 * (lam / (lam - c.L)) ** 2 * (c.sigma_g**2 / b + nu**2))
    noise_moves = c.sigma_h > 0
    return nu + (3 if noise_moves else 1) * c.L / lam * sigma


def _product(bound: float, factor: float) -> float:
    """bound * factor, where nothing times an unknown (infinite) bound is nothing."""
    return 0.0 if factor == 0 else bound * factor
