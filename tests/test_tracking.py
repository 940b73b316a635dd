"""Tracking into a real MLflow store."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlflow
import pytest

from persafl_lit import compose, run
from persafl_lit.errors import ConfigError, DivergenceError
from persafl_lit.timeline import from_csv
from persafl_lit.tracking import store_uri

FAST = ["model=logistic", "clients=5", "updates=15", "local_steps=2", "eval.every=1.5"]


@pytest.fixture
def store():
    return mlflow.MlflowClient(store_uri(None))


def artifact(store, run_id, name):
    return Path(mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=name, tracking_uri=store_uri(None))).read_text()


def test_a_run_leaves_config_metrics_timeline_and_summary(store, tmp_path):
    result = run(FAST)
    kept = store.get_run(result.run_id)
    assert kept.info.status == "FINISHED"
    assert kept.data.params["method.lam"] == "25.0"
    assert kept.data.params["clients"] == "5"
    assert kept.data.tags["persafl.trial"] == compose(FAST).hash()
    history = store.get_metric_history(result.run_id, "accuracy.test")
    assert [(m.step, m.timestamp) for m in history] == [(p.updates, round(p.sim_time * 1000)) for p in result.points]
    assert [m.value for m in history] == result.curves()["accuracy.test"]
    assert len(history) > 3
    (tmp_path / "t.csv").write_text(artifact(store, result.run_id, "timeline.csv"))
    assert from_csv(tmp_path / "t.csv", 5).digest() == result.timeline.digest()
    assert compose(compose(FAST).values).hash() == compose(FAST).hash()
    assert json.loads(artifact(store, result.run_id, "summary.json"))["updates"] == 15
    assert "persafl_me" in artifact(store, result.run_id, "config.yaml")
    assert (tmp_path / "mlruns" / "artifacts").is_dir()


def test_a_diverged_run_is_kept_as_failed_with_what_it_recorded(store):
    with pytest.raises(DivergenceError):
        run(["data=quadratic", "method=fedasync", "eta=1e3", "updates=200", "eval.every=0.5"])
    (kept,) = store.search_runs([store.get_experiment_by_name("persafl").experiment_id])
    assert kept.info.status == "FAILED"
    assert "update" in kept.data.tags["persafl.error"]
    assert len(store.get_metric_history(kept.info.run_id, "loss.test")) >= 1
    assert all(math.isfinite(value) for value in kept.data.metrics.values())


def test_runs_share_one_store_and_experiments_have_names(store):
    ids = {run([*FAST, "tracking.experiment=one"]).run_id, run([*FAST, "tracking.experiment=two", "seed=1"]).run_id}
    assert len(ids) == 2
    for name in ("one", "two"):
        assert len(store.search_runs([store.get_experiment_by_name(name).experiment_id])) == 1


def test_the_environments_store_is_used_unless_the_config_names_one(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    result = run(FAST)
    assert (tmp_path / "elsewhere.db").exists()
    assert mlflow.MlflowClient(store_uri("sqlite:///elsewhere.db")).get_run(result.run_id).info.status == "FINISHED"
    run([*FAST, "tracking.uri=sqlite:///named.db"])
    assert (tmp_path / "named.db").exists()


def test_tracking_can_be_off(tmp_path):
    result = run([*FAST, "tracking.enabled=false", "checkpoint.every=0"])
    assert result.run_id is None
    assert not (tmp_path / "mlruns").exists()


def test_a_store_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="cannot track to tracking.uri=nonsense://"):
        run([*FAST, "tracking.uri=nonsense://x"])


def test_a_store_that_goes_away_does_not_stop_the_run(monkeypatch, capsys):
    """Every call fails after the third; the run ends all the same and says what could not be sent."""
    calls = iter(range(3))
    real = mlflow.MlflowClient.log_batch

    def failing(self, *arguments, **keywords):
        if next(calls, None) is None:
            raise mlflow.exceptions.MlflowException("the store is gone")
        return real(self, *arguments, **keywords)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", failing)
    assert run(FAST).points[-1].updates == 15
    said = capsys.readouterr().err
    assert said.count("the run goes on: the store is gone") == 1
    assert "could not be sent" in said
