"""What a run leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from persafl_lit.config.compose import Config
from persafl_lit.engine.experiment import Experiment
from persafl_lit.errors import (
    ConfigError,
)
from persafl_lit.learning.scores import Point, Scores, accuracy_of, further_of, loss_of, models_of, signs_of
from persafl_lit.timeline import Timeline

if TYPE_CHECKING:
    import lightning as L
    from torch import Tensor

    from persafl_lit.common.tensors import Tensors
    from persafl_lit.data import Federation


@dataclass(frozen=True)
class Result:
    """What a run leaves: curves, a table per client, the timeline, the model."""

    config: Config
    run_id: str | None
    points: Sequence[Point]
    timeline: Timeline
    model: L.LightningModule
    """The backbone with the shared model's weights, and the initial values of those that clients keep (for
    method=local: of all)."""
    wall_seconds: float
    buffer: int
    notes: tuple[str, ...] = ()
    evaluation_share: float = 0.0
    """Of the workers' time."""
    bytes_per_transfer: int = 0
    model_changed: bool = True
    """If not, the run trained nothing and is no result: sweeps and reports leave it out."""
    thinned_from: int | None = None
    """How many evaluations there would have been if they had all fitted into the evaluation budget; None if they
    did."""
    federation: Federation | None = field(default=None, repr=False)
    memory: Mapping[int, Tensors] = field(default_factory=dict, repr=False)
    """What each client keeps; clients that keep nothing are not in it."""
    _state_dict: Callable[[Tensors, int], dict[str, Tensor]] | None = field(default=None, repr=False)
    first_weights: str = ""
    """A hash of the weights that the run began with. Those of a model that is given as an object are the caller's."""
    keeps_model: bool = False
    """Whether clients keep a model of their own: private parameters, or a personal model."""
    memory_bytes: int = 0
    """What one client keeps between visits."""

    @property
    def accuracy(self) -> dict[str, float]:
        """The last point's mean accuracies: val, test, std, worst_decile after fine-tuning; global without."""
        return self.points[-1].accuracy()

    def state_dict(self) -> dict[str, Tensor]:
        """The shared model's, with the initial values of what clients keep."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def client_state_dict(self, client: int) -> dict[str, Tensor]:
        """A client's own model before fine-tuning: the shared model with what this client keeps."""
        if not 0 <= client < len(self.timeline.arrivals_per_client()) + len(self.points[-1].held_out):
            raise ConfigError(f"client {client} does not exist; clients are numbered from 0")
        shared = self.state_dict()
        if self._state_dict is None:
            return shared
        return {
            name: value.to(shared[name].dtype)
            for name, value in self._state_dict(self.memory.get(client, {}), client).items()
        }

    def curves(self) -> dict[str, list[float]]:
        """Columns over the evaluation points: sim_time, updates, accuracy.*, loss.* and what training saw."""
        rows = [{"sim_time": point.sim_time, "updates": point.updates} | point.metrics() for point in self.points]
        return {name: [row.get(name, math.nan) for row in rows] for name in rows[0]}

    def clients(self) -> list[dict[str, float]]:
        """The last point, one row per client, with its number of arrivals."""
        arrivals = dict(enumerate(self.timeline.arrivals_per_client().tolist()))
        return [row | {"arrivals": arrivals.get(int(row["client"]), 0)} for row in self.points[-1].table()]

    def summary(self) -> dict[str, Any]:
        """The object that `persafl run --json` prints; a value that does not exist (accuracy on quadratics) is null."""
        last, staleness = self.points[-1], self.timeline.staleness(self.buffer)
        held_out: dict[str, Any] = {"clients": len(last.held_out)}
        if last.held_out:
            held_out |= {
                "accuracy": _null_for_nan(accuracy_of(last.held_out)),
                "loss": _null_for_nan(loss_of(last.held_out)),
            }
            held_out["models"] = self._models(last.held_out)
            held_out |= {"metrics": metrics} if (metrics := _further(last.held_out)) else {}
        beside = {
            rule: {
                **_null_for_nan(values),
                "loss": _null_for_nan(loss_of(last.scores, rule)),
                **({"metrics": found} if (found := _further(last.scores, rule)) else {}),
            }
            for rule, values in last.beside().items()
        }
        return {
            "run_id": self.run_id,
            "method": self.config.name,
            "seed": self.config.seed,
            "updates": last.updates,
            "versions": last.updates // self.buffer,
            "model_changed": self.model_changed,
            "sim_time": last.sim_time,
            "grad_evals": last.training["grad_evals"],
            "dropped": self.timeline.dropped,
            "skipped": int(last.training["skipped"]),
            "staleness": {
                "mean": float(staleness.mean()) if len(staleness) else 0.0,
                "max": int(staleness.max(initial=0)),
            },
            "concurrency": self.timeline.mean_concurrency(),
            "bytes_communicated": 2 * self.bytes_per_transfer * (last.updates + self.timeline.dropped),
            "accuracy": _null_for_nan(last.accuracy()),
            "loss": _null_for_nan(last.loss()),
            "holdout": held_out,
            "metrics": _further(last.scores),
            "beside": beside,
            "models": self._models(last.scores),
            "memory_bytes_per_client": self.memory_bytes,
            "evaluations": {"made": len(self.points), "thinned_from": self.thinned_from},
            "first_weights": self.first_weights,
            "evaluation_share": self.evaluation_share,
            "wall_seconds": self.wall_seconds,
            "notes": list(self.notes),
            "config": self.config.values,
        }

    def _models(self, scores: Sequence[Scores]) -> dict[str, Any]:
        """Which model was measured; where nothing is shared there is no shared one."""
        return {
            model: {state: _null_for_nan(splits) for state, splits in states.items()}
            for model, states in models_of(scores, self.keeps_model).items()
            if self.bytes_per_transfer or model != "shared"
        }


