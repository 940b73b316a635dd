"""A sweep in MLflow: a parent run, and a child for every trial. MLflow records which trials finished."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persafl_lit import __version__
from persafl_lit.errors import TrackingError, first_line
from persafl_lit.tracking.environment import git_commit
from persafl_lit.tracking.location import SQLITE
from persafl_lit.tracking.messages import IMPORTED, PRUNED, SELECT, TrackingMessage, timestamp
from persafl_lit.tracking.mlflow_view import experiment_tags
from persafl_lit.tracking.outbox import keep
from persafl_lit.tracking.store import Store, open_store
from persafl_lit.tracking.tracker import new_run

if TYPE_CHECKING:
    from persafl_lit.config.compose import Config

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Child:
    """A trial as the store knows it."""

    run_id: str
    status: str
    """RUNNING also when its process is gone."""
    error: str
    pruned: bool = False
    imported: str = ""


@dataclass(frozen=True)
class Ended:
    """What a store has of a sweep's trials that ended, by their hashes."""

    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of those that finished."""
    errors: dict[str, str] = field(default_factory=dict)
    """Of those that failed, KIND: sentence."""


def ended_trials(uri: str, name: str) -> Ended:
    """Of a sweep; nothing is made where there is no store yet."""
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).exists():
        return Ended()
    store = open_store(uri)
    everywhere = [experiment.experiment_id for experiment in store.client.search_experiments()]
    runs = store.search(everywhere, f"tags.`persafl.sweep` = '{name}' and tags.`persafl.trial` != ''")
    finished = [run for run in runs if run.info.status == "FINISHED"]
    texts = {run.data.tags["persafl.trial"]: store.text(run.info.run_id, "summary.json") for run in finished}
    summaries = {trial: json.loads(text) for trial, text in texts.items() if text}
    failed = [run.data.tags for run in runs if run.info.status == "FAILED"]
    errors = {tags["persafl.trial"]: tags.get("persafl.error", "") for tags in failed}
    return Ended(summaries, {trial: error for trial, error in errors.items() if trial not in summaries})


class SweepRuns:
    """The parent is known by the sweep's name, a child by the hash of its config: begun again, a sweep finds both."""

    def __init__(
        self, store: Store, experiment: str, name: str, varied: Sequence[Sequence[str]], select: str, sign: int = 1
    ) -> None:
        """`varied` are the sets of keys that go together, `select` the metric that settings are chosen by, `sign` -1
        if its lower values are better."""
        self._store, self._name, self._select = store, name, select
        self._experiment = store.experiment(experiment)
        for key, value in experiment_tags(varied, select.removesuffix(".val"), lower=sign < 0).items():
            store.client.set_experiment_tag(self._experiment, key, value)
        parents = store.search([self._experiment], f"tags.`persafl.sweep` = '{name}' and tags.`persafl.kind` = 'sweep'")
        if parents:
            self.parent = str(parents[-1].info.run_id)
            store.reopen(self.parent)
        else:
            tags = {"persafl.sweep": name, "persafl.kind": "sweep", "persafl.version": __version__, **git_commit()}
            self.parent = str(store.client.create_run(self._experiment, run_name=name, tags=tags).info.run_id)
        self._children: dict[str, Child] = {}
        for run in store.search([self._experiment], f"tags.`mlflow.parentRunId` = '{self.parent}'"):
            tags = run.data.tags
            child = Child(
                run.info.run_id, run.info.status, tags.get("persafl.error", ""), PRUNED in tags, tags.get(IMPORTED, "")
            )
            known = self._children.setdefault(tags.get("persafl.trial", ""), child)
            if known is not child and known.status != "FINISHED":  # a copied store, or a launcher that was thought dead
                self._children[tags["persafl.trial"]] = child

    def children(self) -> dict[str, Child]:
        """By the hash of the trial's config."""
        return dict(self._children)

    def child(self, config: Config, name: str) -> str:
        """The run of a trial: the one it has, or a new one."""
        give_up_at = time.monotonic() + config.tracking.patience
        while True:
            try:
                return self._child(config, name)
            except Exception as error:  # MLflow, its drivers and its servers raise their own types
                if self._store.refuses(error) or time.monotonic() > give_up_at:
                    raise TrackingError(
                        f"{self._store.uri} takes no new run: {first_line(error)}; the same command goes on later"
                    ) from None
                time.sleep(1.0)

    def _child(self, config: Config, name: str) -> str:
        known = self._children.get(config.hash())
        if known is not None:
            self._store.describe(known.run_id, config.flat())  # its making may have been interrupted
            return known.run_id
        run_id = new_run(
            self._store,
            config,
            name,
            {"persafl.sweep": self._name, SELECT: self._select, "mlflow.parentRunId": self.parent},
        )
        self._children[config.hash()] = Child(run_id, "RUNNING", "")
        self._store.describe(run_id, config.flat())
        return run_id

    def summary(self, run_id: str) -> dict[str, Any] | None:
        """What a finished child came to; None if that is not in the store."""
        try:
            found = json.loads(self._store.text(run_id, "summary.json") or "null")
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def adopt(
        self,
        config: Config,
        name: str,
        tags: dict[str, str],
        summary: dict[str, Any],
        curves: dict[str, list[float]],
        timeline: str | None,
    ) -> str:
        """A finished run of a trial that ran elsewhere, from what is known of it; `tags` say where it is from."""
        run_id = self.child(config, name)
        points = [dict(zip(curves, row, strict=True)) for row in zip(*curves.values(), strict=True)]
        metrics = [
            [key, value, timestamp(point["sim_time"]), int(point["updates"])]
            for point in points
            for key, value in point.items()
            if key not in ("sim_time", "updates") and math.isfinite(value)
        ]
        summary = {"run_id": run_id, **summary}
        self._send(
            run_id,
            {"tags": {"persafl.error": "", **tags}},
            {"metrics": metrics},
            {"text": config.yaml(), "name": "config.yaml"},
            *([{"text": timeline, "name": "timeline.csv"}] if timeline is not None else []),
            {"text": json.dumps({"summary": summary, "curves": curves, "clients": []}), "name": "results.json"},
            {"text": json.dumps(summary, indent=2), "name": "summary.json"},
            {"status": "FINISHED", "end_time": int(time.time() * 1000)},
        )
        return run_id

    def end(self, run_id: str, status: str, error: str = "", tags: dict[str, str] | None = None) -> None:
        """Close a child whose process could not."""
        self._send(
            run_id,
            {"tags": {"persafl.error": error, **(tags or {})}},
            {"status": status, "end_time": int(time.time() * 1000)},
        )

    def tell(self, **message: Any) -> None:
        """Of the sweep as a whole."""
        self._send(self.parent, message)

    def _send(self, run_id: str, *messages: TrackingMessage) -> None:
        """What a store that is away does not take is kept and sent later."""
        try:
            for message in messages:
                self._store.send(run_id, message)
        except Exception as error:  # MLflow, its drivers and its servers raise their own types
            logger.warning("%s is away, its record waits for `persafl sync`: %s", self._store.uri, first_line(error))
            try:
                keep(self._store.uri, run_id, messages)
            except OSError as full:  # what matters of it comes again when the sweep is started again
                logger.warning("and it cannot be kept: %s", full.strerror)
