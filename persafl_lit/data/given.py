"""Settings of data that users bring; `data/adapters.py` makes a federation of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from persafl_lit.data.partition import Partition
from persafl_lit.errors import ConfigError

if TYPE_CHECKING:
    from persafl_lit.data.federation import Federation


@dataclass(frozen=True)
class Given(Partition, ABC):
    """Data of a user's. What says whose each sample is decides who holds what; other data is dealt by `partition`."""

    holdout_clients: int = 0
    """The last so many clients never train and are only evaluated."""
    classes: int | None = None
    """Number of classes; null is the largest label and one."""
    in_memory: float = 1000.0
    """Megabytes up to which all samples are read once and kept in memory; more, or samples that change, are read by
    index. 0 is by index always."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes is not None and self.classes < 1:
            raise ConfigError(f"data.classes must be >= 1 or null; got {self.classes}")
        if not self.in_memory >= 0:
            raise ConfigError(f"data.in_memory must be >= 0 megabytes; got {self.in_memory!r}")

    @abstractmethod
    def load(self) -> Any:
        """What `persafl_lit.run(data=...)` takes."""

    def adapted(self, data: Any, clients: int | None, seed: int) -> Federation:
        """A federation of whatever `run(data=...)` takes; `clients` is how many were asked for."""
        from persafl_lit.data.adapters import adapt

        return adapt(data, self, clients, seed)

    def federation(self, clients: int | None, seed: int) -> Federation:
        return self.adapted(self.load(), clients, seed)

    def count(self, clients: int | None) -> int:
        """How many clients there are when `clients` were asked for."""
        return self.federation(None, 0).clients if clients is None else clients
