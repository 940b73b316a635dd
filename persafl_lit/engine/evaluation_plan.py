"""When to evaluate, whom, and how many evaluations a run can afford."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from persafl_lit.common.seeding import rng
from persafl_lit.data.federation import SPLITS, Federation
from persafl_lit.engine.executors import Work
from persafl_lit.errors import ConfigError
from persafl_lit.learning.personalisation import Finetune
from persafl_lit.timeline import Timeline

MOST_POINTS = 100_000


def affordable_evaluations(work: Work, timeline: Timeline, evaluated: Sequence[int]) -> float:
    """How many evaluations, the last one by all rules, fit into a quarter of the run: into a third of its training.

    A fifth of that is kept back: counted samples are not quite time.
    """
    gradients = work.local_steps * work.objective.cost + work.personal.gradients(work.local_steps)
    training = len(timeline) * gradients * work.batch_size
    rules = list(work.finetune.values())
    own = work.sharing.anything_private or work.personal.keeps  # beside which the shared model is measured
    common = evaluation_cost(work.federation, evaluated, rules[:1], work.batch_size, own)
    everything = evaluation_cost(work.federation, evaluated, rules + rules[:1] * own, work.batch_size, own)
    return 1 + (0.8 * training / 3 - everything) / common


def evaluation_moments(horizon: float, every: float | None, affordable: float = math.inf) -> list[float]:
    """0, every, 2 every, ... and the end. Without `every`: up to ten steps, as many as `affordable` evaluations
    allow."""
    step = every or horizon / max(1, min(10, int(min(affordable, 11.0)) - 1)) or 1.0
    if horizon / step > MOST_POINTS:
        raise ConfigError(
            f"eval.every={step:g} makes more than {MOST_POINTS} evaluations by simulated time {horizon:g}; raise it"
        )
    grid = [k * step for k in range(math.ceil(horizon / step - 1e-9))] or [0.0]
    return [*grid, horizon] if horizon > grid[-1] else grid


def evaluated_clients(federation: Federation, most: int | None, seed: int) -> list[int]:
    """All clients, or `most` of those that train and `most` of the held-out ones, drawn by the seed."""
    trained = federation.trained()
    groups = (range(trained), range(trained, federation.clients))
    if most is None:
        return [client for group in groups for client in group]
    stream = rng(seed, "evaluated clients")
    return [
        int(client) for group in groups for client in sorted(stream.permutation(np.asarray(group, dtype=int))[:most])
    ]


def evaluation_cost(
    federation: Federation, clients: Sequence[int], rules: Sequence[Finetune], batch_size: int, own: bool = False
) -> float:
    """Samples that one evaluation sends through the network and back; a sample that is only measured counts a third.
    Beside an `own` model the shared one is measured, too."""
    cost = 0.0
    for client in clients:
        train, val, test = (federation.count(client, split) for split in SPLITS)
        cost += (
            sum(rule.steps * min(batch_size, train) + rule.full * train for rule in rules)
            + (len(rules) + 1 + own) * (val + test) / 3
        )
    return cost
