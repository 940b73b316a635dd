"""A Ray cluster: the same units of work as actor calls, on one node or many."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import ray
import torch
from torch import Tensor

from persafl_lit.common.process_memory import keep_freed_memory
from persafl_lit.engine.executors.executor import POLL, Executor, Unit, UnitResult, perform, unsendable
from persafl_lit.engine.executors.transport import Header, as_bytes, describe, unpack
from persafl_lit.engine.executors.worker import Worker
from persafl_lit.errors import ConfigError, WorkerError, first_line, located

CALLS_PER_LANE = 2
"""Calls per lane: one under way and one ready."""
SMALL = 100_000
"""Bytes up to which Ray sends an argument with the call."""
UNIT_RETRIES = 3
"""How often Ray does a unit again whose process or node was lost."""


class RayExecutor(Executor):
    """Ray tasks with one CPU and one torch thread each. RAY_ADDRESS names a cluster; without it a local one is started.

    A task whose process or node is lost is done again: the result has the same bits.
    """

    def __init__(self, worker: Worker, lanes: int) -> None:
        super().__init__(worker, lanes)
        self._started = not ray.is_initialized()
        if self._started:
            connect(None, lanes, "executor=ray")
        self._name = uuid.uuid4().hex
        self._parts: dict[tuple[int, int], tuple[Tensor, Any]] = {}
        self._calls: dict[Any, Unit] = {}
        try:
            self._work_stored = ray.put(worker.work)
        except Exception as error:  # a model's own way of being pickled may raise anything
            self.close()
            raise unsendable(worker, _why_unpicklable(worker) or error) from None

    def _free(self) -> bool:
        return len(self._calls) < CALLS_PER_LANE * self.lanes

    def _send(self, unit: Unit) -> None:
        header, tensors = describe(unit.message)
        # In a list, so that Ray passes the reference: a process unpacks the work once, not once per call.
        call = _perform.remote(self._name, [self._work_stored], header, *map(self._stored, map(as_bytes, tensors)))
        self._calls[call] = unit

    def _stored(self, part: Tensor) -> Any:
        """A large tensor in the cluster's memory: once, however many jobs read it. A small one travels with the
        call."""
        if len(part) < SMALL:
            return part.numpy()
        place = part.data_ptr(), len(part)
        if place not in self._parts:
            while len(self._parts) >= 4 * CALLS_PER_LANE * self.lanes:
                del self._parts[next(iter(self._parts))]
            self._parts[place] = part, ray.put(part.numpy())
        return self._parts[place][1]

    def _collect(self, wait: bool) -> Iterator[tuple[Unit, UnitResult, float]]:
        if not self._calls:
            return
        done, _ = ray.wait(list(self._calls), num_returns=1, timeout=POLL if wait else 0)
        for call in done:
            unit = self._calls.pop(call)
            try:
                header, wall_seconds, *parts = ray.get(call)
            except ray.exceptions.RayTaskError as error:
                raise WorkerError(
                    f"client {unit.message.client} could not be done by Ray: {located(error.cause)}"
                ) from None
            except ray.exceptions.RayError as error:
                raise WorkerError(
                    f"client {unit.message.client} could not be done by Ray in {UNIT_RETRIES + 1} attempts: "
                    f"{first_line(error)}"
                ) from None
            yield unit, unpack(header, map(_writable, parts), self.worker.device), wall_seconds

    def close(self) -> None:
        for call in self._calls:
            ray.cancel(call, force=True)
        if self._started:
            ray.shutdown()


def _why_unpicklable(worker: Worker) -> Exception | None:
    """Why the model cannot be pickled: Ray's own search reports other attributes first."""
    try:
        ray.cloudpickle.dumps(worker.work)
    except Exception as error:  # as above
        return error
    return None


_workers: dict[str, Worker] = {}
"""In a Ray process: the worker of the run that it serves."""


@ray.remote(num_cpus=1, max_retries=UNIT_RETRIES)  # type: ignore[untyped-decorator]
def _perform(name: str, work: list[Any], header: Header, *parts: Any) -> tuple[Any, ...]:
    if name not in _workers:
        torch.set_num_threads(1)
        keep_freed_memory()
        _workers.clear()
        _workers[name] = Worker(ray.get(work[0]))
    worker = _workers[name]
    result, wall_seconds = perform(worker, unpack(header, map(_writable, parts), worker.device))
    header, tensors = describe(result)
    return (header, wall_seconds, *(as_bytes(tensor).numpy() for tensor in tensors))


def _writable(part: Any) -> Tensor:
    """Arrays that come from Ray are read-only."""
    return torch.from_numpy(part.copy())


def _check_reachable(address: str | None) -> None:
    """Raise OSError if nothing listens at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            pass


def connect(address: str | None, cpus: int, who: str) -> None:
    """The cluster at `address` or that RAY_ADDRESS names, or a local one; without dashboard and telemetry."""
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):  # Ray reads them when it starts
        os.environ.setdefault(name, "0")
    address = address or os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {} if address else {"num_cpus": cpus, "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    try:
        _check_reachable(address)
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **local)
    except Exception as error:  # Ray raises many types; each is about the cluster
        what = f"the cluster at {address}" if address else "a local Ray"
        raise ConfigError(f"{who} cannot reach {what}: {first_line(error)}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray has put its own in its place
