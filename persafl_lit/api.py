"""A run from Python: `persafl_lit.run(["method=persafl_me", "eta=0.05"])`."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from persafl_lit.common.limits import cores
from persafl_lit.common.logs import quieted
from persafl_lit.common.plugins import exits_refused
from persafl_lit.config.compose import Config, compose
from persafl_lit.config.registry import HOOKS, LOGGER_NEEDS, path_of, resolve
from persafl_lit.data.adapters import brings_clients, described
from persafl_lit.engine.checkpoint import Checkpoint
from persafl_lit.engine.evaluation_plan import (
    affordable_evaluations,
    evaluated_clients,
    evaluation_moments,
)
from persafl_lit.engine.executors import Executor, Processes, Serial, Work, Worker, make_fabric
from persafl_lit.engine.experiment import Experiment
from persafl_lit.engine.memory_file import MemoryFile
from persafl_lit.engine.result import Result, notes_of
from persafl_lit.errors import (
    CallbackError,
    ConfigError,
    DivergenceError,
    ModelError,
    PersaflError,
    TakenError,
    located,
    shown,
)
from persafl_lit.learning.metrics import Metrics
from persafl_lit.learning.personalisation import Finetune, further_rule
from persafl_lit.models.backbone import build_backbone, build_from_class, check_backbone
from persafl_lit.server.buffers import exported

if TYPE_CHECKING:
    import lightning as L
    from lightning.fabric.loggers.logger import Logger

    from persafl_lit.data import Federation
    from persafl_lit.learning.objectives import Objective
    from persafl_lit.learning.personal_models import PersonalModel
    from persafl_lit.server.rules import Rule
    from persafl_lit.server.state import State
    from persafl_lit.timeline import Delays, Schedule
    from persafl_lit.tracking import Tracker

logger = logging.getLogger(__name__)


def run(
    config: Config | Mapping[str, Any] | Iterable[str] = (),
    model: L.LightningModule | nn.Sequential | type[L.LightningModule] | None = None,
    *,
    data: Any = None,
    objective: Objective | type[Objective] | None = None,
    rule: Rule | type[Rule] | None = None,
    personal: PersonalModel | type[PersonalModel] | None = None,
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

    `data` is yours: a list with one entry per client (a Dataset, which is split by the config's shares, a tuple or dict
    of train, val and test, or a LightningDataModule); one Dataset or arrays (x, y), dealt by `data.partition`; the same
    with the client of each sample, (x, y, client); or a `persafl_lit.Federation`. docs/data.md has more.

    `objective`, `rule`, `personal`, `schedule`, `delays` and `finetune` are classes or objects of ours or yours,
    recorded by class and field values as if the config had named them. `callbacks` are told what happens
    (`persafl_lit.Callback` has the hooks) and `loggers` are Lightning's (CSV, TensorBoard, ...): they get the metrics
    of every evaluation with step = updates. `metrics` are measured beside loss and accuracy, by name: functions of
    (module(inputs), targets) or torchmetrics' objects (docs/extending.md). When `should_stop()` turns true, the run
    writes a checkpoint and raises `Interrupted`. With `resume`, an interrupted run of the same config goes on. `tags`
    go to the MLflow run; with `run_id` that is not a new one but this. `wait_seconds` is how long to wait for another
    process that is doing the same run to end.
    """
    config = config if isinstance(config, Config) else compose(config)
    check_listeners(callbacks, loggers)
    parts = {
        "objective": objective,
        "rule": rule,
        "personal": personal,
        "schedule": schedule,
        "delays": delays,
        "finetune": finetune,
    }
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
            backbone = (
                build_from_class(model, federation, config.seed)
                if isinstance(model, type)
                else check_backbone(model, federation)
            )
        else:
            backbone = build_backbone(config.build("model"), federation, config.seed, config.allow_code)
        tracker = _tracker(config, run_id, tags, should_stop)
        listeners = [*callbacks, *config.listed("callbacks"), *([tracker] if tracker else [])]
        fabric = make_fabric(
            config.accelerator, config.devices, config.precision, listeners, [*loggers, *config.listed("loggers")]
        )
        worker = Worker(work_of(config, federation, _copied(backbone), metrics or {}), fabric)
        evaluated = evaluated_clients(federation, config.eval.clients, config.seed)
        affordable = affordable_evaluations(worker.work, timeline, evaluated)
        wanted, moments = (
            evaluation_moments(timeline.horizon, config.eval.every, most) for most in (math.inf, affordable)
        )

        logger.debug(
            "%d updates by simulated time %g; %d evaluations of %d clients",
            len(timeline),
            timeline.horizon,
            len(moments),
            len(evaluated),
        )

        def build_model(state: State) -> L.LightningModule:
            trained = _copied(backbone)
            trained.load_state_dict(worker.state_dict(state.model, exported(state)))
            return trained

        with (
            _checkpoint(config, resume, wait_seconds) as checkpoint,
            _executor(config, worker, len(timeline)) as executor,
        ):
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
                memory_file=MemoryFile(config.memory_gb * 1e9, config.checkpoint_path.parent),
                settings=config.flat(),
                should_stop=should_stop,
            )
            experiment.wall_before = time.monotonic() - wall_start
            experiment.identify(config.hash(), federation.digest())
            if resume:
                found = checkpoint is not None and experiment.restore()
                where = (
                    f"after update {experiment.state.arrivals} of {len(timeline)}"
                    if found
                    else "nothing: no interrupted run of this config"
                )
                logger.info("resuming %s", where)
            experiment.begin()  # the workers train while MLflow is imported
            with _reported_end(experiment):
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
                    federation.notes + worker.notes + notes_of(experiment),
                    executor.evaluation_share(),
                    worker.transfer_bytes,
                    experiment.model_changed,
                    len(wanted) if len(moments) < len(wanted) else None,
                    federation,
                    {client: slot.tensors for client, slot in experiment.state.memories.items()},
                    functools.partial(worker.state_dict, experiment.state.model) if worker.keeps else None,
                    worker.digest,
                    worker.keeps_model,
                    worker.memory_bytes,
                )
                experiment.call("on_run_end", result=result)
            if checkpoint:
                checkpoint.delete()
        return result


