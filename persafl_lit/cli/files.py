"""Files that commands write: refused early, and whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from persafl_lit.errors import ConfigError


def writable(name: str | None) -> Path | None:
    """The path, refused now rather than after the work if it could not be written."""
    if name is None:
        return None
    path = Path(name)
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write {name!r}: {'it is a folder' if path.is_dir() else f'{str(folder)!r} is not a writable folder'}")
    return path


def atomically(path: Path, write: Callable[[Any], Any]) -> None:
    """The whole file or none of it."""
    if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
        with open(path, "wb") as file:
            write(file)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
