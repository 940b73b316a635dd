"""What the server knows: the shared model, what a rule keeps beside it, and the memories of clients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from persafl_lit.common.tensors import NO_VISIT, Tensors

if TYPE_CHECKING:
    from torch import Tensor


class Slot(NamedTuple):
    """A client's memory as one visit left it: written once, replaced by the next visit's, never changed."""

    visit: int
    tensors: Tensors


@dataclass
class State:
    """What the server knows. Tensors are replaced, never changed in place: jobs in flight still hold the versions they
    read."""

    w: Tensor
    """The shared model; what clients keep is not part of it."""
    arrivals: int = 0
    skipped: int = 0
    """Of these, how many were not finite and did not enter (on_divergence=skip)."""
    waiting: Tensor | None = None
    """The sum of discounted updates in a buffer that is not full yet."""
    in_waiting: int = 0
    """How many updates that sum holds."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """What a rule keeps beside the model, such as SCAFFOLD's c."""
    memories: dict[int, Slot] = field(default_factory=dict)
    """What each client keeps between visits; a client that is not here starts from the initial private values."""

    sender: tuple[int, int] = (NO_VISIT, NO_VISIT)
    """The client whose update is arriving, and its visit."""
    latest: dict[int, Slot] = field(default_factory=dict)
    """The latest update of each client, where a rule keeps it: in checkpoints, written once; never sent to anybody."""

    @property
    def model(self) -> Tensors:
        """What is evaluated: the shared model, and the statistics (BatchNorm's) that are shared with it."""
        return {"w": self.w, **{name: self.kept[name] for name in ("buffers",) if name in self.kept}}

    def snapshot(self) -> State:
        """This moment, whatever happens to the state later."""
        return replace(self, kept=dict(self.kept), memories=dict(self.memories), latest=dict(self.latest))

    def memory(self, client: int) -> Slot:
        """What the client's next visit finds."""
        return self.memories.get(client, EMPTY)


EMPTY = Slot(NO_VISIT, {})
