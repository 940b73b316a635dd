"""Arrays of an npz file that may come from anybody: bounded in size, never unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Collection

import numpy as np

from persafl_lit.common.input_files import plain_file
from persafl_lit.common.limits import MOST_BYTES
from persafl_lit.errors import DataError, first_line


def load_npz(
    path: str, names: Collection[str], said: str, write: str, convert: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> dict[str, np.ndarray]:
    """Those of `names` that are there. An error begins with `said` and ends with `write`, how such a file is made."""
    if not zipfile.is_zipfile(plain_file(path, DataError)):
        raise DataError(f"{said}: it is not an npz file at all; {write}")
    try:
        with zipfile.ZipFile(path) as packed:
            size = sum(member.file_size for member in packed.infolist())
        if size > MOST_BYTES:
            raise DataError(f"it unpacks to {size:,} bytes, more than the {MOST_BYTES:,} that are read")
        with np.load(path, allow_pickle=False) as file:
            return {name: convert(file[name]) for name in file.files if name in names}
    except Exception as error:  # a damaged file can raise anything
        why = (
            "it holds Python objects, which are never unpickled" if "allow_pickle" in str(error) else first_line(error)
        )
        raise DataError(f"{said}: {why}; {write}") from None
