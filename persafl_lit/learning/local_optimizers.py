"""What turns gradients into local steps (`local.optimizer`). Settings only; torch is imported where an optimizer is
built."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from persafl_lit.errors import ConfigError, ModelError, located, shown
from persafl_lit.learning.objectives import Objective, Plain, Proximal

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from persafl_lit.common.tensors import Tensors

VECTORS = {"sgd": 0, "momentum": 1, "adamw": 2, "module": 2}
"""About how many vectors of the model's size an optimizer keeps."""


@dataclass(frozen=True)
class Local:
    """w_{i,q+1} from w_{i,q} and the gradient of the objective: by plain steps as in the paper, or by another optimizer
    of torch.optim."""

    optimizer: Literal["sgd", "momentum", "adamw", "module"] = "sgd"
    """The paper's plain steps, SGD with momentum, AdamW (each with step size eta), or what the module's own
    `configure_optimizers` returns."""
    momentum: float | None = None
    """Of `momentum`; null is 0.9."""
    weight_decay: float = 0.0
    """As in torch.optim; `adamw` decouples it from the gradient."""
    keep_state: bool = False
    """Whether a client keeps the optimizer's state between visits; else each visit begins with a new one."""

    def __post_init__(self) -> None:
        if self.momentum is not None and self.optimizer != "momentum":
            raise ConfigError(f"local.momentum is for local.optimizer=momentum; here it is {self.optimizer}")
        if self.momentum is not None and not 0 < self.momentum < 1:
            raise ConfigError(f"local.momentum must lie in (0, 1); got {self.momentum!r}")
        if not self.weight_decay >= 0:
            raise ConfigError(f"local.weight_decay must be >= 0; got {self.weight_decay!r}")
        if self.weight_decay and self.optimizer == "module":
            raise ConfigError("local.weight_decay is not for local.optimizer=module: the module sets its own")
        if self.keep_state and self.optimizer == "sgd":
            raise ConfigError("local.optimizer=sgd has no state to keep: leave local.keep_state at false")

    @property
    def plain(self) -> bool:
        """Whether a local step is -eta times the gradient."""
        return self.optimizer == "sgd" and not self.weight_decay

    def check(self, objective: Objective, personal: bool = False) -> None:
        """Only the gradient of a loss at w means something to an optimizer; a `personal` model takes plain steps."""
        if not self.plain and personal:
            raise ConfigError(
                "a personal model takes plain steps, so the shared one does, too: leave local.optimizer at sgd and "
                "local.weight_decay at 0"
            )
        if not self.plain and not isinstance(objective, (Plain, Proximal)):
            other = "local.weight_decay > 0" if self.optimizer == "sgd" else f"local.optimizer={self.optimizer}"
            raise ConfigError(
                f"{other} goes with the objectives plain and proximal; {type(objective).__name__.lower()} "
                "takes plain steps only"
            )

    def build(self, w: Tensor, eta: float, module: Any) -> Optimizer:
        """An optimizer without state; of `w`, or of the module's parameters."""
        from torch import optim

        if self.optimizer == "module":
            return own_optimizer(module)
        if self.optimizer == "adamw":
            return optim.AdamW([w], lr=eta, weight_decay=self.weight_decay)
        momentum = (self.momentum or 0.9) if self.optimizer == "momentum" else 0.0
        return optim.SGD([w], lr=eta, momentum=momentum, weight_decay=self.weight_decay)


def own_optimizer(module: Any) -> Optimizer:
    """The one optimizer that a LightningModule configures."""
    from torch.optim import Optimizer

    name = type(module).__name__
    if not overrides(module):
        raise ConfigError(f"local.optimizer=module needs a model with configure_optimizers; {name} has none")
    try:
        found = module.configure_optimizers()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ModelError(f"{name}.configure_optimizers fails: {located(error)}") from error
    paired = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], (list, tuple))
    optimizers, schedulers = found if paired else (found, [])
    listed = [*optimizers] if isinstance(optimizers, (list, tuple)) else [optimizers]
    if schedulers or any(isinstance(one, dict) and one.get("lr_scheduler") is not None for one in listed):
        raise ConfigError(
            "local.optimizer=module takes no schedulers: a client has no schedule of its own; "
            f"{name}.configure_optimizers returns one"
        )
    listed = [one.get("optimizer") if isinstance(one, dict) else one for one in listed]
    if len(listed) != 1 or not isinstance(listed[0], Optimizer):
        raise ConfigError(
            f"local.optimizer=module takes one optimizer of torch.optim; {name}.configure_optimizers returns "
            f"{shown(found)}"
        )
    closure = inspect.signature(type(listed[0]).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"local.optimizer=module takes optimizers that step once per gradient; {type(listed[0]).__name__} "
            "evaluates the loss itself, as often as it likes (its step needs a closure)"
        )
    return listed[0]


def overrides(module: Any) -> bool:
    """Whether the module's class, and not Lightning, says how to optimise it."""
    method = getattr(type(module), "configure_optimizers", None)
    return method is not None and not method.__module__.startswith("lightning.")


# -- state as client memory -------------------------------------------------------------------------------------------

MEMORY_PREFIX = "optimizer"


def state_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors, by the number of the parameter and their name."""
    found: dict[str, Tensor] = {}
    for parameter, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if value is None:
                continue
            if not hasattr(value, "dtype"):
                raise ModelError(
                    f"local.keep_state keeps tensors; {type(optimizer).__name__} has {name!r}, a "
                    f"{type(value).__name__}: set it to false"
                )
            found[f"{MEMORY_PREFIX}.{parameter}.{name}"] = value
    return found


def restore(optimizer: Optimizer, memory: Tensors) -> None:
    """Undo `state_of`, with copies: an optimizer changes its tensors in place, and a client's memory never changes."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in memory.items():
        if key.startswith(f"{MEMORY_PREFIX}."):
            _, parameter, name = key.split(".", 2)
            state.setdefault(int(parameter), {})[name] = value.clone()
    if state:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
