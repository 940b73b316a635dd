"""Trials in processes of this machine, one per core. A process that dies is replaced; its trial is reported as lost."""

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
from persafl_lit.sweep.run_trial import Order, TrialMessage

logger = logging.getLogger(__name__)


@dataclass
class TrialProcess:
    """A process and what it is at."""

    process: subprocess.Popen[bytes]
    log: Path
    order: Order | None = None
    ready: bool = False
    rest: bytes = b""

    def send(self, message: TrialMessage) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is seen where its words are read
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()


@dataclass
class LocalLauncher:
    """A launcher: `start` trials while `free`, ask for `events`, `stop` one or all of them, `close`."""

    lanes: int
    folder: Path
    """Where the processes' stderr is kept."""
    _processes: list[TrialProcess] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def begin(self, trials: int) -> None:
        """Start the processes: they import while the sweep is prepared."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(min(self.lanes, trials)):
            self._open()

    def free(self) -> bool:
        return sum(worker.order is not None for worker in self._processes) < self.lanes

    def start(self, order: Order) -> None:
        worker = next((worker for worker in self._processes if worker.order is None), None) or self._open()
        worker.order = order
        logger.debug("process %d begins trial %s", worker.process.pid, order["trial"])
        worker.send({**order})

    def events(self, wall_seconds: float) -> Iterator[tuple[str, TrialMessage]]:
        """What has been said since the last time, by trial; waits a while for the first word."""
        for key, _ in self._selector.select(wall_seconds):
            worker: TrialProcess = key.data
            chunk = os.read(key.fd, 1 << 20)
            *lines, worker.rest = (worker.rest + chunk).split(b"\n")
            for line in lines:
                message = json.loads(line)
                worker.ready = True
                trial = worker.order["trial"] if worker.order else ""
                if not {"summary", "stopped", "failed", "transient"}.isdisjoint(message):
                    worker.order = None
                if trial:
                    yield trial, message
            if not chunk:
                yield from self._ended(worker)

    def stop(self, trial: str | None = None) -> None:
        """Ask a trial, or all, to write a checkpoint and end."""
        for worker in self._processes:
            if worker.order and trial in (None, worker.order["trial"]):
                worker.send({"stop": worker.order["trial"]})

    def close(self) -> None:
        """End the processes; those that are still at a trial are killed."""
        for worker in self._processes:
            self._selector.unregister(_output(worker))
            worker.process.kill()
            worker.process.wait()
            for pipe in (worker.process.stdin, worker.process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]
            if not worker.log.read_bytes().strip():
                worker.log.unlink()
        self._processes.clear()

    def _open(self) -> TrialProcess:
        number = max([int(worker.log.stem.split("-")[-1]) for worker in self._processes], default=-1) + 1
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
        worker = TrialProcess(process, log)
        self._processes.append(worker)
        self._selector.register(_output(worker), selectors.EVENT_READ, worker)
        return worker

    def _ended(self, worker: TrialProcess) -> Iterator[tuple[str, TrialMessage]]:
        """A process that is no more."""
        self._selector.unregister(_output(worker))
        self._processes.remove(worker)
        code = worker.process.wait()
        if code >= 0 and not worker.ready:
            last = worker.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise WorkerError(f"a process for trials cannot start: {''.join(last)}; see {worker.log}")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if worker.order is not None:
            yield worker.order["trial"], {"transient": f"WorkerError: its process {how}; see {worker.log}"}


def _output(worker: TrialProcess) -> IO[bytes]:
    assert worker.process.stdout is not None
    return worker.process.stdout
