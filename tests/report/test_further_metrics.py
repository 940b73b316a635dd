"""A report of a task without classes, whose sweep chooses by a metric of the user's."""

from __future__ import annotations

import csv

import pytest

from persafl_lit.report import write_report
from persafl_lit.report.record import Record

MAE = {"fedasync": (0.5, 0.25), "fedavg": (0.75, 0.375)}
"""On test data at the start and at the end; validation is 0.125 below."""


def record(method):
    start, end = MAE[method]
    curves = {"sim_time": [0.0, 10.0], "updates": [0, 5], "accuracy.test": [float("nan")] * 2}
    curves |= {"loss.val": [2.0, 1.0], "loss.test": [2.0, 1.0]}
    curves |= {"mae.val": [start - 0.125, end - 0.125], "mae.test": [start, end], "bias.test": [0.5, -0.5]}
    metrics = {
        "mae": {"val": end - 0.125, "test": end, "direction": "lower"},
        "bias": {"val": None, "test": -0.5, "direction": None},
    }
    summary = {
        "accuracy": {"val": None, "test": None},
        "loss": {"val": 1.0, "test": 1.0},
        "metrics": metrics,
        "versions": 5,
        "updates": 5,
    }
    rows = [{"client": i, "arrivals": i, "test_mae": end, "test_bias": -0.5, "test_loss": 1.0} for i in range(2)]
    config = {"method.name": method, "seed": 0, "data.name": "custom"}
    return Record(method, "FINISHED", config, None, summary, curves, rows, select="mae.val", trial=method)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("report")
    write_report([record(method) for method in MAE], "regression", found)
    return found


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_what_the_sweep_chooses_by_is_what_a_task_without_accuracy_is_judged_by(folder):
    rows = read(folder / "summary.csv")
    assert [(row["method"], float(row["test_mean"]), row["selected_on"]) for row in rows] == [
        ("fedasync", 0.25, "mae.val"),
        ("fedavg", 0.375, "mae.val"),
    ]
    assert "fedasync is best of 2 methods on validation data (mae.val)" in (folder / "report.md").read_text()


def test_every_row_of_the_summary_has_the_other_metrics_and_its_own_task(folder):
    rows = read(folder / "summary.csv")
    assert [(row["task"], float(row["bias_test_mean"]), float(row["loss_test_mean"])) for row in rows] == [
        ("", -0.5, 1.0)
    ] * 2


def test_each_metric_has_figures_over_time_and_by_client_and_columns(folder):
    stems = {path.stem for path in folder.glob("*.png")} & {path.stem for path in folder.glob("*.svg")}
    assert {"mae", "metrics_bias", "metrics_loss", "clients", "clients_bias", "clients_loss"} <= stems
    assert not any(stem.startswith("accuracy") for stem in stems)
    page = (folder / "report.html").read_text()
    for text in ("<legend>metric</legend>", ">bias.test</th>", ">test bias</th>"):
        assert text in page
    assert [row["test_bias"] for row in read(folder / "clients.csv")] == ["-0.5"] * 4
