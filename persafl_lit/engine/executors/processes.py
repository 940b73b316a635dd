"""Worker processes on this machine, one torch thread each; models and updates pass through shared memory."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor

from persafl_lit.common.logs import LogSettings
from persafl_lit.common.plugins import really_exit
from persafl_lit.common.process_memory import keep_freed_memory
from persafl_lit.engine.executors.executor import POLL, Executor, Unit, UnitResult, perform, unsendable
from persafl_lit.engine.executors.transport import Place
from persafl_lit.engine.executors.worker import ALIGNED, Work, Worker
from persafl_lit.errors import ConfigError, WorkerError

logger = logging.getLogger(__name__)

UNITS_PER_LANE = 2
"""Units a process holds: one under way and one ready, so that it never waits for the server."""
UNIT_ATTEMPTS = 3
"""How often a unit may lose its process before the run gives up."""


@dataclass
class Lane:
    """A process, our end of its pipe, and its places in shared memory."""

    process: BaseProcess
    pipe: connection.Connection
    memory: Tensor
    """(DEPTH, bytes), shared with the process: the tensors of a message, replaced by those of its result."""
    places: Sequence[Place]
    units: dict[int, Unit] = field(default_factory=dict)


class Processes(Executor):
    """Persistent processes. One that dies is replaced and its units are done again: the result has the same bits.

    Processes are forked where that is possible (Linux, CPU): they start at once and share the data. Elsewhere they are
    spawned and are sent it.
    """

    def __init__(self, worker: Worker, lanes: int, start: str | None = None) -> None:
        super().__init__(worker, lanes)
        self._context = get_context(
            start or ("fork" if sys.platform == "linux" and worker.device.type == "cpu" else "spawn")
        )
        if self._context.get_start_method() == "fork":
            worker.federation.before_fork()
        room = -(-worker.room // ALIGNED) * ALIGNED
        _check_shared_memory(lanes * UNITS_PER_LANE * room)
        memories = [torch.empty((UNITS_PER_LANE, room), dtype=torch.uint8).share_memory_() for _ in range(lanes)]
        self._lanes: list[Lane] = []
        for memory in memories:
            self._lanes.append(self._start(memory))
        logger.debug("%d worker processes (%s)", lanes, self._context.get_start_method())

    def _start(self, memory: Tensor) -> Lane:
        ours, theirs = self._context.Pipe()
        forked = self._context.get_start_method() == "fork"
        source = self.worker if forked else self.worker.work
        # A forked process has our ends of all pipes, too: it must close them, or the end of this process would
        # go unnoticed.
        inherited = [ours, *(lane.pipe for lane in self._lanes)] if forked else []
        about = (source, theirs, memory, inherited, LogSettings.current())
        process = self._context.Process(target=_serve, args=about, daemon=True)  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # about forking with threads: a worker touches none of them
            try:
                process.start()
            except OSError as error:
                self.close()
                raise WorkerError(
                    f"cannot start a worker process: {error.strerror}; use fewer workers or executor=serial"
                ) from None
            except (AttributeError, TypeError, ValueError, RecursionError, pickle.PicklingError) as error:
                self.close()
                raise unsendable(self.worker, error) from None
        theirs.close()
        if forked and not _can_train(ours):
            process.join()
            ours.close()
            self._context = get_context("spawn")
            return self._start(memory)
        return Lane(process, ours, memory, [Place(part) for part in memory])

    def _free(self) -> bool:
        return min(len(lane.units) for lane in self._lanes) < UNITS_PER_LANE

    def _send(self, unit: Unit) -> None:
        lane = min(self._lanes, key=lambda lane: len(lane.units))
        place = next(place for place in range(UNITS_PER_LANE) if place not in lane.units)
        lane.units[place] = unit
        try:
            lane.pipe.send((place, lane.places[place].store(unit.message)))
        except OSError:
            self._replace(lane)

    def _collect(self, wait: bool) -> Iterator[tuple[Unit, UnitResult, float]]:
        pipes = {lane.pipe: lane for lane in self._lanes if lane.units}
        for pipe in connection.wait(list(pipes), POLL if wait else 0):
            lane = pipes[pipe]  # type: ignore[index]
            try:
                place, header, wall_seconds = lane.pipe.recv()
            except (EOFError, OSError):
                self._replace(lane)
                continue
            yield lane.units.pop(place), lane.places[place].fetch(header, self.worker.device, copy=True), wall_seconds

    def _replace(self, lane: Lane) -> None:
        """A worker process is gone: say so, start another and give it the same units."""
        lane.pipe.close()
        lane.process.join()
        code, lost = lane.process.exitcode or 0, list(lane.units.values())
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        for unit in lost:
            if unit.attempts + 1 >= UNIT_ATTEMPTS:
                raise WorkerError(
                    f"client {unit.message.client} ended {UNIT_ATTEMPTS} worker processes ({cause}); is there "
                    "enough memory? "
                    "Fewer workers need less, and executor=serial shows where it happens"
                )
        logger.warning("worker process %s is gone (%s); another one does its work again", lane.process.pid, cause)
        self._lanes[self._lanes.index(lane)] = self._start(lane.memory)
        for unit in lost:
            self._send(unit._replace(attempts=unit.attempts + 1))

    def close(self) -> None:
        for lane in self._lanes:
            lane.process.kill()
        for lane in self._lanes:
            lane.process.join()
            lane.pipe.close()


def _can_train(pipe: connection.Connection) -> bool:
    """A forked process says whether autograd works in it: not if this one has threads for devices, which some imports
    start."""
    try:
        return bool(pipe.recv())
    except (EOFError, OSError):  # it has ended already, which shows when its work is waited for
        return True


def _autograd_works() -> bool:
    try:
        torch.ones((), requires_grad=True).mul(1.0).backward()
    except RuntimeError:
        return False
    return True


def _serve(
    source: Worker | Work,
    pipe: connection.Connection,
    memory: Tensor,
    inherited: Sequence[connection.Connection],
    log: LogSettings,
) -> None:
    """Main function of a worker process. It ends when the pipe closes: the run is over or its process has died."""
    for end in inherited:
        end.close()
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when to stop
        signal.signal(number, signal.SIG_IGN)
    log.apply()
    torch.set_num_threads(1)
    keep_freed_memory()
    gc.enable()  # it may be paused where this process was forked
    if isinstance(source, Worker):
        works = _autograd_works()
        pipe.send(works)
        if not works:
            really_exit(0)
        worker = source
    else:
        worker = Worker(source)
    places = [Place(part) for part in memory]
    try:
        while True:
            place, header = pipe.recv()
            result, wall_seconds = perform(worker, places[place].fetch(header, worker.device))
            pipe.send((place, places[place].store(result), wall_seconds))
    except (EOFError, OSError):
        really_exit(0)


def _check_shared_memory(needed: int) -> None:
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return
    free = room.f_bavail * room.f_frsize
    if free < needed:
        raise ConfigError(
            f"the worker processes need {needed / 1e6:.0f} MB of shared memory and /dev/shm has {free / 1e6:.0f} MB; "
            "use fewer workers, executor=serial, or a larger /dev/shm (docker: --shm-size)"
        )
