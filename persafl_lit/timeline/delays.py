"""How long a client downloads, computes, uploads and rests.

Slow clients stay slow: a mean per client, then a draw per visit around it. The draws are named by (seed, client,
visit), so every schedule and every method meets the same delays: "the exact same communication setup". Only with
`per_gradient` > 0 do methods differ: those that take more gradients per local step compute longer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from persafl_lit.common.seeding import rng
from persafl_lit.errors import ConfigError, TimelineError, shown
from persafl_lit.timeline.timeline import Floats, number, read_rows

VISITS_AT_A_TIME = 64  # visits drawn at a time
FEW = 50  # clients looked at to guess how long visits take
PHASES = ("download", "compute", "upload", "idle")

VisitDelays = Callable[[int], Floats]
"""A client's delays: block number -> array (BLOCK, 4) of download, compute, upload, idle."""


class Delays:
    """A source of delays. A subclass says how long one `visit` takes, or, faster, gives `of` a client's visits in
    blocks.

    Both are functions of their arguments alone: draw from `persafl_lit.rng(seed, "a name of yours", client, visit)`.
    `gradients` is how many gradients the method's objective takes per local step (`Objective.cost`).
    """

    def visit(self, seed: int, client: int, visit: int, local_steps: int, gradients: float) -> Sequence[float]:
        """download, compute, upload and idle time of a client's visit number 0, 1, 2, ..."""
        raise NotImplementedError(f"{type(self).__name__} defines neither visit nor of")

    def of(self, seed: int, client: int, local_steps: int, gradients: float = 1) -> VisitDelays:
        """One client's visits in blocks."""

        def block_of(block: int) -> Floats:
            numbers = range(block * VISITS_AT_A_TIME, (block + 1) * VISITS_AT_A_TIME)
            visits = np.array(
                [self.visit(seed, client, number, local_steps, gradients) for number in numbers], dtype=np.float64
            )
            possible = visits.shape == (VISITS_AT_A_TIME, len(PHASES)) and bool(
                (visits >= 0).all() and np.isfinite(visits).all()
            )
            if not possible or not visits[:, :3].any(axis=1).all():
                raise TimelineError(
                    f"{type(self).__name__}.visit must give {', '.join(PHASES)} >= 0, not all of the first three 0; "
                    f"client {client} got {shown(visits.tolist()[0] if visits.ndim == 2 else visits.shape)}"
                )
            return visits

        return block_of

    def longest(self, seed: int, clients: int, local_steps: int, gradients: float = 1) -> float:
        """A visit, with its rest, that is longer than most: the longest of some clients' first visits."""
        return max(
            float(self.of(seed, client, local_steps, gradients)(0).sum(axis=1).max())
            for client in range(min(clients, FEW))
        )


@dataclass(frozen=True)
class RandomDelays(Delays, ABC):
    """Random delays around a mean per client; subclasses say which distribution.

    mean download ~ U(download)      mean upload = ratio * mean download, ratio ~ U(upload_ratio): the paper's 4 to 6
    mean compute = local_steps * (compute + per_gradient * gradients)
    mean rest = idle * (mean of all the rest): 0.25 keeps 80 % of the clients active

    `gradients` counts what every local step takes: plain, proximal and SCAFFOLD 1, MAML 4 (2 if first order, 1 with
    alpha = 0), Moreau `inner_steps`, also where `nu` stops earlier. Not counted is what a visit takes besides
    (SCAFFOLD's pass over all local data, Moreau's residual) or now and then (a finite difference that is taken again).
    """

    download: tuple[float, float] = (0.5, 1.5)
    """Range of the clients' mean download times."""
    upload_ratio: tuple[float, float] = (4.0, 6.0)
    """Range of mean upload / mean download (the paper: 4 to 6)."""
    compute: float = 0.001
    """Mean time of one local step (the paper: negligible)."""
    per_gradient: float = 0.0
    """Mean time of one gradient: compute grows with the objective's gradients per local step (plain 1, MAML 4, Moreau
    inner_steps)."""
    idle: float = 0.25
    """Mean rest / mean of the rest of a visit; 0.25 keeps 80 % of the clients active."""

    def __post_init__(self) -> None:
        for name in ("download", "upload_ratio"):
            low, high = _pair(name, getattr(self, name))
            if not 0 <= low <= high:
                raise ConfigError(
                    f"delays.{name} must be a range [low, high] with 0 <= low <= high; got [{low}, {high}]"
                )
        for name in ("compute", "per_gradient", "idle"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"delays.{name} must be >= 0; got {getattr(self, name)!r}")
        if self.download[1] == 0 and self.compute == 0 and self.per_gradient == 0:
            raise ConfigError(
                "delays.download, delays.compute and delays.per_gradient are all 0: no simulated time would ever pass"
            )

    @abstractmethod
    def around_one(self, stream: np.random.Generator, size: tuple[int, int]) -> Floats:
        """Draws with mean 1."""

    def means(self, seed: int, client: int, local_steps: int, gradients: float = 1) -> Floats:
        """A client's mean download, compute, upload and idle time."""
        stream = rng(seed, "delay means", client)
        download = stream.uniform(*self.download)
        upload = download * stream.uniform(*self.upload_ratio)
        compute = (self.compute + self.per_gradient * gradients) * local_steps
        return np.array([download, compute, upload, self.idle * (download + compute + upload)])

    def of(self, seed: int, client: int, local_steps: int, gradients: float = 1) -> VisitDelays:
        means = self.means(seed, client, local_steps, gradients)
        return lambda block: (
            means * self.around_one(rng(seed, "delays", client, block), (VISITS_AT_A_TIME, len(PHASES)))
        )


