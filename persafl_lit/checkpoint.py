"""Checkpoints: small, atomic, and only for the run that wrote them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from persafl_lit.errors import CheckpointError, TakenError, UnwritableError, first_line
from persafl_lit.evaluate import Measured, Point, Scores
from persafl_lit.executors import Task
from persafl_lit.lock import Lock
from persafl_lit.server import State

FORMAT = 4
MARK = b"\nsha256 "
DIGEST = len(MARK) + 64
"""Bytes that the checksum takes at the end of a file; `torch.load` ignores them."""

Captured = tuple[float, int, dict[str, float], list[Tensor]]
"""A moment whose evaluation was not done: its time, updates, training numbers and models."""


class Checkpoint:
    """The last two states of a run, each in a file that is whole or not there: written to a temporary name, flushed and renamed.

    A file ends in the SHA-256 of what is before it, so that a truncated or changed one is recognised and the one before it used.
    Who writes holds the lock beside them: `claim` it first, and leave the context to give it back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.previous = path.with_suffix(".previous.pt")
        self.lock = Lock(path.with_suffix(".lock"))
        self._newest_is_damaged = False

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.lock.release()

    def claim(self, wait_seconds: float = 0.0) -> bool:
        """Become the only process that reads and writes these files; False if another one is and stays so for so long."""
        try:
            mine = self.lock.acquire(wait_seconds)
        except OSError as error:
            raise UnwritableError(f"cannot lock {self.lock.path}: {error.strerror}; choose another checkpoint.dir") from None
        if mine:  # whoever wrote temporary files is gone
            with contextlib.suppress(OSError):
                for left in self.path.parent.glob(f"{self.path.stem}.*.tmp"):
                    left.unlink(missing_ok=True)
        return mine

    def owner(self) -> str:
        """Who has claimed it, as far as known."""
        pid = self.lock.holder()
        return "another process" if pid is None else f"process {pid}"

    def exists(self) -> bool:
        return self.path.exists() or self.previous.exists()

    def save(self, identity: str, content: dict[str, Any]) -> None:
        if not self.claim():
            raise TakenError(f"cannot write the checkpoint {self.path}: {self.owner()} is doing the same run")
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                summed = _Summed(file)
                torch.save({"format": FORMAT, "identity": identity, **content}, summed)  # type: ignore[arg-type]
                file.write(MARK + summed.sum.hexdigest().encode())
                file.flush()
                os.fsync(file.fileno())
            if self.path.exists() and not self._newest_is_damaged:
                os.replace(self.path, self.previous)
            os.replace(temporary, self.path)
            self._newest_is_damaged = False
            _flush_folder(self.path.parent)
        except (OSError, RuntimeError) as error:  # torch says RuntimeError when the disk is full
            why = getattr(error, "strerror", None) or first_line(error)
            raise UnwritableError(f"cannot write the checkpoint {self.path}: {why}; make room or choose another checkpoint.dir") from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def check(self) -> None:
        """Refuse a folder that could not be written, before any work is done."""
        folder = next(path for path in self.path.parents if path.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UnwritableError(f"checkpoints cannot be written below {folder}; choose another checkpoint.dir")

    def load(self, identity: str) -> dict[str, Any] | None:
        """What was saved last and is sound, or None if nothing was saved."""
        damaged: list[str] = []
        for path in (self.path, self.previous):
            try:
                content = _read(path)
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            if content.get("identity") != identity:
                raise CheckpointError(
                    f"the checkpoint {path} belongs to another run (config, data, timeline or first model differ); delete it or run without --resume"
                )
            if damaged:
                self._newest_is_damaged = True
                print(f"persafl: {damaged[0]}; the one before it is used", file=sys.stderr)
            return content
        if damaged:
            raise CheckpointError(f"{', and '.join(damaged)}; delete {'it' if len(damaged) == 1 else 'both'} to start anew")
        return None

    def delete(self) -> None:
        """The run needs them no more. Not another process's."""
        with contextlib.suppress(OSError, UnwritableError):  # one that stays behind does no harm
            if self.exists() and self.claim():
                for path in (self.path, self.previous):
                    path.unlink(missing_ok=True)


class _Summed:
    """A file that sums what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sum = hashlib.sha256()

    def write(self, part: Any) -> int:
        self.sum.update(part)
        return self.file.write(part)

    def flush(self) -> None:
        self.file.flush()


def _read(path: Path) -> dict[str, Any]:
    """A sound checkpoint: tensors and plain values only, nothing else is unpickled."""
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error.strerror}") from None
    payload, found = whole[:-DIGEST], whole[-DIGEST:]
    if found != MARK + hashlib.sha256(payload).hexdigest().encode():
        raise CheckpointError(f"the checkpoint {path} is truncated or was changed: its checksum is wrong")
    try:
        content = torch.load(io.BytesIO(payload), weights_only=True)
    except Exception as error:  # a file made by someone else can raise anything
        raise CheckpointError(f"the checkpoint {path} cannot be read: {first_line(error)}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"the checkpoint {path} is of another version of persafl_lit")
    return content


def _flush_folder(folder: Path) -> None:
    """The renaming, too, must survive a power cut; some file systems cannot be asked."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def pack(state: State, pending: dict[int, Task], points: list[Point], captured: list[Captured]) -> dict[str, Any]:
    """Plain values and tensors. A model that several jobs read is stored once: they share its storage."""
    return {
        "state": dict(vars(state)),
        "pending": {index: list(task) for index, task in pending.items()},
        "points": [[p.sim_time, p.updates, _numbers(p.scores), p.training, _numbers(p.held_out)] for p in points],
        "captured": [list(moment) for moment in captured],
    }


def unpack(content: dict[str, Any]) -> tuple[State, dict[int, Task], list[Point], list[Captured]]:
    points = [Point(time, updates, _scores(rows), training, _scores(held)) for time, updates, rows, training, held in content["points"]]
    pending = {index: Task(*task) for index, task in content["pending"].items()}
    return State(**content["state"]), pending, points, [(time, count, training, models) for time, count, training, models in content["captured"]]


def _numbers(scores: Sequence[Scores]) -> list[list[Any]]:
    return [
        [score.client, score.samples, list(score.shared), list(score.own), {rule: list(found) for rule, found in score.beside.items()}]
        for score in scores
    ]


def _scores(rows: list[list[Any]]) -> tuple[Scores, ...]:
    return tuple(
        Scores(client, samples, Measured(*shared), Measured(*own), {rule: Measured(*found) for rule, found in beside.items()})
        for client, samples, shared, own, beside in rows
    )
