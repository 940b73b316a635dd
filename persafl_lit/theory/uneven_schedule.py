"""A schedule with fast and slow clients, which breaks Assumption 1."""

from __future__ import annotations

import math

import numpy as np

from persafl_lit.theory.bounds import Theorem
from persafl_lit.theory.problems.quadratic import QuadraticProblem
from persafl_lit.theory.simulation import GivenTimeline, Run, simulate
from persafl_lit.theory.study import Settings, Study, Tick
from persafl_lit.timeline.delays import Exponential
from persafl_lit.timeline.schedules import Asynchronous, Setting

UNEVEN_T = 40_000
UNEVEN_L = 0.02
UNEVEN_CLIENTS = 4
"""Few beside tau: waiting for the slowest holds the fast ones back, and the more clients there are the more it evens
out."""
UNEVEN_SEEDS = 8
DOWNLOADS = (0.2, 2.0)
"""Range of the clients' mean download times: the fastest are ten times as fast as the slowest."""


def uneven_schedule(found: Study, settings: Settings, tick: Tick) -> None:
    """Option A on `schedule=asynchronous`: staleness is bounded by waiting, but i_t is not uniform.

    Client i arrives with a share p_i of all updates, so the run approaches the optimum of sum_i p_i f_i, where grad f
    is not zero. The bound goes to zero with T; what is measured does not. Here the faster half of the clients wants w =
    1 and the slower half w = -1, with the same curvature L for all: gamma_g is known everywhere, and runs start at the
    optimum.
    """
    n = min(settings.clients, UNEVEN_CLIENTS)
    if n < 2:
        return
    tau, L, seeds = max(settings.tau, 1), UNEVEN_L, range(UNEVEN_SEEDS)
    wants = np.where(np.arange(n) < n // 2, 1.0, -1.0)[:, None]
    problem = QuadraticProblem(np.full((n, 1, 1), L), wants, wants.mean(0), sigma_g=0.3 * L)
    theorem = Theorem("a", problem.constants, settings.Q, tau)
    Ts = [UNEVEN_T // 8, UNEVEN_T // 4, UNEVEN_T // 2, UNEVEN_T]
    delays = Exponential(download=DOWNLOADS)
    lines = {}
    for seed in seeds:
        line = Asynchronous(tau, "wait").timeline(Setting(n, settings.Q, delays, seed, None, UNEVEN_T))
        rank = np.argsort(np.argsort([delays.means(seed, client, settings.Q).sum() for client in range(n)]))
        lines[seed] = rank[line.client], line.reads
    runs = [Run(seed, T, tau, theorem.eta(T)) for T in Ts for seed in seeds]
    draws = GivenTimeline(n, lines)
    uneven = simulate(
        problem, "a", runs, settings.Q, draws, tick=lambda updates: tick("option a, asynchronous schedule", updates)
    )
    even = simulate(problem, "a", runs, settings.Q, tick=lambda updates: tick("option a, drawn schedule", updates))
    gap = float(problem.cost("a", problem.w0)) - problem.f_star
    shares = np.array([np.bincount(client, minlength=n) / len(client) for client, _ in lines.values()])
    limit = float(
        np.mean([(problem.cost_gradient("a", problem.optimum("a", weights=share)) ** 2).sum() for share in shares])
    )
    pairs = [x.average.reshape(len(Ts), -1).mean(1) for x in (uneven, even)]
    bounds = np.array([theorem.bound(T, gap).total for T in Ts])
    found.uneven = {
        "T": Ts,
        "tau": tau,
        "seeds": UNEVEN_SEEDS,
        "asynchronous": pairs[0].tolist(),
        "drawn": pairs[1].tolist(),
        "bound": bounds.tolist(),
        "times_the_bound": [
            float(value / bound) if bound else math.inf for value, bound in zip(pairs[0], bounds, strict=True)
        ],
        "other_conditions_hold": [theorem.conditions_hold(T) for T in Ts],
        "limit": limit,
        "shares": shares.mean(0).tolist(),
        "exceeds_the_bound_from_T": bound_crossing(theorem, gap, limit),
    }


def bound_crossing(theorem: Theorem, gap: float, limit: float) -> float:
    """The T from which the bound is below a limit that the average never leaves."""
    return theorem.updates_for(limit, gap) if limit > 0 else math.inf
