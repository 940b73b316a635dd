"""Sweeps as they are run: real processes, a real store, killed at any moment; and a real Ray cluster that loses a node."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from persafl_lit.tracking import store_uri
from persafl_lit.tracking.store import Store

SWEEP = """name: kills
overrides: [model=logistic, clients=6, updates=60, local_steps=2, eval.every=1.0, tracking.model=false, tracking.figures=false, checkpoint.every=5]
grid:
  - {method: fedasync, method.beta: [0.8, 1.2]}
  - {method: persafl_me, method.lam: [20, 30]}
seeds: [0, 1]
"""
TRIALS = 8
COMMAND = [sys.executable, "-m", "persafl_lit", "sweep", "kills.yaml"]


def folder_with_sweep(path, text=SWEEP):
    path.mkdir(parents=True)
    (path / "kills.yaml").write_text(text)
    return path


def start(folder, *options, **environment):
    return subprocess.Popen(
        [*COMMAND, *options],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def finish(folder, *options, code=0, **environment):
    process = start(folder, *options, **environment)
    out, err = process.communicate(timeout=400)
    assert process.returncode == code, err
    return out, err


def results(folder):
    """The table, whose bits must not depend on what happened on the way."""
    return (folder / "mlruns/sweeps/kills/trials.csv").read_bytes()


def runs(folder, where="tags.`persafl.trial` != ''", uri=None):
    store = Store(uri or store_uri(f"sqlite:///{folder}/mlruns/mlflow.db"))
    return store.search([experiment.experiment_id for experiment in store.client.search_experiments()], where)


def histories(folder):
    """Every metric of every trial at every moment, but those of wall time."""
    store = Store(store_uri(f"sqlite:///{folder}/mlruns/mlflow.db"))
    found = {}
    for run in runs(folder):
        for name in run.data.metrics:
            if name != "wall_seconds":
                values = [
                    (metric.step, metric.timestamp, metric.value)
                    for metric in store.client.get_metric_history(run.info.run_id, name)
                ]
                found[run.data.tags["persafl.trial"], name] = sorted(values)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = folder_with_sweep(tmp_path_factory.mktemp("sweeps") / "undisturbed")
    finish(folder)
    return folder


@pytest.mark.slow
def test_a_sweep_is_a_parent_with_a_finished_child_for_every_trial(undisturbed):
    rows = list(csv.DictReader(results(undisturbed).decode().splitlines()))
    assert len(rows) == TRIALS
    assert {row["status"] for row in rows} == {"finished"}
    (parent,) = runs(undisturbed, "tags.`persafl.kind` = 'sweep'")
    children = runs(undisturbed)
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.data.tags["persafl.sweep"] for run in children} == {"kills"}
    assert {run.data.tags["persafl.trial"] for run in children} == {row["trial"] for row in rows}
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    assert {run.info.run_name for run in children} >= {"fedasync beta=0.8 seed=0", "persafl_me lam=30.0 seed=1"}
    assert {run.data.params["method.lam"] for run in children if run.data.tags["persafl.method"] == "persafl_me"} == {
        "20.0",
        "30.0",
    }
    store = Store(store_uri(f"sqlite:///{undisturbed}/mlruns/mlflow.db"))
    assert store.text(parent.info.run_id, "sweep.yaml") == SWEEP
    assert store.text(parent.info.run_id, "trials.csv").encode() == results(undisturbed)
    assert len(json.loads(store.text(parent.info.run_id, "trials.json"))["data"]) == TRIALS
    assert not list((undisturbed / "mlruns/checkpoints/kills").glob("*"))
    assert not list((undisturbed / "mlruns/sweeps/kills").glob("*.log"))  # the processes had nothing to say


@pytest.mark.slow
def test_a_trial_is_what_the_run_command_makes_of_it(undisturbed, tmp_path):
    command = [sys.executable, "-m", "persafl_lit", "run", "--json", "tracking.enabled=false", "executor=serial"]
    settings = SWEEP.splitlines()[1].partition("[")[2].rstrip("]").split(", ")
    out = subprocess.run(
        [*command, *settings, "method=persafl_me", "method.lam=30", "seed=1"],
        capture_output=True,
        cwd=tmp_path,
        check=True,
    ).stdout
    summary = json.loads(out)
    row = list(csv.DictReader(results(undisturbed).decode().splitlines()))[-1]
    assert (float(row["accuracy.val"]), float(row["loss.test"])) == (
        summary["accuracy"]["val"],
        summary["loss"]["test"],
    )


@pytest.mark.slow
def test_a_finished_sweep_has_nothing_left_to_do(undisturbed):
    before = results(undisturbed)
    out, err = finish(undisturbed)
    assert "8 trials, 8 finished" in out
    assert "/8" not in err  # no trial was begun
    assert results(undisturbed) == before
    assert len(runs(undisturbed)) == TRIALS


def said(process, pattern):
    """Wait for a line on stderr; False if the process ends without it."""
    return any(re.search(pattern, line) for line in process.stderr)


def workers_of(process):
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    return [int(pid) for pid in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        ["launcher", "worker", "interrupt"],
        pytest.param(["launcher", "worker", "launcher", "interrupt", "worker", "launcher"], marks=pytest.mark.faults),
    ],
    ids=["few", "many"],
)
def test_kills_between_and_within_trials_change_nothing(kinds, undisturbed, tmp_path):
    folder = folder_with_sweep(tmp_path / "killed")
    dice = random.Random(20)
    survived = 0
    for kind in kinds:
        process = start(folder)
        if not said(process, rf"\d/{TRIALS} "):
            break
        survived += 1  # a trial has ended, another one has begun or is under way
        if kind == "worker":
            if workers := workers_of(process):
                os.kill(dice.choice(workers), signal.SIGKILL)
            said(process, rf"\d/{TRIALS} |it is tried again")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) in (0, 130)
        elif kind == "interrupt":
            process.send_signal(signal.SIGINT)
            assert process.wait(60) in (0, 130)
        else:
            process.kill()
            process.wait()
        process.communicate()
    finish(folder)
    assert survived >= 2
    assert results(folder) == results(undisturbed)
    children = runs(folder)
    assert len(children) == TRIALS
    assert {run.info.status for run in children} == {"FINISHED"}
    assert {run.info.status for run in runs(folder, "tags.`persafl.kind` = 'sweep'")} == {"FINISHED"}
    assert histories(folder) == histories(undisturbed)


@pytest.mark.slow
def test_what_diverges_fails_once_and_the_rest_goes_on(tmp_path):
    text = SWEEP.replace("method.beta: [0.8, 1.2]", "method.beta: [0.8], eta: [0.01, 1e9]").replace(
        "seeds: [0, 1]", "seeds: [0]"
    )
    folder = folder_with_sweep(tmp_path / "diverging", text.replace("model=logistic", "model=mlp, 'model.hidden=[8]'"))
    out, err = finish(folder, code=3)
    assert "4 trials, 3 finished, 1 failed" in out
    assert (
        "failed: fedasync beta=0.8 eta=1000000000.0 seed=0: DivergenceError: the evaluation after update 0 diverges"
        in out
    )
    (failed,) = [run for run in runs(folder) if run.info.status == "FAILED"]
    assert failed.data.tags["persafl.error"].startswith("DivergenceError")
    _, err = finish(folder, code=3)
    assert "/4" not in err
    _, err = finish(folder, "--retry-failed", code=3)
    assert "4/4 fedasync beta=0.8 eta=1000000000.0 seed=0: failed" in err
    assert len(runs(folder)) == 4
    rows = json.loads(finish(folder, "--json", code=3)[0])
    assert [row["status"] for row in rows["trials"]] == ["finished", "failed", "finished", "finished"]


@pytest.mark.slow
def test_a_sweep_under_way_is_not_begun_a_second_time(tmp_path):
    folder = folder_with_sweep(tmp_path / "twice")
    first = start(folder)
    lock = folder / "mlruns/sweeps/kills/lock"
    while not (lock.exists() and lock.read_text()):
        assert first.poll() is None
        time.sleep(0.1)
    _, err = finish(folder, code=2)
    assert f"the sweep kills is under way already (process {first.pid})" in err
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "the same command goes on" in err
    assert "RUNNING" not in {run.info.status for run in runs(folder, "")}


@pytest.mark.slow
def test_a_trial_that_was_killed_and_is_no_longer_in_the_file_does_not_run_for_ever(tmp_path):
    folder = folder_with_sweep(tmp_path / "shrunk", SWEEP.replace("updates=60", "updates=3000"))
    first = start(folder)
    while len(list((folder / "mlruns/checkpoints/kills").glob("*.pt"))) < 2:
        assert first.poll() is None
        time.sleep(0.2)
    first.kill()
    first.communicate()
    assert {run.info.status for run in runs(folder)} == {"RUNNING"}
    again = start(folder)
    assert re.match(
        r"0 of 8 trials are done already; [12] of the others goe?s? on from a checkpoint", again.stderr.readline()
    )
    again.kill()
    again.communicate()
    (folder / "kills.yaml").write_text(
        SWEEP.replace("method.beta: [0.8, 1.2]", "method.beta: [1.0]").replace("seeds: [0, 1]", "seeds: [0]")
    )
    finish(folder)
    assert sorted(run.info.status for run in runs(folder)) == ["FINISHED"] * 3 + ["KILLED"] * 2


@pytest.mark.slow
def test_an_adaptive_search_prunes_remembers_and_goes_on(tmp_path):
    text = """name: kills
