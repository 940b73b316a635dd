"""Checkpoints on disk: damaged ones are recognised, two are kept, and one process at a time writes them."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from persafl_lit import compose, run
from persafl_lit.cli import main
from persafl_lit.common.lock import Lock
from persafl_lit.common.sealed_file import MARK
from persafl_lit.engine.checkpoint import FORMAT, Checkpoint
from persafl_lit.engine.experiment import Interrupted
from persafl_lit.errors import CheckpointError, DivergenceError, UnwritableError
from persafl_lit.sweep.run_trial import Order, forget, run_trial
from persafl_lit.tracking import store_uri
from tests.support.runs import BASE, interrupted, run_for

OVERRIDES = [*BASE, "method=fedasync", "tracking.enabled=false"]


def two_checkpoints():
    """After updates 21 (by request) and 14 (by `every`)."""
    interrupted([*OVERRIDES, "checkpoint.every=14"], 21)
    checkpoint = Checkpoint(compose(OVERRIDES).checkpoint_path)
    return checkpoint.path, checkpoint.previous


def signed(payload):
    return payload + MARK + hashlib.sha256(payload).hexdigest().encode()


def saved(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return signed(buffer.getvalue())


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "empty", "junk", "one bit", "longer", "missing"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(damage, capsys):
    whole = run(OVERRIDES)
    newest, _ = two_checkpoints()
    content = newest.read_bytes()
    places = {
        "truncated": [content[:-1]],
        "empty": [b""],
        "junk": [b"\x80\x02junk"],
        "one bit": [flipped(content, len(content) * k // 7) for k in range(7)],
        "longer": [content + b"\0"],
        "missing": [None],
    }
    for changed in places[damage]:
        newest.unlink() if changed is None else newest.write_bytes(changed)
        capsys.readouterr()
        with pytest.raises(Interrupted, match="after update 15 of 40"):
            run_for([*OVERRIDES, "checkpoint.every=0"], 1, resume=True)
        said = capsys.readouterr().err
        assert "resuming after update 14 of 40" in said
        if changed is not None:
            assert (
                f"{newest.name} is truncated or was changed: its checksum is wrong; the one before it is used" in said
            )
        newest.unlink()
    resumed = run(OVERRIDES, resume=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


def test_a_damaged_file_never_takes_the_place_of_the_sound_one():
    newest, previous = two_checkpoints()
    sound = previous.read_bytes()
    newest.write_bytes(b"junk")
    with pytest.raises(Interrupted, match="after update 15"):
        run_for([*OVERRIDES, "checkpoint.every=0"], 1, resume=True)
    assert previous.read_bytes() == sound
    assert newest.stat().st_size > 1000


def test_two_damaged_checkpoints_are_one_sentence(capsys):
    for file in two_checkpoints():
        file.write_bytes(file.read_bytes()[:1000])
    assert main(["run", *OVERRIDES, "--resume"]) == 2
    said = capsys.readouterr().err
    assert said.count("its checksum is wrong") == 2
    assert said.rstrip().endswith("delete both to start anew")
    assert said.count("\n") == 1


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


@pytest.mark.parametrize(
    "content",
    [
        signed(pickle.dumps({"format": FORMAT, "identity": Attack()})),
        saved({"format": FORMAT, "identity": Attack()}),
        saved([1, 2]),
        saved({"format": FORMAT - 1}),
    ],
)
def test_a_forged_checkpoint_runs_no_code(content, tmp_path):
    newest, previous = two_checkpoints()
    newest.write_bytes(content)
    previous.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: |is of another version"):
        run(OVERRIDES, resume=True)
    assert not (tmp_path / "attacked").exists()


def test_a_sound_file_with_other_content_is_refused():
    newest, previous = two_checkpoints()
    content = torch.load(newest, weights_only=True)
    previous.unlink()
    for change in ({"state": {"w": torch.zeros(3)}}, {"pending": 5}, {"tally": {"mood": "good"}}, {"points": [[1]]}):
        newest.write_bytes(saved(content | change))
        with pytest.raises(CheckpointError, match="does not hold what this version writes"):
            run(OVERRIDES, resume=True)
    newest.write_bytes(saved(content | {"identity": "another"}))
    with pytest.raises(CheckpointError, match="belongs to another run"):
        run(OVERRIDES, resume=True)
    newest.write_bytes(saved(content))
    assert run(OVERRIDES, resume=True).points[-1].updates == 40


def test_a_checkpoint_of_an_earlier_version_is_refused_with_a_way_out(capsys):
    """The hash of a config is as in 0.1, so that its checkpoints are found, and told what they are."""
    newest, previous = two_checkpoints()
    previous.unlink()
    newest.write_bytes(saved({"format": 4, "identity": "x", "state": {}}))
    assert main(["run", *OVERRIDES, "--resume"]) == 2
    said = capsys.readouterr().err
    assert (
        "an earlier one, and cannot be continued by this one; finish the run with that version, or run without --resume"
        in said
    )
    assert said.count("\n") == 1


# -- when -------------------------------------------------------------------------------------------------------------


def test_seconds_between_checkpoints_are_wall_time(tmp_path, monkeypatch):
    """0.3 s per update by a clock of the test's, a checkpoint each second at most: after 1.2, 2.4 and 3.6 seconds."""
    clock, saved = [0.0], []
    monkeypatch.setattr("persafl_lit.engine.experiment.time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Clock:
        def on_update(self):
            clock[0] += 0.3

        def on_checkpoint(self, experiment):
            saved.append(experiment.state.arrivals)

    run([*OVERRIDES, "checkpoint.every=0", "checkpoint.seconds=1", "updates=14"], callbacks=[Clock()])
    assert saved == [4, 8, 12]
    assert not list((tmp_path / "mlruns" / "checkpoints").iterdir())


class Clocked:
    """Wall time from the start of a run to its last update."""

    def on_run_start(self):
        self._start = time.monotonic()

    def on_update(self):
        self.wall_seconds = time.monotonic() - self._start


def test_the_time_before_an_interruption_counts():
    class Slow:
        updates = 0

        def on_update(self):
            self.updates += 1
            if self.updates <= 10:
                time.sleep(0.2)

    slow = Slow()
    with pytest.raises(Interrupted):
        run(OVERRIDES, callbacks=[slow], should_stop=lambda: slow.updates >= 10)
    second = run(OVERRIDES, resume=True, callbacks=[again := Clocked()])
    assert second.wall_seconds >= 10 * 0.2 + again.wall_seconds


def test_a_run_that_diverges_leaves_no_checkpoint(tmp_path):
    with pytest.raises(DivergenceError):
        run(
            [
                "data=quadratic",
                "method=fedasync",
                "eta=10",
                "updates=500",
                "checkpoint.every=1",
                "tracking.enabled=false",
            ]
        )
    folder = tmp_path / "mlruns" / "checkpoints"
    assert folder.is_dir(), "it had written some"
    assert not list(folder.iterdir())


# -- one process at a time --------------------------------------------------------------------------------------------


def hold(path, ready, seconds):
    assert Lock(path).acquire()
    ready.set()
    time.sleep(seconds)


def other_process(seconds):
    """A process that holds the checkpoints of OVERRIDES for so long and is then gone without a word."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    path = Checkpoint(compose(OVERRIDES).checkpoint_path).lock.path
    process = context.Process(target=hold, args=(path, ready, seconds))
    process.start()
    assert ready.wait(30)
    return process


def test_a_run_that_another_process_is_doing_is_not_resumed(capsys):
    two_checkpoints()
    other = other_process(60)
    capsys.readouterr()
    assert main(["run", *OVERRIDES, "--resume"]) == 2
    assert (
        capsys.readouterr().err
        == f"persafl: process {other.pid} is doing this run now; wait for it, or stop it and then resume\n"
    )
    other.kill()
    other.join()
    assert run(OVERRIDES, resume=True).points[-1].updates == 40


def test_a_second_run_of_the_same_config_writes_no_checkpoints(capsys):
    files = two_checkpoints()
    before = [file.read_bytes() for file in files]
    other = other_process(60)
    result = run(OVERRIDES)
    assert (
        f"process {other.pid} is doing the same run and keeps its checkpoints; this one writes none"
        in capsys.readouterr().err
    )
    assert result.points[-1].updates == 40
    with pytest.raises(Interrupted, match="after update 21 of 40, without a checkpoint"):
        run_for(OVERRIDES, 21)
    with pytest.raises(CheckpointError, match=f"process {other.pid} is doing the same run"):
        run_for([*OVERRIDES, "checkpoint.every=0"], 21)
    assert [file.read_bytes() for file in files] == before
    other.kill()
    other.join()


def test_a_run_may_wait_for_another_process_to_end():
    two_checkpoints()
    other = other_process(3)
    assert run(OVERRIDES, resume=True, wait_seconds=60).points[-1].updates == 40
    other.join()


def test_a_claim_may_wait_for_another_process_to_end():
    checkpoint = Checkpoint(compose(OVERRIDES).checkpoint_path)
    other = other_process(1.5)
    with checkpoint:
        assert not checkpoint.claim()
        assert not checkpoint.claim(wait_seconds=0.3)
        assert checkpoint.claim(wait_seconds=30)
        assert checkpoint.lock.holder() == os.getpid()
        assert not Checkpoint(checkpoint.path).claim(), "threads of one process are kept apart, too"
    other.join()
    assert not checkpoint.lock.path.exists()
    with Checkpoint(checkpoint.path) as again:
        assert again.claim()


def test_asking_who_holds_a_lock_does_not_end_it(tmp_path):
    """A record lock ends when its process closes any descriptor of the file."""
    lock = Lock(tmp_path / "run.lock")
    assert lock.acquire()
    other = Lock(tmp_path / "run.lock")
    assert not other.acquire(), "another thread's"
    assert other.holder() == os.getpid()
    code = "import sys; from pathlib import Path; from persafl_lit.common.lock import Lock; sys.exit(Lock(Path('run.lock')).acquire())"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0, "still held"
    lock.release()
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 1


def test_a_disk_that_is_full_costs_a_trial_none_of_its_checkpoints(tmp_path, monkeypatch):
    config = compose([*BASE, "method=fedasync", "checkpoint.every=14"])
    with pytest.raises(Interrupted):
        run_for(config, 21)
    before = sorted(path.name for path in config.checkpoint_path.parent.glob("*.pt"))

    def full(self, *rest):
        raise UnwritableError("cannot write the checkpoint: No space left on device")

    monkeypatch.setattr(Checkpoint, "save", full)
    order = Order(trial="x", config=config.values, run_id=None, uri=store_uri(None), folder=str(tmp_path))
    assert run_trial(order, lambda message: None, lambda: False) == {
        "transient": "UnwritableError: cannot write the checkpoint: No space left on device"
    }
    assert sorted(path.name for path in config.checkpoint_path.parent.glob("*.pt")) == before
    assert len(before) == 2
    forget(config.checkpoint_path)
    assert not list(config.checkpoint_path.parent.iterdir())


ORPHANS = """
import os, sys, time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from persafl_lit.common.lock import Lock
assert Lock(Path("run.lock")).acquire()
child = get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_orphaned_workers_do_not_keep_the_claim(tmp_path):
    """A worker process has every file that its parent had open, and may live on a while after the parent was killed."""
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    orphan = int(parent.stdout.readline())
    lock = Lock(tmp_path / "run.lock")
    assert not lock.acquire()
    parent.kill()
    parent.wait()
    os.kill(orphan, 0)
    assert lock.acquire(wait_seconds=5)
    os.kill(orphan, signal.SIGKILL)
    lock.release()


def contend(path, rounds, counter):
    for _ in range(rounds):
        lock = Lock(path)
        assert lock.acquire(wait_seconds=60)
        number = int(counter.read_text())
        time.sleep(0.001)
        counter.write_text(str(number + 1))
        lock.release()


def test_a_lock_that_is_removed_when_given_back_still_excludes(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=contend, args=(tmp_path / "lock", 25, counter)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert counter.read_text() == "100"
