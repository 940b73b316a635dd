"""Arrays from an npz file: x, y, and perhaps whose each sample is and in which split."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

from persafl_lit.data.given import Given
from persafl_lit.errors import DataError, first_line, shown
from persafl_lit.inputs import plain_file
from persafl_lit.limits import MOST_BYTES

NAMES = ("x", "y", "client", "split")


@dataclass(frozen=True, kw_only=True)
class Arrays(Given):
    """An npz with x (n, ...) and y (n, ...), and perhaps client (n,) and split (n,: train, val, test); nothing in it is unpickled."""

    path: str
    """The npz file: numpy.savez(path, x=x, y=y, client=client)."""

    def load(self) -> Any:
        return read_arrays(self.path)


def read_arrays(path: str) -> dict[str, np.ndarray]:
    whole = "write it with numpy.savez(path, x=x, y=y)"
    if not zipfile.is_zipfile(plain_file(path, DataError)):
        raise DataError(f"cannot read data.path={shown(path)}: it is not an npz file; {whole}")
    try:
        with zipfile.ZipFile(path) as packed:
            size = sum(member.file_size for member in packed.infolist())
        if size > MOST_BYTES:
            raise DataError(f"it unpacks to {size:,} bytes, more than the {MOST_BYTES:,} that are read")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in file.files if name in NAMES}
    except Exception as error:  # a damaged file can raise anything
        why = "it holds Python objects, which are never unpickled" if "allow_pickle" in str(error) else first_line(error)
        raise DataError(f"cannot read data.path={shown(path)}: {why}; {whole}") from None
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(f"data.path={shown(path)}: no array {name!r} in it; it needs x (n, ...) and y (n, ...)")
    return arrays
