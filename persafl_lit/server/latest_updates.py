"""Rules that keep every client's latest update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from persafl_lit.common.fields import NOT_A_KEY
from persafl_lit.common.limits import MOST_CACHED
from persafl_lit.errors import ConfigError
from persafl_lit.server.rules import Descent
from persafl_lit.server.state import Slot, State

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LatestUpdates(Descent):
    """Descent beside which `state.latest` holds the latest update of each client, and `kept` their sum.

    That is n x d values in the server's memory, for n clients and d shared values of the model: 30 x 100,000 are 12 MB
    in single precision. A checkpoint writes an update once, as it does with clients' memories.

    An arrival costs O(d): the sum, in double precision, is changed by the difference. Once in n arrivals it is summed
    anew, in the order of clients, so that rounding does not add up and a huge update leaves no trace when it is
    replaced.
    """

    clients: int = field(default=1, metadata=NOT_A_KEY)
    """n, from the federation."""

    def check_size(self, values: int) -> None:
        if self.clients * values > MOST_CACHED:
            raise ConfigError(
                f"the server would keep an update per client, {self.clients:,} x {values:,} values, more than "
                f"{MOST_CACHED:,}; take fewer clients, a smaller model or more private parameters (method.private)"
            )

    def remember(self, state: State, update: Tensor) -> Tensor | None:
        """Make this the sender's latest update; returns the one before."""
        client, visit = state.sender
        before = state.latest.get(client)
        state.latest[client] = Slot(visit, {"update": update})
        total = state.kept.get("latest_sum")
        if total is None or state.arrivals % self.clients == 0:
            total = summed(state.latest)
        else:
            total = total + update if before is None else total + update - before.tensors["update"]
        state.kept["latest_sum"] = total
        return None if before is None else before.tensors["update"]


def summed(latest: Mapping[int, Slot]) -> Tensor:
    """The sum of updates in double precision, in the order of clients."""
    first, *others = (latest[client].tensors["update"] for client in sorted(latest))
    total = first.double()
    for update in others:
        total = total + update
    return total
