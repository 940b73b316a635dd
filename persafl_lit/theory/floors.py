"""The floors of Options B and C: what is left of the gradient however large T is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from persafl_lit.theory import fit
from persafl_lit.theory.bounds import Theorem
from persafl_lit.theory.fit import Estimate, with_interval
from persafl_lit.theory.over_time import ENVELOPE
from persafl_lit.theory.problems.corners import Corners
from persafl_lit.theory.problems.problem import Problem
from persafl_lit.theory.problems.quadratic import random_quadratics
from persafl_lit.theory.simulation import Run, simulate
from persafl_lit.theory.study import Settings, Study, Tick
from persafl_lit.timeline.timeline import Floats

FLOOR_T = 20_000
FLOOR_SEEDS = 60
"""The mean of a gradient is smaller than its noise by far."""
NU_SEEDS = 20
NEAR = 0.15
"""How far from the theorem's exponent the interval of a fitted one may end."""


def squared_mean(late: Floats) -> Floats:
    """|mean over seeds of (the mean of grad F over the second half)|^2 for each setting: late is (seeds, settings,
    d)."""
    return np.asarray((late.mean(0) ** 2).sum(-1))


def maml_floor(found: Study, settings: Settings, tick: Tick) -> None:
    """Vary alpha and b where gradients have sharp corners: there the bias of Option B is as large as its lemma allows,
    up to a factor.

    On quadratics it is zero, and on smooth costs it is of the second order: with corners that are rounder than the
    noise the floor goes as alpha^4 / b^2. Both are computed from the expected step, without simulation.
    """
    L = 0.1
    sharp = Corners(np.zeros(2), np.zeros(1), L, width=0.1, left=0.4, reach=8.0, sigma_g=1.0)
    smooth = replace(sharp, width=10.0, reach=20.0)
    alphas, sizes = np.array([0.05, 0.1, 0.2]) / L, np.array([1.0, 2.0, 4.0, 8.0])
    cases = [(alpha, 1.0) for alpha in alphas] + [(alphas[-1], b) for b in sizes]
    tau = min(settings.tau, 10)
    theorems = [Theorem("b", sharp.constants, settings.Q, tau, b, alpha=alpha) for alpha, b in cases]
    runs = [
        Run(seed, FLOOR_T, tau, theorem.eta(FLOOR_T), alpha=alpha, noise=1 / math.sqrt(b))
        for (alpha, b), theorem in zip(cases, theorems, strict=True)
        for seed in range(FLOOR_SEEDS)
    ]
    measured = simulate(sharp, "b", runs, settings.Q, tick=lambda updates: tick("option b, floor", updates))
    late = measured.late.reshape(len(cases), FLOOR_SEEDS, 1).swapaxes(0, 1)
    of_alpha, of_b = late[:, : len(alphas)], late[:, len(alphas) :]
    in_alpha = fit.jackknife(lambda some: fit.slope(alphas, squared_mean(some)), of_alpha)
    in_b = fit.jackknife(lambda some: fit.slope(sizes, squared_mean(some)), of_b)
    exact_alpha = [sharp.maml_floor(alpha) for alpha in alphas]
    exact_b = [sharp.maml_floor(alphas[-1], 1 / math.sqrt(b)) for b in sizes]
    smooth_alpha = fit.slope(alphas, np.array([smooth.maml_floor(alpha) for alpha in alphas]))
    smooth_b = fit.slope(sizes, np.array([smooth.maml_floor(alphas[-1], 1 / math.sqrt(b)) for b in sizes]))
    found.slopes |= {"floor_alpha": in_alpha, "floor_b": in_b}
    found.floor = {
        "over": {"alpha": alphas.tolist(), "b": sizes.tolist()},
        "measured": {"alpha": squared_mean(of_alpha).tolist(), "b": squared_mean(of_b).tolist()},
        "limit": {"alpha": exact_alpha, "b": exact_b},
        "bound": {
            "alpha": [t.bound(FLOOR_T, 0.0).floor for t in theorems[: len(alphas)]],
            "b": [t.bound(FLOOR_T, 0.0).floor for t in theorems[len(alphas) :]],
        },
        "smooth_slopes": {"alpha": smooth_alpha, "b": smooth_b},
        "T": FLOOR_T,
        "seeds": FLOOR_SEEDS,
    }
    exact = f"{fit.slope(alphas, np.array(exact_alpha)):.3f} and {fit.slope(sizes, np.array(exact_b)):.3f} as T grows"
    round_ones = f"{smooth_alpha:.2f} and {smooth_b:.2f} with rounder corners"
    found.check(
        "MAML's floor scales as alpha^2/b",
        _near(in_alpha, 2.0) and _near(in_b, -1.0),
        f"slope in alpha {with_interval(in_alpha)}, in b {with_interval(in_b)}; {exact}; {round_ones}",
    )


