"""kill -9 at random moments: whatever is left behind leads to the same model, summary and metrics."""

from __future__ import annotations

import random

import pytest

from tests.faults.harness import Case, Fresh, overrides
from tests.support.runs import METHODS

KILLS = 7


@pytest.mark.parametrize(("method", "executor", "kills"), [("persafl_me", "processes", 3), ("scaffold", "serial", 3)])
def test_a_few_kills_change_nothing(method, executor, kills, nursery, empty_store, tmp_path):
    Case(overrides(method, executor), tmp_path, empty_store, nursery).survive_kills(kills, random.Random(1))


@pytest.mark.parametrize(
    ("executor", "kills"),
    [("processes", 3), *(pytest.param(name, 28, marks=pytest.mark.faults) for name in ("serial", "processes"))],
)
def test_kills_of_a_run_with_memory_that_a_callback_stops_change_nothing(
    executor, kills, nursery, empty_store, tmp_path
):
    """The callback's own count, the clients' memories and the end of the run at its sixth point survive; MLflow says FINISHED."""
    case = Case(overrides("fedper", executor, "eval.every=6.0"), tmp_path, empty_store, nursery, points=6)
    summary = case.expected[1]
    assert 20 < summary["updates"] < 110
    assert len({step for key, step, *_ in case.expected[2] if key == "accuracy.test"}) == 6
    case.survive_kills(kills, random.Random(f"stop {executor}"))


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("executor", ["serial", "processes"])
@pytest.mark.parametrize("method", METHODS)
def test_many_kills_change_nothing(method, executor, nursery, empty_store, tmp_path):
    chance = random.Random(f"{method} {executor}")
    Case(overrides(method, executor), tmp_path, empty_store, nursery).survive_kills(KILLS, chance)


@pytest.mark.slow
@pytest.mark.faults
def test_kills_of_fresh_processes_change_nothing(nursery, empty_store, tmp_path):
    """From the first import to the last line, with the picture and the model that a run leaves in MLflow."""
    case = Case(
        overrides("fedbuff", "processes", "tracking.model=true", "tracking.figures=true"),
        tmp_path,
        empty_store,
        nursery,
    )
    case.survive_kills(8, random.Random(2), Fresh())


@pytest.mark.slow
@pytest.mark.faults
def test_kills_with_skipped_updates_and_checkpoints_by_the_clock_change_nothing(nursery, empty_store, tmp_path):
    """eta = 2 makes some updates infinite; checkpoints come every 0.1 s."""
    more = ["on_divergence=skip", "checkpoint.every=0", "checkpoint.seconds=0.1"]
    quadratics = [
        "data=quadratic",
        "data.condition=1e12",
        "model=point",
        "clients=8",
        "updates=400",
        "local_steps=9",
        "eta=0.5",
    ]
    settings = [
        "method=fedasync",
        "eval.every=10",
        "eval.finetune=none",
        "workers=2",
        "tracking.model=false",
        "tracking.figures=false",
    ]
    case = Case([*quadratics, *settings, *more], tmp_path, empty_store, nursery)
    assert case.expected[1]["skipped"] > 0
    case.survive_kills(6, random.Random(3))
