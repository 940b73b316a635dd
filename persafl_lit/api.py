"""A run from Python: `persafl_lit.run(["method=persafl_me", "eta=0.05"])`."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from persafl_lit.buffers import exported
from persafl_lit.checkpoint import Checkpoint
from persafl_lit.client import build_backbone, build_from_class, check_backbone
from persafl_lit.config import Config, compose
from persafl_lit.data.adapters import brings_clients, described
from persafl_lit.errors import CallbackError, ConfigError, DivergenceError, ModelError, PersaflError, TakenError, located, shown
from persafl_lit.evaluate import Point, Scores, accuracy_of, evaluation_cost, further_of, loss_of, signs_of
from persafl_lit.executors import Executor, Processes, Serial, Work, Worker, make_fabric
from persafl_lit.experiment import Experiment, evaluated_clients, evaluation_moments
from persafl_lit.finetune import Finetune, further_rule
from persafl_lit.limits import cores
from persafl_lit.metrics import Metrics
from persafl_lit.plugins import exits_refused
from persafl_lit.registry import path_of, resolve
from persafl_lit.timeline import Timeline

if TYPE_CHECKING:
    import lightning as L
    from lightning.fabric.loggers.logger import Logger
    from torch import Tensor

    from persafl_lit.data import Federation
    from persafl_lit.messages import Tensors
    from persafl_lit.objectives import Objective
    from persafl_lit.server import Rule, State
    from persafl_lit.timeline import Delays, Schedule
    from persafl_lit.tracking import Tracker


@dataclass(frozen=True)
class Result:
    """What a run leaves: curves, a table per client, the timeline, the model."""

    config: Config
    run_id: str | None
    points: Sequence[Point]
    timeline: Timeline
    model: L.LightningModule
    """The backbone with the shared model's weights, and the initial values of those that clients keep (for method=local: of all)."""
    wall_seconds: float
    buffer: int
    notes: tuple[str, ...] = ()
    evaluation_share: float = 0.0
    """Of the workers' time."""
    bytes_per_transfer: int = 0
    model_changed: bool = True
    """If not, the run trained nothing and is no result: sweeps and reports leave it out."""
    thinned_from: int | None = None
    """How many evaluations there would have been if they had all fitted into the evaluation budget; None if they did."""
    federation: Federation | None = field(default=None, repr=False)
    memory: Mapping[int, Tensors] = field(default_factory=dict, repr=False)
    """What each client keeps; clients that keep nothing are not in it."""
    _state_dict: Callable[[Tensors, int], dict[str, Tensor]] | None = field(default=None, repr=False)
    first_weights: str = ""
    """A hash of the weights that the run began with. Those of a model that is given as an object are the caller's."""

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
        return {name: value.to(shared[name].dtype) for name, value in self._state_dict(self.memory.get(client, {}), client).items()}

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
            held_out |= {"accuracy": _null_for_nan(accuracy_of(last.held_out)), "loss": _null_for_nan(loss_of(last.held_out))}
            held_out |= {"metrics": metrics} if (metrics := _further(last.held_out)) else {}
        beside = {
            rule: {**_null_for_nan(values), **({"metrics": found} if (found := _further(last.scores, rule)) else {})}
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
            "staleness": {"mean": float(staleness.mean()) if len(staleness) else 0.0, "max": int(staleness.max(initial=0))},
            "concurrency": self.timeline.mean_concurrency(),
            "bytes_communicated": 2 * self.bytes_per_transfer * (last.updates + self.timeline.dropped),
            "accuracy": _null_for_nan(last.accuracy()),
            "loss": _null_for_nan(last.loss()),
            "holdout": held_out,
            "metrics": _further(last.scores),
            "beside": beside,
            "evaluations": {"made": len(self.points), "thinned_from": self.thinned_from},
            "first_weights": self.first_weights,
            "evaluation_share": self.evaluation_share,
            "wall_seconds": self.wall_seconds,
            "notes": list(self.notes),
            "config": self.config.values,
        }