def moreau_floor(found: Study, settings: Settings, tick: Tick) -> None:
    """Vary nu on quadratics, with short inner steps so that |grad h| ends just below nu and not far below."""
    problem = random_quadratics(10, 3, 0.01, settings.seed, sigma_g=0.1)
    L = problem.constants.L
    lam, nus = ENVELOPE * L, np.array([0.05, 0.1, 0.2, 0.4]) * L
    tau = min(settings.tau, 10)
    theorems = [Theorem("c", problem.constants, settings.Q, tau, lam=lam, nu=nu) for nu in nus]
    start = tuple(problem.optimum("c", lam=lam).tolist())
    runs = [
        Run(seed, FLOOR_T, tau, theorem.eta(FLOOR_T), lam=lam, nu=theorem.nu, inner_share=0.3, w0=start)
        for theorem in theorems
        for seed in range(NU_SEEDS)
    ]
    measured = simulate(problem, "c", runs, settings.Q, tick=lambda updates: tick("option c, floor", updates))
    late = measured.late.reshape(len(nus), NU_SEEDS, -1).swapaxes(0, 1)
    in_nu = fit.jackknife(lambda some: fit.slope(nus, squared_mean(some)), late)
    # Inner steps for a tolerance: at most kappa log(|grad h(w)| / nu) + 1 with the contraction of the step that is
    # taken.
    tolerances = np.geomspace(1.0, 1e-6, 7) * L
    inner = inner_steps(problem, lam, tolerances, settings)
    found.slopes["floor_nu"] = in_nu
    found.floor = {
        "over": {"nu": nus.tolist()},
        "measured": {"nu": squared_mean(late).tolist()},
        "bound": {"nu": [t.bound(FLOOR_T, 0.0).floor for t in theorems]},
        "inner_steps": {"nu": tolerances.tolist(), **inner},
        "T": FLOOR_T,
        "seeds": NU_SEEDS,
    }
    found.check("ME's floor scales as nu^2", _near(in_nu, 2.0), f"slope in nu {with_interval(in_nu)}, against 2")
    found.check(
        "inner iterations follow (lam+L)/(lam-L) log(1/nu)",
        all(steps <= most for steps, most in zip(inner["steps"], inner["most"], strict=True)),
        f"{inner['steps'][0]:.2f} to {inner['steps'][-1]:.2f} steps for nu = {tolerances[0]:.1g} to "
        f"{tolerances[-1]:.1g}; "
        f"{inner['per_decade']:.2f} more per decade, at most {inner['most_per_decade']:.2f}",
    )


def inner_steps(
    problem: Problem, lam: float, tolerances: Floats, settings: Settings, share: float = 1.0
) -> dict[str, Any]:
    """Mean inner steps of Option C near the optimum, and the most that gradient descent on h needs.

    h has curvatures in [lam - L, lam + L]; a step of share / (lam + L) shrinks grad h by 1 - share (lam - L) / (lam +
    L) or more, so at most 1 + (lam + L) / (share (lam - L)) log(|grad h(w)| / nu) steps are taken, where |grad h(w)| =
    |grad f(w; D)| at the first.
    """
    L = problem.constants.L
    runs = [
        Run(seed, 50, 0, 1e-9 / L, lam=lam, nu=nu, inner_share=share)
        for nu in tolerances
        for seed in range(settings.seeds)
    ]
    measured = simulate(problem, "c", runs, 1)
    steps = measured.inner_steps.reshape(len(tolerances), -1).mean(1)
    first = float(np.linalg.norm(problem.gradients(problem.w0), axis=-1).max()) + 6 * problem.constants.sigma_g
    kappa = (lam + L) / (share * (lam - L))
    most = 1 + kappa * np.log(np.maximum(first / tolerances, 1.0))
    return {
        "steps": steps.tolist(),
        "most": most.tolist(),
        "per_decade": float(np.polyfit(-np.log10(tolerances), steps, 1)[0]),
        "most_per_decade": kappa * math.log(10),
    }


def _near(estimate: Estimate, value: float) -> bool:
    return estimate.low - NEAR <= value <= estimate.high + NEAR
