"""A run's callbacks and loggers: told through its Fabric, named where they fail, their states kept in checkpoints."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric import Fabric

from persafl_lit.errors import CallbackError, Interrupted, PersaflError, TrackingError, located

if TYPE_CHECKING:
    from persafl_lit.learning.scores import Point

logger = logging.getLogger(__name__)

LET_THROUGH = (CallbackError, TrackingError, Interrupted, KeyboardInterrupt)
"""What a callback may raise without being named: it has a name already, or is the tracker's, or the user's wish to
stop."""


class Listeners:
    """The callbacks and loggers of a Fabric."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._finalized: set[int] = set()

    # -- callbacks ----------------------------------------------------------------------------------------------------

    def named(self) -> list[tuple[Any, str]]:
        """Callbacks, each with a name that a resumed run gives it again."""
        named: list[tuple[Any, str]] = []
        for callback in self.fabric._callbacks:
            kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
            named.append((callback, f"{kind} {sum(key.startswith(f'{kind} ') for _, key in named)}"))
        return named

    def tell(self, hook: str, about: Mapping[str, Any], callbacks: Sequence[Any] | None = None) -> None:
        """Call a hook of all callbacks, or of some; the error of one that fails names it."""
        fabric = self.fabric
        if callbacks is not None:
            fabric = copy.copy(fabric)
            fabric._callbacks = list(callbacks)
        try:
            fabric.call(hook, **about)
        except LET_THROUGH:
            raise
        except BaseException as error:
            raise CallbackError(
                f"the callback {type(culprit(error)).__name__} failed in {hook}: {located(error)}"
            ) from error

    def tell_error(self, about: Mapping[str, Any]) -> None:
        """Call every callback and logger, also after one that raises."""
        words: list[Callable[[], None]] = [functools.partial(self.finalize, "failed")]
        words += [
            functools.partial(self.tell, "on_run_error", about, [callback]) for callback in self.fabric._callbacks
        ]
        for tell in words:
            try:
                tell()
            except PersaflError as another:
                logger.error("%s", another)

    def states(self, rescue: bool) -> dict[str, Any]:
        """States of the callbacks that have one; with `rescue`, those that fail to give it are left out."""
        states = {}
        for callback, key in self.named():
            if callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None)):
                try:
                    with naming("callback", callback, "state_dict"):
                        states[key] = plain_state(callback.state_dict())
                except CallbackError:
                    if not rescue:
                        raise
        return {key: state for key, state in states.items() if state}

    def load(self, states: Mapping[str, Any]) -> None:
        for callback, key in self.named():
            if key in states:
                with naming("callback", callback, "load_state_dict"):
                    callback.load_state_dict(states[key])

    # -- loggers ------------------------------------------------------------------------------------------------------

    def start_loggers(self, settings: Mapping[str, Any], points: Sequence[Point]) -> None:
        """The config, and points from before a resume: a logger that was made anew has nothing of them."""
        for logger in self.fabric.loggers:
            with (
                naming("logger", logger, "log_hyperparams"),
                contextlib.suppress(NotImplementedError),
            ):  # some of Lightning's have no place for them
                logger.log_hyperparams(dict(settings))
        for point in points:
            self.log(point)

    def log(self, point: Point, known: Collection[str] = ()) -> None:
        """step = updates; simulated time is a metric, as a Lightning Logger has no other place for it."""
        if not self.fabric.loggers:
            return
        metrics = {name: value for name, value in point.metrics().items() if math.isfinite(value) and name not in known}
        for logger in self.fabric.loggers:
            with naming("logger", logger, "log_metrics"):
                logger.log_metrics({"sim_time": point.sim_time, **metrics}, step=point.updates)
                logger.save()

    def finalize(self, status: str) -> None:
        """Each logger once, also after one that fails."""
        failure: CallbackError | None = None
        for logger in self.fabric.loggers:
            if id(logger) not in self._finalized:
                self._finalized.add(id(logger))
                try:
                    with naming("logger", logger, "finalize"):
                        logger.finalize(status)
                except CallbackError as error:
                    failure = failure or error
        if failure is not None:
            raise failure


@contextlib.contextmanager
def naming(kind: str, who: Any, method: str) -> Iterator[None]:
    """Errors in here are those of a callback or a logger."""
    try:
        yield
    except LET_THROUGH:
        raise
    except BaseException as error:
        raise CallbackError(f"the {kind} {type(who).__name__} failed in {method}: {located(error)}") from error


def culprit(error: BaseException | None) -> Any:
    """The callback in which an error was raised: Fabric's loop over them knows it."""
    for frame, _ in traceback.walk_tb(error.__traceback__ if error else None):
        if frame.f_code is Fabric.call.__code__ and "callback" in frame.f_locals:
            return frame.f_locals["callback"]
    return None


def plain_state(value: Any, where: str = "state_dict()") -> Any:
    """A callback's state as a checkpoint can hold it, which is read without running code: tensors and plain values
    only."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in (dict, OrderedDict):
        return {
            plain_state(key, f"a key of {where}"): plain_state(part, f"{where}[{key!r}]") for key, part in value.items()
        }
    if where == "state_dict()":
        raise TypeError(f"state_dict() must return a dict; got a {type(value).__name__}")
    if type(value) in (list, tuple):
        return type(value)(plain_state(part, f"{where}[{index}]") for index, part in enumerate(value))
    if value is None or type(value) in (bool, int, float, str, torch.Tensor, torch.nn.Parameter):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}; checkpoints hold tensors, numbers, text, lists and dicts")