def run(
    config: Config | Mapping[str, Any] | Iterable[str] = (),
    model: L.LightningModule | nn.Sequential | type[L.LightningModule] | None = None,
    *,
    data: Any = None,
    objective: Objective | type[Objective] | None = None,
    rule: Rule | type[Rule] | None = None,
    schedule: Schedule | type[Schedule] | None = None,
    delays: Delays | type[Delays] | None = None,
    finetune: Finetune | type[Finetune] | None = None,
    callbacks: Sequence[Any] = (),
    loggers: Sequence[Logger] = (),
    metrics: Mapping[str, Any] | None = None,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    tags: dict[str, str] | None = None,
    run_id: str | None = None,
    wait_seconds: float = 0.0,
) -> Result:
    """Run one experiment. `config` is a Config, a list of overrides or a dict of them; `model` a backbone of yours,
    or an nn.Sequential that gives class scores. An object brings its weights; a class is built from the run's seed.

    `data` is yours: a list with one entry per client (a Dataset, which is split by the config's shares, a tuple or dict of train, val and
    test, or a LightningDataModule); one Dataset or arrays (x, y), dealt by `data.partition`; the same with the client of each sample,
    (x, y, client); or a `persafl_lit.Federation`. docs/data.md has more.

    `objective`, `rule`, `schedule`, `delays` and `finetune` are classes or objects of ours or yours, recorded by class and field values as if
    the config had named them. `callbacks` are told what happens (`persafl_lit.Callback` has the hooks) and `loggers` are Lightning's (CSV,
    TensorBoard, ...): they get the metrics of every evaluation with step = updates. `metrics` are measured beside loss and accuracy, by name:
    functions of (module(inputs), targets) or torchmetrics' objects (docs/extending.md). When `should_stop()` turns true, the run writes a
    checkpoint and raises `Interrupted`. With `resume`, an interrupted run of the same config goes on. `tags` go to the MLflow run; with
    `run_id` that is not a new one but this. `wait_seconds` is how long to wait for another process that is doing the same run to end.
    """
    config = config if isinstance(config, Config) else compose(config)
    parts = {"objective": objective, "rule": rule, "schedule": schedule, "delays": delays, "finetune": finetune}
    config = config.with_parts(**{name: part for name, part in parts.items() if part is not None})
    if model is not None:
        layers = {"layers": [" ".join(str(layer).split()) for layer in model]} if type(model) is nn.Sequential else {}
        cls = model if isinstance(model, type) else type(model)
        config = config.with_model(f"{cls.__module__}.{cls.__qualname__}", layers)
    if data is not None:
        config = config.with_data(described(data), brings_clients(data))
    if metrics:
        config = config.with_metrics(checked_metrics(metrics))
    with quiet_single_threaded_torch(), exits_refused():
        wall_start = time.monotonic()
        federation = config.federation(data)
        timeline = config.timeline(federation.trained())
        if not len(timeline):
            raise ConfigError(f"no update arrives by horizon={config.horizon:g}; raise it")
        rule = config.rule(federation.trained(), timeline)
        if model is not None:
            backbone = build_from_class(model, federation, config.seed) if isinstance(model, type) else check_backbone(model, federation)
        else:
            backbone = build_backbone(config.build("model"), federation, config.seed, config.allow_code)
        tracker = _tracker(config, run_id, tags, should_stop)
        told = [*callbacks, *config.listed("callbacks"), *([tracker] if tracker else [])]
        fabric = make_fabric(config.accelerator, config.devices, config.precision, told, [*loggers, *config.listed("loggers")])
        worker = Worker(work_of(config, federation, _copied(backbone), metrics or {}), fabric)
        evaluated = evaluated_clients(federation, config.eval.clients, config.seed)
        affordable = affordable_evaluations(worker.work, timeline, evaluated)
        wanted, moments = (evaluation_moments(timeline.horizon, config.eval.every, most) for most in (math.inf, affordable))

        def build_model(state: State) -> L.LightningModule:
            trained = _copied(backbone)
            trained.load_state_dict(worker.state_dict(state.model, exported(state)))
            return trained

        with _checkpoint(config, resume, wait_seconds) as checkpoint, _executor(config, worker, len(timeline)) as executor:
            experiment = Experiment(
                fabric,
                timeline,
                rule,
                executor,
                config.eta,
                moments,
                evaluated,
                build_model,
                config.eval.gradient,
                checkpoint=checkpoint,
                checkpoint_every=config.checkpoint.every,
                checkpoint_seconds=config.checkpoint.seconds,
                skip_divergence=config.on_divergence == "skip",
                settings=config.flat(),
                should_stop=should_stop,
            )
            experiment.wall_before = time.monotonic() - wall_start
            experiment.identify(config.hash(), federation.digest())
            if resume:
                found = checkpoint is not None and experiment.restore()
                where = f"after update {experiment.state.arrivals} of {len(timeline)}" if found else "nothing: no interrupted run of this config"
                print(f"persafl: resuming {where}", file=sys.stderr)
            experiment.begin()  # the workers train while MLflow is imported
            with _told(experiment):
                experiment.run()
                if tracker:
                    tracker.wait_until_open(experiment)
                result = Result(
                    config,
                    tracker.run_id if tracker else None,
                    tuple(experiment.points),
                    experiment.timeline,
                    build_model(experiment.state),
                    experiment.wall_seconds(),
                    rule.arrivals_per_version,
                    federation.notes + _notes(experiment),
                    executor.evaluation_share(),
                    worker.transfer_bytes,
                    experiment.model_changed,
                    len(wanted) if len(moments) < len(wanted) else None,
                    federation,
                    {client: slot.tensors for client, slot in experiment.state.memories.items()},
                    functools.partial(worker.state_dict, experiment.state.model) if worker.keeps else None,
                    worker.digest,
                )
                experiment.call("on_run_end", result=result)
            if checkpoint:
                checkpoint.delete()
        return result


