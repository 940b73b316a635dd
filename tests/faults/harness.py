"""Starts runs as real processes, kills them at chosen moments, resumes them, and compares what they come to."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.support.runs import METHODS

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_DISABLE_TELEMETRY": "true"}
TRANSIENT = ("wall_seconds", "evaluation_share", "run_id")
"""What may differ between two runs of one config."""

survived: Counter[str] = Counter()
"""Faults by kind, after which everything was as it would have been without them."""


details: Counter[str] = Counter()
"""What else was counted: no faults."""


SMALL = [
    "model=mlp",
    "model.hidden=[16]",
    "model.dropout=0.2",
    "clients=8",
    "updates=120",
    "local_steps=3",
    "eval.every=12.0",
    "checkpoint.every=6",
    "workers=2",
    "tracking.model=false",
    "tracking.figures=false",
]


def overrides(method, executor, *more):
    return [*SMALL, f"method={method}", *METHODS[method], f"executor={executor}", *more]


@dataclass
class Attempt:
    """One process, from its start to its end."""

    pid: int
    stdout: Path
    stderr: Path
    started: float
    code: int | None = None

    def said(self) -> str:
        return self.stderr.read_text(errors="replace")

    def summary(self) -> dict:
        return json.loads(self.stdout.read_text())

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


_numbers = itertools.count()


def outputs(folder: Path) -> tuple[Path, Path]:
    """Files for what a process says, each process its own."""
    number = next(_numbers)
    files = folder / f"{number}.stdout", folder / f"{number}.stderr"
    for file in files:
        file.touch()  # a process may be killed before it opens them
    return files


class Nursery:
    """Children of a process that has imported everything (see `nursery.py`), one at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.faults.nursery"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answer(120)

    def start(
        self, folder: Path, arguments: list[str], clock: tuple[float, float] | None = None, points: int = 0
    ) -> Attempt:
        stdout, stderr = outputs(folder)
        request = {
            "folder": str(folder),
            "arguments": arguments,
            "stdout": str(stdout),
            "stderr": str(stderr),
            "clock": clock,
            "points": points,
        }
        print(json.dumps(request), file=self.process.stdin)
        return Attempt(self._answer(30)["pid"], stdout, stderr, time.monotonic())

    def wait(self, attempt: Attempt, seconds: float) -> bool:
        """Whether it has ended within so many seconds."""
        if attempt.code is None:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, seconds))
            if ready:
                attempt.code = self._answer(5)["code"]
        return attempt.code is not None

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def _answer(self, seconds: float) -> dict:
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        assert ready, "the nursery is silent"
        return json.loads(self.process.stdout.readline())


