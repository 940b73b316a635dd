"""What a run writes to fails: disks that are full or read-only, locked databases, servers that are slow or broken."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time

import mlflow
import pytest

from persafl_lit import run
from persafl_lit.errors import ConfigError
from tests.faults.harness import Case, overrides, survived, wait_for_checkpoint
from tests.faults.servers import Misbehaving
from tests.support.runs import At
from tests.support.tracking import FAST, Server, check_whole, wait_for_run

# -- disks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder, megabytes):
    """A file system of its own over a folder, with what was in it."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small file system needs root")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        for name, content in before.items():
            (folder / name).write_bytes(content)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(file):
    with open(file, "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))


def test_a_full_disk_stops_a_run_with_a_sentence_and_loses_nothing(nursery, empty_store, tmp_path):
    case = Case(overrides("fedasync", "processes", "tracking.patience=1"), tmp_path, empty_store, nursery)
    store = tmp_path / "faulty" / "mlruns"
    with small_disk(store, 8):
        attempt = case.start(resume=False)
        wait_for_checkpoint(case, attempt)
        fill(store / "filler")
        case.finish(attempt, seconds=60, code=2)
        assert attempt.said().count("cannot write the checkpoint") == 1
        assert "No space left on device; make room or choose another checkpoint.dir" in attempt.said()
        assert not list(store.rglob("*.tmp"))
        (store / "filler").unlink()
        case.check(case.start())
    survived["disk full"] += 1


def test_a_read_only_folder_is_one_sentence_before_any_work(nursery, empty_store, tmp_path):
    case = Case(overrides("fedasync", "serial"), tmp_path, empty_store, nursery)
    store, usual = tmp_path / "faulty" / "mlruns", list(case.overrides)
    with small_disk(store, 30):
        subprocess.run(["mount", "-o", "remount,ro", str(store)], check=True)
        for more, sentence in (
            ([], "checkpoints cannot be written below"),
            (["checkpoint.every=0"], "cannot track to tracking.uri=sqlite:///"),
        ):
            case.overrides[:] = [*usual, *more]
            attempt = case.start(resume=False)
            case.finish(attempt, seconds=60, code=2)
            assert sentence in attempt.said()
        subprocess.run(["mount", "-o", "remount,rw", str(store)], check=True)
        case.overrides[:] = usual
        case.check(case.start())
    survived["read-only store"] += 2


# -- a locked database ------------------------------------------------------------------------------------------------

LOCK = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
connection.execute("ROLLBACK")
"""


@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.faults])])
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_database_locked_by_another_process_is_waited_for(when, seconds, nursery, empty_store, tmp_path):
    case = Case(overrides("fedasync", "serial", "tracking.patience=60"), tmp_path, empty_store, nursery)
    database = tmp_path / "faulty" / "mlruns" / "mlflow.db"

    def lock():
        process = subprocess.Popen(
            [sys.executable, "-c", LOCK, str(database), str(seconds)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "locked\n"
        return process

    other = lock() if when == "before" else None
    attempt = case.start(resume=False)
    if other is None:
        while not runs_in(database):
            assert not nursery.wait(attempt, 0.02), attempt.said()
        other = lock()
    case.check(attempt)
    other.wait()
    survived["sqlite locked by another process"] += 1


def runs_in(database):
    with contextlib.closing(sqlite3.connect(database)) as store:
        return store.execute("select count(*) from runs").fetchone()[0]


# -- servers ----------------------------------------------------------------------------------------------------------


def test_a_server_that_only_fails_is_said_within_seconds():
    with Misbehaving(status=500) as server:
        start = time.monotonic()
        with pytest.raises(ConfigError, match=f"cannot track to tracking.uri={server.uri}"):
            run([*FAST, f"tracking.uri={server.uri}"])
        assert server.refused
        assert time.monotonic() - start < 30
    survived["tracking server that answers 500 from the start"] += 1


@pytest.mark.slow
@pytest.mark.faults
def test_a_server_that_is_slow_or_fails_for_a_while_gets_everything(tmp_path, capfd):
    real = Server(tmp_path)
    try:
        with Misbehaving(behind=real.port) as server:
            here = [*FAST, f"tracking.uri={server.uri}", "updates=60", "eval.every=0.5", "tracking.model=false"]

            def slow():
                wait_for_run(real.uri)
                server.delay = 0.5

            slowly = run(here, callbacks=[At(u2=slow)])
            server.delay = 0.0
            check_whole(real.uri, slowly)
            survived["tracking server that takes half a second for each answer"] += 1

            def breaks():
                wait_for_run(real.uri, 2)
                server.status = 500

            def heals():
                while server.refused < 3:
                    time.sleep(0.1)
                server.status = None

            healed = run([*here, "seed=1"], callbacks=[At(u2=breaks, u40=heals)])
            check_whole(real.uri, healed)
            assert "the run goes on and tries again" in capfd.readouterr().err
            survived["tracking server that answers 500 for a while"] += 1
        assert mlflow.MlflowClient(real.uri).get_run(healed.run_id).data.params["seed"] == "1"
    finally:
        real.kill()
