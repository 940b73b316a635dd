"""Serial, worker processes, a Ray cluster: who does the work changes no bit of the result, nor does losing some of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import lightning as L
import pytest
import torch
from torch import nn

from persafl_lit import run
from persafl_lit.common.limits import cores
from persafl_lit.engine.executors import Processes, Serial, Worker
from persafl_lit.engine.executors.executor import WINDOW
from persafl_lit.engine.messages import Evaluate, Train
from persafl_lit.errors import ConfigError, DivergenceError, ModelError, WorkerError
from persafl_lit.learning.objectives import Plain, Scaffold
from tests.support.clients import parts
from tests.support.modules import Deadly
from tests.support.runs import METHODS as SAMPLE
from tests.support.runs import bits

QUIET = ["tracking.enabled=false", "checkpoint.every=0"]
SMALL = [
    *QUIET,
    "model=mlp",
    "model.hidden=[8]",
    "model.dropout=0.2",
    "clients=6",
    "updates=24",
    "local_steps=3",
    "eval.every=1.0",
]
METHODS = SAMPLE | {
    "fedprox": ["schedule.cohort=3"],
    "per_fedavg": ["schedule.cohort=3"],
    "pfedme": ["schedule.cohort=3", "method.inner_steps=3"],
}


@pytest.mark.parametrize("method", METHODS)
def test_the_number_of_workers_does_not_change_a_single_bit(method):
    overrides = [*SMALL, f"method={method}", *METHODS[method]]
    serial = bits(run([*overrides, "executor=serial"]))
    for workers in (1, 2, 5):
        assert bits(run([*overrides, "executor=processes", f"workers={workers}"])) == serial


def test_spawned_workers_give_the_same_bits_as_forked_ones():
    _, _, work = parts(Scaffold())
    worker = Worker(work)
    read, kept = (
        {"w": worker.start, "control": torch.ones_like(worker.start) / 100},
        {"control": torch.ones_like(worker.start) / 50},
    )
    jobs = [Train(client, visit, read, kept if visit else {}, visit - 1) for client in range(2) for visit in range(2)]
    found = {}
    for name, executor in {
        "serial": Serial(worker),
        "fork": Processes(worker, 2, start="fork"),
        "spawn": Processes(worker, 1, start="spawn"),
    }.items():
        with executor:
            for index, job in enumerate(jobs):
                executor.submit(index, job)
            updates = [executor.result(index)[1] for index in range(len(jobs))]
            evaluation = executor.evaluate([Evaluate(client, ("none",), read) for client in (0, 1)], 0)
            executor.finish(evaluation)
            tensors = [
                {name: value.tolist() for name, value in {**update.sent, "kept": update.memory["control"]}.items()}
                for update in updates
            ]
            found[name] = tensors, [(update.loss, update.evaluations) for update in updates], evaluation.scores()
    assert found["serial"] == found["fork"] == found["spawn"]


def test_killing_workers_in_mid_run_changes_nothing(tmp_path, capfd):
    folder = tmp_path / "deaths"
    folder.mkdir()
    torch.manual_seed(0)
    model = Deadly(folder, 2)
    overrides = [*SMALL, "method=fedasync"]
    quiet = bits(run([*overrides, "executor=serial"], model))
    killed = bits(run([*overrides, "workers=2"], model))
    assert len(os.listdir(folder)) >= 2
    assert killed == quiet
    assert "is gone (killed by SIGKILL); another one does its work again" in capfd.readouterr().err


def test_a_client_that_ends_every_worker_ends_the_run_with_a_sentence(tmp_path):
    folder = tmp_path / "deaths"
    folder.mkdir()
    with pytest.raises(WorkerError, match="ended 3 worker processes .killed by SIGKILL.; is there enough memory"):
        run([*SMALL, "method=fedasync", "workers=2"], Deadly(folder, 10**6))


def test_a_divergence_is_reported_at_its_update_whoever_finds_it_first():
    overrides = [*SMALL, "method=fedasync", "eta=1e12"]
    messages = []
    for executor in ("serial", "processes"):
        with pytest.raises(DivergenceError) as error:
            run([*overrides, f"executor={executor}", "workers=2"])
        messages.append(str(error.value))
    assert messages[0] == messages[1]


class Broken(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 10)

    def training_step(self, batch, batch_idx):
        return self.linear(batch[0].flatten(1)).sum()


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_a_model_that_fails_is_said_in_one_sentence_with_the_place(executor):
    with pytest.raises(
        ModelError,
        match=r"client \d+ cannot be \w+: Broken fails: RuntimeError: .* \(test_executors.py, line \d+\); set PERSAFL_TRACEBACK=1",
    ):
        run([*SMALL, "method=fedasync", f"executor={executor}"], Broken())


def test_no_worker_outlives_its_run():
    from multiprocessing import active_children

    run([*SMALL, "method=fedasync", "workers=3"])
    assert active_children() == []


def test_updates_done_ahead_are_bounded():
    """A lane does not run away from the server: with 200 jobs ready, few results are kept before they are asked for."""
    _, _, work = parts(Plain(), local_steps=1)
    worker = Worker(work)
    with Processes(worker, 2) as executor:
        for index in range(200):
            executor.submit(index, Train(index % 4, index // 4, {"w": worker.start}))
        kept = []
        for index in range(200):
            executor.result(index)
            executor.forget(index)
            kept.append(len(executor._finished))
        assert executor.pending == {}
    assert max(kept) <= 2 * (WINDOW + 2)


def test_evaluation_may_be_of_some_clients_only():
    result = run([*SMALL, "method=fedasync", "eval.clients=3", "data.holdout_clients=2"])
    everyone = run([*SMALL, "method=fedasync", "data.holdout_clients=2"])
    rows = {row["client"]: row for row in everyone.clients()}
    chosen = [row["client"] for row in result.clients()]
    assert len(chosen) == 5
    assert chosen == sorted(chosen)
    assert set(chosen) >= {4, 5}, "both held-out clients"
    assert result.clients() == [rows[client] for client in chosen]


def test_by_default_evaluation_costs_at_most_a_quarter_of_the_work():
    for method in ("fedasync", "persafl_me"):
        result = run([*QUIET, "model=logistic", f"method={method}", "updates=300"])
        intervals = len(result.points) - 1
        evaluation = result.evaluation_share
        assert 1 <= intervals <= 10
        assert evaluation < 0.4, "the estimate counts samples; a machine's time may differ by some"
    assert intervals == 10


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["workers=0"], "workers must be >= 1"),
        (["eval.clients=0"], "eval.clients must be >= 1"),
        (["eval.beside=[magic]"], "unknown eval.beside 'magic'"),
    ],
)
def test_bad_values_are_refused(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run([*SMALL, *overrides])


# -- Ray --------------------------------------------------------------------------------------------------------------

RAY = """
import json, os, sys, tempfile
import ray
import torch
from persafl_lit import run
from persafl_lit.errors import ModelError
from tests.support.modules import Deadly, Stubborn
from tests.support.runs import bits