@contextlib.contextmanager
def _told(experiment: Experiment) -> Iterator[None]:
    """However the run ends, callbacks and loggers are told. What fails in a callback of the user's costs nothing: the state is kept."""
    try:
        yield
        experiment.listeners.finalize("success")
    except BaseException as error:
        if isinstance(error, CallbackError) and experiment.checkpoint is not None:
            with contextlib.suppress(PersaflError):
                experiment.save(rescue=True)
                print(f"persafl: the state after update {experiment.state.arrivals} is kept; --resume continues from it", file=sys.stderr)
        experiment.tell_error(error)
        raise


def _copied(backbone: L.LightningModule) -> L.LightningModule:
    """A run trains a copy: the model it was given stays as it was."""
    try:
        return copy.deepcopy(backbone)
    except Exception as error:  # a model may hold what cannot be copied, and its own way of copying may raise anything
        raise ModelError(f"{type(backbone).__name__} cannot be copied, and a run trains a copy: {located(error)}") from error


@contextlib.contextmanager
def _checkpoint(config: Config, resume: bool, wait_seconds: float) -> Iterator[Checkpoint | None]:
    """This run's checkpoints, claimed; or None if another process that is doing the same run keeps them."""
    with Checkpoint(config.checkpoint_path) as checkpoint:
        if config.checkpoint.regular:
            checkpoint.check()
        mine = not (config.checkpoint.regular or resume) or checkpoint.claim(wait_seconds)  # else it is claimed when one is written
        if not mine and resume:
            raise TakenError(f"{checkpoint.owner()} is doing this run now; wait for it, or stop it and then resume")
        if not mine:
            print(f"persafl: {checkpoint.owner()} is doing the same run and keeps its checkpoints; this one writes none", file=sys.stderr)
        try:
            yield checkpoint if mine else None
        except DivergenceError:  # it would diverge again
            if mine:
                checkpoint.delete()
            raise


