"""Arrays from an npz file: x, y, and perhaps whose each sample is and in which split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from persafl_lit.data.given import Given
from persafl_lit.data.npz import load_npz
from persafl_lit.errors import DataError, shown

NAMES = ("x", "y", "client", "split")


@dataclass(frozen=True, kw_only=True)
class Arrays(Given):
    """An npz with x (n, ...) and y (n, ...), and perhaps client (n,) and split (n,: train, val, test); nothing in it is
    unpickled."""

    path: str
    """The npz file: numpy.savez(path, x=x, y=y, client=client)."""

    def load(self) -> Any:
        return read_arrays(self.path)


def read_arrays(path: str) -> dict[str, np.ndarray]:
    arrays = load_npz(path, NAMES, f"cannot read data.path={shown(path)}", "write it with numpy.savez(path, x=x, y=y)")
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(f"data.path={shown(path)}: no array {name!r} in it; it needs x (n, ...) and y (n, ...)")
    return arrays
