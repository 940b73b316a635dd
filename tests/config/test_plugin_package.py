"""A package of somebody else's, built, installed and used without a line of ours changed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
FILES = {
    "pyproject.toml": """
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"

        [project]
        name = "persafl-blobs"
        version = "3.1"

        [project.entry-points."persafl_lit.objectives"]
        anchored = "persafl_blobs.parts:Anchored"

        [project.entry-points."persafl_lit.data"]
        blobs = "persafl_blobs.parts:Blobs"

        [project.entry-points."persafl_lit.delays"]
        steady = "persafl_blobs.parts:Steady"

        [project.entry-points."persafl_lit.metrics"]
        brier = "persafl_blobs.parts:Brier"

        [project.entry-points."persafl_lit.callbacks"]
        broken = "persafl_blobs.nowhere:Missing"

        [project.entry-points."persafl_lit.conf"]
        blobs = "persafl_blobs.conf"

        [tool.hatch.build.targets.wheel]
        packages = ["persafl_blobs"]
    """,
    "persafl_blobs/__init__.py": "",
    "persafl_blobs/conf/method/anchored_sgd.yaml": """
        # Plain steps with an anchor, by persafl-blobs
        objective: anchored
        weight: 0.4
        defaults: {delays: steady}
    """,
    "persafl_blobs/conf/data/blobs.yaml": """
        # Gaussian blobs, by persafl-blobs
        defaults: {model: logistic}
    """,
    "persafl_blobs/parts.py": '''
        from dataclasses import dataclass

        from persafl_lit import Delays, Objective, rng


        @dataclass(frozen=True)
        class Anchored(Objective):
            """A pull towards the model that was read."""

            weight: float = 0.1
            """Of the pull."""

            def gradient(self, f, step):
                return f.gradient(step.w, step.batches[0]) + self.weight * (step.w - step.read)


        @dataclass(frozen=True)
        class Steady(Delays):
            """The same for all, with some jitter."""

            jitter: float = 0.5
            """Most of it."""

            def visit(self, seed, client, visit, local_steps, gradients):
                return 1.0, 0.0, 2.0 + self.jitter * rng(seed, "steady", client, visit).random(), 0.5


        class Brier:
            """Mean squared distance between the classes' probabilities and what is so."""

            higher_is_better = False

            def reset(self):
                self.total, self.count = 0.0, 0

            def update(self, scores, labels):
                hit = scores.softmax(1).gather(1, labels[:, None])[:, 0]
                self.total, self.count = self.total + float(((1 - hit) ** 2).sum()), self.count + len(labels)

            def compute(self):
                return self.total / self.count


        @dataclass(frozen=True)
        class Blobs:
            """Two classes around two points."""

            samples: int = 30
            """Of each client."""

            def count(self, clients):
                return clients or 5

            def federation(self, clients, seed):
                import numpy as np
                import torch
                from persafl_lit import Samples

                count = self.count(clients)
                stream = rng(seed, "blobs")
                labels = stream.integers(2, size=count * self.samples)
                inputs = stream.normal(size=(len(labels), 4)) + labels[:, None]
                places = np.arange(len(labels)).reshape(count, self.samples)
                thirds = [np.split(row, [self.samples // 2, 3 * self.samples // 4]) for row in places]
                parts = [dict(zip(("train", "val", "test"), map(torch.from_numpy, split))) for split in thirds]
                return Samples(torch.from_numpy(inputs).float(), torch.from_numpy(labels), 2, parts, f"blobs {seed} {inputs.sum()}")
    ''',
}
RUN = [
    "method=anchored_sgd",
    "data=blobs",
    "clients=4",
    "updates=4000",
    "local_steps=3",
    "executor=serial",
    "checkpoint.every=20",
    "eval.metrics=[brier]",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of installed packages with the wheel in it."""
    folder = tmp_path_factory.mktemp("package")
    for name, text in FILES.items():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_text(textwrap.dedent(text).lstrip())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    for command in (
        [*pip, "wheel", *offline, "--wheel-dir", folder, folder / "source"],
        [*pip, "install", *offline[:3], "--target", folder / "site"],
    ):
        wheels = [] if "wheel" in command else list(folder.glob("*.whl"))
        done = subprocess.run([*command, *wheels], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder / "site"


def start(site, *arguments, **options):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "persafl_lit", *arguments], env=environment, stdout=-1, stderr=-1, text=True, **options
    )


def persafl(site, *arguments, **options):
    process = start(site, *arguments, **options)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out, err


@pytest.mark.slow
def test_a_package_runs_and_resumes_after_kill_9(site, tmp_path):
    (tmp_path / "alone").mkdir()
    alone = [*RUN, "tracking.enabled=false", "--json", "--save-model", "whole.pt"]
    undisturbed = json.loads(persafl(site, "run", *alone, cwd=tmp_path / "alone")[0])
    killed = start(site, "run", *RUN)
    while not list(tmp_path.glob("mlruns/checkpoints/*.pt")):
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    out, err = persafl(site, "run", *RUN, "--resume", "--json", "--save-model", "resumed.pt")
    assert "resuming after update" in err
    summary = json.loads(out)
    assert (summary["method"], summary["updates"], summary["config"]["delays"]) == (
        "anchored_sgd",
        4000,
        {"name": "steady", "jitter": 0.5},
    )
    whole, resumed = (torch.load(path, weights_only=True) for path in ("alone/whole.pt", "resumed.pt"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert summary["accuracy"]["test"] > 0.7
    assert summary["metrics"] == undisturbed["metrics"]
    assert (list(summary["metrics"]), summary["metrics"]["brier"]["direction"]) == (["brier"], "lower")


@pytest.mark.slow
def test_a_package_sweeps_reports_and_is_listed(site, tmp_path):
    (tmp_path / "weights.yaml").write_text(
        "name: weights\noverrides: [data=blobs, clients=4, updates=40, tracking.figures=false, 'eval.metrics=[brier]']\n"
        "grid:\n  - {method: anchored_sgd, method.weight: [0.1, 0.5]}\n  - {method: fedasync, delays: steady, delays.jitter: 0.1}\n"
        "select: {metric: brier.val}\n"
    )
    out, _ = persafl(site, "sweep", "weights.yaml", "--workers", "2", "--json")
    trials = json.loads(out)["trials"]
    assert [trial["status"] for trial in trials] == ["finished"] * 3
    best = min(trials[:2], key=lambda trial: trial["brier.val"])
    assert {"method": "anchored_sgd", "setting": {"method.weight": best["method.weight"]}} in json.loads(out)["chosen"]
    persafl(site, "report", "weights", "--out", "report")
    assert "anchored_sgd" in Path("report/report.md").read_text()
    with open("report/summary.csv", newline="") as file:
        assert {row["selected_on"] for row in csv.DictReader(file)} == {"brier.val"}
    from persafl_lit.tracking.store import open_store

    store = open_store("sqlite:///mlruns/mlflow.db")
    trials = store.search([store.experiment("weights")], "tags.`persafl.sweep` = 'weights'")
    assert {run.data.tags.get("persafl.plugins") for run in trials if "persafl.kind" not in run.data.tags} == {
        "persafl-blobs 3.1"
    }
    out, err = persafl(site, "list")
    for line in (
        "Plain steps with an anchor, by persafl-blobs  (package persafl-blobs 3.1)",
        "The same for all, with some jitter.  (package persafl-blobs 3.1)",
        "Mean squared distance between the classes' probabilities and what is so.  (package persafl-blobs 3.1)",
    ):
        assert line in out
    assert err.count("callbacks=broken of persafl-blobs 3.1") == 1
