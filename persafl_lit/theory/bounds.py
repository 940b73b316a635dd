"""The three theorems: step sizes, conditions on T, right-hand sides. beta = 1 throughout, as in the paper.

    1/T sum_{t<T} E |grad F(w^t)|^2  <=  start / sqrt(T) + noise / sqrt(T) + stale / T + floor        for all T >=
    least_updates

`AS_PRINTED` differs from `CORRECTED` in Theorem ME only: its condition has the square of tau + 1 where the proof needs
the cube, its third term gamma_g^2 where the proof has gamma_c^2, and its first term F(w^t) where the proof has F(w^0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from persafl_lit.errors import ConfigError
from persafl_lit.theory import constants
from persafl_lit.theory.constants import Constants, Personal

Option = Literal["a", "b", "c"]
OPTIONS: tuple[Option, ...] = ("a", "b", "c")
METHODS: dict[Option, str] = {"a": "fedasync", "b": "persafl_maml", "c": "persafl_me"}
THEOREMS: dict[Option, str] = {"a": "FedAsync", "b": "PersA-FL-MAML", "c": "PersA-FL-ME"}
LEAST_LAM = 7.0
"""Theorem ME asks lam >= 7 L."""


@dataclass(frozen=True)
class Bound:
    """The right-hand side at one T, term by term."""

    start: float
    noise: float
    stale: float
    floor: float

    @property
    def total(self) -> float:
        return self.start + self.noise + self.stale + self.floor


@dataclass(frozen=True)
class Theorem:
    """One of the three theorems for given constants: Option A (FedAsync), B (PersA-FL-MAML) or C (PersA-FL-ME)."""

    option: Option
    c: Constants
    Q: int = 1
    tau: int = 0
    b: float = 1
    alpha: float = 0.0
    """Option B."""
    lam: float = math.nan
    """Option C."""
    nu: float = 0.0
    """Option C."""
    as_printed: bool = False

    def __post_init__(self) -> None:
        if self.option not in OPTIONS:
            raise ConfigError(f"the options are {', '.join(OPTIONS)}; got {self.option!r}")
        if self.Q < 1 or self.tau < 0 or not self.b >= 1:
            raise ConfigError(
                f"a theorem needs Q >= 1, tau >= 0 and b >= 1; got Q={self.Q}, tau={self.tau}, b={self.b:g}"
            )

    @property
    def personal(self) -> Personal:
        """L, mu, sigma, gamma and G of the option's cost."""
        if self.option == "a":
            return constants.plain(self.c, self.b)
        return (
            constants.maml(self.c, self.alpha, self.b)
            if self.option == "b"
            else constants.moreau(self.c, self.lam, self.nu, self.b)
        )

    def eta(self, T: float) -> float:
        """eta = 1 / (Q sqrt(L T)), with the L of the option's cost."""
        return 1 / (self.Q * math.sqrt(self.personal.L * T))

    @property
    def least_updates(self) -> float:
        """A: 160 L (Q + 7) (tau + 1)^3        B: 64 L_b        C: 288 L_c (Q + 7) (tau + 1)^3, printed with a square"""
        L = self.personal.L
        if self.option == "b":
            return 64 * L
        power = 2.0 if self.option == "c" and self.as_printed else 3.0
        return float((160 if self.option == "a" else 288) * L * (self.Q + 7) * (self.tau + 1) ** power)

    def conditions_hold(self, T: float) -> bool:
        """T is large enough, and for Option C lam >= 7 L."""
        return self.least_updates <= T and (self.option != "c" or self.lam >= LEAST_LAM * self.c.L)

    def bound(self, T: float, gap: float) -> Bound:
        """The right-hand side at T; `gap` is F(w^0) - f* (as printed, Theorem ME has F(w^t) - f*)."""
        p, Q, root, spread = self.personal, self.Q, math.sqrt(self.personal.L / T), self.tau**2 + 1
        start, noise = 4 * root * gap, 8 * root * (p.sigma**2 + p.gamma**2)
        if self.option == "a":
            return Bound(start, noise, 80 * p.L * (1 + Q) * spread * (p.sigma**2 + p.gamma**2) / T, 0.0)
        if self.option == "b":
            return Bound(start, noise, 20 * Q * p.L * (p.G**2 + p.sigma**2) * spread / T, 4 * Q * p.mu**2)
        gamma = self.c.gamma_g if self.as_printed else p.gamma
        return Bound(start, noise, 144 * p.L * (1 + Q) * spread * (p.sigma**2 + gamma**2) / T, 4 * Q * p.mu**2)

    def from_proof(self, T: float, gap: float) -> Bound | None:
        """What the last inequality of the proof gives at this T, before constants are rounded up; None if it gives
        nothing.

        A: eq. afl-main-5, B: persafl-maml-main-4, C: persafl-me-main-3. Each bounds `kept` times the average; nothing
        follows unless kept > 0. In A and C one step replaces 1 by tau, so tau = 0 counts as 1 there.
        """
        p, Q, tau = self.personal, self.Q, self.tau
        eta = self.eta(T)
        square = (eta * Q * p.L) ** 2
        if self.option == "b":
            kept = 1 - 4 * eta * p.L * Q
            stale = 8 * square * Q * (1 + 2 * eta * p.L * Q) * (p.G**2 + p.sigma**2) * (tau**2 + 1)
        else:
            factor = (
                (8 * (1 + 4 * eta * p.L) if self.option == "a" else 16 * (1 + 2 * eta * p.L)) * 2 * (1 + 2 * Q) * square
            )
            kept = 1 - 4 * eta * p.L * Q - factor * max(tau, 1) * (tau + 1) ** 2
            stale = factor * (tau**2 + 1) * (p.sigma**2 + p.gamma**2)
            if eta > 1 / (4 * p.L * (Q + 1)):
                return None
        if kept <= 0:
            return None
        noise = 4 * eta * p.L * Q * (p.sigma**2 + p.gamma**2)
        return Bound(2 * gap / (eta * Q * T) / kept, noise / kept, stale / kept, 2 * Q * p.mu**2 / kept)

    def updates_for(self, epsilon: float, gap: float) -> float:
        """The smallest T >= least_updates with a right-hand side of at most epsilon; infinite if the floor alone is
        above it."""
        if self.bound(math.inf, gap).floor >= epsilon:
            return math.inf
        one = self.bound(1.0, gap)
        slow, fast, rest = one.start + one.noise, one.stale, epsilon - one.floor
        # rest x^2 - slow x - fast = 0 in x = sqrt(T)
        root = (slow + math.sqrt(slow**2 + 4 * rest * fast)) / (2 * rest)
        return float(math.ceil(max(root**2, self.least_updates, 1.0)))

    def printed(self) -> Theorem:
        return replace(self, as_printed=True)
