"""Files of tensors and plain values that are whole or not there, and that show when they were changed.

A file ends in the SHA-256 of what is before it, which
`torch.load` ignores. Reading unpickles tensors and plain values only.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from persafl_lit.common.atomic_file import write_atomically
from persafl_lit.errors import CheckpointError, UnwritableError, first_line

MARK = b"\nsha256 "
DIGEST = len(MARK) + 64
"""Bytes that the checksum takes at the end of a file."""


def write_sealed(path: Path, content: dict[str, Any], before_rename: Callable[[], None] = lambda: None) -> None:
    """Write, flush and rename; `before_rename` is called when the new file is whole and the old one still has its
    name."""

    def write(file: BinaryIO) -> None:
        summed = _Summed(file)
        torch.save(content, summed)  # type: ignore[arg-type]
        file.write(MARK + summed.sum.hexdigest().encode())

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write, before_rename)
    except (OSError, RuntimeError) as error:  # torch says RuntimeError when the disk is full
        why = getattr(error, "strerror", None) or first_line(error)
        raise UnwritableError(
            f"cannot write the checkpoint {path}: {why}; make room or choose another checkpoint.dir"
        ) from None


def read_sealed(path: Path) -> dict[str, Any]:
    """The content of a sound file."""
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error.strerror}") from None
    payload, found = whole[:-DIGEST], whole[-DIGEST:]
    if found != MARK + hashlib.sha256(payload).hexdigest().encode():
        raise CheckpointError(f"the checkpoint {path} is truncated or was changed: its checksum is wrong")
    try:
        content = torch.load(io.BytesIO(payload), weights_only=True)
    except Exception as error:  # a file made by someone else can raise anything
        raise CheckpointError(f"the checkpoint {path} cannot be read: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"the checkpoint {path} is of another version of persafl_lit")
    return content


class _Summed:
    """A file that sums what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sum = hashlib.sha256()

    def write(self, part: Any) -> int:
        self.sum.update(part)
        return self.file.write(part)

    def flush(self) -> None:
        self.file.flush()
