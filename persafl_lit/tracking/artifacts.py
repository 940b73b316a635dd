"""What a finished run leaves in MLflow beside its metrics: results, tables, a picture, the model."""

from __future__ import annotations

import copy
import json
import logging
from typing import TYPE_CHECKING

from persafl_lit.common.csv_table import columns_to_csv
from persafl_lit.errors import located
from persafl_lit.tracking.messages import CHANGED, NOTE

if TYPE_CHECKING:
    from persafl_lit.engine.result import Result
    from persafl_lit.tracking.tracker import Tracker

logger = logging.getLogger(__name__)


def log_result(tracker: Tracker, result: Result) -> None:
    """A picture or a model that cannot be made is said, and costs nothing else."""
    summary, curves, clients = result.summary(), result.curves(), result.clients()
    tracker.say(text=json.dumps({"summary": summary, "curves": curves, "clients": clients}), name="results.json")
    tracker.say(text=json.dumps(summary, indent=2), name="summary.json")
    tracker.say(text=columns_to_csv(curves), name="curves.csv")
    tracker.say(tags={NOTE: "; ".join(result.notes), CHANGED: str(result.model_changed).lower()})
    tracker.say(table={name: [row[name] for row in clients] for name in clients[0]}, name="clients.json")
    tracker.metrics({"wall_seconds": result.wall_seconds}, result.points[-1])
    try:
        _log_picture(tracker, result)
        _log_model(tracker, result)
    except Exception as error:  # whatever it is, the results count
        logger.warning("the run's picture or model could not be kept: %s", located(error))


def _log_picture(tracker: Tracker, result: Result) -> None:
    if result.config.tracking.figures:
        from persafl_lit.report.run_overview import draw_run

        file = tracker.staging / "run.png"
        draw_run(result.config.name, result.curves(), result.timeline, result.buffer, result.clients(), file)
        tracker.say(path=str(file), folder="figures")


def _log_model(tracker: Tracker, result: Result) -> None:
    from torch import Tensor

    if result.config.tracking.model and result.federation is not None:
        from persafl_lit.tracking.store import save_model

        data, _ = next(result.federation.whole(0, "test", 2))
        if result.config.data["name"] == "quadratic" or not (
            isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor)
        ):
            return
        example = data[0].float() if data[0].is_floating_point() else data[0]
        folder = tracker.staging / "model"
        if save_model(copy.deepcopy(result.model).float(), example.contiguous(), folder):
            tracker.say(path=str(folder), folder="model")
