"""Clients' memories on disk, beside a checkpoint.

A slot is a client's memory as one visit left it, named (client, visit), and never changes. So a checkpoint does not
repeat what an earlier one wrote: new slots go into one more file, a *segment*, that is whole before a checkpoint names
it; and a segment is deleted only when neither of the two kept checkpoints names it. A process that is killed between
the two leaves a segment that no checkpoint names, which the next checkpoint removes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from persafl_lit.common.sealed_file import read_sealed, write_sealed
from persafl_lit.common.tensors import Tensors
from persafl_lit.errors import CheckpointError

Name = tuple[int, int]
"""(client, visit)."""


class Slots:
    """The segments of one run."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._written: dict[str, set[Name]] = {}
        """Slots by segment, as far as the last checkpoint named them."""
        self._kept: set[str] | None = None
        """Segments that the checkpoint before may name; if None, all that exist."""
        self._now: dict[str, set[Name]] = {}
        """Likewise, for the checkpoint that is being written."""

    def files(self) -> list[Path]:
        return sorted(self._checkpoint.parent.glob(f"{self._checkpoint.stem}.*.slots"))

    def write(self, identity: str, memories: Mapping[Name, Tensors]) -> dict[str, list[list[int]]]:
        """Put every memory that is not there yet into a new segment; returns which segment holds which slots.

        What is left of segments that are mostly out of date moves along, so that the files stay below twice what they
        hold.
        """
        placed: dict[str, set[Name]] = {}
        for segment, names in self._written.items():
            live = names & memories.keys()
            if 2 * len(live) >= len(names) and live:
                placed[segment] = names
        missing = memories.keys() - set().union(*placed.values())
        if missing:
            segment = self._new_name()
            content = [[*name, dict(memories[name])] for name in sorted(missing)]
            write_sealed(self._checkpoint.parent / segment, {"identity": identity, "slots": content})
            placed[segment] = set(missing)
        self._now = placed
        return {segment: [list(name) for name in sorted(names & memories.keys())] for segment, names in placed.items()}

    def named(self) -> None:
        """The checkpoint that names what `write` returned is in place: what neither it nor the one before names can
        go."""
        before = {file.name for file in self.files()} if self._kept is None else self._kept
        for file in self.files():
            if file.name not in before and file.name not in self._now:
                file.unlink(missing_ok=True)
        self._kept, self._written = set(self._now), self._now

    def read(
        self,
        identity: str,
        segments: Mapping[str, Iterable[Iterable[int]]],
        keep: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    ) -> dict[Name, Tensors]:
        """The slots that a checkpoint names, as `keep` keeps them."""
        found: dict[Name, Tensors] = {}
        self._written = {}
        for segment, names in segments.items():
            path = self._checkpoint.parent / Path(segment).name
            try:
                content = read_sealed(path)
            except FileNotFoundError:
                raise CheckpointError(f"{path}, with clients' memories of the checkpoint, is missing") from None
            if content.get("identity") != identity:
                raise CheckpointError(f"{path} belongs to another run")
            held = {(int(client), int(visit)): tensors for client, visit, tensors in content["slots"]}
            self._written[segment] = set(held)
            found |= {name: keep(held[name]) for name in map(_as_name, names)}
        self._kept = set(segments)
        return found

    def delete(self) -> None:
        for file in self.files():
            file.unlink(missing_ok=True)

    def _new_name(self) -> str:
        """A number that no file has: segments are written once."""
        numbers = [int(number) for file in self.files() if (number := file.name.split(".")[-2]).isdigit()]
        return f"{self._checkpoint.stem}.{max(numbers, default=0) + 1}.slots"


def _as_name(name: Iterable[Any]) -> Name:
    client, visit = name
    return int(client), int(visit)
