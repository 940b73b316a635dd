"""How updates enter the model. A rule is a pure description; what changes is the `State` it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from persafl_lit.errors import ConfigError
from persafl_lit.typed import NOT_A_KEY

if TYPE_CHECKING:
    from torch import Tensor

    from persafl_lit.timeline import Timeline

Discount = Literal["constant", "polynomial", "hinge"]
DISCOUNTS = ("constant", "polynomial", "hinge")


@dataclass
class State:
    """The server's memory. `w` is replaced, never changed in place: jobs in flight still hold the versions they read."""

    w: Tensor
    arrivals: int = 0
    skipped: int = 0
    """Of these, how many were not finite and did not enter (on_divergence=skip)."""
    waiting: Tensor | None = None
    """The sum of discounted updates in a buffer that is not full yet."""
    in_waiting: int = 0
    """How many updates that sum holds."""
    control: Tensor | None = None
    """SCAFFOLD's c."""
    control_waiting: Tensor | None = None
    per_client: dict[int, Tensor] = field(default_factory=dict)
    """SCAFFOLD's c_i, or the models of clients that train alone."""


@dataclass(frozen=True)
class Arrival:
    """An update as it reaches the server."""

    client: int
    read: Tensor
    delta: Tensor
    staleness: int
    control: Tensor | None = None


class Rule(ABC):
    """A server rule: what a client reads, and what an arrival does."""

    @property
    def arrivals_per_version(self) -> int:
        return 1

    def check(self, timeline: Timeline) -> None:  # noqa: B027
        """Refuse a timeline that the rule is not made for."""

    def read(self, state: State, client: int) -> tuple[Tensor, Tensor | None]:
        """The model a client downloads, and SCAFFOLD's correction c - c_i."""
        return self.model_of(state, client), None

    def model_of(self, state: State, client: int) -> Tensor:
        """The model that a client starts from."""
        return state.w

    @abstractmethod
    def apply(self, state: State, arrival: Arrival) -> None:
        """Take in one update."""

    def arrive(self, state: State) -> None:
        """Count an arrival. By itself this is one that must not enter: the versions that later jobs read exist all the same."""
        state.arrivals += 1

    def put_back(self, state: State, client: int, model: Tensor) -> None:
        """Take back what the last arrival, this client's, made of the model; what it did to buffers stays."""
        state.w = model


@dataclass(frozen=True)
class Discounted:
    """Stale updates count less: s(staleness) of Xie et al.

    constant: 1        polynomial: (staleness + 1)^-a        hinge: 1 up to b, then 1 / (a (staleness - b) + 1)
    """

    discount: Discount = "constant"
    """Weight of a stale update: `constant` 1, `polynomial` (s+1)^-a, `hinge` 1 up to b, then 1/(a(s-b)+1)."""
    discount_a: float = 0.5
    """a of `polynomial` and `hinge`."""
    discount_b: float = 4.0
    """b of `hinge`."""

    def __post_init__(self) -> None:
        if self.discount not in DISCOUNTS:
            raise ConfigError(f"method.discount must be one of {', '.join(DISCOUNTS)}; got {self.discount!r}")
        for name in ("discount_a", "discount_b"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"method.{name} must be >= 0; got {getattr(self, name)!r}")

    def weight(self, staleness: int) -> float:
        """s(staleness)."""
        if self.discount == "polynomial":
            return float((staleness + 1.0) ** -self.discount_a)
        if self.discount == "hinge" and staleness > self.discount_b:
            return 1.0 / (self.discount_a * (staleness - self.discount_b) + 1.0)
        return 1.0


