"""Deal samples to clients: a few classes each, Dirichlet proportions, or evenly mixed; sizes unbalanced on request.

Every partition maps labels to one index array per client, without overlap, and `split` divides each into train,
validation and test, class by class, so that all three follow the client's own distribution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np

from persafl_lit.common.seeding import rng
from persafl_lit.errors import ConfigError, DataError, closest, shown

if TYPE_CHECKING:
    from persafl_lit.data.federation import Samples

Parts = list[np.ndarray]
Pieces = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A client's samples: train, val and test."""
PARTITION_ATTEMPTS = 200
SMALLEST = 3  # a sample each to train, validate and test


@dataclass(frozen=True)
class Partition:
    """Settings of the deal; `partition` chooses which of them count."""

    partition: Literal["classes", "dirichlet", "iid", "natural"] = "classes"
    """How samples are dealt: a few classes per client, Dirichlet proportions, evenly mixed, or as the data says whose
    each sample is."""
    classes_per_client: int = 5
    """Classes that a client holds, for `classes`."""
    concentration: float = 0.5
    """Concentration of the proportions, for `dirichlet`; small is uneven."""
    imbalance: float = 0.3
    """Spread of the clients' sizes (log-normal sigma); 0 is equal."""
    val_share: float = 0.2
    """Share of a client's samples that are for validation."""
    test_share: float = 0.2
    """Share of a client's samples that are for testing."""

    def __post_init__(self) -> None:
        known = (*PARTITIONS, NATURAL)
        if self.partition not in known:
            raise ConfigError(
                f"data.partition must be one of {', '.join(known)}; got "
                f"{shown(self.partition)}.{closest(self.partition, known)}"
            )
        if self.classes_per_client < 1:
            raise ConfigError(f"data.classes_per_client must be >= 1; got {self.classes_per_client}")
        if not self.concentration > 0:
            raise ConfigError(f"data.concentration must be > 0; got {self.concentration!r}")
        if not 0 <= self.imbalance <= 5:
            raise ConfigError(f"data.imbalance must lie in [0, 5]; got {self.imbalance!r}")
        check_shares(self)

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> Parts:
        """One array of sample indices per client."""
        if self.partition == NATURAL:
            raise ConfigError(
                f"data.partition=natural needs data that says whose each sample is; use {', '.join(PARTITIONS)}"
            )
        if clients * SMALLEST > len(labels):
            raise DataError(
                f"{clients} clients need at least {SMALLEST} samples each (train, val, test), but there are "
                f"{len(labels)} samples; lower clients"
            )
        parts = PARTITIONS[self.partition](labels, clients, self, seed)
        for client, part in enumerate(parts):
            if len(part) < SMALLEST:
                raise DataError(
                    f"client {client} would have {len(part)} samples, fewer than the {SMALLEST} that train, "
                    "val and test need; "
                    "lower clients or data.imbalance, or raise data.concentration"
                )
        return parts


def by_classes(labels: np.ndarray, clients: int, settings: Partition, seed: int) -> Parts:
    """Each client holds c classes (the paper: c = 5 on MNIST, 3 on CIFAR-10); a class is shared unevenly by its
    holders."""
    kinds = np.unique(labels)
    c = settings.classes_per_client
    if c > len(kinds):
        raise ConfigError(f"data.classes_per_client={c}, but the data has {len(kinds)} classes; lower it")
    stream = rng(seed, "partition classes")
    held = np.zeros((clients, len(kinds)), dtype=bool)
    for client in stream.permutation(clients):
        # The classes with the fewest holders so far, ties at random: every class is used about equally often.
        order = np.lexsort((stream.random(len(kinds)), held.sum(axis=0)))
        held[client, order[:c]] = True
    weights = stream.lognormal(0.0, settings.imbalance, size=clients)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for column, kind in enumerate(kinds):
        holders = np.flatnonzero(held[:, column])
        if not len(holders):
            continue
        samples = stream.permutation(np.flatnonzero(labels == kind))
        if len(holders) > len(samples):
            raise DataError(
                f"{len(holders)} clients would share the {len(samples)} samples of class {kind}; lower "
                "clients or data.classes_per_client"
            )
        for client, piece in zip(holders, _cut(samples, weights[holders]), strict=True):
            parts[client].append(piece)
    return [np.concatenate(pieces) for pieces in parts]


def dirichlet(labels: np.ndarray, clients: int, settings: Partition, seed: int) -> Parts:
    """Class k goes to the clients in proportions p_k ~ Dirichlet(concentration); drawn anew until no client is left
    without."""
    for attempt in range(PARTITION_ATTEMPTS):
        stream = rng(seed, "partition dirichlet", attempt)
        pieces: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for kind in np.unique(labels):
            samples = stream.permutation(np.flatnonzero(labels == kind))
            ends = np.cumsum(stream.dirichlet(np.full(clients, settings.concentration)))[:-1] * len(samples)
            for client, piece in enumerate(np.split(samples, np.rint(ends).astype(int))):
                pieces[client].append(piece)
        parts = [np.concatenate(piece) for piece in pieces]
        if min(map(len, parts)) >= SMALLEST:
            return parts
    raise DataError(
        f"no Dirichlet({settings.concentration:g}) partition in {PARTITION_ATTEMPTS} draws gives each of {clients} "
        f"clients {SMALLEST} samples; "
        "raise data.concentration or lower clients"
    )