@dataclass(frozen=True)
class Constant(RandomDelays):
    """Every visit takes the client's mean."""

    def around_one(self, stream: np.random.Generator, size: tuple[int, int]) -> Floats:
        return np.ones(size)


@dataclass(frozen=True)
class Uniform(RandomDelays):
    """Uniform on mean * [1 - spread, 1 + spread]."""

    spread: float = 0.5
    """Half the width of the distribution, relative to the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.spread <= 1:
            raise ConfigError(f"delays.spread must lie in [0, 1]; got {self.spread!r}")

    def around_one(self, stream: np.random.Generator, size: tuple[int, int]) -> Floats:
        return stream.uniform(1 - self.spread, 1 + self.spread, size)


@dataclass(frozen=True)
class Exponential(RandomDelays):
    """Memoryless delays."""

    def around_one(self, stream: np.random.Generator, size: tuple[int, int]) -> Floats:
        return stream.standard_exponential(size)


@dataclass(frozen=True)
class Lognormal(RandomDelays):
    """exp(N(-sigma^2/2, sigma^2)): the usual fit for network transfers."""

    sigma: float = 0.5
    """Standard deviation of the logarithm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.sigma <= 5:
            raise ConfigError(f"delays.sigma must lie in [0, 5]; got {self.sigma!r}")

    def around_one(self, stream: np.random.Generator, size: tuple[int, int]) -> Floats:
        return stream.lognormal(-(self.sigma**2) / 2, self.sigma, size)


@dataclass(frozen=True)
class Pareto(RandomDelays):
    """Heavy tails: P(delay > x) ~ x^-shape. Shape must exceed 1, or there is no mean."""

    shape: float = 2.5
    """Tail exponent, > 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shape > 1:
            raise ConfigError(f"delays.shape must be > 1, or the delays have no mean; got {self.shape!r}")

    def around_one(self, stream: np.random.Generator, size: tuple[int, int]) -> Floats:
        return stream.pareto(self.shape, size) * (self.shape - 1)


@dataclass(frozen=True)
class Trace(Delays):
    """Measured delays: a CSV with the columns client,download,compute,upload,idle and one row per visit.

    Client i of the simulation uses the rows of the i-th traced client (modulo their number), in order and then again
    from the first row. `compute` is the whole visit's, as measured, whatever the method.
    """

    path: str
    """A CSV file with the columns client,download,compute,upload,idle and one row per visit."""
    visits: tuple[Floats, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        per_client: dict[int, list[list[float]]] = {}
        for line, row in read_rows(self.path, ("client", *PHASES)):
            client = int(number(int, row["client"], self.path, line, "client"))
            visit = [number(float, row[name], self.path, line, name) for name in PHASES]
            if not sum(visit[:3]) > 0:
                raise TimelineError(
                    f"{self.path}, line {line}: download + compute + upload must be > 0: a visit takes time"
                )
            per_client.setdefault(client, []).append(visit)
        if not per_client:
            raise TimelineError(f"{self.path}: no visits in it; a trace needs at least one row below its header")
        object.__setattr__(self, "visits", tuple(np.array(per_client[client]) for client in sorted(per_client)))

    def of(self, seed: int, client: int, local_steps: int, gradients: float = 1) -> VisitDelays:
        visits = self.visits[client % len(self.visits)]
        return lambda block: visits[np.arange(block * VISITS_AT_A_TIME, (block + 1) * VISITS_AT_A_TIME) % len(visits)]

    def longest(self, seed: int, clients: int, local_steps: int, gradients: float = 1) -> float:
        return max(float(visits.sum(axis=1).max()) for visits in self.visits)


DELAYS = {
    "constant": Constant,
    "uniform": Uniform,
    "exponential": Exponential,
    "lognormal": Lognormal,
    "pareto": Pareto,
    "trace": Trace,
}


def _pair(name: str, value: tuple[float, float]) -> tuple[float, float]:
    if len(value) != 2:
        raise ConfigError(f"delays.{name} must be a range [low, high]; got {list(value)!r}")
    return value[0], value[1]
