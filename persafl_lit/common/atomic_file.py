"""Atomic writes: afterwards a file is the new one as a whole, or unchanged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_atomically(
    path: Path, write: Callable[[BinaryIO], Any], before_rename: Callable[[], None] = lambda: None
) -> None:
    """Give `write` a temporary file that replaces `path` once it is complete; on an error `path` stays as it was.

    The file is written beside it as NAME.PID.tmp, flushed to the disk and renamed; `before_rename` is called when the
    new file is whole and the old one still has its name. A pipe or a device is written to, not replaced. Whatever
    `write` raises is raised, and so is an OSError of the disk; the temporary file is removed then.
    """
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            write(file)
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        before_rename()
        os.replace(temporary, path)
        _flush_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """The same of a text, as UTF-8; half characters become question marks."""
    write_atomically(path, lambda file: file.write(text.encode("utf-8", errors="replace")))


def _flush_folder(folder: Path) -> None:
    """The renaming, too, must survive a power cut; some file systems cannot be asked."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
