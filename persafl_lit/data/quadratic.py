"""Quadratic clients: the closed-form playground for theory and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from persafl_lit.common.limits import MOST_NUMBERS
from persafl_lit.common.seeding import rng
from persafl_lit.data.npz import load_npz
from persafl_lit.errors import ConfigError, DataError, shown

if TYPE_CHECKING:
    from persafl_lit.data.quadratic_federation import Quadratics

LARGEST_ENTRY = 1e100
"""Of a file's numbers: their products must still be numbers."""


@dataclass(frozen=True)
class Quadratic:
    """Quadratics from an npz (`H` (n, d, d), `a` (n, d), optional `w0` (d,)), or generated.

    Generated: eigenvalues of H_i log-uniform on [1, condition], optima a_i ~ N(0, heterogeneity^2 I).
    """

    path: str | None = None
    """An npz file with H (n, d, d), a (n, d) and optionally w0 (d,); null generates them."""
    dimension: int = 10
    """d, where they are generated."""
    condition: float = 10.0
    """Largest curvature; the eigenvalues of H are log-uniform between 1 and it."""
    heterogeneity: float = 1.0
    """Standard deviation of the clients' optima."""
    noise: float = 0.0
    """Standard deviation of the gradient noise."""
    holdout_clients: int = 0
    """The last so many clients never train and are only evaluated."""

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise ConfigError(f"data.dimension must be >= 1; got {self.dimension}")
        if not self.condition >= 1:
            raise ConfigError(f"data.condition must be >= 1; got {self.condition!r}")
        for name in ("heterogeneity", "noise"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"data.{name} must be >= 0; got {getattr(self, name)!r}")

    def count(self, clients: int | None) -> int:
        """How many clients there are when `clients` were asked for: a file brings its own number."""
        if self.path is None:
            return 30 if clients is None else clients
        held = len(read_npz(self.path)["a"])
        if clients not in (None, held):
            raise ConfigError(
                f"clients={clients}, but {self.path} holds {held} clients; leave clients out or change it"
            )
        return held

    def federation(self, clients: int | None, seed: int) -> Quadratics:
        import torch

        from persafl_lit.data.quadratic_federation import Quadratics

        count = self.count(clients)
        if self.path is None and count * self.dimension**2 > MOST_NUMBERS:
            raise ConfigError(
                f"{count} clients with data.dimension={self.dimension} need {count * self.dimension**2:,} "
                f"numbers, more than {MOST_NUMBERS:,}; "
                "lower data.dimension or clients"
            )
        arrays = self._generate(count, seed) if self.path is None else read_npz(self.path)
        H, a, w0 = (torch.from_numpy(arrays[name]) for name in ("H", "a", "w0"))
        return Quadratics(H, a, w0, self.noise, self.holdout_clients)

    def _generate(self, clients: int, seed: int) -> dict[str, np.ndarray]:
        d, H, a = self.dimension, [], []
        for client in range(clients):
            stream = rng(seed, "quadratic", client)
            basis, _ = np.linalg.qr(stream.normal(size=(d, d)))
            eigenvalues = np.exp(stream.uniform(0.0, np.log(self.condition), size=d))
            H.append((basis * eigenvalues) @ basis.T)
            a.append(stream.normal(scale=self.heterogeneity, size=d))
        return {"H": np.array(H), "a": np.array(a), "w0": np.zeros(d)}


def read_npz(path: str) -> dict[str, np.ndarray]:
    """`H`, `a` and `w0` (zeros by default) of a file, as float64; nothing in it is unpickled."""
    said, write = f"cannot read {shown(path)} as an npz of numbers", "write it with numpy.savez(path, H=H, a=a)"
    arrays = load_npz(path, ("H", "a", "w0"), said, write, lambda array: array.astype(np.float64, casting="same_kind"))
    for name in ("H", "a"):
        if name not in arrays:
            raise DataError(f"{path}: no array {name!r} in it; it needs H (n, d, d) and a (n, d)")
    H, a = arrays["H"], arrays["a"]
    if a.ndim != 2 or 0 in a.shape:
        raise DataError(f"{path}: a must have the shape (n, d); got {a.shape}")
    n, d = a.shape
    if H.shape != (n, d, d):
        raise DataError(f"{path}: H must have the shape ({n}, {d}, {d}) to go with a {a.shape}; got {H.shape}")
    w0 = arrays.setdefault("w0", np.zeros(d))
    if w0.shape != (d,):
        raise DataError(f"{path}: w0 must have the shape ({d},); got {w0.shape}")
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise DataError(f"{path}: {name} holds values that are not finite")
        if np.abs(array).max() > LARGEST_ENTRY:
            raise DataError(f"{path}: {name} holds values beyond {LARGEST_ENTRY:g}, with which no loss can be computed")
    if not np.allclose(H, H.swapaxes(1, 2)):
        raise DataError(
            f"{path}: every H[i] must be symmetric; client "
            f"{int(np.argmax(np.abs(H - H.swapaxes(1, 2)).max(axis=(1, 2))))} is not"
        )
    return arrays
