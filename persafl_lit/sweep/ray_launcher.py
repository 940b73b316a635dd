"""Trials as Ray tasks, on a cluster or on a Ray of this machine. A trial whose node is lost is begun again on another,
from its checkpoint where that can be read."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from persafl_lit.common.limits import cores
from persafl_lit.common.logs import LogSettings
from persafl_lit.common.process_memory import keep_freed_memory
from persafl_lit.engine.executors.ray_cluster import connect
from persafl_lit.errors import ConfigError, first_line
from persafl_lit.sweep.run_trial import Order, TrialMessage, run_trial

TRIAL_RETRIES = 5
"""How often Ray begins a trial again whose process or node was lost."""
ASKS_EVERY = 1.0
"""Seconds of wall time between a trial's questions whether to stop."""


@ray.remote(num_cpus=0)
class TrialEvents:
    """Actor that collects the events of trials, on the launcher's node; it answers whether to stop."""

    def __init__(self) -> None:
        self._words: list[tuple[str, TrialMessage]] = []
        self._stopping: set[str] = set()

    def tell(self, trial: str, messages: list[TrialMessage]) -> bool:
        self._words += [(trial, message) for message in messages]
        return trial in self._stopping

    def take(self) -> list[tuple[str, TrialMessage]]:
        words, self._words = self._words, []
        return words

    def stop(self, trials: list[str]) -> None:
        self._stopping |= set(trials)


@ray.remote  # type: ignore[untyped-decorator]
def _trial(order: Order, events: Any) -> TrialMessage:
    """In a process of the cluster."""
    keep_freed_memory()
    said: list[TrialMessage] = []
    asked_at, stop = 0.0, False

    def should_stop() -> bool:
        nonlocal asked_at, stop
        if time.monotonic() - asked_at >= ASKS_EVERY or any("point" in message for message in said):
            asked_at = time.monotonic()
            with contextlib.suppress(ray.exceptions.RayError):  # the launcher may be gone: Ray ends this process then
                stop = ray.get(events.tell.remote(order["trial"], list(said)))
            said.clear()
        return stop

    LogSettings(*order["log"]).apply()
    with _in_folder(order["folder"]):
        return run_trial(order, said.append, should_stop)


def _in_folder(folder: str) -> contextlib.AbstractContextManager[None]:
    """Relative paths of a config mean the folder where the sweep was started, where this node has it."""
    return contextlib.chdir(folder) if os.path.isdir(folder) else contextlib.nullcontext()


@dataclass
class RayLauncher:
    """Trials as Ray tasks; the methods are those of `LocalLauncher`."""

    address: str | None
    uri: str
    cpus: float = 1.0
    gpus: float = 0.0
    lanes: int = 0
    """At a time; 0 is as many as the cluster has room for."""
    _calls: dict[Any, str] = field(default_factory=dict)
    _events: Any = None

    def begin(self, trials: int) -> None:
        connect(self.address, self.lanes or cores(), "--launcher ray")
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len({node["NodeManagerAddress"] for node in nodes}) > 1 and not self.uri.startswith(("http://", "https://")):
            raise ConfigError(
                f"a cluster of {len(nodes)} machines cannot share the store {self.uri}; "
                "start `mlflow server` on one of them and set MLFLOW_TRACKING_URI to its address"
            )
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._events = TrialEvents.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
        if not self.lanes:
            total = ray.cluster_resources()
            room = [total.get("CPU", 0) / self.cpus] if self.cpus else []
            room += [total.get("GPU", 0) / self.gpus] if self.gpus else []
            self.lanes = max(1, int(min(room, default=1)))

    def free(self) -> bool:
        return len(self._calls) < self.lanes

    def start(self, order: Order) -> None:
        task = _trial.options(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=TRIAL_RETRIES)
        self._calls[task.remote(order, self._events)] = order["trial"]

    def events(self, wall_seconds: float) -> Iterator[tuple[str, TrialMessage]]:
        done, _ = ray.wait(list(self._calls), num_returns=1, timeout=wall_seconds) if self._calls else ([], [])
        yield from ray.get(self._events.take.remote())
        for call in done:
            trial = self._calls.pop(call)
            try:
                yield trial, ray.get(call)
            except ray.exceptions.RayTaskError as error:
                yield trial, {"transient": f"WorkerError: {type(error.cause).__name__}: {first_line(error.cause)}"}
            except ray.exceptions.RayError as error:
                yield trial, {"transient": f"WorkerError: {first_line(error)}"}

    def stop(self, trial: str | None = None) -> None:
        ray.get(self._events.stop.remote([trial] if trial else list(self._calls.values())))

    def close(self) -> None:
        if ray.is_initialized() and threading.current_thread() is threading.main_thread():
            for call in self._calls:
                ray.cancel(call, force=True)
            self._calls.clear()
            ray.shutdown()
