"""CA2FL: the latest updates of all clients calibrate a buffer."""

from __future__ import annotations

from dataclasses import dataclass

from persafl_lit.common.tensors import Tensors
from persafl_lit.server.latest_updates import LatestUpdates
from persafl_lit.server.state import State


@dataclass(frozen=True)
class CachedCalibration(LatestUpdates):
    """CA2FL (Wang et al.): w <- w - beta v with v = h + 1/buffer sum_k s(staleness_k) (Delta_k - h_k).

    h_k is client k's latest update, 0 before its first, and h the mean of all n clients' at the last version. Keeps
    n x d values.

    An update replaces its client's h_k when it arrives: of two in one buffer, the second is calibrated by the first. A
    discount makes differences count less; what is kept is the update itself.
    """

    def apply(self, state: State, read: Tensors, sent: Tensors, staleness: int) -> None:
        before = self.remember(state, sent["delta"])
        super().apply(state, read, sent if before is None else {"delta": sent["delta"] - before}, staleness)

    def arrive(self, state: State) -> None:
        """One that must not enter is a zero in the sum of differences, and its client's latest update stays. A buffer
        of such makes no step."""
        super().arrive(state)
        if state.arrivals % self.buffer == 0 and "latest_sum" in state.kept:
            state.kept["calibration_sum"] = state.kept["latest_sum"]

    def step(self, state: State) -> None:
        assert state.waiting is not None
        v = state.waiting / self.buffer
        if "calibration_sum" in state.kept:
            v = v + (state.kept["calibration_sum"] / self.clients).to(v.dtype)
        state.w = state.w.sub(v, alpha=self.beta)
