"""persafl_lit: personalised asynchronous federated learning, on Lightning Fabric, tracked in MLflow."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from persafl_lit.common.process_memory import gc_paused

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from persafl_lit.api import run
    from persafl_lit.callbacks import Callback
    from persafl_lit.common.fields import NOT_A_KEY
    from persafl_lit.common.seeding import rng
    from persafl_lit.config.compose import Config, compose
    from persafl_lit.data import Augmented, Federation, Samples
    from persafl_lit.engine.result import Result
    from persafl_lit.errors import ConfigError, PersaflError
    from persafl_lit.learning.objectives import LocalLoss, Maml, Moreau, Objective, Plain, Proximal, Scaffold, Step
    from persafl_lit.learning.personal_models import PersonalModel
    from persafl_lit.learning.personalisation import Finetune
    from persafl_lit.server.rules import ControlVariates, Descent, Mixing, Rule
    from persafl_lit.server.state import State
    from persafl_lit.timeline import Delays, RandomDelays, Schedule, Setting, Timeline, jobs_to_timeline

_MODULES = {
    "api": ("Result", "run"),
    "common.seeding": ("rng",),
    "common.fields": ("NOT_A_KEY",),
    "config.compose": ("Config", "compose"),
    "data": ("Augmented", "Federation", "Samples"),
    "callbacks": ("Callback",),
    "errors": ("ConfigError", "PersaflError"),
    "learning.objectives": ("LocalLoss", "Maml", "Moreau", "Objective", "Plain", "Proximal", "Scaffold", "Step"),
    "learning.personal_models": ("PersonalModel",),
    "learning.personalisation": ("Finetune",),
    "server.rules": ("ControlVariates", "Descent", "Mixing", "Rule"),
    "server.state": ("State",),
    "timeline": ("Delays", "RandomDelays", "Schedule", "Setting", "Timeline", "jobs_to_timeline"),
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
    "PersonalModel",
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
    """What users call and subclass, wherever it lives; `persafl_lit.run` imports torch and Lightning only when it is
    used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'persafl_lit' has no attribute {name!r}")
    with gc_paused():
        return getattr(import_module(f"persafl_lit.{_LAZY[name]}"), name)
