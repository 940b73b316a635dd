"""What becomes of buffers that training changes, such as BatchNorm's statistics (`model.buffers`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from persafl_lit.common.tensors import Tensors
from persafl_lit.errors import ConfigError
from persafl_lit.server.rules import Rule
from persafl_lit.server.state import State

if TYPE_CHECKING:
    from persafl_lit.timeline import Timeline


@dataclass(frozen=True)
class Buffers:
    """`local`: each client keeps its own. `shared`: the server mixes them into its own, s <- s + a (mean_k s_k - s),
    once per version."""

    buffers: Literal["local", "shared", "refuse"] = "local"
    """Buffers that training changes (BatchNorm's statistics): each client keeps its own, the server mixes them, or such
    a model is refused."""
    buffers_mix: float | None = None
    """a of `shared`, in (0, 1]; null is min(1, updates per version / clients)."""

    def __post_init__(self) -> None:
        if self.buffers_mix is not None and not 0 < self.buffers_mix <= 1:
            raise ConfigError(f"model.buffers_mix must lie in (0, 1]; got {self.buffers_mix!r}")
        if self.buffers_mix is not None and self.buffers != "shared":
            raise ConfigError(f"model.buffers_mix is for model.buffers=shared; here it is {self.buffers}")

    def around(self, rule: Rule, clients: int) -> Rule:
        """The rule, beside which statistics are mixed if they are shared."""
        if self.buffers != "shared":
            return rule
        return MixedBuffers(rule, self.buffers_mix or min(1.0, rule.arrivals_per_version / clients))


@dataclass(frozen=True)
class MixedBuffers(Rule):
    """Any rule for the model, and for the statistics s <- s + a (mean_k s_k - s) over the updates of a version.

    Neither beta nor discounts touch them: as means of variances, they stay positive.
    """

    rule: Rule
    a: float

    @property
    def arrivals_per_version(self) -> int:
        return self.rule.arrivals_per_version

    def check(self, timeline: Timeline) -> None:
        self.rule.check(timeline)

    def check_size(self, values: int) -> None:
        self.rule.check_size(values)

    def read(self, state: State) -> Tensors:
        return {**self.rule.read(state), **state.model}

    def apply(self, state: State, read: Tensors, sent: Tensors, staleness: int) -> None:
        if "buffers" in sent:
            waiting = state.kept.get("buffers_waiting")
            one = sent["buffers"].double()
            count = one.new_ones(1)
            state.kept["buffers_waiting"] = one if waiting is None else waiting + one
            state.kept["buffers_count"] = count if waiting is None else state.kept["buffers_count"] + count
        self.rule.apply(state, read, sent, staleness)
        self._mix(state)

    def arrive(self, state: State) -> None:
        """Those of an update that must not enter do not, either."""
        self.rule.arrive(state)
        self._mix(state)

    def _mix(self, state: State) -> None:
        if (
            state.arrivals % self.arrivals_per_version == 0
            and (waiting := state.kept.pop("buffers_waiting", None)) is not None
        ):
            s = state.kept["buffers"]
            state.kept["buffers"] = s.lerp((waiting / state.kept.pop("buffers_count")).to(s.dtype), self.a)


def exported(state: State) -> Tensors:
    """The statistics of the exported model: the shared ones, else the mean over clients that have some."""
    if "buffers" in state.kept:
        return {"buffers": state.kept["buffers"]}
    kept = [slot.tensors["buffers"] for _, slot in sorted(state.memories.items()) if "buffers" in slot.tensors]
    if not kept:
        return {}
    total = kept[0].double()
    for one in kept[1:]:
        total = total + one
    return {"buffers": (total / len(kept)).to(kept[0].dtype)}