def _notes(experiment: Experiment) -> tuple[str, ...]:
    """What a user should be told about a run that did less than it seems."""
    timeline, buffer, skipped = experiment.timeline, experiment.rule.arrivals_per_version, experiment.state.skipped
    notes = []
    if experiment.stopped:
        notes.append(f"a callback ended the run at simulated time {timeline.horizon:g}, after {len(timeline)} updates")
    if not experiment.model_changed:
        why = f"only {len(timeline)} updates arrived and the server waits for {buffer}; raise horizon or lower method.buffer"
        why = f"none of {len(timeline)} updates entered it" if len(timeline) >= buffer or skipped == len(timeline) else why
        notes.append(f"the model never changed: {why}. This is no result: sweeps and reports leave it out")
    scores = experiment.points[-1].scores + experiment.points[-1].held_out
    for name in signs_of(scores):
        missing = [score.client for score in scores if math.isnan(score.own.value(name, "val")) or math.isnan(score.own.value(name, "test"))]
        if missing:
            where = f"{len(missing)} of {len(scores)} clients, client {missing[0]} first"
            notes.append(f"the metric {name} has no value (nan) for {where}; its means are over the others")
    if skipped:
        notes.append(f"{skipped} of {len(timeline)} updates were not finite, or made the model so, and were skipped; lower eta or set clip")
    return tuple(notes)


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Metrics from Python by name, each with the path of its function or class."""
    for name, metric in metrics.items():
        if not callable(metric) or isinstance(metric, type):
            raise ConfigError(f"the metric {name!r} must be a function of (module(inputs), targets) or a torchmetrics object; got {shown(metric)}")
    return {name: path_of(metric if hasattr(metric, "__qualname__") else type(metric)) for name, metric in metrics.items()}


def work_of(config: Config, federation: Federation, backbone: L.LightningModule, metrics: Mapping[str, Any] = MappingProxyType({})) -> Work:
    """What the workers must know of a config, and of metrics that were passed from Python."""
    objective = config.objective()
    rules: dict[str, Finetune] = {config.eval.finetune["name"]: config.build("eval.finetune")}
    for name in config.eval.beside:
        beside = further_rule(name, objective)
        if beside is None and name != "own":
            beside = resolve("eval.finetune", name, config.allow_code, "eval.beside")()
        if beside is not None and name not in rules:
            rules[name] = beside
    return Work(
        backbone,
        federation,
        objective,
        rules,
        config.local_steps,
        config.eta,
        config.batch_size,
        config.seed,
        config.accelerator,
        config.devices,
        config.precision,
        config.clip,
        config.sharing(),
        config.derivatives,
        config.buffers(),
        config.local,
        Metrics(copy.deepcopy(config.metrics(metrics)), config.eval.direction),
    )


def _executor(config: Config, worker: Worker, jobs: int) -> Executor:
    """Who trains. More workers than jobs have nothing to do."""
    lanes = min(config.workers or cores(), jobs)
    if config.executor == "serial":
        return Serial(worker)
    if config.executor == "processes":
        return Processes(worker, lanes)
    try:
        from persafl_lit.executors.cluster import Cluster
    except ImportError:
        raise ConfigError("executor=ray needs Ray; install it with: pip install 'persafl_lit[ray]'") from None
    return Cluster(worker, lanes)


def affordable_evaluations(work: Work, timeline: Timeline, evaluated: Sequence[int]) -> float:
    """How many evaluations, the last one by all rules, fit into a quarter of the run: into a third of its training.

    A fifth of that is kept back: counted samples are not quite time.
    """
    training = len(timeline) * work.local_steps * work.objective.cost * work.batch_size
    common, everything = (evaluation_cost(work.federation, evaluated, list(work.finetune.values())[:k], work.batch_size) for k in (1, None))
    return 1 + (0.8 * training / 3 - everything) / common


def _tracker(config: Config, run_id: str | None, tags: dict[str, str] | None, hurry: Callable[[], bool]) -> Tracker | None:
    if not config.tracking.enabled:
        return None
    from persafl_lit.tracking import Tracker

    return Tracker(config, run_id, tags, hurry)


@contextlib.contextmanager
def quiet_single_threaded_torch() -> Iterator[None]:
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


def _further(scores: Sequence[Scores], rule: str | None = None) -> dict[str, dict[str, Any]]:
    """Metrics beside accuracy and loss, with the direction in which they improve."""
    directions = {1: "higher", -1: "lower", 0: None}
    signs = signs_of(scores)
    return {name: {**_null_for_nan(values), "direction": directions[signs[name]]} for name, values in further_of(scores, rule).items()}


def _null_for_nan(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
