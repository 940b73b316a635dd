"""What the theorems say against what happens: measured over T and tau, floors, limits, and a schedule that breaks
Assumption 1.

Every study simulates Algorithms 1 and 2 (`simulation.py`) on problems with known constants (`problems.py`) and ends in
checks: statements that are computed from the numbers and either hold or do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import numpy as np

from persafl_lit.common.limits import cores
from persafl_lit.errors import ConfigError
from persafl_lit.theory import fit
from persafl_lit.theory.bounds import METHODS, OPTIONS, THEOREMS, Option, Theorem
from persafl_lit.theory.fit import Estimate
from persafl_lit.theory.problems import Corners, Problem, QuadraticProblem, random_logistic, random_quadratics
from persafl_lit.theory.simulation import GivenTimeline, Run, Simulated, simulate
from persafl_lit.timeline.delays import Exponential
from persafl_lit.timeline.schedules import Asynchronous, Setting
from persafl_lit.timeline.timeline import Floats

Tick = Callable[[str, int], object]
"""Told what is being simulated and how many server updates it has just done."""

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
PROBLEMS = ("quadratic", "logistic")
MOST_UPDATES = 5_000_000


@dataclass(frozen=True)
class Settings:
    """What a user may choose."""

    tau: int = 10
    clients: int = 10
    seeds: int = 20
    Q: int = 2
    dimension: int = 3
    problem: str = "quadratic"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("tau", 0, 100),
            ("clients", 1, 1000),
            ("seeds", 2, 1000),
            ("Q", 1, 100),
            ("dimension", 1, 100),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(
                    f"--{'local-steps' if name == 'Q' else name} must lie between {least} and {most}; got {value}"
                )
        if self.problem not in PROBLEMS:
            raise ConfigError(f"--problem must be one of {', '.join(PROBLEMS)}; got {self.problem!r}")

    def taus(self) -> list[int]:
        """0, about a quarter, a half and all of tau."""
        return sorted({0, max(1, round(self.tau / 4)), max(1, round(self.tau / 2)), self.tau} if self.tau else {0})


@dataclass(frozen=True)
class Check:
    """A statement, whether it holds, and the numbers that say so."""

    option: str
    name: str
    passed: bool
    detail: str


@dataclass
class Study:
    """All that was found about one option."""

    option: Option
    constants: dict[str, float]
    rows: list[dict[str, Any]] = field(default_factory=list)
    slopes: dict[str, Estimate] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    staleness: dict[str, Any] = field(default_factory=dict)
    floor: dict[str, Any] = field(default_factory=dict)
    limit: dict[str, Any] = field(default_factory=dict)
    uneven: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, passed: bool, detail: str) -> None:
        self.checks.append(Check(self.option, name, bool(passed), detail))

    def summary(self) -> dict[str, Any]:
        return {
            "option": self.option,
            "theorem": THEOREMS[self.option],
            "method": METHODS[self.option],
            "constants": self.constants,
            "slopes": {name: estimate._asdict() for name, estimate in self.slopes.items()},
            "staleness": self.staleness,
            "floor": self.floor,
            "limit": self.limit,
            "uneven": self.uneven,
        }


def study(option: Option, settings: Settings, tick: Tick = lambda what, updates: None) -> Study:
    """Everything about one option."""
    problem, theorem, about = set_up(option, settings)
    found = Study(
        option,
        {name: value for name, value in asdict(problem.constants).items() if name != "affine"}
        | personal_constants(theorem),
    )
    over_time_and_staleness(found, problem, theorem, about, settings, tick)
    if option == "a":
        uneven_schedule(found, settings, tick)
    elif option == "b":
        maml_floor(found, settings, tick)
        recovers_fedasync(found, settings, tick)
    else:
        moreau_floor(found, settings, tick)
        recovers_fedasync(found, settings, tick)
    return found


def updates_of(option: Option, settings: Settings) -> int:
    """Server updates that a study simulates, for a progress bar."""
    main = max(times(set_up(option, settings)[1], option))
    return (
        main
        + {"a": 2 * UNEVEN_T if settings.clients > 1 else 0, "b": FLOOR_T + LIMIT_T, "c": FLOOR_T + LIMIT_T}[option]
    )


# -- measured against bound -------------------------------------------------------------------------------------------


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
        f"slope {_shown(slope)} at tau={tau}, against -0.5",
    )


def _check_staleness(found: Study, taus: Sequence[int], Ts: Sequence[int], average: Floats, steady: Floats) -> None:
    """What staleness adds: measured(tau) - measured(0) on the same draws, for runs that start at the optimum."""
    effect = steady[1:] - steady[:1]  # (taus, Ts, seeds)
    used = [j for j in range(len(Ts)) if _significant(effect[-1, j])] or [0]
    x, t = np.array(taus[1:], dtype=float), np.array([Ts[j] for j in used], dtype=float)
    in_tau = fit.jackknife(lambda some: fit.slope(x, np.abs(some.mean(0))), effect[:, used[0]].T)
    found.slopes["tau"] = in_tau
    passed, detail = in_tau.low <= 2, f"in tau: slope {_shown(in_tau)} at T={Ts[used[0]]}, against 2"
    if len(used) > 1:
        in_T = fit.jackknife(lambda some: fit.slope(t, np.abs(some.mean(0))), effect[-1, used].T)
        found.slopes["tau_over_T"] = in_T
        passed, detail = passed and in_T.low <= -1 + STALE_SLACK, f"{detail}; in T: slope {_shown(in_T)}, against -1"
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


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


# -- floors -----------------------------------------------------------------------------------------------------------

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
        f"slope in alpha {_shown(in_alpha)}, in b {_shown(in_b)}; {exact}; {round_ones}",
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
    found.check("ME's floor scales as nu^2", _near(in_nu, 2.0), f"slope in nu {_shown(in_nu)}, against 2")
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


# -- limits -----------------------------------------------------------------------------------------------------------

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


# -- a schedule with fast and slow clients ----------------------------------------------------------------------------

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


# -- all of it --------------------------------------------------------------------------------------------------------


def studies(options: Sequence[Option], settings: Settings, tick: Tick = lambda what, updates: None) -> list[Study]:
    """One after the other in this process, or several options in a process each, as far as there are cores."""
    lanes = min(len(options), cores())
    if lanes < 2:
        return [study(option, settings, tick) for option in options]
    context = get_context("spawn")
    told: Any = context.SimpleQueue()
    longest_first = sorted(options, key=lambda option: option != "c")
    with ProcessPoolExecutor(lanes, context, _listen, (told,)) as pool:
        work = {option: pool.submit(_study_and_tell, option, settings) for option in longest_first}
        going = True
        while going:
            ended = wait(work.values(), timeout=0.2, return_when=FIRST_EXCEPTION)
            going = bool(ended.not_done) and not any(one.exception() for one in ended.done)
            while not told.empty():
                tick(*told.get())
        return [work[option].result() for option in options]


def _listen(told: Any) -> None:
    """Where this process puts what it has done."""
    global _told
    _told = told


_told: Any = None


def _study_and_tell(option: Option, settings: Settings) -> Study:
    return study(option, settings, lambda what, updates: _told.put((what, updates)))


def study_report(studies: Iterable[Study], settings: Settings) -> dict[str, Any]:
    """The object that `persafl theory --json` prints."""
    found = list(studies)
    return {
        "settings": asdict(settings),
        "rows": [row for one in found for row in one.rows],
        "checks": [asdict(check) for one in found for check in one.checks],
        "studies": [one.summary() for one in found],
        "passed": all(check.passed for one in found for check in one.checks),
    }


__all__ = ["OPTIONS", "Check", "Settings", "Study", "studies", "study", "study_report", "updates_of"]
