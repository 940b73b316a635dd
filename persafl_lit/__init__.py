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
    from persafl_lit.data import Augmented, Federation

_LAZY = {"run": "api", "Result": "api", "Callback": "callbacks", "compose": "config", "Config": "config", "Augmented": "data", "Federation": "data"}

__all__ = ["Augmented", "Callback", "Config", "Federation", "Result", "__version__", "compose", "run"]


def __getattr__(name: str) -> Any:
    """`persafl_lit.run` imports torch and Lightning only when it is used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'persafl_lit' has no attribute {name!r}")
    with collector_at_rest():
        return getattr(import_module(f"persafl_lit.{_LAZY[name]}"), name)
