"""Algorithms 1 and 2 on a problem, for many runs at once: one row per run, one numpy operation per line of the
algorithm.

The arithmetic is the engine's: given the draws of `persafl run`, a row ends at the same model (a test holds both to
1e-10). A timeline and batches for many runs come from `Draws`; runs of one seed share them, so that only what is varied
differs between rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from persafl_lit.common.seeding import rng
from persafl_lit.errors import DivergenceError
from persafl_lit.learning.objectives.moreau import MOST_INNER_STEPS
from persafl_lit.theory.bounds import Option
from persafl_lit.theory.problems.problem import Problem
from persafl_lit.timeline.delays import Constant
from persafl_lit.timeline.schedules import Drawn, Setting
from persafl_lit.timeline.timeline import Floats, Ints

CHECK_EVERY = 256
"""Server updates between two looks at the gradient: enough to make looking cheap."""
SLOTS: dict[Option, int] = {"a": 1, "b": 3, "c": 1}


@dataclass(frozen=True)
class Run:
    """One row: T server updates with staleness up to tau."""

    seed: int
    T: int
    tau: int
    eta: float
    alpha: float = 0.0
    lam: float = np.inf
    nu: float = 0.0
    noise: float = 1.0
    """Factor on the batches' noise, where it is additive: 1/sqrt(b) makes a batch of b."""
    inner_share: float = 1.0
    """Option C: the inner step is this share of 1 / (lam + L)."""
    w0: tuple[float, ...] | None = None
    """Where the run starts; the problem's w0 if None."""


class Draws(ABC):
    """Who arrives with which staleness, and on which batches it has trained."""

    @abstractmethod
    def timeline(self, seed: int, tau: int, T: int) -> tuple[Ints, Ints]:
        """(client, reads) of T arrivals."""

    @abstractmethod
    def batches(self, problem: Problem, seed: int, first: int, count: int, slots: int, Q: int) -> Any:
        """Batches of the arrivals first, ..., first + count - 1: leading axes (count, slots, Q)."""


class FastDraws(Draws):
    """Assumption 1 exactly (`schedule=drawn`), and batches drawn many at a time."""

    @lru_cache(maxsize=256)  # noqa: B019 - a Draws lives as long as a study
    def timeline(self, seed: int, tau: int, T: int) -> tuple[Ints, Ints]:
        drawn = Drawn(tau).timeline(Setting(self.clients, 1, Constant(), seed, None, T))
        return drawn.client, drawn.reads

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def batches(self, problem: Problem, seed: int, first: int, count: int, slots: int, Q: int) -> Any:
        """D, D' and D'' have streams of their own, so that every option sees the same D."""
        return np.stack(
            [problem.draw(rng(seed, "theory batches", slot, first), count, Q) for slot in range(slots)], axis=1
        )


class GivenTimeline(FastDraws):
    """The same with timelines of one's own, one per seed."""

    def __init__(self, clients: int, timelines: dict[int, tuple[Ints, Ints]]) -> None:
        super().__init__(clients)
        self.timelines = timelines

    def timeline(self, seed: int, tau: int, T: int) -> tuple[Ints, Ints]:  # type: ignore[override]
        client, reads = self.timelines[seed]
        return client[:T], reads[:T]


@dataclass(frozen=True)
class Simulated:
    """What each row saw; arrays have one entry per run, in the order they were given."""

    average: Floats
    """1/T sum_{t<T} |grad F(w^t)|^2."""
    late: Floats
    """The mean of grad F(w^t) over the second half: (runs, d). Noise averages out of it, a bias does not."""
    farthest: Floats
    """max |w - centre| over all models, also the clients' own."""
    w: Floats
    """w^T."""
    inner_steps: Floats
    """Mean number of inner steps per local step (Option C)."""