SMALL, METHODS = json.loads(sys.argv[1])
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
for method in METHODS:
    overrides = [*SMALL, f"method={method}", *METHODS[method]]
    assert bits(run([*overrides, "executor=ray", "workers=2"])) == bits(run([*overrides, "executor=serial"])), method
with tempfile.TemporaryDirectory() as folder:
    model = Deadly(folder, 2)
    overrides = [*SMALL, "method=fedasync"]
    assert bits(run([*overrides, "executor=ray", "workers=2"], model)) == bits(run([*overrides, "executor=serial"], model))
    assert len(os.listdir(folder)) >= 2
try:
    run([*SMALL, "executor=ray", "workers=2"], Stubborn())
except ModelError as error:
    assert "Stubborn cannot be sent to worker processes (TypeError: I stay here); use executor=serial" in str(error), error
else:
    raise AssertionError("it was sent")
print("equal", len(METHODS))
"""


@pytest.mark.slow
def test_a_ray_cluster_gives_the_same_bits():
    """Every method, and with workers killed. In a network with only loopback: Ray's services would listen on all interfaces."""
    pytest.importorskip("ray")
    inside = (
        ["unshare", "-n", "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$@"', "sh"] if os.geteuid() == 0 else []
    )
    command = [*inside, sys.executable, "-c", RAY, json.dumps([SMALL, METHODS])]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"PYTHONPATH": root, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"equal {len(METHODS)}\n" in done.stdout


def test_no_more_workers_than_the_cores_this_process_may_use():
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usual)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, usual)
    assert cores() == len(usual)
