"""MLflow itself: the only file that imports it."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sqlite3
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from persafl_lit.common.lock import Lock
from persafl_lit.common.logs import quieted
from persafl_lit.config.schema import ADDED, ADDED_BESIDE
from persafl_lit.errors import ConfigError, TrackingError, first_line
from persafl_lit.report.record import Record
from persafl_lit.timeline import from_csv
from persafl_lit.tracking.location import SQLITE
from persafl_lit.tracking.messages import PLANNED, PRUNED, SELECT, TrackingMessage
from persafl_lit.tracking.mlflow_view import experiment_tags

if TYPE_CHECKING:
    from mlflow.entities import Run

DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # We try again ourselves and go on with the run meanwhile; MLflow's own patience would be minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Environment variables that MLflow reads when it is imported and at every request."""
QUIET = {
    "alembic": logging.WARNING,
    "mlflow": logging.ERROR,
    "mlflow.store.db.utils": logging.CRITICAL,  # tracebacks of errors that we say in a sentence
}
BATCH = 1000  # metrics MLflow takes in one call


@functools.cache
def load_mlflow() -> Any:
    """MLflow with our defaults; environment variables that the user has set stay as they are."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    import mlflow

    return mlflow


def load_sqlite() -> None:
    """What MLflow imports for its first sqlite store."""
    load_mlflow()
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


class QuietClient:
    """MLflow's client, whose calls log only what we do not say ourselves."""

    def __init__(self, uri: str) -> None:
        mlflow = load_mlflow()
        with quieted(QUIET):
            self._client = mlflow.MlflowClient(tracking_uri=uri)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*arguments: Any, **named: Any) -> Any:
            with quieted(QUIET):
                return method(*arguments, **named)

        return call


