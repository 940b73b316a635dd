"""ACE: every step goes along the mean of all clients' latest updates."""

from __future__ import annotations

from dataclasses import dataclass

from persafl_lit.common.tensors import Tensors
from persafl_lit.errors import ConfigError
from persafl_lit.server.latest_updates import LatestUpdates
from persafl_lit.server.state import State

NEVER = -1
"""The version that a client without an update has read."""


@dataclass(frozen=True)
class AllClients(LatestUpdates):
    """ACE (Chang et al.): w <- w - beta u at every arrival, with u = 1/n sum_i U_i over all n clients' latest updates.

    U_i = s(staleness) Delta_i as it arrived, 0 before the first: fast clients do not count more than slow ones. With
    `tau_algo` (ACED), u is the mean over clients whose update was computed from one of the last versions. Keeps n x d
    values. buffer = 1 is the paper's; otherwise a step is made after so many arrivals.

    An arrival that must not enter makes no step of its own, and its client's latest update stays.
    """

    beta: float = 0.15
    """Step size of the server."""
    tau_algo: int | None = None
    """ACED: forget an update when the model that it was computed from is more than so many versions old; null is
    never."""
    warmup: bool = False
    """Whether the model waits for everybody's first update; otherwise those that are missing count as 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau_algo is not None and self.tau_algo < 0:
            raise ConfigError(f"method.tau_algo must be >= 0 versions or null; got {self.tau_algo}")
        if self.tau_algo is not None and self.warmup:
            raise ConfigError("method.warmup waits for all clients and method.tau_algo forgets some; leave out one")

    def apply(self, state: State, read: Tensors, sent: Tensors, staleness: int) -> None:
        weight = self.weight(staleness)
        self.remember(state, sent["delta"] if weight == 1 else sent["delta"] * weight)
        if self.tau_algo is not None:
            known = state.kept.get("latest_versions")
            versions = state.w.new_full((self.clients,), NEVER).long() if known is None else known.clone()
            versions[state.sender[0]] = state.arrivals // self.buffer - staleness
            state.kept["latest_versions"] = versions
        state.in_waiting += 1
        self.arrive(state)

    def step(self, state: State) -> None:
        if self.tau_algo is not None:
            self._forget(state, self.tau_algo)
        if not state.latest or (self.warmup and len(state.latest) < self.clients):
            return
        count = self.clients if self.tau_algo is None else len(state.latest)
        state.w = state.w.sub((state.kept["latest_sum"] / count).to(state.w.dtype), alpha=self.beta)

    def _forget(self, state: State, tau_algo: int) -> None:
        """Drop the updates that were computed from a model more than tau_algo versions before the last one."""
        versions, last = state.kept["latest_versions"], state.arrivals // self.buffer - 1
        old = (versions != NEVER) & (last - versions > tau_algo)
        for client in old.nonzero().flatten().tolist():
            gone = state.latest.pop(client)
            state.kept["latest_sum"] = state.kept["latest_sum"] - gone.tensors["update"]
        state.kept["latest_versions"] = versions.masked_fill(old, NEVER)
