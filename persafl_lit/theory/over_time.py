"""Measured against bound: the theorems over T and tau."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from persafl_lit.errors import ConfigError
from persafl_lit.theory import fit
from persafl_lit.theory.bounds import Option, Theorem
from persafl_lit.theory.fit import with_interval
from persafl_lit.theory.problems.logistic import random_logistic
from persafl_lit.theory.problems.problem import Problem
from persafl_lit.theory.problems.quadratic import random_quadratics
from persafl_lit.theory.simulation import Run, simulate
from persafl_lit.theory.study import Settings, Study, Tick
from persafl_lit.timeline.timeline import Floats

RELAXATION: dict[Option, float] = {"a": 8.0, "b": 16.0, "c": 8.0}
"""sqrt(L T) at the smallest T: how many times the slowest directions forget where they started, about."""
MULTIPLES = (1, 2, 4, 8)
"""T, as multiples of the smallest one."""
MAML_START = 64
"""Theorem MAML asks so little of T (64 L_b, whatever tau is) that eta would be near its limit; its study begins at so
many times that."""
ADAPTATION, ENVELOPE, TOLERANCE = 0.25, 10.0, 1e-3
"""alpha L, lam / L and nu / L of the studies."""
SLACK = 0.02
"""How much flatter than 1/sqrt(T) a fitted slope may be: what is left of the start at the smallest T flattens it a
little."""
STALE_SLACK = 0.1
"""The same for what staleness adds: runs from the optimum take a while to reach their steady noise, the longer the
larger their share of T."""
MOST_UPDATES = 5_000_000


def set_up(option: Option, settings: Settings) -> tuple[Problem, Theorem, dict[str, Any]]:
    """A problem whose curvature is so small that the condition on T can hold, and the theorem for it.

    The condition is T >= k L with k = 160 (Q + 7) (tau + 1)^3 or the like. After T updates a run has forgotten its
    start exp(-sqrt(L T)) times, so L = RELAXATION / sqrt(k) makes the smallest admissible T just long enough.
    """
    Q, tau = settings.Q, settings.tau
    k = {"a": 160 * (Q + 7) * (tau + 1) ** 3, "b": MAML_START * 64, "c": 288 * (Q + 7) * (tau + 1) ** 3}[option]
    grown = {"a": 1.0, "b": (1 + ADAPTATION) ** 2, "c": ENVELOPE / (ENVELOPE - 1)}[option]
    L = RELAXATION[option] / math.sqrt(k) / grown
    make = random_quadratics if settings.problem == "quadratic" else random_logistic
    problem: Problem = make(settings.clients, settings.dimension, L, settings.seed)
    L = problem.constants.L
    own: dict[str, Any] = {"b": {"alpha": ADAPTATION / L}, "c": {"lam": ENVELOPE * L, "nu": TOLERANCE * L}}.get(
        option, {}
    )
    if settings.problem == "logistic" and option == "c":
        own["nu"] *= float(np.linalg.norm(problem.w0))
    theorem = Theorem(option, problem.constants, Q, tau, problem.b, **own)
    if max(times(theorem, option)) > MOST_UPDATES:
        raise ConfigError(
            f"tau={tau} with Q={Q} needs T={max(times(theorem, option)):,}, more than {MOST_UPDATES:,} "
            "updates; lower --tau"
        )
    return problem, theorem, own


def times(theorem: Theorem, option: Option) -> list[int]:
    """The smallest T that the theorem admits (for Option B `ROOM` times that) and multiples of it."""
    least = math.ceil(theorem.least_updates * (MAML_START if option == "b" else 1))
    return [max(least, 1) * multiple for multiple in MULTIPLES]


def personal_constants(theorem: Theorem) -> dict[str, float]:
    """L_b, mu_b, ... under their own names."""
    if theorem.option == "a":
        return {"sigma_a": theorem.personal.sigma}
    names = ("L", "mu", "sigma", "gamma", "G") if theorem.option == "b" else ("L", "mu", "sigma", "gamma")
    return {f"{name}_{theorem.option}": float(getattr(theorem.personal, name)) for name in names}


def over_time_and_staleness(
    found: Study, problem: Problem, theorem: Theorem, about: dict[str, Any], settings: Settings, tick: Tick
) -> None:
    """The table: every T and tau, all seeds; then the checks on bound, rate and staleness."""
    option, taus, Ts = found.option, settings.taus(), times(theorem, found.option)
    cost_about = {key: value for key, value in about.items() if key != "nu"}
    gap = float(problem.cost(option, problem.w0, **cost_about)) - problem.f_star
    seeds = range(settings.seeds)
    runs = [Run(seed, T, tau, theorem.eta(T), **about) for tau in taus for T in Ts for seed in seeds]
    # A second set starts at the optimum: what staleness does to a start that is forgotten hides what it does to the
    # noise that stays.
    settled = tuple(problem.optimum(option, **cost_about).tolist())
    runs += [replace(run, w0=settled) for run in runs]
    what = f"option {option}, {len(runs)} runs"
    measured = simulate(problem, option, runs, settings.Q, tick=lambda updates: tick(what, updates))
    average, steady = measured.average.reshape(2, len(taus), len(Ts), settings.seeds)
    farthest = measured.farthest.reshape(2, len(taus), len(Ts), settings.seeds)[0]
    for i, tau in enumerate(taus):
        own = replace(theorem, tau=tau)
        for j, T in enumerate(Ts):
            found.rows.append(row(own, T, gap, average[i, j], float(farthest[i, j].max()), problem.radius))
    _check_bound(found)
    _check_rate(found, Ts, average[-1].T, settings.tau)
    if len(taus) > 2:
        _check_staleness(found, taus, Ts, average, steady)


def row(theorem: Theorem, T: int, gap: float, average: Floats, farthest: float, radius: float) -> dict[str, Any]:
    """One line of the table."""
    bound, printed, estimate = theorem.bound(T, gap), theorem.printed().bound(T, gap), fit.mean(average)
    inside = farthest <= radius
    return {
        "option": theorem.option,
        "T": T,
        "tau": theorem.tau,
        "Q": theorem.Q,
        "eta": theorem.eta(T),
        "seeds": len(average),
        "measured": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "largest": float(average.max()),
        "bound": bound.total,
        "terms": asdict(bound),
        "ratio": bound.total / estimate.value,
        "as_printed": {"bound": printed.total, "smallest_T": theorem.printed().least_updates},
        "smallest_T": theorem.least_updates,
        "farthest": farthest,
        "radius": radius if math.isfinite(radius) else None,
        "conditions_hold": bool(theorem.conditions_hold(T) and inside),
    }


def _check_bound(found: Study) -> None:
    """The theorem is about an expectation: the mean over seeds, with the upper end of its interval."""
    held = [r for r in found.rows if r["conditions_hold"]]
    worst = min(((r["bound"] / r["high"], r) for r in held), key=lambda pair: pair[0], default=(math.nan, None))
    detail = f"{len(held)} of {len(found.rows)} rows meet the conditions"
    if worst[1] is not None:
        detail += (
            f"; bound / measured is {worst[0]:.3g} or more there (least at T={worst[1]['T']}, tau={worst[1]['tau']})"
        )
    found.check("the bound holds where its conditions do", bool(held) and worst[0] >= 1, detail)


def _check_rate(found: Study, Ts: Sequence[int], samples: Floats, tau: int) -> None:
    slope = fit.slope_of_means(np.array(Ts, dtype=float), samples)
    found.slopes["T"] = slope
    found.check(
        "decay in T is at least as fast as 1/sqrt(T)",
        slope.low <= -0.5 + SLACK,
        f"slope {with_interval(slope)} at tau={tau}, against -0.5",
    )


def _check_staleness(found: Study, taus: Sequence[int], Ts: Sequence[int], average: Floats, steady: Floats) -> None:
    """What staleness adds: measured(tau) - measured(0) on the same draws, for runs that start at the optimum."""
    effect = steady[1:] - steady[:1]  # (taus, Ts, seeds)
    used = [j for j in range(len(Ts)) if _significant(effect[-1, j])] or [0]
    x, t = np.array(taus[1:], dtype=float), np.array([Ts[j] for j in used], dtype=float)
    in_tau = fit.jackknife(lambda some: fit.slope(x, np.abs(some.mean(0))), effect[:, used[0]].T)
    found.slopes["tau"] = in_tau
    passed, detail = in_tau.low <= 2, f"in tau: slope {with_interval(in_tau)} at T={Ts[used[0]]}, against 2"
    if len(used) > 1:
        in_T = fit.jackknife(lambda some: fit.slope(t, np.abs(some.mean(0))), effect[-1, used].T)
        found.slopes["tau_over_T"] = in_T
        passed, detail = (
            passed and in_T.low <= -1 + STALE_SLACK,
            f"{detail}; in T: slope {with_interval(in_T)}, against -1",
        )
    whole = average[-1, 0].mean() / average[0, 0].mean() - 1
    noise = effect[-1, 0].mean() / steady[0, 0].mean()
    found.staleness = {
        "tau": list(taus[1:]),
        "T": list(Ts),
        "effect": effect.mean(-1).tolist(),
        "from_the_optimum": float(noise),
        "from_the_start": float(whole),
    }
    detail += (
        f"; at T={Ts[0]} tau={taus[-1]} changes the average by {noise:+.2%} from the optimum, by {whole:+.2%} from afar"
    )
    found.check("the effect of tau grows no faster than tau^2/T", passed, detail)


def _significant(samples: Floats) -> bool:
    estimate = fit.mean(samples)
    return estimate.low > 0 or estimate.high < 0