def notes_of(experiment: Experiment) -> tuple[str, ...]:
    """What a user should be told about a run that did less than it seems."""
    timeline, buffer, skipped = experiment.timeline, experiment.rule.arrivals_per_version, experiment.state.skipped
    notes = []
    if experiment.stopped:
        notes.append(f"a callback ended the run at simulated time {timeline.horizon:g}, after {len(timeline)} updates")
    if not experiment.model_changed:
        why = (
            f"only {len(timeline)} updates arrived and the server waits for {buffer}; raise horizon or lower "
            "method.buffer"
        )
        why = (
            f"none of {len(timeline)} updates entered it"
            if len(timeline) >= buffer or skipped == len(timeline)
            else why
        )
        notes.append(f"the model never changed: {why}. This is no result: sweeps and reports leave it out")
    scores = experiment.points[-1].scores + experiment.points[-1].held_out
    for name in signs_of(scores):
        missing = [
            score.client
            for score in scores
            if math.isnan(score.personalised.value(name, "val")) or math.isnan(score.personalised.value(name, "test"))
        ]
        if missing:
            where = f"{len(missing)} of {len(scores)} clients, client {missing[0]} first"
            notes.append(f"the metric {name} has no value (nan) for {where}; its means are over the others")
    if skipped:
        notes.append(
            f"{skipped} of {len(timeline)} updates were not finite, or made the model so, and were skipped; "
            "lower eta or set clip"
        )
    return tuple(notes)


def _further(scores: Sequence[Scores], rule: str | None = None) -> dict[str, dict[str, Any]]:
    """Metrics beside accuracy and loss, with the direction in which they improve."""
    directions = {1: "higher", -1: "lower", 0: None}
    signs = signs_of(scores)
    return {
        name: {**_null_for_nan(values), "direction": directions[signs[name]]}
        for name, values in further_of(scores, rule).items()
    }


def _null_for_nan(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
