"""Tasks without classes from end to end: a run's table, a sweep that selects by a metric, its export, report and view in the UI."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from persafl_lit import compose, run
from persafl_lit.cli import main
from persafl_lit.report.config_keys import task_of
from persafl_lit.sweep.dashboard import Dashboard
from persafl_lit.sweep.plan import plan_of
from persafl_lit.sweep.results import Outcome
from persafl_lit.sweep.trials import first_trials
from persafl_lit.sweep.yaml_lines import Source
from persafl_lit.tracking import store_uri
from persafl_lit.tracking.store import Store
from tests.support.browser import Browser, needs_chromium
from tests.support.tasks import Line, NextCharacter, numbers, text
from tests.support.ui import ui

SHARED = ["allow_code=true", "updates=9", "eval.every=4", "executor=serial", "tracking.figures=false"]
NUMBERS = [*SHARED, "data=custom", "data.path=tests.support.tasks.numbers", "model=custom", "eval.metrics=[mae]"]
NUMBERS += ["model.path=tests.support.tasks.Line", "eta=0.05"]
TEXT = [*SHARED, "data=custom", "data.path=tests.support.tasks.text", "model=custom", "eval.metrics=[perplexity]"]
TEXT += ["model.path=tests.support.tasks.NextCharacter", "eta=0.5"]


def sweep_text(name, overrides, select):
    return f"""name: {name}
overrides: {json.dumps(overrides)}
grid:
  - {{method: fedasync, method.beta: [0.5, 1.0]}}
  - {{method: fedavg, schedule.cohort: 2}}
seeds: [0, 1]
select: {{metric: {select}, stages: two}}
"""


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Both sweeps, with their reports."""
    folder, before = tmp_path_factory.mktemp("machine"), Path.cwd()
    os.chdir(folder)
    try:
        others = ["data.holdout_clients=1", "eval.beside=[none]"]
        for name, overrides, select in (("numbers", [*NUMBERS, *others], "mae.val"), ("text", TEXT, "perplexity.val")):
            Path(f"{name}.yaml").write_text(sweep_text(name, overrides, select))
            assert main(["sweep", f"{name}.yaml"]) == 0
            assert main(["report", name, "--out", name]) == 0
    finally:
        os.chdir(before)
    return folder


# -- a run ------------------------------------------------------------------------------------------------------------


def test_the_table_of_a_run_shows_every_metric_and_needs_no_accuracy(capsys):
    assert main(["run", *NUMBERS, "data.holdout_clients=1", "eval.beside=[none]", "tracking.enabled=false"]) == 0
    said = capsys.readouterr().out
    for row in (
        "test loss, personalised",
        "test mae, personalised",
        "test r2, personalised",
        "test bias, personalised",
    ):
        assert row in said
    assert "personalised test loss, fine-tuning by" in said
    assert "clients that" in said
    assert "accuracy" not in said


def test_a_number_in_the_table_is_that_of_the_summary(capsys):
    result = run([*NUMBERS, "tracking.enabled=false"])
    assert main(["run", *NUMBERS, "tracking.enabled=false"]) == 0
    assert f"{result.summary()['metrics']['mae']['test']:.6g}" in capsys.readouterr().out


def test_the_mean_absolute_error_of_a_client_is_that_of_its_model_on_its_data():
    result = run([*NUMBERS, "eval.finetune=none", "tracking.enabled=false"], Line, data=numbers())
    for row in result.clients():
        (inputs, targets), _ = next(result.federation.whole(int(row["client"]), "test", 10_000))
        with torch.no_grad():
            found = result.model.eval()(inputs)
        assert row["test_mae"] == pytest.approx(float((found - targets).abs().mean()), abs=1e-6)
        assert row["test_bias"] == pytest.approx(float((found - targets).mean()), abs=1e-6)
        rest = float(((found - targets) ** 2).sum() / ((targets - targets.mean()) ** 2).sum())
        assert row["test_r2"] == pytest.approx(1 - rest, abs=1e-5)


def test_the_perplexity_of_a_text_is_the_exponential_of_its_loss_and_token_accuracy_is_a_share():
    result = run([*TEXT, "eval.finetune=none", "tracking.enabled=false"], NextCharacter, data=text())
    for row in result.clients():
        (characters, following), _ = next(result.federation.whole(int(row["client"]), "test", 10_000))
        with torch.no_grad():
            scores = result.model.eval()(characters)
        loss = F.cross_entropy(scores.flatten(0, 1), following.flatten())
        assert row["test_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        assert row["test_accuracy"] == pytest.approx(float((scores.argmax(2) == following).float().mean()), abs=1e-6)
    curves = result.curves()
    assert all(0 <= value <= 1 for name in curves if name.startswith("accuracy") for value in curves[name])


# -- a sweep ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "metric"), [("numbers", "mae"), ("text", "perplexity")])
def test_the_setting_of_the_lowest_validation_value_runs_on_the_other_seed(swept, name, metric):
    rows = read(swept / "mlruns" / "sweeps" / name / "trials.csv")
    first = [row for row in rows if row["method"] == "fedasync" and row["seed"] == "0"]
    second = [row for row in rows if row["method"] == "fedasync" and row["seed"] == "1"]
    best = min(first, key=lambda row: float(row[f"{metric}.val"]))
    assert [row["method.beta"] for row in second] == [best["method.beta"]]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "metric"), [("numbers", "mae"), ("text", "perplexity")])