def iid(labels: np.ndarray, clients: int, settings: Partition, seed: int) -> Parts:
    """Every client draws from the whole data set; only the sizes differ."""
    stream = rng(seed, "partition iid")
    weights = stream.lognormal(0.0, settings.imbalance, size=clients)
    return _cut(stream.permutation(len(labels)), weights, least=SMALLEST)


PARTITIONS = {"classes": by_classes, "dirichlet": dirichlet, "iid": iid}
NATURAL = "natural"


class SplitShares(Protocol):
    """Settings with the shares of a client's samples that are for validation and for testing."""

    @property
    def val_share(self) -> float: ...

    @property
    def test_share(self) -> float: ...


def check_shares(settings: SplitShares) -> None:
    for name, share in (("val_share", settings.val_share), ("test_share", settings.test_share)):
        if not 0 < share < 1:
            raise ConfigError(f"data.{name} must lie between 0 and 1; got {share!r}")
    if settings.val_share + settings.test_share >= 1:
        raise ConfigError(
            f"data.val_share + data.test_share must stay below 1; got {settings.val_share + settings.test_share:g}"
        )


def split(part: np.ndarray, labels: np.ndarray, settings: SplitShares, client: int, seed: int) -> Pieces:
    """Train, validation and test indices of one client, class by class in the same proportions, none of them empty.

    Samples are shuffled within their class, put in the order of their quantile there, and cut: that keeps the class
    shares of the three splits as equal as whole samples allow.
    """
    part = _by_quantile(part, labels, rng(seed, "split", client))
    vals = min(max(1, round(settings.val_share * len(part))), len(part) - 2)
    tests = min(max(1, round(settings.test_share * len(part))), len(part) - 1 - vals)
    return part[tests + vals :], part[tests : tests + vals], part[:tests]


def set_aside(
    part: np.ndarray, labels: np.ndarray, share: float, client: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """A share of one client's samples, class by class like `split`, and the others: for data that lacks one of the
    splits."""
    part = _by_quantile(part, labels, rng(seed, "split", client))
    count = min(max(1, round(share * len(part))), len(part) - 1)
    return part[:count], part[count:]


def _by_quantile(part: np.ndarray, labels: np.ndarray, stream: np.random.Generator) -> np.ndarray:
    part = stream.permutation(part)
    quantile = np.empty(len(part))
    for kind in np.unique(labels[part]):
        members = np.flatnonzero(labels[part] == kind)
        quantile[members] = (np.arange(len(members)) + stream.random()) / len(members)
    return part[np.argsort(quantile, kind="stable")]


def _cut(samples: np.ndarray, weights: np.ndarray, least: int = 1) -> Parts:
    """Consecutive pieces in proportion to `weights`, each of at least `least` samples."""
    spare = len(samples) - least * len(weights)
    extra = np.diff(np.rint(np.cumsum(weights) / np.sum(weights) * spare).astype(int), prepend=0)
    return np.split(samples, np.cumsum(extra + least)[:-1])


# -- who holds what ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """Who holds what: indices of samples per client and split, and what follows from labels alone."""

    labels: np.ndarray
    parts: list[Pieces]
    holdout: int = 0

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def notes(self) -> tuple[str, ...]:
        """What no client holds is said, not lost silently."""
        left = len(self.labels) - int(self.sizes().sum())
        return (f"{left} of {len(self.labels)} samples belong to classes that no client holds",) if left else ()

    def sizes(self) -> np.ndarray:
        """Samples per client and split."""
        return np.array([[len(piece) for piece in pieces] for pieces in self.parts])

    def class_sizes(self) -> np.ndarray:
        """Samples per class, over all clients."""
        return np.bincount(self.labels, minlength=self.classes)

    def label_counts(self) -> np.ndarray:
        """Samples per client and class, all splits together."""
        return np.stack(
            [np.bincount(self.labels[np.concatenate(pieces)], minlength=self.classes) for pieces in self.parts]
        )


@dataclass(frozen=True)
class Partitioned(Partition, ABC):
    """A data set that is dealt to clients; the last `holdout_clients` of them never train and are only evaluated."""

    holdout_clients: int = 0
    """The last so many clients never train and are only evaluated."""

    shape: ClassVar[tuple[int, ...]]
    """Of a sample."""

    @abstractmethod
    def read_labels(self) -> np.ndarray:
        """The labels of all samples, without the samples."""

    @abstractmethod
    def federation(self, clients: int | None, seed: int) -> Samples:
        """The samples, dealt."""

    def shares(self, labels: np.ndarray, clients: int | None, seed: int) -> Shares:
        """Who holds what when `clients` were asked for."""
        parts = self.deal(labels, self.count(clients), seed)
        return Shares(
            labels, [split(part, labels, self, client, seed) for client, part in enumerate(parts)], self.holdout_clients
        )

    def count(self, clients: int | None) -> int:
        """How many clients there are when `clients` were asked for."""
        return 30 if clients is None else clients


def trained(clients: int, holdout: int) -> int:
    """How many clients train; at least one must."""
    if not 0 <= holdout < clients:
        raise ConfigError(f"data.holdout_clients must lie between 0 and clients - 1 = {clients - 1}; got {holdout}")
    return clients - holdout