@contextlib.contextmanager
def _reported_end(experiment: Experiment) -> Iterator[None]:
    """Callbacks and loggers learn how the run ends. If a callback of the user's fails, a checkpoint is kept."""
    try:
        yield
        experiment.listeners.finalize("success")
    except BaseException as error:
        if isinstance(error, CallbackError) and experiment.checkpoint is not None:
            with contextlib.suppress(PersaflError):
                experiment.save(rescue=True)
                logger.warning(
                    "the state after update %d is kept; --resume continues from it", experiment.state.arrivals
                )
        experiment.tell_error(error)
        raise


def _copied(backbone: L.LightningModule) -> L.LightningModule:
    """A run trains a copy: the model it was given stays as it was."""
    try:
        return copy.deepcopy(backbone)
    except Exception as error:  # a model may hold what cannot be copied, and its own way of copying may raise anything
        raise ModelError(
            f"{type(backbone).__name__} cannot be copied, and a run trains a copy: {located(error)}"
        ) from error


@contextlib.contextmanager
def _checkpoint(config: Config, resume: bool, wait_seconds: float) -> Iterator[Checkpoint | None]:
    """This run's checkpoints, claimed; or None if another process that is doing the same run keeps them."""
    with Checkpoint(config.checkpoint_path) as checkpoint:
        if config.checkpoint.regular:
            checkpoint.check()
        mine = not (config.checkpoint.regular or resume) or checkpoint.claim(
            wait_seconds
        )  # else it is claimed when one is written
        if not mine and resume:
            raise TakenError(f"{checkpoint.owner()} is doing this run now; wait for it, or stop it and then resume")
        if not mine:
            logger.warning(
                "%s is doing the same run and keeps its checkpoints; this one writes none", checkpoint.owner()
            )
        try:
            yield checkpoint if mine else None
        except DivergenceError:  # it would diverge again
            if mine:
                checkpoint.delete()
            raise


def check_listeners(callbacks: Sequence[Any], loggers: Sequence[Any]) -> None:
    """A callback that can be told nothing, and a logger that cannot log, are mistakes."""
    for key, listed in (("callbacks", callbacks), ("loggers", loggers)):
        classes = [one.__name__ for one in listed if isinstance(one, type)]
        if classes:
            raise ConfigError(f"{key}= takes objects; got the class {classes[0]}: write {classes[0]}(...)")
    for callback in callbacks:
        if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
            raise ConfigError(f"the callback {shown(callback)} has none of the hooks {', '.join(HOOKS)}")
    for logger in loggers:
        missing = [name for name in LOGGER_NEEDS if not callable(getattr(logger, name, None))]
        if missing:
            raise ConfigError(f"the logger {shown(logger)} is none of Lightning's: it needs {', '.join(missing)}")


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Metrics from Python by name, each with the path of its function or class."""
    for name, metric in metrics.items():
        if not callable(metric) or isinstance(metric, type):
            raise ConfigError(
                f"the metric {name!r} must be a function of (module(inputs), targets) or a torchmetrics "
                f"object; got {shown(metric)}"
            )
    return {
        name: path_of(metric if hasattr(metric, "__qualname__") else type(metric)) for name, metric in metrics.items()
    }


def work_of(
    config: Config,
    federation: Federation,
    backbone: L.LightningModule,
    metrics: Mapping[str, Any] = MappingProxyType({}),
) -> Work:
    """What the workers must know of a config, and of metrics that were passed from Python."""
    objective, sharing, personal = config.objective(), config.sharing(), config.personal()
    rules: dict[str, Finetune] = {config.eval.finetune["name"]: config.build("eval.finetune")}
    for name in config.eval.beside:
        beside = further_rule(name, objective, sharing.anything_private, personal.keeps)
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
        sharing,
        personal,
        config.derivatives,
        config.buffers(),
        config.local,
        Metrics(copy.deepcopy(config.metrics(metrics)), config.eval.direction),
    )


def _executor(config: Config, worker: Worker, jobs: int) -> Executor:
    """The executor that the config names, with at most as many workers as jobs."""
    lanes = min(config.workers or cores(), jobs)
    if config.executor == "serial":
        return Serial(worker)
    if config.executor == "processes":
        return Processes(worker, lanes)
    try:
        from persafl_lit.engine.executors.ray_cluster import RayExecutor
    except ImportError:
        raise ConfigError("executor=ray needs Ray; install it with: pip install 'persafl_lit[ray]'") from None
    return RayExecutor(worker, lanes)


def _tracker(
    config: Config, run_id: str | None, tags: dict[str, str] | None, hurry: Callable[[], bool]
) -> Tracker | None:
    if not config.tracking.enabled:
        return None
    from persafl_lit.tracking import Tracker

    return Tracker(config, run_id, tags, hurry)


@contextlib.contextmanager
def quiet_single_threaded_torch() -> Iterator[None]:
    """One thread gives the same bits everywhere; the caller's settings come back afterwards."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with quieted({"lightning.fabric": logging.WARNING}):
            yield
    finally:
        torch.set_num_threads(threads)
