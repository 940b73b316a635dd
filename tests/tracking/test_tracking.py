"""Tracking into a real MLflow store."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import multiprocessing
import os
import time
from importlib import metadata
from pathlib import Path

import mlflow
import pytest
import torch

from persafl_lit import compose, run
from persafl_lit.errors import ConfigError, DivergenceError, TrackingError
from persafl_lit.timeline import from_csv
from persafl_lit.tracking import Tracker, store_uri, sync
from persafl_lit.tracking.outbox import keep
from persafl_lit.tracking.store import Store
from tests.support.runs import At
from tests.support.tracking import FAST, Server, check_whole, free_port, wait_for_run


@pytest.fixture
def store():
    return mlflow.MlflowClient(store_uri(None))


def artifact(store, run_id, name):
    return Path(store.download_artifacts(run_id, name)).read_text()


def test_a_run_leaves_config_metrics_timeline_and_summary(store, tmp_path):
    result = run(FAST)
    kept = store.get_run(result.run_id)
    assert kept.info.status == "FINISHED"
    assert kept.data.params["method.lam"] == "25.0"
    assert kept.data.params["clients"] == "5"
    assert kept.data.tags["persafl.trial"] == compose(FAST).hash()
    history = store.get_metric_history(result.run_id, "accuracy.test")
    assert [(m.step, m.timestamp) for m in history] == [
        (p.updates, max(1, round(p.sim_time * 1000))) for p in result.points
    ]
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


def test_a_run_whose_model_never_changed_is_marked_in_mlflow(store):
    waiting = run([*FAST, "method=fedbuff", "method.buffer=50"])
    tags = store.get_run(waiting.run_id).data.tags
    assert tags["persafl.model_changed"] == "false"
    assert tags["persafl.note"].startswith(
        "the model never changed: only 15 updates arrived and the server waits for 50"
    )
    tags = store.get_run(run([*FAST, "method=fedbuff", "method.buffer=5"]).run_id).data.tags
    assert (tags["persafl.model_changed"], tags["persafl.note"]) == ("true", "")


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


@contextlib.contextmanager
def chosen_store():
    """MLflow's own functions use a global store."""
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(store_uri(None))
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)
        os.environ.pop("MLFLOW_TRACKING_URI", None)  # MLflow sets it


def test_the_final_model_loads_from_mlflow_with_its_signature():
    result = run([*FAST, "model=cnn2"])
    with chosen_store():
        loaded = mlflow.pytorch.load_model(f"runs:/{result.run_id}/model")
    inputs = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        assert torch.allclose(loaded(inputs), result.model.eval()(inputs), atol=1e-6)
    with chosen_store():
        described = artifact(mlflow.MlflowClient(), result.run_id, "model/MLmodel")
    assert "signature" in described
    assert [file.name for file in Path("mlruns").rglob("model/data/*")] == ["model.pt2"], (
        "a traced graph, nothing pickled"
    )


def test_per_client_results_are_an_mlflow_table(store):
    result = run(FAST)
    with chosen_store():
        table = store.load_table(store.get_experiment_by_name("persafl").experiment_id, "clients.json", [result.run_id])
    assert table["client"].tolist() == [0, 1, 2, 3, 4]
    assert table["test_accuracy"].tolist() == pytest.approx([row["test_accuracy"] for row in result.clients()])


def test_a_run_says_what_it_ran_on_and_has_a_telling_name(store):
    kept = store.get_run(run([*FAST, "method.lam=20", "seed=3"]).run_id)
    assert kept.info.run_name == "persafl_me lam=20.0 model=logistic clients=5 local_steps=2 updates=15 seed=3"
    assert kept.data.tags["persafl.version"]
    described = json.loads(artifact(store, kept.info.run_id, "environment.json"))
    assert described["packages"]["torch"] == metadata.version("torch")


def test_records_read_back_are_what_the_run_was():
    first, second = (
        run([*FAST, "tracking.experiment=a"]),
        run([*FAST, "tracking.experiment=a", "seed=1", "method.lam=20"]),
    )
    records = Store(store_uri(None)).records("a")
    assert [record.run_id for record in records] == [first.run_id, second.run_id]
    for record, result in zip(records, (first, second), strict=True):
        assert record.config == result.config.flat()
        assert record.summary == json.loads(json.dumps(result.summary()))
        assert json.dumps(record.curves) == json.dumps(result.curves())
        assert record.clients == result.clients()
        assert record.timeline.digest() == result.timeline.digest()
    assert [record.run_id for record in Store(store_uri(None)).records(first.run_id)] == [first.run_id]
    with pytest.raises(ConfigError, match="'b' is no run, sweep or experiment in .*; its experiments are Default, a"):
        Store(store_uri(None)).records("b")


@pytest.mark.slow
def test_eight_processes_log_to_one_new_store_and_lose_nothing(store):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    started = [context.Process(target=run_one, args=(seed, results)) for seed in range(8)]
    for process in started:
        process.start()
    found = [results.get(timeout=200) for _ in started]
    for process in started:
        process.join()
    assert len({run_id for run_id, _ in found}) == 8
    for run_id, curve in found:
        assert store.get_run(run_id).info.status == "FINISHED"
        assert [metric.value for metric in store.get_metric_history(run_id, "accuracy.test")] == curve
        assert len(curve) > 3