overrides: [model=logistic, clients=6, updates=60, local_steps=2, eval.every=1.0, tracking.model=false, tracking.figures=false, checkpoint.every=5]
grid:
  - {method: persafl_me, method.lam: {low: 1, high: 50, log: true}, eta: [1e-5, 0.02, 0.01]}
seeds: [0, 1]
search: {how: adaptive, trials: 12}
"""
    folder = folder_with_sweep(tmp_path / "searched", text)
    first = start(folder)
    while (
        not (folder / "mlruns/sweeps/kills/optuna.db").exists()
        or len(list((folder / "mlruns/checkpoints/kills").glob("*"))) == 0
    ):
        assert first.poll() is None
        time.sleep(0.2)
    first.kill()
    first.communicate()
    found = json.loads(finish(folder, "--json")[0])
    status = [row["status"] for row in found["trials"]]
    assert len(status) == 13
    assert 0 < status.count("pruned") < 10
    assert found["chosen"][0]["setting"]["eta"] > 1e-5
    assert len({row["trial"] for row in found["trials"]}) == len(runs(folder)) == 13
    assert {run.info.status for run in runs(folder) if "persafl.pruned" not in run.data.tags} == {"FINISHED"}
    again = json.loads(finish(folder, "--json")[0])
    assert {row["trial"]: row["status"] for row in again["trials"]} == {
        row["trial"]: row["status"] for row in found["trials"]
    }


# -- Ray --------------------------------------------------------------------------------------------------------------

CLUSTER = """
import os, signal, subprocess, sys, time, urllib.request
from pathlib import Path
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
cluster.wait_for_nodes()
refused = subprocess.run([*sys.argv[1:], "--launcher", "ray", "--address", cluster.address], capture_output=True, text=True)
assert refused.returncode == 2 and "a cluster of 2 machines cannot share the store" in refused.stderr, refused.stderr
server = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", "sqlite:///mlruns/mlflow.db", "--artifacts-destination", "mlruns/artifacts"]
server = subprocess.Popen([*server, "--port", "5055", "--workers", "1"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
os.environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:5055"
for attempt in range(600):
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open("http://127.0.0.1:5055/health", timeout=1)
        break
    except OSError:
        time.sleep(0.1)
sweep = subprocess.Popen([*sys.argv[1:], "--launcher", "ray", "--address", cluster.address])
checkpoints = Path("mlruns/checkpoints/kills")
while sweep.poll() is None and len(list(checkpoints.glob("*.pt"))) < 2:
    time.sleep(0.2)
assert sweep.poll() is None, "the sweep was over before the node could be killed"
cluster.remove_node(second, allow_graceful=False)
print("NODE KILLED", flush=True)
code = sweep.wait(400)
os.killpg(server.pid, signal.SIGTERM)
server.wait()
cluster.shutdown()
sys.exit(code)
"""


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_gives_the_same_bits(tmp_path):
    """Two real nodes in a network of their own, because Ray's services listen on all interfaces."""
    pytest.importorskip("ray")
    text = SWEEP.replace("updates=60", "updates=150").replace("seeds: [0, 1]", "seeds: [0]")
    folder, alone = folder_with_sweep(tmp_path / "ray", text), folder_with_sweep(tmp_path / "alone", text)
    (folder / "cluster.py").write_text(CLUSTER)
    inside = (
        ["unshare", "-n", "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$@"', "sh"] if os.geteuid() == 0 else []
    )
    (folder / "mlruns").mkdir()
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    command = [*inside, sys.executable, "cluster.py", *COMMAND]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=580, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "NODE KILLED" in done.stdout
    finish(alone)
    assert results(folder) == results(alone)
    assert len(runs(folder)) == TRIALS // 2
    assert {run.info.status for run in runs(folder)} == {"FINISHED"}
    assert histories(folder) == histories(alone)


def test_ray_says_what_it_cannot_reach(tmp_path, capsys):
    pytest.importorskip("ray")
    from persafl_lit.cli import main

    Path("kills.yaml").write_text(SWEEP)
    assert main(["sweep", "kills.yaml", "--launcher", "ray", "--address", "127.0.0.1:1"]) == 2
    assert "--launcher ray cannot reach the cluster at 127.0.0.1:1" in capsys.readouterr().err
