"""Options B and C become Option A: alpha -> 0 and lam -> infinity."""

from __future__ import annotations

import numpy as np

from persafl_lit.theory import fit
from persafl_lit.theory.bounds import Theorem
from persafl_lit.theory.problems.quadratic import random_quadratics
from persafl_lit.theory.simulation import Run, Simulated, simulate
from persafl_lit.theory.study import Settings, Study, Tick
from persafl_lit.timeline.timeline import Floats

LIMIT_T = 2_000


def recovers_fedasync(found: Study, settings: Settings, tick: Tick) -> None:
    """alpha = 0 is Option A to the bit; as lam grows, the difference from Option A shrinks as 1/lam."""
    problem = random_quadratics(settings.clients, settings.dimension, 0.1, settings.seed)
    L, tau, seeds = problem.constants.L, min(settings.tau, 10), range(settings.seeds)
    eta = Theorem("a", problem.constants, settings.Q, tau).eta(LIMIT_T)
    plain = simulate(problem, "a", [Run(seed, LIMIT_T, tau, eta) for seed in seeds], settings.Q)

    def distance(measured: Simulated) -> Floats:
        return np.asarray(np.linalg.norm(measured.w - plain.w, axis=1))

    def ticked(updates: int) -> object:
        return tick(f"option {found.option}, limit", updates)

    if found.option == "b":
        apart = distance(
            simulate(problem, "b", [Run(seed, LIMIT_T, tau, eta, alpha=0.0) for seed in seeds], settings.Q, tick=ticked)
        )
        found.limit = {"alpha": [0.0], "distance": [float(apart.max())]}
        found.check(
            "alpha = 0 recovers FedAsync", float(apart.max()) == 0, f"final models differ by {apart.max():.3g} at most"
        )
        return
    lams = np.geomspace(1e1, 1e5, 5) * L
    runs = [Run(seed, LIMIT_T, tau, eta, lam=lam, nu=1e-9 * L) for lam in lams for seed in seeds]
    far = simulate(problem, "c", runs, settings.Q, tick=ticked)
    apart = np.linalg.norm(far.w.reshape(len(lams), settings.seeds, -1) - plain.w, axis=-1).mean(1)
    slope = fit.slope(lams, apart)
    found.limit = {"lam": lams.tolist(), "distance": apart.tolist(), "slope": slope}
    detail = (
        f"final models are {apart[0]:.2g} apart at lam = 10 L and {apart[-1]:.2g} at lam = 10^5 L: slope "
        f"{slope:.3f}, against -1"
    )
    found.check("lam -> infinity recovers FedAsync", slope <= -0.9, detail)
