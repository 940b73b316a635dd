"""Checkpoints: small, atomic, and only for the run that wrote them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from persafl_lit.errors import CheckpointError, first_line
from persafl_lit.evaluate import Measured, Point, Scores
from persafl_lit.executors import Task
from persafl_lit.server import State

FORMAT = 2

Captured = tuple[float, int, dict[str, float], list[Tensor]]
"""A moment whose evaluation was not done: its time, updates, training numbers and models."""


class Checkpoint:
    """One file per run, written to a temporary name, flushed to disk and renamed: whole or not there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, identity: str, content: dict[str, Any]) -> None:
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                torch.save({"format": FORMAT, "identity": identity, **content}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except (OSError, RuntimeError) as error:  # torch says RuntimeError when the disk is full
            why = getattr(error, "strerror", None) or first_line(error)
            raise CheckpointError(f"cannot write the checkpoint {self.path}: {why}; choose another checkpoint.dir") from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def check(self) -> None:
        """Refuse a folder that could not be written, before any work is done."""
        folder = next(path for path in self.path.parents if path.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise CheckpointError(f"checkpoints cannot be written below {folder}; choose another checkpoint.dir")

    def load(self, identity: str) -> dict[str, Any] | None:
        """What was saved, or None if nothing was; tensors and plain values only, nothing else is unpickled."""
        try:
            content = torch.load(self.path, weights_only=True)
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged file can raise anything
            raise CheckpointError(f"the checkpoint {self.path} cannot be read ({first_line(error)}); delete it to start anew") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("identity") != identity:
            raise CheckpointError(
                f"the checkpoint {self.path} belongs to another run (config, data, timeline or first model differ); delete it or run without --resume"
            )
        return content

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


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