class Fresh:
    """Genuinely new processes, imports included."""

    def start(self, folder: Path, arguments: list[str], clock: None = None, points: int = 0) -> Attempt:
        stdout, stderr = outputs(folder)
        command = [sys.executable, "-m", "persafl_lit", *arguments]
        with open(stdout, "w") as out, open(stderr, "w") as err:
            self.process = subprocess.Popen(
                command, cwd=folder, env=ENVIRONMENT, stdout=out, stderr=err, start_new_session=True
            )
        return Attempt(self.process.pid, stdout, stderr, time.monotonic())

    def wait(self, attempt: Attempt, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            attempt.code = self.process.wait(max(0.0, seconds))
        return attempt.code is not None


@dataclass
class Case:
    """One config, run without disturbance in one folder and with faults in another."""

    overrides: list[str]
    folder: Path
    store: Path
    """An empty MLflow store to copy: making one takes longer than the runs here."""
    starter: Nursery | Fresh
    points: int = 0
    """If not 0, a callback stops the run after so many evaluations."""
    kills: int = 0
    moments: list[float] = field(default_factory=list)
    """When processes were killed, in shares of the undisturbed run's wall time."""

    def __post_init__(self) -> None:
        for name in ("quiet", "faulty"):
            (self.folder / name / "mlruns").mkdir(parents=True)
            shutil.copy(self.store, self.folder / name / "mlruns" / "mlflow.db")
        quiet = self.start(False, folder="quiet")
        self.finish(quiet)
        self.wall_seconds = time.monotonic() - quiet.started
        self.expected = self.outcome(quiet, "quiet")

    def start(
        self,
        resume: bool = True,
        folder: str = "faulty",
        clock: tuple[float, float] | None = None,
        starter: Fresh | None = None,
    ) -> Attempt:
        arguments = ["run", *self.overrides, "--json", "--save-model", "model.pt", *(["--resume"] if resume else [])]
        return (starter or self.starter).start(self.folder / folder, arguments, clock, self.points)

    def finish(self, attempt: Attempt, seconds: float = 180, code: int = 0) -> None:
        assert self.starter.wait(attempt, seconds), f"still there after {seconds} s: {attempt.said()[-2000:]}"
        assert attempt.code == code, (attempt.code, attempt.said()[-3000:])
        assert "Traceback" not in attempt.said(), attempt.said()[-3000:]

    def outcome(self, attempt: Attempt, folder: str = "faulty") -> tuple:
        """Everything that a run is for: the model to the bit, the summary, the metrics in MLflow."""
        summary = attempt.summary()
        model = torch.load(self.folder / folder / "model.pt", weights_only=True)
        bits = {name: value.numpy().tobytes() for name, value in model.items()}
        with contextlib.closing(sqlite3.connect(self.folder / folder / "mlruns" / "mlflow.db")) as store:
            (status,) = store.execute("select status from runs where run_uuid = ?", (summary["run_id"],)).fetchone()
            question = "select key, step, timestamp, value from metrics where run_uuid = ? and key != 'wall_seconds' order by 1, 2, 3"
            metrics = store.execute(question, (summary["run_id"],)).fetchall()
        assert status == "FINISHED"
        assert len(metrics) > 20
        return bits, {key: value for key, value in summary.items() if key not in TRANSIENT}, metrics

    def check(self, attempt: Attempt) -> None:
        """The disturbed run has come to the same, and tidied up."""
        self.finish(attempt)
        for found, expected, what in zip(
            self.outcome(attempt), self.expected, ("model", "summary", "metrics"), strict=True
        ):
            assert found == expected, f"another {what} after {self.kills} kills at {self.moments}"
        details["runs that ended well after faults and were equal to undisturbed ones"] += 1
        left = [file.name for file in (self.folder / "faulty" / "mlruns" / "checkpoints").iterdir()]
        assert not left, left

    def survive_kills(self, kills: int, chance: random.Random, fresh: Fresh | None = None) -> None:
        """kill -9 at random moments of the process's life, resume, until it ends well; begin again until killed often enough.

        One moment in four lies in the last part of an undisturbed run's time, where results and checkpoints change hands.
        """
        starter, longest = fresh or self.starter, self.wall_seconds
        if fresh is not None:
            longest = self._wall_seconds_of(fresh)
        while self.kills < kills:
            moment = chance.uniform(0.8, 1.02) if chance.random() < 0.25 else chance.uniform(0, 1)
            attempt = self.start(starter=fresh)
            if starter.wait(attempt, moment * longest):
                self.check(attempt)
                continue
            attempt.signal(signal.SIGKILL)
            starter.wait(attempt, 30)
            if attempt.code == 0:  # it was quicker
                self.check(attempt)
                continue
            assert attempt.code == -signal.SIGKILL, (attempt.code, attempt.said()[-3000:])
            assert "Traceback" not in attempt.said(), attempt.said()[-3000:]
            wait_until_gone(attempt.pid)
            details["killed processes that had gone on from a checkpoint"] += "resuming after update" in attempt.said()
            self.kills += 1
            self.moments.append(round(moment, 3))
        self.check(self.start())
        survived["kill -9 of the main process"] += self.kills

    def _wall_seconds_of(self, starter: Fresh) -> float:
        attempt = self.start(starter=starter)
        assert starter.wait(attempt, 180)
        self.check(attempt)
        return time.monotonic() - attempt.started


def wait_for_checkpoint(case, attempt):
    give_up_at = time.monotonic() + 60
    while not list((case.folder / "faulty").glob("mlruns/checkpoints/*.pt")):
        assert time.monotonic() < give_up_at
        assert not case.starter.wait(attempt, 0.02), attempt.said()


def wait_until_gone(session: int, seconds: float = 20) -> None:
    """No worker process lives on after its run was killed."""
    give_up_at = time.monotonic() + seconds
    while left := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if session_of(pid) == session]:
        assert time.monotonic() < give_up_at, f"processes {left} live on"
        time.sleep(0.05)


def session_of(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[3])
