"""Workers killed, checkpoints damaged, the clock turned back, two processes at once."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from persafl_lit.common.lock import Lock
from tests.faults.harness import Case, Fresh, overrides, session_of, survived, wait_for_checkpoint


def workers_of(attempt):
    return [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if pid != attempt.pid and session_of(pid) == attempt.pid
    ]


@pytest.mark.slow
@pytest.mark.faults
def test_workers_killed_at_random_moments_change_nothing(nursery, empty_store, tmp_path):
    chance = random.Random(4)
    case = Case(overrides("persafl_maml", "processes", "updates=300"), tmp_path, empty_store, nursery)
    kills = 0
    while kills < 10:
        attempt = case.start(resume=False)
        while not case.starter.wait(attempt, chance.uniform(0.1, 0.4) * case.wall_seconds):
            if found := workers_of(attempt):
                os.kill(chance.choice(found), signal.SIGKILL)
                kills += 1
        case.check(attempt)
    survived["kill -9 of a worker process"] += kills


@pytest.mark.slow
@pytest.mark.faults
def test_a_damaged_checkpoint_after_a_kill_changes_nothing(nursery, empty_store, tmp_path):
    chance = random.Random(5)
    case = Case(overrides("fedbuff", "processes"), tmp_path, empty_store, nursery)
    folder = tmp_path / "faulty" / "mlruns" / "checkpoints"
    damaged = 0
    while damaged < 8:
        attempt = case.start(resume=False)
        while not list(folder.glob("*.previous.pt")):
            assert not nursery.wait(attempt, 0.02), attempt.said()
        attempt.signal(signal.SIGKILL)
        nursery.wait(attempt, 30)
        newest = next((file for file in folder.glob("*.pt") if not file.name.endswith(".previous.pt")), None)
        if newest is None:  # killed between two renames: the one before is the only one, and enough
            case.check(case.start())
            continue
        content = bytearray(newest.read_bytes())
        if chance.random() < 0.5:
            content = content[: chance.randrange(len(content))]
        else:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        newest.write_bytes(content)
        resumed = case.start()
        case.check(resumed)
        assert "its checksum is wrong; the one before it is used" in resumed.said()
        damaged += 1
        survived["damaged checkpoint"] += 1


def test_a_clock_that_jumps_back_a_day_changes_nothing(nursery, empty_store, tmp_path):
    case = Case(
        overrides("fedasync", "processes", "checkpoint.every=0", "checkpoint.seconds=0.2"),
        tmp_path,
        empty_store,
        nursery,
    )
    attempt = case.start(resume=False, clock=(0.3, 86_400.0))
    wait_for_checkpoint(case, attempt)
    case.check(attempt)
    survived["clock that jumps back a day"] += 1


@pytest.mark.slow
def test_of_two_processes_that_resume_the_same_run_the_second_is_refused(nursery, empty_store, tmp_path):
    case = Case(overrides("fedasync", "serial", "updates=600"), tmp_path, empty_store, nursery)
    killed = case.start(resume=False)
    wait_for_checkpoint(case, killed)
    killed.signal(signal.SIGKILL)
    nursery.wait(killed, 30)

    fresh = Fresh()
    first = case.start(starter=fresh)
    (stale,) = (tmp_path / "faulty" / "mlruns" / "checkpoints").glob("*.lock")
    give_up_at = time.monotonic() + 60
    while Lock(stale).holder() != first.pid:
        assert time.monotonic() < give_up_at
        assert not fresh.wait(first, 0.02), first.said()
    second = case.start()
    case.finish(second, code=2)
    assert (
        second.said()
        == f"persafl: process {first.pid} is doing this run now; wait for it, or stop it and then resume\n"
    )
    assert fresh.wait(first, 120)
    case.check(first)
    survived["two processes that resume one run"] += 1
