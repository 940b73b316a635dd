"""Checkpoints: atomic, small, only for their own run; resuming changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import mlflow
import pytest
import torch

from persafl_lit import compose, run
from persafl_lit.errors import CheckpointError, Interrupted
from persafl_lit.tracking import store_uri
from tests.support.runs import BASE, METHODS, interrupted, run_for


def newest(folder, overrides):
    return folder / "mlruns" / "checkpoints" / f"{compose(overrides).hash()}.pt"


@pytest.mark.parametrize("method", METHODS)
def test_resuming_changes_nothing(method):
    overrides = [*BASE, f"method={method}", *METHODS[method], "tracking.enabled=false"]
    whole = run(overrides)
    for stops in ((0,), (11, 12), (40,)):
        for updates in stops:
            with pytest.raises(Interrupted):
                run_for(overrides, updates, resume=True)
        resumed = run(overrides, resume=True)
        for name, value in whole.state_dict().items():
            assert torch.equal(value, resumed.state_dict()[name])
        assert json.dumps(whole.curves()) == json.dumps(resumed.curves())
        assert whole.clients() == resumed.clients()


def test_a_finished_run_leaves_no_checkpoint_and_an_interrupted_one_a_small_one(tmp_path):
    overrides = [*BASE, "method=fedasync", "tracking.enabled=false"]
    interrupted(overrides, 21)
    folder, name = tmp_path / "mlruns" / "checkpoints", compose(overrides).hash()
    files = {folder / f"{name}.pt", folder / f"{name}.previous.pt"}
    assert set(folder.iterdir()) == files, "the last two, and nothing else"
    (folder / f"{name}.12345.tmp").write_text("left by a process that was killed")
    model = sum(value.numel() * 4 for value in run(overrides).state_dict().values())
    assert not list(folder.iterdir()), "the finished run has removed them"
    interrupted(overrides, 21)
    for file in files:
        assert file.stat().st_size < 10 * model + 50_000, "models in flight, not one per client or update"


def test_a_model_read_by_many_is_stored_once(tmp_path):
    overrides = [*BASE, "method=fedavg", "schedule.cohort=8", "tracking.enabled=false"]
    interrupted(overrides, 18)
    content = torch.load(newest(tmp_path, overrides), weights_only=True)
    assert len(content["pending"]) > 3
    assert len({job[2] for job in content["pending"].values()}) == len(content["reads"]) == 1


def test_without_resume_a_run_starts_anew():
    overrides = [*BASE, "method=fedasync", "tracking.enabled=false"]
    interrupted(overrides, 21)
    seen = []

    class Watch:
        def on_update(self, experiment):
            seen.append(experiment.state.arrivals - 1)

    run(overrides, callbacks=[Watch()])
    assert seen[0] == 0
    interrupted(overrides, 21)
    seen.clear()
    run(overrides, resume=True, callbacks=[Watch()])
    assert seen[0] == 21


def test_resuming_says_where_it_goes_on(capsys):
    overrides = [*BASE, "method=fedasync", "tracking.enabled=false"]
    interrupted(overrides, 21)
    run(overrides, resume=True)
    assert "resuming after update 21 of 40" in capsys.readouterr().err
    run(overrides, resume=True)
    assert "resuming nothing: no interrupted run of this config" in capsys.readouterr().err


def test_a_changed_timeline_file_is_another_run(tmp_path):
    """The config only names the file; the checkpoint knows what was in it."""
    timeline = compose([*BASE, "method=fedasync"]).timeline(8)
    (tmp_path / "t.csv").write_text(timeline.to_csv())
    overrides = [*BASE, "method=fedasync", "schedule=replay", "schedule.path=t.csv", "tracking.enabled=false"]
    interrupted(overrides, 21)
    shifted = compose([*BASE, "method=fedasync", "seed=1"]).timeline(8)
    (tmp_path / "t.csv").write_text(shifted.to_csv())
    with pytest.raises(CheckpointError, match="belongs to another run"):
        run(overrides, resume=True)


# -- processes --------------------------------------------------------------------------------------------------------

SLOW = ["method=persafl_me", "method.inner_steps=3", "model=mlp", "clients=8", "updates=300", "checkpoint.every=5"]


def start(*more):
    command = [sys.executable, "-m", "persafl_lit", "run", *SLOW, "--json", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_checkpoint(process, folder):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if list(folder.glob("*.pt")):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("no checkpoint in two minutes")


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_process_resumes_to_the_same_result_in_the_same_tracking_run(tmp_path):
    """kill -9, then SIGTERM (exit 130), then to the end: equal to the undisturbed run, one MLflow run, every metric in it."""
    whole = json.loads(start().communicate()[0])
    checkpoints = tmp_path / "mlruns" / "checkpoints"

    killed = start()
    wait_for_checkpoint(killed, checkpoints)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL

    before = next(checkpoints.glob("*.pt")).stat().st_mtime_ns
    stopped = start("--resume")
    while next(checkpoints.glob("*.pt")).stat().st_mtime_ns == before:
        assert stopped.poll() is None, stopped.communicate()
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)
    _, stderr = stopped.communicate()
    assert stopped.returncode == 130, stderr
    assert "the same command with --resume continues" in stderr

    resumed = json.loads(start("--resume").communicate()[0])
    telling = ("updates", "grad_evals", "accuracy", "loss", "staleness", "sim_time")
    assert {key: whole[key] for key in telling} == {key: resumed[key] for key in telling}
    client = mlflow.MlflowClient(store_uri(None))
    runs = client.search_runs([client.get_experiment_by_name("persafl").experiment_id])
    assert {run.info.run_id for run in runs} == {whole["run_id"], resumed["run_id"]}
    assert {run.info.status for run in runs} == {"FINISHED"}
    histories = [
        [(m.step, m.timestamp, m.value) for m in client.get_metric_history(r["run_id"], "accuracy.test")]
        for r in (whole, resumed)
    ]
    assert histories[0] == histories[1]