def test_a_sweep_by_a_metric_is_whole_again_from_its_export(swept, name, metric, capsys):
    Path(f"{name}.yaml").write_text((swept / f"{name}.yaml").read_text())
    export = swept / name / "runs.csv"
    assert main(["sweep", f"{name}.yaml", "--json", "--finished", str(export)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["trials"]) == 5
    assert all(trial["imported"] for trial in found["trials"])
    original = {row["trial"]: row for row in read(export)}
    for trial in found["trials"]:
        for split in ("val", "test"):
            assert trial[f"{metric}.{split}"] == float(original[trial["trial"]][f"metrics_{metric}_{split}"])
    assert main(["report", name, "--out", "again"]) == 0
    again, before = read("again/summary.csv"), read(swept / name / "summary.csv")
    assert [list(row.items()) for row in again] == [list(row.items()) for row in before]
    assert {row["selected_on"] for row in again} == {f"{metric}.val"}
    if name == "numbers":
        assert all(row["held_out_clients_mean"] and row["after_none_rule_mean"] for row in again)


def test_a_metric_of_the_models_own_selects_only_once_its_direction_is_told(capsys):
    Path("own.yaml").write_text(sweep_text("own", NUMBERS, "r2.val"))
    assert main(["sweep", "own.yaml"]) == 2
    said = capsys.readouterr().err
    assert "eval.direction.r2=higher or lower" in said
    assert len(said.splitlines()) == 1
    Path("own.yaml").write_text(sweep_text("own", [*NUMBERS, "eval.direction.r2=higher"], "r2.val"))
    assert main(["sweep", "own.yaml", "--dry-run"]) == 0


@pytest.mark.slow
def test_a_sweep_that_selects_by_an_accuracy_that_is_not_there_says_so(capsys):
    Path("none.yaml").write_text(sweep_text("none", NUMBERS, "accuracy.val"))
    assert main(["sweep", "none.yaml"]) == 2
    said = capsys.readouterr().err
    assert re.search(r"1/3 \S+ \S+ seed=0: loss \d", said)
    assert "no finished trial has accuracy.val" in said


def test_the_line_of_a_trial_that_ended_tells_the_metric_that_selects_else_loss(capsys):
    plan = plan_of(Source("numbers.yaml", sweep_text("numbers", NUMBERS, "mae.val")), "numbers")
    trials = first_trials(plan)
    summary = {"accuracy": {"test": None}, "loss": {"test": 0.25}, "metrics": {"mae": {"test": 0.5}}, "versions": 1}
    for kind in (plan.select.kind, "accuracy"):
        with Dashboard("numbers", len(trials), 1, kind=kind) as board:
            board.ends(Outcome(trials[0], "", "finished", summary))
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == ["mae 0.5", "loss 0.25"]


# -- MLflow and the page ----------------------------------------------------------------------------------------------


def test_mlflow_has_every_metric_under_the_names_of_the_curves():
    result = run([*NUMBERS, "data.holdout_clients=1", "eval.beside=[none]"])
    client = Store(store_uri(None)).client
    names = set(client.get_run(result.run_id).data.metrics)
    curves = result.curves()
    for name in ("mae.val", "mae.test", "mae.worst_decile", "mae.global", "bias.test", "r2.test"):
        history = sorted(client.get_metric_history(result.run_id, name), key=lambda metric: metric.step)
        assert [metric.value for metric in history] == curves[name]
    (at_the_end,) = client.get_metric_history(result.run_id, "none.mae.test")
    assert at_the_end.value == result.summary()["beside"]["none"]["metrics"]["mae"]["test"]
    assert {"holdout.mae.test", "holdout.none.mae.test"} <= names
    assert not any(name.startswith("accuracy") for name in names)


@pytest.mark.slow
def test_the_ui_shows_what_the_sweep_selects_by_and_the_best_first(swept):
    os.chdir(swept)
    store = Store(store_uri(None))
    tags = store.client.get_experiment(store.experiment("numbers")).tags
    view = json.loads(tags["mlflow.sharedViewState.persafl"])
    assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`mae.val`", True)
    assert "accuracy" not in json.dumps(view)


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("name", "metric"), [("numbers", "mae"), ("text", "perplexity")])
def test_a_browser_shows_report_and_charts(swept, name, metric, tmp_path):
    os.chdir(swept)
    with ui() as (_, links), Browser(tmp_path / "browser") as browser:
        browser.open((swept / name / "report.html").as_uri())
        browser.wait_for(f"test {metric} after fine-tuning", "fedasync", "fedavg")
        browser.wait_until("document.querySelectorAll('.js-plotly-plot').length > 2", True)
        assert browser.complaints == []
        browser.open(links[name], 2400, 1800)
        browser.wait_for(f"{metric}.test", f"{metric}.global", "Relative Time", "Parallel Coordinates")
        if keep := os.environ.get("SCREENSHOTS"):
            browser.screenshot(Path(keep) / f"{name}.png")


def test_metrics_of_a_run_are_no_part_of_its_task():
    """Runs that measure more are compared with those that measure less."""
    assert task_of(compose(NUMBERS).flat()) == task_of(compose([*NUMBERS, "eval.metrics=[mae,mse]"]).flat())