class Store:
    """An MLflow tracking store: our sqlite file or any server."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        with _one_at_a_time(uri):
            if uri.startswith(SQLITE):
                _create(Path(uri.removeprefix(SQLITE)))
            self.client = QuietClient(uri)
            self.client.search_experiments(max_results=1)

    def experiment(self, name: str) -> str:
        """The id of an experiment, which is made if it does not exist yet."""
        with _one_at_a_time(self.uri):
            found = self.client.get_experiment_by_name(name)
            if found is None:
                artifacts = _beside(self.uri).as_uri() if self.uri.startswith(SQLITE) else None
                return str(self.client.create_experiment(name, artifact_location=artifacts, tags=experiment_tags()))
            if found.lifecycle_stage == "deleted":
                raise ConfigError(
                    f"the experiment {name!r} is deleted in this store; restore it or set another tracking.experiment"
                )
            return str(found.experiment_id)

    def create(self, experiment: str, name: str, tags: dict[str, str]) -> str:
        """A new run."""
        return str(self.client.create_run(self.experiment(experiment), run_name=name, tags=tags).info.run_id)

    def describe(self, run_id: str, params: dict[str, Any]) -> None:
        """A run's parameters, as far as it lacks them: MLflow refuses to change one, such as `workers` when a run is
        resumed with more."""
        known, param = self.client.get_run(run_id).data.params, load_mlflow().entities.Param
        self.client.log_batch(
            run_id, params=[param(key, str(value)[:6000]) for key, value in params.items() if key not in known]
        )

    def reopen(self, run_id: str) -> bool:
        """Go on with an interrupted run, if the store has it."""
        try:
            self.client.update_run(run_id, status="RUNNING")
        except load_mlflow().MlflowException as error:
            if self.refuses(error):
                return False
            raise
        return True

    def send(self, run_id: str, message: TrackingMessage) -> None:
        """Tell MLflow one thing; telling it twice changes nothing."""
        entities = load_mlflow().entities
        match message:
            case {"metrics": rows}:
                metrics = [entities.Metric(*row) for row in rows]
                for start in range(0, len(metrics), BATCH):
                    self.client.log_batch(run_id, metrics=metrics[start : start + BATCH])
            case {"params": params}:
                self.describe(run_id, params)
            case {"tags": tags}:
                self.client.log_batch(run_id, tags=[entities.RunTag(key, value[:5000]) for key, value in tags.items()])
            case {"text": text, "name": name}:
                self.client.log_text(run_id, text, name)
            case {"table": columns, "name": name}:
                self.client.log_text(
                    run_id,
                    json.dumps({"columns": list(columns), "data": list(zip(*columns.values(), strict=True))}),
                    name,
                )
                tables = json.dumps([{"path": name, "type": "table"}])
                self.client.set_tag(run_id, "mlflow.loggedArtifacts", tables)
            case {"path": path, "folder": folder}:
                if Path(path).is_dir():
                    self.client.log_artifacts(run_id, path, folder)
                else:
                    self.client.log_artifact(run_id, path, folder)
            case {"status": status, "end_time": end_time}:
                self.client.set_terminated(run_id, status=status, end_time=end_time)

    @staticmethod
    def refuses(error: Exception) -> bool:
        """Whether sending again would fail, too: the store is reachable and refuses."""
        return (
            isinstance(error, load_mlflow().MlflowException)
            and 400 <= error.get_http_status_code() < 500
            and error.get_http_status_code() not in (408, 429)
        )

    @staticmethod
    def is_locked(error: Exception) -> bool:
        """Whether another process has locked the database; worth waiting for."""
        return "database is locked" in str(error)

    # -- reading back -------------------------------------------------------------------------------------------------

    def records(self, target: str) -> list[Record]:
        """The runs that `target` names: a run, a sweep, or an experiment; oldest first."""
        planned = self._planned(target)
        return [self._record(run, planned) for run in reversed(self._find(target))]

    def _planned(self, target: str) -> int | None:
        """How many trials the sweep that `target` names has, as far as known; None for anything else."""
        counts = [run.data.tags.get(PLANNED, "") for run in self._sweeps(target)]
        return sum(map(int, counts)) if counts and all(count.isdecimal() for count in counts) else None

    def _sweeps(self, target: str) -> list[Run]:
        """The parent runs of a sweep, by its name or by their own id."""
        with contextlib.suppress(load_mlflow().MlflowException):
            run = self.client.get_run(target)
            return [run] if _is_sweep(run) else []
        if "'" in target:
            return []
        everywhere = [experiment.experiment_id for experiment in self.client.search_experiments()]
        return self.search(everywhere, f"tags.`persafl.sweep` = '{target}' and tags.`persafl.kind` = 'sweep'")

    def keep_report(self, targets: Sequence[str], folder: Path) -> None:
        """A report, with the run it is about, or as a run of its own beside those it compares: of several targets
        beside the first's."""
        runs, target = next((found for target in targets if (found := self._find(target))), []), ", ".join(targets)
        if not runs:
            return
        alone = len(runs) == 1 and runs[0].info.run_id == target
        experiment, tags = runs[0].info.experiment_id, {"persafl.report": target}
        run_id = (
            target if alone else self.client.create_run(experiment, run_name=f"report {target}", tags=tags).info.run_id
        )
        self.client.log_artifacts(run_id, str(folder), "report")
        if not alone:
            self.client.set_terminated(run_id)

    def _find(self, target: str) -> list[Run]:
        everywhere = [experiment.experiment_id for experiment in self.client.search_experiments()]
        with contextlib.suppress(load_mlflow().MlflowException):
            run = self.client.get_run(target)
            return self.search(everywhere, f"tags.`mlflow.parentRunId` = '{run.info.run_id}'") or (
                [] if _is_sweep(run) else [run]
            )
        quoted = target.replace("'", "")
        if quoted == target and (
            runs := self.search(everywhere, f"tags.`persafl.sweep` = '{target}' and tags.`persafl.trial` != ''")
        ):
            return runs
        named = self.client.get_experiment_by_name(target)
        if named is None:
            names = sorted(experiment.name for experiment in self.client.search_experiments())
            raise ConfigError(
                f"{target!r} is no run, sweep or experiment in {self.uri}; its experiments are "
                f"{', '.join(names) or 'none'}"
            )
        return self.search([named.experiment_id], "tags.`persafl.trial` != ''")

    def search(self, experiments: list[str], which: str) -> list[Run]:
        """Newest first."""
        found: list[Run] = []
        active, token = load_mlflow().entities.ViewType.ACTIVE_ONLY, None
        while True:
            page = self.client.search_runs(experiments, which, active, max_results=1000, page_token=token)
            found += page
            token = page.token
            if not token:
                return found

    def _record(self, run: Run, planned: int | None) -> Record:
        run_id, tags, config = (
            run.info.run_id,
            run.data.tags,
            {key: _value(text) for key, text in run.data.params.items()},
        )
        if (
            "delays.name" in config
        ):  # a run of 0.1 is comparable with one of today: what it did not have, it had as by default
            config = {key: value for key, value in ADDED.items() if ADDED_BESIDE[key] in config} | config
        results = json.loads(self.text(run_id, "results.json") or "{}")
        timeline = None
        with contextlib.suppress(Exception):  # whatever is wrong with it, a report does without
            path = self.client.download_artifacts(run_id, "timeline.csv")
            timeline = from_csv(path, int(config["clients"]) - int(config["data.holdout_clients"]))
        summary = results.get("summary")
        return Record(
            run_id,
            run.info.status,
            config,
            tags.get("persafl.error") or None,
            summary,
            results.get("curves") or self._curves(run),
            results.get("clients") or [],
            timeline,
            (summary or {}).get("bytes_communicated"),
            tags.get(SELECT) or None,
            PRUNED in tags,
            planned,
            tags.get("persafl.trial", ""),
            tags.get("persafl.version", ""),
            tags.get("mlflow.source.git.commit", ""),
        )

    def _curves(self, run: Run) -> dict[str, list[float]]:
        """From the metrics, for a run that has no results yet; only metrics that every point has."""
        columns: dict[str, dict[int, float]] = {}
        for name in run.data.metrics:
            columns[name] = {
                metric.timestamp: metric.value for metric in self.client.get_metric_history(run.info.run_id, name)
            }
            if name == "accuracy.test" or (name == "loss.test" and "updates" not in columns):
                columns["updates"] = {
                    metric.timestamp: metric.step for metric in self.client.get_metric_history(run.info.run_id, name)
                }
        times = sorted(columns.get("updates", {}))
        whole = {name: [found[time] for time in times] for name, found in columns.items() if set(times) <= set(found)}
        return {"sim_time": [time / 1000 if time > 1 else 0.0 for time in times], **whole} if times else {}

    def text(self, run_id: str, name: str) -> str | None:
        """An artifact, if it is there."""
        try:
            return Path(self.client.download_artifacts(run_id, name)).read_text()
        except (load_mlflow().MlflowException, OSError):
            return None


