"""Checkpoints: small, atomic, and only for the run that wrote them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from persafl_lit.common.lock import Lock
from persafl_lit.common.sealed_file import read_sealed, write_sealed
from persafl_lit.common.tensors import NO_VISIT, Tensors
from persafl_lit.engine.memory_slots import Slots
from persafl_lit.engine.messages import Train
from persafl_lit.errors import CheckpointError, OtherRunError, TakenError, UnwritableError
from persafl_lit.learning.scores import Measured, Point, Scores, Value
from persafl_lit.server.state import Slot, State

logger = logging.getLogger(__name__)

FORMAT = 6
NOT_OURS = "the checkpoint does not hold what this version writes; delete it to start anew"


class Checkpoint:
    """The last two states of a run, each in a file that is whole or not there, and the memories of clients beside them.

    A truncated or changed file is recognised, and the one before it used. Who writes holds the lock beside them:
    `claim` it first, and leave the context to give it back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.previous = path.with_suffix(".previous.pt")
        self.lock = Lock(path.with_suffix(".lock"))
        self.slots = Slots(path)
        self._newest_is_damaged = False

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lock.release()

    def claim(self, wait_seconds: float = 0.0) -> bool:
        """Become the only process that reads and writes these files; False if another one is and stays so for so
        long."""
        try:
            mine = self.lock.acquire(wait_seconds)
        except OSError as error:
            raise UnwritableError(
                f"cannot lock {self.lock.path}: {error.strerror}; choose another checkpoint.dir"
            ) from None
        if mine:  # the process that wrote temporary files has ended
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

    def save(
        self, identity: str, content: dict[str, Any], memories: Mapping[tuple[int, int], Tensors] = MappingProxyType({})
    ) -> None:
        """Keep this state; `memories` are the slots that it names."""
        if not self.claim():
            raise TakenError(f"cannot write the checkpoint {self.path}: {self.owner()} is doing the same run")
        segments = self.slots.write(identity, memories)
        write_sealed(
            self.path, {"format": FORMAT, "identity": identity, **content, "segments": segments}, self._keep_newest
        )
        self._newest_is_damaged = False
        self.slots.named()

    def _keep_newest(self) -> None:
        if self.path.exists() and not self._newest_is_damaged:
            os.replace(self.path, self.previous)

    def check(self) -> None:
        """Refuse a folder that could not be written, before any work is done."""
        folder = next(path for path in self.path.parents if path.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UnwritableError(f"checkpoints cannot be written below {folder}; choose another checkpoint.dir")

    def load(
        self, identity: str, keep: Callable[[Tensors], Tensors] = lambda tensors: tensors
    ) -> dict[str, Any] | None:
        """What was saved last and is sound, or None if nothing was saved; `keep` says where memories go."""
        damaged: list[str] = []
        for path in (self.path, self.previous):
            try:
                content = read_sealed(path)
                if content.get("format") != FORMAT:
                    raise CheckpointError(_other_format(path, content.get("format")))
                if content.get("identity") != identity:
                    raise OtherRunError(
                        f"the checkpoint {path} belongs to another run (config, data, timeline or first model differ); "
                        "delete it or run without --resume"
                    )
                content["memories"] = self.slots.read(identity, content["segments"], keep)
            except FileNotFoundError:
                continue
            except OtherRunError:
                raise
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            except (KeyError, TypeError, ValueError, AttributeError):
                raise CheckpointError(NOT_OURS) from None
            if damaged:
                self._newest_is_damaged = True
                logger.warning("%s; the one before it is used", damaged[0])
            return content
        if damaged:
            raise CheckpointError(
                f"{', and '.join(damaged)}; delete {'it' if len(damaged) == 1 else 'both'} to start anew"
            )
        return None

    def delete(self) -> None:
        """The run needs them no more. Not another process's."""
        with contextlib.suppress(OSError, UnwritableError):  # one that stays behind does no harm
            if self.exists() and self.claim():
                for path in (self.path, self.previous):
                    path.unlink(missing_ok=True)
                self.slots.delete()


def _other_format(path: Path, found: Any) -> str:
    if isinstance(found, int) and found < FORMAT:
        return (
            f"the checkpoint {path} is of another version of persafl_lit, an earlier one, and cannot be "
            "continued by this one; "
            "finish the run with that version, or run without --resume"
        )
    return f"the checkpoint {path} is of another version of persafl_lit"


# -- what a checkpoint holds ------------------------------------------------------------------------------------------

Memories = dict[tuple[int, int], Tensors]
"""Slots by (client, visit); those of clients' latest updates have negative numbers instead of clients."""
Reads = dict[str, Tensors]
"""What jobs in flight have read, by a name that tells versions apart: clients that read one version share it."""

SLOTTED = ("memories", "latest")
"""What of a state is written once, in slots."""


def pack_state(state: State, memories: Memories) -> dict[str, Any]:
    """Plain values and tensors, with memories and latest updates by name; they themselves are added to `memories`."""
    memories |= {(client, slot.visit): slot.tensors for client, slot in state.memories.items()}
    memories |= {(_update_of(client), slot.visit): slot.tensors for client, slot in state.latest.items()}
    named = {name: {client: slot.visit for client, slot in getattr(state, name).items()} for name in SLOTTED}
    return {**vars(state), **named}


def unpack_state(content: dict[str, Any], memories: Memories) -> State:
    named = {client: Slot(visit, memories[client, visit]) for client, visit in content["memories"].items()}
    latest = {client: Slot(visit, memories[_update_of(client), visit]) for client, visit in content["latest"].items()}
    return State(**{**content, "memories": named, "latest": latest})


def _update_of(client: int) -> int:
    """The name of the slot of a client's update, beside that of its memory."""
    return -1 - client


def pack_job(job: Train, reads: Reads, memories: Memories) -> list[Any]:
    """Plain values; what it read, and its client's memory, are added to `reads` and `memories`, each once."""
    if job.after != NO_VISIT:
        memories[job.client, job.after] = job.memory
    key = " ".join(str(id(tensor)) for tensor in job.read.values())
    if key not in reads:
        reads[key] = dict(job.read)
    return [job.client, job.visit, key, job.after]


def unpack_job(content: list[Any], reads: Reads, memories: Memories) -> Train:
    client, visit, read, after = content
    return Train(client, visit, reads[read], {} if after == NO_VISIT else memories[client, after], after)


def pack_point(point: Point) -> list[Any]:
    return [point.sim_time, point.updates, _numbers(point.scores), point.training, _numbers(point.held_out)]


def unpack_point(content: list[Any]) -> Point:
    sim_time, updates, scores, training, held_out = content
    return Point(sim_time, updates, _scores(scores), training, _scores(held_out))


def _numbers(scores: Sequence[Scores]) -> list[list[Any]]:
    return [
        [
            score.client,
            score.samples,
            _plain(score.shared),
            _plain(score.personalised),
            {rule: _plain(found) for rule, found in score.beside.items()},
        ]
        for score in scores
    ]


def _scores(rows: list[list[Any]]) -> tuple[Scores, ...]:
    return tuple(
        Scores(
            client,
            samples,
            _measured(shared),
            _measured(personalised),
            {rule: _measured(found) for rule, found in beside.items()},
        )
        for client, samples, shared, personalised, beside in rows
    )


def _plain(measured: Measured) -> list[Any]:
    return [*measured[:4], {name: list(value) for name, value in measured.further.items()}]


def _measured(content: list[Any]) -> Measured:
    val_accuracy, test_accuracy, val_loss, test_loss, *further = content
    named = {name: Value(*value) for name, value in further[0].items()} if further else {}
    return Measured(val_accuracy, test_accuracy, val_loss, test_loss, named)
