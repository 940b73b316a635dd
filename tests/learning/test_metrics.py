"""Metrics beside loss and accuracy: against torchmetrics and scikit-learn on all data of a client, through workers and checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn
from torch.nn import functional as F

from persafl_lit import compose, run
from persafl_lit.config.registry import make_metric
from persafl_lit.errors import ConfigError, Interrupted, ModelError
from persafl_lit.learning.metric_names import FURTHER_METRICS
from persafl_lit.sweep.plan import plan_of
from persafl_lit.sweep.yaml_lines import Source
from tests.support.gates import CALLBACK, ROOT, Gate
from tests.support.runs import Stopper, bits

QUIET = [
    "tracking.enabled=false",
    "checkpoint.every=0",
    "executor=serial",
    "model=logistic",
    "clients=3",
    "updates=6",
    "eval.finetune=none",
]


def confidence(scores, labels):
    return scores.softmax(1).max(1).values.mean()


def test_values_are_those_of_sklearn_and_torchmetrics_on_all_data_of_a_client():
    result = run(
        [*QUIET, "eval.metrics=[accuracy,f1,auroc]"],
        metrics={"sure": confidence, "macro": torchmetrics.classification.MulticlassF1Score(10)},
    )
    model = result.model.eval()
    for row in result.clients():
        (inputs, labels), _ = next(result.federation.whole(int(row["client"]), "test", 10_000))
        with torch.no_grad():
            scores = model(inputs)
        shares, found = scores.double().softmax(1).numpy(), scores.argmax(1)
        assert row["test_f1"] == pytest.approx(f1_score(labels, found, average="macro"), abs=1e-6)
        assert row["test_macro"] == pytest.approx(row["test_f1"], abs=1e-6)
        assert row["test_auroc"] == pytest.approx(
            np.mean([roc_auc_score(labels == k, shares[:, k]) for k in labels.unique()]), abs=1e-6
        )
        assert row["test_sure"] == pytest.approx(shares.max(1).mean(), abs=1e-6)
    told = result.summary()["metrics"]
    assert told["f1"]["test"] == pytest.approx(np.mean([row["test_f1"] for row in result.clients()]))
    assert told["f1"]["direction"] == "higher"
    assert told["sure"]["direction"] is told["sure"]["worst_decile"] is None
    assert result.curves()["f1.test"][-1] == told["f1"]["test"]


def test_worker_processes_give_the_same_values():
    def once(executor):
        return run(
            [*QUIET, f"executor={executor}", "workers=2", "eval.metrics=[f1,ece]"], metrics={"sure": confidence}
        ).curves()

    for name, values in once("serial").items():
        np.testing.assert_array_equal(values, once("processes")[name]) if name.startswith(
            ("f1", "ece", "sure")
        ) else None


def test_metrics_go_on_from_a_checkpoint_with_the_same_bits():
    overrides = [*QUIET, "checkpoint.every=2", "eval.every=2", "eval.metrics=[f1,ece]", "updates=12"]
    stop = Stopper(5)
    with pytest.raises(Interrupted):
        run(overrides, Logs, metrics={"mean": confidence}, callbacks=[stop], should_stop=stop)
    resumed = run(overrides, Logs, metrics={"mean": confidence}, resume=True)
    straight = run([*overrides, "checkpoint.every=0"], Logs, metrics={"mean": confidence})
    assert bits(resumed) == bits(straight)
    assert resumed.summary()["metrics"] == straight.summary()["metrics"]
    assert set(straight.summary()["metrics"]) == {"f1", "ece", "mean", "sure", "macro"}


KILLED = [
    *["allow_code=true", "data=custom", "data.path=tests.support.tasks.numbers", "model=custom", "eval.metrics=[mae]"],
    *["model.path=tests.support.tasks.Line", "updates=40", "eval.every=3", "checkpoint.every=4", "workers=2"],
]


def persafl(*arguments, environment=None, prefix=()):
    command = [*prefix, sys.executable, "-m", "persafl_lit", *arguments, "tracking.enabled=false", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"} | (environment or {})
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def summary_of(process):
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    told = json.loads(out)
    return {key: told[key] for key in ("metrics", "loss", "accuracy", "updates")}, err


@pytest.mark.slow
def test_metrics_survive_kill_9(tmp_path):
    """Of a module that logs torchmetrics' objects, and by name."""
    gate = Gate(tmp_path / "gate", checkpoints=3)
    killed = persafl("run", *KILLED, *CALLBACK, environment=gate.environment)
    gate.reached(killed)
    killed.kill()
    killed.communicate()
    resumed, err = summary_of(persafl("run", *KILLED, *CALLBACK, "--resume"))
    assert "resuming after update 1" in err
    straight, _ = summary_of(persafl("run", *KILLED))
    assert resumed == straight
    assert set(straight["metrics"]) == {"mae", "r2", "bias"}


