"""How updates enter the shared model. A rule is a pure description; what changes is the `State` it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from persafl_lit.common.fields import NOT_A_KEY
from persafl_lit.common.tensors import Tensors
from persafl_lit.errors import ConfigError
from persafl_lit.server.discounts import Discounted
from persafl_lit.server.state import State

if TYPE_CHECKING:
    from persafl_lit.timeline import Timeline


class Rule(ABC):
    """A server rule: what a client reads, and what an arrival does. It sees the shared model only, never a client's
    memory."""

    receives: ClassVar[tuple[str, ...]] = ()
    """Named tensors that clients must send beside `delta`: those that the objective `sends`."""

    @property
    def arrivals_per_version(self) -> int:
        return 1

    def check(self, timeline: Timeline) -> None:  # noqa: B027
        """Refuse a timeline that the rule is not made for."""

    def check_size(self, values: int) -> None:  # noqa: B027
        """Refuse a model of so many shared values, if what the rule keeps beside it would not fit."""

    def read(self, state: State) -> Tensors:
        """What a client downloads: the model `w`, and what this rule's objective needs beside it."""
        return {"w": state.w}

    @abstractmethod
    def apply(self, state: State, read: Tensors, sent: Tensors, staleness: int) -> None:
        """Take in one update: what the client read, what it sent, and how many versions lie between."""

    def arrive(self, state: State) -> None:
        """Count an arrival. By itself this is one that must not enter: the versions that later jobs read exist all the
        same."""
        state.arrivals += 1


@dataclass(frozen=True)
class Descent(Discounted, Rule):
    """Algorithm 1, with a buffer: after every `buffer` arrivals, w <- w - beta / buffer * sum_k s(staleness_k) Delta_k.

    buffer = 1 is the paper's server, buffer = cohort on rounds is federated averaging, in between is FedBuff. The sum
    is divided by the number of updates, not by the sum of their weights: old updates count less, the rest not more.
    """

    beta: float = 1.0
    """Step size of the server."""
    buffer: Annotated[int, Literal["cohort", "auto"]] = 1
    """Updates per model version; `cohort` is a whole round, `auto` is that where there are rounds and 1 elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise ConfigError(f"method.beta must be > 0; got {self.beta!r}")
        if self.buffer < 1:
            raise ConfigError(f"method.buffer must be >= 1; got {self.buffer}")

    @property
    def arrivals_per_version(self) -> int:
        return self.buffer

    def apply(self, state: State, read: Tensors, sent: Tensors, staleness: int) -> None:
        weight = self.weight(staleness)
        weighted = sent["delta"] if weight == 1 else sent["delta"] * weight
        state.waiting = weighted if state.waiting is None else state.waiting + weighted
        state.in_waiting += 1
        self.arrive(state)

    def arrive(self, state: State) -> None:
        """A full buffer becomes a version. One that must not enter is a zero in the sum: the rest counts neither more
        nor less for it."""
        state.arrivals += 1
        if state.arrivals % self.buffer == 0:
            if state.in_waiting:
                self.step(state)
            state.waiting, state.in_waiting = None, 0

    def step(self, state: State) -> None:
        """Make a version of what waits, which is at least one update."""
        assert state.waiting is not None
        state.w = state.w.sub(state.waiting, alpha=self.beta / self.buffer)


@dataclass(frozen=True)
class ControlVariates(Descent):
    """SCAFFOLD's server: Descent, and c <- c + 1/n sum over the cohort of (c_i^+ - c_i), with n ALL clients."""

    clients: int = field(default=1, metadata=NOT_A_KEY)
    """n, from the federation."""

    receives: ClassVar[tuple[str, ...]] = ("control",)

    def check(self, timeline: Timeline) -> None:
        staleness = timeline.staleness(self.buffer)
        if len(staleness) and (worst := int(staleness.max())) > 0:
            raise ConfigError(
                f"scaffold needs a timeline without staleness; this one reaches {worst} at arrival "
                f"{int(staleness.argmax())}: use schedule=rounds"
            )

    def read(self, state: State) -> Tensors:
        return super().read(state) if "control" not in state.kept else {"w": state.w, "control": state.kept["control"]}

    def apply(self, state: State, read: Tensors, sent: Tensors, staleness: int) -> None:
        waiting = state.kept.get("control_waiting")
        state.kept["control_waiting"] = sent["control"] if waiting is None else waiting + sent["control"]
        super().apply(state, read, sent, staleness)

    def arrive(self, state: State) -> None:
        """The changes of controls that did arrive count: c stays the mean of the c_i."""
        super().arrive(state)
        if state.arrivals % self.buffer == 0 and (waiting := state.kept.pop("control_waiting", None)) is not None:
            change, control = waiting / self.clients, state.kept.get("control")
            state.kept["control"] = change if control is None else control + change


@dataclass(frozen=True)
class Mixing(Discounted, Rule):
    """Xie et al.'s FedAsync: mix the client's MODEL into the current one, w <- (1 - a) w + a w_i, a = mix *
    s(staleness)."""

    mix: float = 0.6
    """Share of the arriving model, before it is discounted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mix <= 1:
            raise ConfigError(f"method.mix must lie in (0, 1]; got {self.mix!r}")

    def apply(self, state: State, read: Tensors, sent: Tensors, staleness: int) -> None:
        a = self.mix * self.weight(staleness)
        state.w = (1 - a) * state.w + a * (read["w"] - sent["delta"])
        self.arrive(state)
