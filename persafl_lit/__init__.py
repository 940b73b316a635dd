"""persafl_lit: personalised asynchronous federated learning, on Lightning Fabric, tracked in MLflow."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from persafl_lit.memory import collector_at_rest

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from persafl_lit.api import Result, run
    from persafl_lit.callbacks import Callback
    from persafl_lit.config import Config, compose
    from persafl_lit.data import Augmented, Federation, Samples
    from persafl_lit.errors import ConfigError, PersaflError
    from persafl_lit.finetune import Finetune
    from persafl_lit.objectives import LocalLoss, Maml, Moreau, Objective, Plain, Proximal, Scaffold, Step
    from persafl_lit.server import ControlVariates, Descent, Mixing, Rule, State
    from persafl_lit.streams import rng
    from persafl_lit.timeline import Delays, RandomDelays, Schedule, Setting, Timeline, jobs_to_timeline
    from persafl_lit.typed import NOT_A_KEY

_MODULES = {
    "api": ("Result", "run"),
    "callbacks": ("Callback",),
    "config": ("Config", "compose"),
    "data": ("Augmented", "Federation", "Samples"),
    "errors": ("ConfigError", "PersaflError"),
    "finetune": ("Finetune",),
    "objectives": ("LocalLoss", "Maml", "Moreau", "Objective", "Plain", "Proximal", "Scaffold", "Step"),
    "server": ("ControlVariates", "Descent", "Mixing", "Rule", "State"),
    "streams": ("rng",),
    "timeline": ("Delays", "RandomDelays", "Schedule", "Setting", "Timeline", "jobs_to_timeline"),
    "typed": ("NOT_A_KEY",),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "NOT_A_KEY",
    "Augmented",
    "Callback",
    "Config",
    "ConfigError",
    "ControlVariates",
    "Delays",
    "Descent",
    "Federation",
    "Finetune",
    "LocalLoss",
    "Maml",
    "Mixing",
    "Moreau",
    "Objective",
    "PersaflError",
    "Plain",
    "Proximal",
    "RandomDelays",
    "Result",
    "Rule",
    "Samples",
    "Scaffold",
    "Schedule",
    "Setting",
    "State",
    "Step",
    "Timeline",
    "__version__",
    "compose",
    "jobs_to_timeline",
    "rng",
    "run",
]


def __getattr__(name: str) -> Any:
    """What users call and subclass, wherever it lives; `persafl_lit.run` imports torch and Lightning only when it is used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'persafl_lit' has no attribute {name!r}")
    with collector_at_rest():
        return getattr(import_module(f"persafl_lit.{_LAZY[name]}"), name)
