"""SIGINT and SIGTERM: a clean stop within seconds, with exit code 130, and the rest when the run is resumed."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.faults.harness import Case, overrides, survived, wait_for_checkpoint
from tests.faults.servers import Misbehaving

WITHIN = 5.0
"""Seconds of the promise in docs/reliability.md: measured in the long form only, on a machine that does nothing else."""


def stop(case, attempt, number, within=60.0):
    """Whether it stopped (or ended well, just then); measured from the signal."""
    sent = time.monotonic()
    attempt.signal(number)
    assert case.starter.wait(attempt, 60), "it does not stop"
    took = time.monotonic() - sent
    assert took < within, (took, attempt.said())
    assert "Traceback" not in attempt.said(), attempt.said()
    if attempt.code == 0:
        case.check(attempt)
        return False
    assert attempt.code == 130, (attempt.code, attempt.said())
    assert "the same command with --resume continues" in attempt.said()
    survived[f"{signal.Signals(number).name}, stopped"] += 1
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_run_cleanly_and_it_can_be_resumed(number, nursery, empty_store, tmp_path):
    case = Case(overrides("fedasync", "processes"), tmp_path, empty_store, nursery)
    attempt = case.start(resume=False)
    wait_for_checkpoint(case, attempt)
    assert stop(case, attempt, number)
    case.check(case.start())


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_signals_at_random_moments(executor, nursery, empty_store, tmp_path):
    """Also while the last evaluations go on and while the store is being opened; not before the first lines of the program."""
    chance = random.Random(executor)
    case = Case(overrides("persafl_maml", executor), tmp_path, empty_store, nursery)
    stops = 0
    while stops < 8:
        attempt = case.start()
        if case.starter.wait(attempt, 0.3 + chance.uniform(0, 1) * case.wall_seconds):
            case.check(attempt)
            continue
        stops += stop(case, attempt, chance.choice([signal.SIGINT, signal.SIGTERM]), WITHIN)
    case.check(case.start())


def test_a_tracking_server_that_hangs_does_not_keep_a_run_from_stopping(nursery, empty_store, tmp_path):
    case = Case(overrides("fedasync", "serial"), tmp_path, empty_store, nursery)
    usual = list(case.overrides)
    with Misbehaving(delay=600) as server:
        case.overrides.append(f"tracking.uri={server.uri}")
        attempt = case.start(resume=False)
        give_up_at = time.monotonic() + 60
        while not server.requests:
            assert time.monotonic() < give_up_at
            assert not nursery.wait(attempt, 0.1), attempt.said()
        assert not nursery.wait(attempt, 1.0), attempt.said()
        assert stop(case, attempt, signal.SIGTERM)
    case.overrides[:] = usual
    case.check(case.start())
    survived["tracking server that hangs, while stopping"] += 1
