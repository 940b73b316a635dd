"""The typed groups of a config that are no choices: evaluation, checkpoints, tracking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from persafl_lit.errors import ConfigError, shown
from persafl_lit.limits import MOST_SECONDS, at_most

LONGEST_NAME = 250


@dataclass(frozen=True)
class Eval:
    every: float | None
    """Simulated time between evaluations; null is a tenth of the run, or less often so that evaluation costs at most a quarter."""
    finetune: dict[str, Any]
    beside: tuple[str, ...]
    """Further fine-tuning rules for the last evaluation; `own` is the method's."""
    clients: int | None
    """Evaluate only so many clients, drawn by the seed; null is all."""
    gradient: bool
    """Also measure |grad F(w)|^2 of the method's own cost, over all data: what the theorems bound."""

    def __post_init__(self) -> None:
        positive("eval.every", self.every)
        if self.clients is not None and self.clients < 1:
            raise ConfigError(f"eval.clients must be >= 1 or null; got {self.clients}")


@dataclass(frozen=True)
class Checkpoints:
    every: int
    """Updates between checkpoints; 0 is never, so that one is written only when `seconds` say so or the run is asked to stop."""
    seconds: float | None
    """Wall seconds between checkpoints; null is never. Whichever of both comes first."""
    dir: str | None
    """Folder of checkpoints; null is mlruns/checkpoints."""

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
    enabled: bool
    uri: str | None
    """An MLflow tracking URI; null is MLFLOW_TRACKING_URI, else the sqlite store mlruns/mlflow.db."""
    experiment: str
    model: bool
    """Keep the final model, in MLflow's format."""
    figures: bool
    """Keep a picture of the run."""
    patience: float
    """Seconds of wall time that the end of a run waits for a store that is away."""

    def __post_init__(self) -> None:
        if not self.experiment.strip() or len(self.experiment) > LONGEST_NAME:
            raise ConfigError(f"tracking.experiment must be a name of 1 to {LONGEST_NAME} characters; got {shown(self.experiment)}")
        if not self.patience >= 0:
            raise ConfigError(f"tracking.patience must be >= 0 seconds; got {self.patience!r}")
        at_most("tracking.patience", self.patience, MOST_SECONDS)


def positive(key: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigError(f"{key} must be > 0; got {value!r}")