def simulate(
    problem: Problem,
    option: Option,
    runs: Sequence[Run],
    Q: int = 1,
    draws: Draws | None = None,
    tick: Callable[[int], object] = lambda updates: None,
) -> Simulated:
    """Run all rows side by side. `tick` is called with the number of server updates since its last call."""
    draws = draws or FastDraws(problem.clients)
    order = np.argsort([-run.T for run in runs], kind="stable")  # rows that end early lie behind, and fall away
    rows = [runs[i] for i in order]
    count, d = len(rows), problem.dimension
    T = np.array([run.T for run in rows])
    window = max(run.tau for run in rows) if rows else 0
    pairs = sorted({(run.seed, run.tau) for run in rows})
    pair = np.array([pairs.index((run.seed, run.tau)) for run in rows])
    longest = int(T[0])
    timelines = [draws.timeline(seed, tau, longest) for seed, tau in pairs]
    clients = np.stack([client for client, _ in timelines], axis=1).astype(np.int16)
    ages = np.stack([np.arange(len(reads)) - reads for _, reads in timelines], axis=1)
    window = max(window, int(ages.max(initial=0)))
    ages = ages.astype(np.int32)
    seeds = sorted({run.seed for run in rows})
    seed_of = np.array([seeds.index(run.seed) for run in rows])
    step = LocalSteps(problem, option, rows, Q)

    W = np.empty((window + CHECK_EVERY + 1, count, d))
    W[: window + 1] = [problem.w0 if run.w0 is None else run.w0 for run in rows]
    total, late, farthest, inner = np.zeros(count), np.zeros((count, d)), np.zeros(count), np.zeros(count)
    final = np.empty((count, d))
    half = T // 2
    groups = step.groups()
    for first in range(0, longest, CHECK_EVERY):
        size = min(CHECK_EVERY, longest - first)
        live = int(np.searchsorted(-T, -first, side="left"))  # rows with T > first
        drawn = np.stack([draws.batches(problem, seed, first, size, SLOTS[option], Q) for seed in seeds], axis=3)
        batches = drawn[:, :, :, seed_of[:live]]  # (size, slots, Q, rows, ...)
        client, age = (
            clients[first : first + size][:, pair[:live]].astype(np.int64),
            ages[first : first + size][:, pair[:live]],
        )
        here = np.arange(live)
        step.begin(live)
        with np.errstate(over="ignore", invalid="ignore"):
            for k in range(size):
                read = W[window + k - age[k], here]
                w = step.visit(client[k], read, batches[k])
                W[window + k + 1, :live] = W[window + k, :live] - (read - w)
        if not np.isfinite(W[window + size, :live]).all():
            raise DivergenceError(
                f"a run of the simulation is not finite after {first + size} updates; its step size is too large"
            )
        t = np.arange(first, first + size)[:, None]
        counts, behind = t < T[:live], t >= half[:live]
        for where, about in groups:
            some = where[where < live]
            if len(some):
                slopes = problem.cost_gradient(option, W[window : window + size, some], **about)
                total[some] += ((slopes**2).sum(-1) * counts[:, some]).sum(0)
                late[some] += (slopes * (counts & behind)[:, some, None]).sum(0)
        away = np.linalg.norm(W[window : window + size, :live] - problem.centre, axis=-1)
        farthest[:live] = np.maximum(farthest[:live], (away * counts).max(0))
        farthest[:live] = np.maximum(farthest[:live], step.farthest[:live])
        for row in np.flatnonzero((T[:live] > first) & (T[:live] <= first + size)):
            final[row] = W[window + T[row] - first, row]
        W[: window + 1, :live] = W[size : size + window + 1, :live]
        tick(size)
    inner = step.inner / np.maximum(T * Q, 1)
    back = np.argsort(order)
    return Simulated((total / T)[back], (late / (T - half)[:, None])[back], farthest[back], final[back], inner[back])


class LocalSteps:
    """Algorithm 2 for a block of rows: Q local steps of one option from the models that were read."""

    def __init__(self, problem: Problem, option: Option, rows: Sequence[Run], Q: int) -> None:
        self.problem, self.option, self.Q, self.rows = problem, option, Q, rows
        column = {
            name: np.array([getattr(run, name) for run in rows])[:, None]
            for name in ("eta", "alpha", "lam", "nu", "noise", "inner_share")
        }
        self.eta, self.alpha, self.lam, self.nu, self.noise, share = column.values()
        self.quiet = bool((self.noise == 1).all())
        self.inner_lr = share / (self.lam + problem.constants.L)
        self.inner, self.farthest = np.zeros(len(rows)), np.zeros(len(rows))
        self.gradient = {"a": self.plain, "b": self.maml, "c": self.moreau}[option]

    def groups(self) -> list[tuple[Ints, dict[str, float]]]:
        """Rows of one personalised cost each."""
        abouts = [
            {"alpha": run.alpha} if self.option == "b" else {"lam": run.lam} if self.option == "c" else {}
            for run in self.rows
        ]
        return [
            (np.flatnonzero([other == about for other in abouts]), about)
            for about in [dict(x) for x in {tuple(a.items()): None for a in abouts}]
        ]

    def begin(self, live: int) -> None:
        self.live = slice(live)
        self.eta_, self.alpha_, self.lam_, self.nu_, self.lr_, self.noise_ = (
            column[:live] for column in (self.eta, self.alpha, self.lam, self.nu, self.inner_lr, self.noise)
        )

    def visit(self, client: Ints, read: Floats, batches: Any) -> Floats:
        """w_{i,Q}; `batches` has the axes (slots, Q, rows)."""
        w = read
        for q in range(self.Q):
            batch = [slot[q] if self.quiet else slot[q] * self.noise_ for slot in batches]
            w = w - self.eta_ * self.gradient(client, w, batch)
        if self.Q > 1:
            self.farthest[self.live] = np.maximum(
                self.farthest[self.live], np.sqrt(((w - self.problem.centre) ** 2).sum(1))
            )
        return w

    def plain(self, client: Ints, w: Floats, batch: Sequence[Any]) -> Floats:
        return self.problem.gradient(client, w, batch[0])

    def maml(self, client: Ints, w: Floats, batch: Sequence[Any]) -> Floats:
        """(I - alpha H(w; D'')) grad f(w - alpha grad f(w; D'); D)"""
        f = self.problem
        gradient = f.gradient(client, w - self.alpha_ * f.gradient(client, w, batch[1]), batch[0])
        return gradient - self.alpha_ * f.hessian_vector(client, w, gradient, batch[2])

    def moreau(self, client: Ints, w: Floats, batch: Sequence[Any]) -> Floats:
        """lam (w - theta), theta by gradient steps of size 1 / (lam + L) from w until |grad h| <= nu."""
        theta = w
        for _ in range(MOST_INNER_STEPS):
            slope = self.problem.gradient(client, theta, batch[0]) + self.lam_ * (theta - w)
            going = (slope**2).sum(1, keepdims=True) > self.nu_**2
            if not going.any():
                return self.lam_ * (w - theta)
            theta = theta - (self.lr_ * going) * slope
            self.inner[self.live] += going[:, 0]
        raise DivergenceError(f"the inner minimisation of the simulation does not reach nu={float(self.nu_.min()):g}")
