"""Li et al.'s synthetic(alpha, beta), generated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from persafl_lit.common.limits import MOST_NUMBERS
from persafl_lit.common.seeding import rng
from persafl_lit.data.partition import Shares, check_shares, split
from persafl_lit.errors import ConfigError

if TYPE_CHECKING:
    from persafl_lit.data.federation import Samples

SMALLEST, LOG_MEAN, LOG_STD = 50, 4.0, 2.0
"""Of the clients' sizes, 50 + floor(lognormal(4, 2)), as in FedProx's and pFedMe's code."""


@dataclass(frozen=True)
class Synthetic:
    """synthetic(alpha, beta) of FedProx (Li et al., 2020), also used by pFedMe.

        y = argmax(W_k x + b_k),   W_k, b_k ~ N(u_k, 1), u_k ~ N(0, alpha^2)
        x ~ N(v_k, S), S = diag(j^-1.2),   v_k ~ N(B_k, 1), B_k ~ N(0, beta^2)

    alpha is how much the clients' models differ, beta how much their inputs do; alpha and beta are standard deviations,
    as in FedProx's code. With `iid`, all clients have one model and the mean of inputs B_k.
    """

    alpha: float = 1.0
    """How much the clients' models differ."""
    beta: float = 1.0
    """How much the clients' inputs differ."""
    dimension: int = 60
    """Numbers of an input."""
    classes: int = 10
    """Number of classes."""
    iid: bool = False
    """Whether one model, W ~ N(0, 1), makes all clients' labels."""
    val_share: float = 0.2
    """Share of a client's samples that are for validation."""
    test_share: float = 0.2
    """Share of a client's samples that are for testing."""
    holdout_clients: int = 0
    """The last so many clients never train and are only evaluated."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise ConfigError(f"data.{name} must lie between 0 and 1e6; got {getattr(self, name)!r}")
        if self.dimension < 1:
            raise ConfigError(f"data.dimension must be >= 1; got {self.dimension}")
        if self.classes < 2:
            raise ConfigError(f"data.classes must be >= 2; got {self.classes}")
        check_shares(self)

    def count(self, clients: int | None) -> int:
        """How many clients there are when `clients` were asked for."""
        return 30 if clients is None else clients

    def federation(self, clients: int | None, seed: int) -> Samples:
        import torch

        from persafl_lit.data.federation import SPLITS
        from persafl_lit.data.federation import Samples as InMemory

        x, y, sizes = self.generate(self.count(clients), seed)
        pieces = np.split(np.arange(len(y)), np.cumsum(sizes)[:-1])
        shares = Shares(
            y, [split(part, y, self, client, seed) for client, part in enumerate(pieces)], self.holdout_clients
        )
        parts = [
            {name: torch.from_numpy(piece) for name, piece in zip(SPLITS, found, strict=True)} for found in shares.parts
        ]
        return InMemory(
            torch.from_numpy(x),
            torch.from_numpy(y),
            self.classes,
            parts,
            hashlib.sha256(x.tobytes()).hexdigest(),
            shares.holdout,
        )

    def generate(self, clients: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs and labels of all clients one after the other, and their numbers of samples."""
        d, c = self.dimension, self.classes
        sizes = np.array(
            [
                SMALLEST + int(rng(seed, "synthetic size", client).lognormal(LOG_MEAN, LOG_STD))
                for client in range(clients)
            ]
        )
        numbers = int(sizes.sum()) * (d + c) + clients * d * c
        if numbers > MOST_NUMBERS:
            raise ConfigError(
                f"{clients} clients with data.dimension={d} need {numbers:,} numbers, more than "
                f"{MOST_NUMBERS:,}; lower one of them"
            )
        scale = np.arange(1, d + 1) ** -0.6  # standard deviations: the variance of component j is j^-1.2
        common = rng(seed, "synthetic model")
        W_all, b_all = common.normal(size=(d, c)), common.normal(size=c)
        x = np.empty((int(sizes.sum()), d), dtype=np.float32)
        y = np.empty(len(x), dtype=np.int64)
        start = 0
        for client, size in enumerate(sizes.tolist()):
            stream = rng(seed, "synthetic", client)
            u, B = self.alpha * stream.normal(), self.beta * stream.normal()
            W, b = stream.normal(u, 1.0, size=(d, c)), stream.normal(u, 1.0, size=c)
            v = stream.normal(B, 1.0, size=d)
            if self.iid:
                W, b, v = W_all, b_all, np.full(d, B)
            inputs = v + scale * stream.normal(size=(size, d))
            x[start : start + size] = inputs
            y[start : start + size] = (inputs @ W + b).argmax(axis=1)
            start += size
        return x, y, sizes
