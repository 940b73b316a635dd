"""Trials in processes of this machine, one per core. A process that dies is replaced; its trial is told as lost."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from persafl_lit.errors import WorkerError
from persafl_lit.sweep.run_trial import Message, Order

logger = logging.getLogger(__name__)


@dataclass
class Seat:
    """A process and what it is at."""

    process: subprocess.Popen[bytes]
    log: Path
    order: Order | None = None
    ready: bool = False
    rest: bytes = b""

    def send(self, message: Message) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is seen where its words are read
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()


@dataclass
class Local:
    """A launcher: `start` trials while `free`, ask for `events`, `stop` one or all of them, `close`."""

    lanes: int
    folder: Path
    """Where the processes' own words are kept."""
    _seats: list[Seat] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def begin(self, trials: int) -> None:
        """Start the processes: they import while the sweep is prepared."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(min(self.lanes, trials)):
            self._open()

    def free(self) -> bool:
        return sum(seat.order is not None for seat in self._seats) < self.lanes

    def start(self, order: Order) -> None:
        seat = next((seat for seat in self._seats if seat.order is None), None) or self._open()
        seat.order = order
        logger.debug("process %d begins trial %s", seat.process.pid, order["trial"])
        seat.send({**order})

    def events(self, wall_seconds: float) -> Iterator[tuple[str, Message]]:
        """What has been said since the last time, by trial; waits a while for the first word."""
        for key, _ in self._selector.select(wall_seconds):
            seat: Seat = key.data
            chunk = os.read(key.fd, 1 << 20)
            *lines, seat.rest = (seat.rest + chunk).split(b"\n")
            for line in lines:
                message = json.loads(line)
                seat.ready = True
                trial = seat.order["trial"] if seat.order else ""
                if not {"summary", "stopped", "failed", "accident"}.isdisjoint(message):
                    seat.order = None
                if trial:
                    yield trial, message
            if not chunk:
                yield from self._ended(seat)

    def stop(self, trial: str | None = None) -> None:
        """Ask a trial, or all, to write a checkpoint and end."""
        for seat in self._seats:
            if seat.order and trial in (None, seat.order["trial"]):
                seat.send({"stop": seat.order["trial"]})

    def close(self) -> None:
        """End the processes; those that are still at a trial are killed."""
        for seat in self._seats:
            self._selector.unregister(_output(seat))
            seat.process.kill()
            seat.process.wait()
            for pipe in (seat.process.stdin, seat.process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]
            if not seat.log.read_bytes().strip():
                seat.log.unlink()
        self._seats.clear()

    def _open(self) -> Seat:
        number = max([int(seat.log.stem.split("-")[-1]) for seat in self._seats], default=-1) + 1
        log = self.folder / f"worker-{number}.log"
        command = [sys.executable, "-m", "persafl_lit.sweep.trial_process"]
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with open(log, "wb") as said:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=environment,
                start_new_session=True,
            )
        seat = Seat(process, log)
        self._seats.append(seat)
        self._selector.register(_output(seat), selectors.EVENT_READ, seat)
        return seat

    def _ended(self, seat: Seat) -> Iterator[tuple[str, Message]]:
        """A process that is no more."""
        self._selector.unregister(_output(seat))
        self._seats.remove(seat)
        code = seat.process.wait()
        if code >= 0 and not seat.ready:
            last = seat.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise WorkerError(f"a process for trials cannot start: {''.join(last)}; see {seat.log}")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if seat.order is not None:
            yield seat.order["trial"], {"accident": f"WorkerError: its process {how}; see {seat.log}"}


def _output(seat: Seat) -> IO[bytes]:
    assert seat.process.stdout is not None
    return seat.process.stdout