@dataclass(frozen=True)
class Descent(Discounted, Rule):
    """Algorithm 1, with a buffer: after every `buffer` arrivals, w <- w - beta / buffer * sum_k s(staleness_k) Delta_k.

    buffer = 1 is the paper's server, buffer = cohort on rounds is federated averaging, in between is FedBuff. The sum is
    divided by the number of updates, not by the sum of their weights: old updates count less, the rest not more.
    """

    beta: float = 1.0
    """Step size of the server."""
    buffer: Annotated[int, Literal["cohort"]] = 1
    """Updates per model version; `cohort` is a whole round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise ConfigError(f"method.beta must be > 0; got {self.beta!r}")
        if self.buffer < 1:
            raise ConfigError(f"method.buffer must be >= 1; got {self.buffer}")

    @property
    def arrivals_per_version(self) -> int:
        return self.buffer

    def apply(self, state: State, arrival: Arrival) -> None:
        weight = self.weight(arrival.staleness)
        weighted = arrival.delta if weight == 1 else arrival.delta * weight
        state.waiting = weighted if state.waiting is None else state.waiting + weighted
        state.in_waiting += 1
        self.arrive(state)

    def arrive(self, state: State) -> None:
        """A full buffer becomes a version. One that must not enter is a zero in the sum: the rest counts neither more nor less for it."""
        state.arrivals += 1
        if state.arrivals % self.buffer == 0:
            if state.waiting is not None:
                state.w = state.w.sub(state.waiting, alpha=self.beta / self.buffer)
            state.waiting, state.in_waiting = None, 0


@dataclass(frozen=True)
class ControlVariates(Descent):
    """SCAFFOLD's server: Descent, and c <- c + 1/n sum over the cohort of (c_i^+ - c_i), with n ALL clients."""

    clients: int = field(default=1, metadata=NOT_A_KEY)
    """n, from the federation."""

    def check(self, timeline: Timeline) -> None:
        staleness = timeline.staleness(self.buffer)
        if len(staleness) and (worst := int(staleness.max())) > 0:
            raise ConfigError(
                f"scaffold needs a timeline without staleness; this one reaches {worst} at arrival {int(staleness.argmax())}: use schedule=rounds"
            )

    def read(self, state: State, client: int) -> tuple[Tensor, Tensor | None]:
        if state.control is None:
            return state.w, None
        own = state.per_client.get(client)
        return state.w, state.control if own is None else state.control - own

    def apply(self, state: State, arrival: Arrival) -> None:
        assert arrival.control is not None
        own = state.per_client.get(arrival.client)
        change = arrival.control if own is None else arrival.control - own
        state.control_waiting = change if state.control_waiting is None else state.control_waiting + change
        state.per_client[arrival.client] = arrival.control
        super().apply(state, arrival)

    def arrive(self, state: State) -> None:
        """The controls that did arrive count, also when the model is put back: c stays the mean of the c_i."""
        super().arrive(state)
        if state.arrivals % self.buffer == 0 and state.control_waiting is not None:
            change = state.control_waiting / self.clients
            state.control = change if state.control is None else state.control + change
            state.control_waiting = None


@dataclass(frozen=True)
class Mixing(Discounted, Rule):
    """Xie et al.'s FedAsync: mix the client's MODEL into the current one, w <- (1 - a) w + a w_i, a = mix * s(staleness)."""

    mix: float = 0.6
    """Share of the arriving model, before it is discounted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mix <= 1:
            raise ConfigError(f"method.mix must lie in (0, 1]; got {self.mix!r}")

    def apply(self, state: State, arrival: Arrival) -> None:
        a = self.mix * self.weight(arrival.staleness)
        state.w = (1 - a) * state.w + a * (arrival.read - arrival.delta)
        self.arrive(state)


@dataclass(frozen=True)
class Separate(Rule):
    """Nobody shares anything: each client goes on from its own last model (method=local)."""

    def check(self, timeline: Timeline) -> None:
        last: dict[int, int] = {}
        for index, job in enumerate(timeline):
            if job.reads <= last.get(job.client, -1):
                raise ConfigError(
                    f"a client alone does one visit after the other, but client {job.client} overlaps itself at arrival {index}; "
                    "use schedule=asynchronous or rounds"
                )
            last[job.client] = index

    def model_of(self, state: State, client: int) -> Tensor:
        return state.per_client.get(client, state.w)

    def put_back(self, state: State, client: int, model: Tensor) -> None:
        state.per_client[client] = model

    def apply(self, state: State, arrival: Arrival) -> None:
        state.per_client[arrival.client] = self.model_of(state, arrival.client) - arrival.delta
        self.arrive(state)


RULES: dict[str, type[Rule]] = {"descent": Descent, "control_variates": ControlVariates, "mixing": Mixing, "separate": Separate}
