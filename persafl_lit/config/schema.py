"""The settings of a run that belong to no class of their own: what a method is made of, evaluation, checkpoints,
tracking."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from persafl_lit.common.limits import MOST_SECONDS, at_most
from persafl_lit.errors import ConfigError, shown
from persafl_lit.learning.metric_names import MEASURED

LONGEST_NAME = 250
ADDED: dict[str, Any] = {
    "derivatives": "auto",
    "delays.per_gradient": 0.0,
    "method.private": ["none"],
    "method.body_steps": None,
    "method.personal": "none",
    "model.init": "torch",
    "model.buffers": "local",
    "model.buffers_mix": None,
    "local.optimizer": "sgd",
    "local.momentum": None,
    "local.weight_decay": 0.0,
    "local.keep_state": False,
    "callbacks": [],
    "eval.metrics": [],
    "eval.direction": {},
}
"""Keys that 0.1 did not have, with the value that means what it did: they are no part of a run's hash then."""
ADDED_BESIDE = {
    "derivatives": "seed",
    "delays.per_gradient": "delays.name",
    "method.private": "method.name",
    "method.body_steps": "method.name",
    "method.personal": "method.name",
    "model.init": "model.hidden",
    "callbacks": "seed",
    "model.buffers": "model.name",
    "model.buffers_mix": "model.name",
    "local.optimizer": "seed",
    "local.momentum": "seed",
    "local.weight_decay": "seed",
    "local.keep_state": "seed",
    "eval.metrics": "seed",
    "eval.direction": "seed",
}
"""For each of them, a key of 0.1 that only the runs have to which it applies."""


def choice(name: str) -> Callable[[], dict[str, Any]]:
    """The default of a group: one of the files in its folder of conf/."""
    return lambda: {"name": name}


@dataclass(frozen=True)
class Method:
    """What a method is made of. It also has the keys of its objective, of its rule and of its personal model."""

    objective: str = "plain"
    """What a client computes."""
    rule: str = "descent"
    """How updates enter the shared model."""
    personal: str = "none"
    """The model that a client keeps beside the shared one."""


@dataclass(frozen=True)
class Eval:
    every: float | None = None
    """Simulated time between evaluations; null is a tenth of the run, or less often so that evaluation costs at most a
    quarter of the work."""
    finetune: dict[str, Any] = field(default_factory=choice("sgd"))
    """How clients personalise the shared model before it is measured: the same rule for every method that is
    compared."""
    beside: tuple[str, ...] = ("own",)
    """Further fine-tuning rules, at the end: `own` (the method's own model: a MAML step, a proximal point, or the model
    that a client keeps, as it is), `none`, `sgd`, `sgd-50`, `maml`, `prox`."""
    clients: int | None = None
    """Evaluate only so many clients, drawn by the seed; null is all."""
    gradient: bool = False
    """Also measure `grad_norm_sq`, the squared norm of the gradient of the method's own cost over all clients' data:
    what the theorems bound."""

    metrics: tuple[str | dict[str, Any], ...] = ()
    """Metrics beside loss and accuracy: `f1`, `auroc`, `mae`, ..., an entry point or package.module.metric, or `{name:
    top3, metric: top5, k: 3}`."""
    direction: dict[str, Literal["higher", "lower"]] = field(default_factory=dict)
    """`eval.direction.NAME=higher|lower`, where a metric does not say which is better: to select by it, and for its
    `worst_decile` and `gap`."""

    def __post_init__(self) -> None:
        positive("eval.every", self.every)
        described = [describe_metric(metric) for metric in self.metrics if metric not in MEASURED]
        names = [metric["name"] for metric in described]
        for name in (*names, *self.direction):
            check_metric_name(name)
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(
                f"eval.metrics has two metrics {twice[0]!r}; name one of them otherwise, {{name: ..., metric: "
                f"{twice[0]}}}"
            )
        object.__setattr__(self, "metrics", tuple(described))
        if self.clients is not None and self.clients < 1:
            raise ConfigError(f"eval.clients must be >= 1 or null; got {self.clients}")


@dataclass(frozen=True)
class Checkpoints:
    every: int = 100
    """Updates between checkpoints; 0 is never, so that one is written only when `seconds` say so or the run is asked to
    stop."""
    seconds: float | None = None
    """Wall seconds between checkpoints; null is never. Whichever of both comes first."""
    dir: str | None = None
    """Folder of checkpoints; null is `mlruns/checkpoints`. The last two are kept."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"checkpoint.every must be >= 0 updates; got {self.every}")
        positive("checkpoint.seconds", self.seconds)

    @property
    def regular(self) -> bool:
        """Whether a run writes checkpoints without being asked to stop."""
        return self.every > 0 or self.seconds is not None


@dataclass(frozen=True)
class Tracking:
    enabled: bool = True
    """Whether the run is recorded in MLflow."""
    uri: str | None = None
    """An MLflow tracking URI; null is MLFLOW_TRACKING_URI, else `sqlite:///mlruns/mlflow.db`."""
    experiment: str = "persafl"
    """The MLflow experiment that the run belongs to."""
    model: bool = True
    """Keep the final model, in MLflow's format."""
    figures: bool = True
    """Keep a picture of the run."""
    patience: float = 30.0
    """Wall seconds that the end of a run waits for a store that is away; what the store does not take is sent later."""

    def __post_init__(self) -> None:
        if not self.experiment.strip() or len(self.experiment) > LONGEST_NAME:
            raise ConfigError(
                f"tracking.experiment must be a name of 1 to {LONGEST_NAME} characters; got {shown(self.experiment)}"
            )
        if not self.patience >= 0:
            raise ConfigError(f"tracking.patience must be >= 0 seconds; got {self.patience!r}")
        at_most("tracking.patience", self.patience, MOST_SECONDS)


def positive(key: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigError(f"{key} must be > 0; got {value!r}")


def describe_metric(value: str | dict[str, Any]) -> dict[str, Any]:
    """`name` is what the metric is called, `metric` what it is, if that is something else; what else there is are
    arguments."""
    described: dict[str, Any] = {"metric": value} if isinstance(value, str) else dict(value)
    metric = described.pop("metric", described.get("name"))
    name = described.pop("name", str(metric).rpartition(".")[2])
    if not isinstance(metric, str) or not isinstance(name, str):
        raise ConfigError(
            "eval.metrics is a list of names such as f1, or of {name: mine, metric: package.module.metric, "
            f"...}}; got {shown(value)}"
        )
    return {"name": name, **({} if metric == name else {"metric": metric}), **described}


def check_metric_name(name: Any) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w{0,99}", name, re.ASCII):
        raise ConfigError(f"a metric's name is a word of letters, digits and '_'; got {shown(name)}")
    if name in MEASURED:
        raise ConfigError(f"{name} is measured anyway, so no other metric can have this name; call it my_{name}")