@pytest.mark.slow
def test_metrics_on_ray_are_those_of_one_process():
    pytest.importorskip("ray")
    inside = (
        ["unshare", "-n", "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$@"', "sh"] if os.geteuid() == 0 else []
    )
    ray, _ = summary_of(persafl("run", *KILLED, "executor=ray", prefix=inside))
    assert ray == summary_of(persafl("run", *KILLED, "executor=serial"))[0]


class Logs(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.f1 = torchmetrics.classification.MulticlassF1Score(10)

    def forward(self, inputs):
        return self.network(inputs)

    def training_step(self, batch, batch_idx):
        self.log("train_noise", 1.0)
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        scores = self(batch[0])
        self.f1(scores, batch[1])
        self.log("val_macro", self.f1)
        self.log_dict({"val_sure": confidence(scores, batch[1]), "val_loss": 0.0})


def test_what_a_module_logs_when_it_is_evaluated_becomes_metrics():
    logged = run([*QUIET], Logs).summary()
    assert set(logged["metrics"]) == {"macro", "sure"}
    assert logged["metrics"]["macro"]["direction"] == "higher"
    assert logged["loss"]["test"] > 0
    asked = run(
        [*QUIET],
        type("Silent", (Logs,), {"validation_step": L.LightningModule.validation_step}),
        metrics={"sure": confidence},
    ).summary()
    assert logged["metrics"]["sure"] == asked["metrics"]["sure"]


@pytest.mark.parametrize("name", FURTHER_METRICS)
def test_the_line_about_a_metric_says_which_way_is_better(name):
    higher = make_metric({"name": name}, False).higher_is_better
    assert FURTHER_METRICS[name].endswith(f"; {'higher' if higher else 'lower'} is better")


def test_without_metrics_hashes_are_as_they_were():
    assert compose(["eval.metrics=[]"]).hash() == compose().hash() != compose(["eval.metrics=[f1]"]).hash()


def raises(scores, labels):
    raise ValueError("no")


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (raises, "the metric mine fails for client [0-2] on its val data: ValueError: no"),
        (
            lambda scores, labels: "high",
            "the metric mine of client [0-2] on its val data must be one number; got 'high'",
        ),
        (lambda scores, labels: scores[:2, 0], r"must be one number; got a Tensor of shape \(2,\)"),
    ],
)
def test_a_metric_that_gives_no_number_is_named_with_client_and_split(metric, said):
    with pytest.raises(ModelError, match=said):
        run(QUIET, metrics={"mine": metric})


def test_a_metric_without_a_value_is_left_out_with_a_note():
    result = run(QUIET, metrics={"mine": lambda scores, labels: float("nan")})
    assert result.summary()["metrics"]["mine"]["test"] is None
    assert "the metric mine has no value (nan) for 3 of 3 clients" in " ".join(result.notes)


def test_names_are_checked_before_anything_runs():
    with pytest.raises(ConfigError, match="Did you mean 'auroc'"):
        run([*QUIET, "eval.metrics=[aurok]"])
    with pytest.raises(ConfigError, match="loss is measured anyway"):
        run(QUIET, metrics={"loss": confidence})


def test_a_sweep_selects_by_a_metric_whose_direction_is_known():
    def plan(metric, *overrides):
        text = f"overrides: {[*overrides]}\ngrid:\n  - {{method: fedasync}}\nselect: {{metric: {metric}}}\n"
        return plan_of(Source("s.yaml", text), "s")

    summary = {
        "metrics": {"ece": {"val": 0.25}},
        "accuracy": {"val": 0.5},
        "loss": {"val": 1.0},
        "versions": 1,
        "updates": 1,
    }
    assert plan("ece.val", "eval.metrics=[ece]").select.score(summary) == -0.25
    assert plan("ece.val", "eval.direction.ece=higher").select.score(summary) == 0.25
    with pytest.raises(ConfigError, match="it is not known which values are better"):
        plan("ece.val")
    with pytest.raises(ConfigError, match="nothing is chosen on test data"):
        plan("ece.test", "eval.metrics=[ece]")
