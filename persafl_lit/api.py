"""A run from Python: `persafl_lit.run(["method=persafl_me", "eta=0.05"])`."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persafl_lit.checkpoint import Checkpoint
from persafl_lit.client import build_backbone, check_backbone
from persafl_lit.config import Config, compose
from persafl_lit.data import DATASETS
from persafl_lit.errors import ConfigError
from persafl_lit.evaluate import FINETUNES, Point, accuracy_of, loss_of
from persafl_lit.executors import Serial, Work, Worker, make_fabric
from persafl_lit.experiment import Experiment, Observer
from persafl_lit.models import MODELS
from persafl_lit.timeline import Timeline

if TYPE_CHECKING:
    import lightning as L
    from torch import Tensor


@dataclass(frozen=True)
class Result:
    """What a run leaves: curves, a table per client, the timeline, the model."""

    config: Config
    run_id: str | None
    points: Sequence[Point]
    timeline: Timeline
    model: L.LightningModule
    """The backbone with the shared model's weights (for method=local: the first model's)."""
    wall_seconds: float
    buffer: int
    notes: tuple[str, ...] = ()

    @property
    def accuracy(self) -> dict[str, float]:
        """The last point's mean accuracies: val, test, std, worst_decile after fine-tuning; global without."""
        return self.points[-1].accuracy()

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def curves(self) -> dict[str, list[float]]:
        """Columns over the evaluation points: sim_time, updates, accuracy.*, loss.* and what training saw."""
        rows = [{"sim_time": point.sim_time, "updates": point.updates} | point.metrics() for point in self.points]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def clients(self) -> list[dict[str, float]]:
        """The last point, one row per client, with its number of arrivals."""
        arrivals = self.timeline.arrivals_per_client().tolist() + [0] * len(self.points[-1].held_out)
        return [row | {"arrivals": count} for row, count in zip(self.points[-1].table(), arrivals, strict=True)]

    def summary(self) -> dict[str, Any]:
        """The object that `persafl run --json` prints; a value that does not exist (accuracy on quadratics) is null."""
        last, staleness = self.points[-1], self.timeline.staleness(self.buffer)
        held_out: dict[str, Any] = {"clients": len(last.held_out)}
        if last.held_out:
            held_out |= {"accuracy": _null_for_nan(accuracy_of(last.held_out)), "loss": _null_for_nan(loss_of(last.held_out))}
        return {
            "run_id": self.run_id,
            "method": self.config.name,
            "seed": self.config.seed,
            "updates": last.updates,
            "versions": last.updates // self.buffer,
            "sim_time": last.sim_time,
            "grad_evals": last.training["grad_evals"],
            "dropped": self.timeline.dropped,
            "staleness": {"mean": float(staleness.mean()) if len(staleness) else 0.0, "max": int(staleness.max(initial=0))},
            "concurrency": self.timeline.mean_concurrency(),
            "accuracy": _null_for_nan(last.accuracy()),
            "loss": _null_for_nan(last.loss()),
            "holdout": held_out,
            "wall_seconds": self.wall_seconds,
            "config": self.config.values,
        }


def run(
    config: Config | Mapping[str, Any] | Iterable[str] = (),
    model: L.LightningModule | None = None,
    *,
    resume: bool = False,
    observers: Sequence[Observer] | Callable[[Timeline], Sequence[Observer]] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Run one experiment. `config` is a Config, a list of overrides or a dict of them; `model` a backbone of yours.

    `observers` watch the run (or a function that makes them once the timeline is known); when `should_stop()` turns true,
    the run writes a checkpoint and raises `Interrupted`. With `resume`, an interrupted run of the same config goes on.
    """
    wall_start = time.monotonic()
    config = config if isinstance(config, Config) else compose(config)
    with _quiet_single_threaded_torch():
        federation = config.build("data", DATASETS).federation(config.clients, config.seed)
        timeline = config.timeline(federation.trained())
        if not len(timeline):
            raise ConfigError(f"no update arrives by horizon={config.horizon:g}; raise it")
        rule = config.rule(federation.trained(), timeline)
        own = model is not None
        original = check_backbone(model) if own else build_backbone(config.build("model", MODELS), federation, config.seed, config.allow_code)
        finetune = config.build("eval.finetune", FINETUNES)
        fabric = make_fabric(config.accelerator, config.devices, config.precision)
        work = Work(copy.deepcopy(original), federation, config.objective(), finetune, config.local_steps, config.eta, config.batch_size, config.seed)
        worker = Worker(work, fabric, config.precision)
        checkpoint = Checkpoint(checkpoint_path(config))
        if config.checkpoint.every:
            checkpoint.check()
        experiment = Experiment(
            timeline,
            rule,
            Serial(worker),
            config.eta,
            config.eval.every,
            observers=list(observers(timeline) if callable(observers) else observers),
            checkpoint=checkpoint,
            checkpoint_every=config.checkpoint.every,
            should_stop=should_stop,
        )
        identity = experiment.identity(config.hash(), federation.digest())
        saved = checkpoint.load(identity) if resume else None
        tracker = _track(config, timeline, saved)
        if tracker is not None:
            experiment.observers = [tracker, *experiment.observers]
            experiment.extra = {"run_id": tracker.run_id}
        try:
            if saved is not None:
                experiment.restore(saved)
            experiment.run(identity)
        except BaseException as failure:
            if tracker is not None:
                tracker.finish(None, failure)
            raise
        trained = copy.deepcopy(original)
        trained.load_state_dict(worker.state_dict(experiment.state.w))
        result = Result(
            config,
            None if tracker is None else tracker.run_id,
            tuple(experiment.points),
            timeline,
            trained,
            time.monotonic() - wall_start,
            rule.arrivals_per_version,
            federation.notes,
        )
        if tracker is not None:
            tracker.finish(result.summary())
        checkpoint.delete()
        return result


def checkpoint_path(config: Config) -> Path:
    """Where an interrupted run of this config is kept."""
    return Path(config.checkpoint.dir or "mlruns/checkpoints") / f"{config.hash()}.pt"


def _track(config: Config, timeline: Timeline, saved: dict[str, Any] | None) -> Any:
    if not config.tracking.enabled:
        return None
    from persafl_lit.tracking import Tracker

    tracker = Tracker(config, run_id=(saved or {}).get("extra", {}).get("run_id"))
    if saved is None:
        tracker.log_timeline(timeline)
    return tracker


@contextlib.contextmanager
def _quiet_single_threaded_torch() -> Iterator[None]:
    """One thread gives the same bits everywhere; the caller's setting comes back afterwards."""
    import logging

    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _null_for_nan(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