def run_one(seed, results):
    result = run([*FAST, "executor=serial", "tracking.model=false", f"seed={seed}"])
    results.put((result.run_id, result.curves()["accuracy.test"]))


def test_of_metrics_that_are_sent_together_a_refused_one_takes_no_other_with_it(store, capfd):
    delivered = Tracker(compose(FAST))
    delivered.start()
    assert delivered._opened.wait(30)
    for step in range(50):
        delivered.say(metrics=[["good", float(step), step, step]])
    delivered.say(metrics=[["not/allowed?*", 1.0, 0, 0]])
    for step in range(50, 60):
        delivered.say(metrics=[["good", float(step), step, step]])
    delivered.finish("FINISHED")
    assert [metric.step for metric in store.get_metric_history(delivered.run_id, "good")] == list(range(60))
    assert capfd.readouterr().err.count("refuses a record") == 1


def test_what_is_kept_of_a_run_at_several_times_is_all_sent_in_its_order(store, tmp_path):
    run_id = run([*FAST, "tracking.model=false"]).run_id
    (tmp_path / "picture.png").write_bytes(b"one")
    keep(
        store_uri(None),
        run_id,
        [{"tags": {"mood": "early", "first": "yes"}}, {"path": str(tmp_path / "picture.png"), "folder": "kept"}],
    )
    (tmp_path / "picture.png").write_bytes(b"two")
    keep(store_uri(None), run_id, [{"tags": {"mood": "late"}}, {"metrics": [["kept", 1.0, 5, 5]]}])
    assert sync() == 1
    found = store.get_run(run_id).data
    assert (found.tags["mood"], found.tags["first"], found.metrics["kept"]) == ("late", "yes", 1.0)
    assert Path(store.download_artifacts(run_id, "kept/picture.png")).read_bytes() == b"one"
    assert not list((tmp_path / "mlruns" / "unsent").iterdir())
    assert sync() == 0


def test_results_that_can_be_neither_sent_nor_kept_fail_the_run_and_leave_its_checkpoint(store, tmp_path, monkeypatch):
    """As when the disk is full: resumed, the run tells everything."""

    def full(*rest):
        raise OSError(errno.ENOSPC, "No space left on device")

    usual = Store.send
    here = [*FAST, "checkpoint.every=5", "tracking.patience=0.3", "tracking.model=false", "tracking.figures=false"]
    monkeypatch.setattr("persafl_lit.tracking.tracker.keep", full)
    with pytest.raises(
        TrackingError,
        match=r"records of run \w+ were not taken by .* could not be kept: No space left on device; make room, and the",
    ):
        run(here, callbacks=[At(u12=lambda: monkeypatch.setattr(Store, "send", full))])
    monkeypatch.setattr(Store, "send", usual)
    resumed = run([*here, "tracking.patience=60"], resume=True)
    history = store.get_metric_history(resumed.run_id, "accuracy.test")
    assert [metric.value for metric in history] == resumed.curves()["accuracy.test"]
    assert store.get_run(resumed.run_id).info.status == "FINISHED"
    assert not list((tmp_path / "mlruns" / "checkpoints").iterdir())


def test_a_resumed_run_tells_the_parameters_that_a_kill_kept_from_the_store(store):
    run_id = Store(store_uri(None)).create("persafl", "killed", {})
    opened = Tracker(compose([*FAST, "workers=2"]), run_id)
    opened.start()
    opened.finish("KILLED")
    assert store.get_run(run_id).data.params["method.name"] == "persafl_me"
    again = Tracker(compose([*FAST, "workers=1", "checkpoint.every=7"]), run_id)
    again.start()
    again.finish("FINISHED")
    assert store.get_run(run_id).data.params["workers"] == "2", "what began it"
    assert store.get_run(run_id).info.status == "FINISHED"


# -- a real server ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_killed_in_mid_run_loses_no_metric(tmp_path, capfd):
    """Killed and restarted during the run; then killed during a second run and restarted only after its end."""
    server = Server(tmp_path)
    try:
        here = [*FAST, f"tracking.uri={server.uri}", "updates=60", "eval.every=0.5", "tracking.model=false"]

        def opened_then_kill():
            wait_for_run(server.uri)
            server.kill()

        first = run(here, callbacks=[At(u2=opened_then_kill, u40=server.start)])
        check_whole(server.uri, first)
        assert "the run goes on and tries again" in capfd.readouterr().err

        second = run(
            [*here, "seed=1", "tracking.patience=1"],
            callbacks=[At(u20=lambda: (wait_for_run(server.uri, 2), server.kill()))],
        )
        assert "`persafl sync` sends them" in capfd.readouterr().err
        server.start()
        assert sync() == 1
        check_whole(server.uri, second)
        assert sync() == 0
    finally:
        server.kill()


def test_a_server_that_is_not_there_is_said_within_seconds():
    port = free_port()
    start = time.monotonic()
    with pytest.raises(ConfigError, match=f"cannot track to tracking.uri=http://127.0.0.1:{port}"):
        run([*FAST, f"tracking.uri=http://127.0.0.1:{port}"])
    assert time.monotonic() - start < 30