def _is_sweep(run: Run) -> bool:
    return bool(run.data.tags.get("persafl.kind") == "sweep")


def open_store(uri: str) -> Store:
    """A store, or a sentence about why not."""
    try:
        return Store(uri)
    except Exception as error:  # drivers and servers raise their own types
        raise TrackingError(f"cannot reach the tracking store {uri}: {first_line(error)}") from error


def save_model(model: Any, example: Any, folder: Path) -> bool:
    """The model in MLflow's own format, with a signature; loads with `mlflow.pytorch.load_model`.

    As a traced graph: loading it runs no code but torch's. Whether that was possible; not every module can be traced.
    """
    import torch

    mlflow = load_mlflow()
    with warnings.catch_warnings(), quieted(QUIET), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            inputs, output = example.numpy(), model.eval()(example).numpy()
            signature = mlflow.models.infer_signature(inputs, output)
            needs = ["torch", "lightning", "persafl_lit"]
            mlflow.pytorch.save_model(
                model, str(folder), signature=signature, input_example=inputs, pip_requirements=needs
            )
        except Exception:  # torch.export raises whatever a user's module makes it raise
            return False
    return True


def _value(text: str) -> Any:
    """A parameter as it was before MLflow made it a string."""
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _beside(uri: str) -> Path:
    """The folder for artifacts of a sqlite store: beside its file."""
    return Path(uri.removeprefix(SQLITE)).parent.absolute() / "artifacts"


def _create(path: Path) -> None:
    """A sqlite store, whole or not there: MLflow makes its tables in a hundred steps, and a process may be killed at
    any of them. In WAL mode, so that many may write."""
    if not path.exists():
        building = path.with_suffix(".building")
        for leftover in path.parent.glob(f"{building.name}*"):
            leftover.unlink()
        QuietClient(f"{SQLITE}{building}").search_experiments(max_results=1)  # makes the tables
        os.replace(building, path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")


@contextlib.contextmanager
def _one_at_a_time(uri: str) -> Iterator[None]:
    """Whatever is made in a sqlite store only if it is not there yet is made by one process at a time."""
    if not uri.startswith(SQLITE):
        yield
        return
    path = Path(uri.removeprefix(SQLITE))
    with Lock(path.with_suffix(".lock")).held():
        yield
