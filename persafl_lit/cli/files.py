"""Files that commands write: refused early, and whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from persafl_lit.errors import ConfigError, shown

FORMATS = ("png", "svg", "pdf")


def writable(name: str | None) -> Path | None:
    """The path, refused now rather than after the work if it could not be written."""
    if name is None:
        return None
    path = Path(name)
    folder = path.parent
    if not name or "\0" in name:
        raise ConfigError(f"cannot write {shown(name)}: that is not the name of a file")
    try:
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(
                f"cannot write {shown(name)}: {'it is a folder' if path.is_dir() else f'{shown(str(folder))} is not a writable folder'}"
            )
    except OSError as error:  # a name that is too long
        raise ConfigError(f"cannot write {shown(name)}: {error.strerror}") from None
    return path


def picture(name: str | None) -> Path | None:
    """The path of a picture in a format that can be drawn."""
    path = writable(name)
    if path is not None and path.suffix and picture_format(path) not in FORMATS:
        raise ConfigError(f"cannot draw {shown(name)}: pictures are {', '.join(FORMATS)}; name it *.{FORMATS[0]}")
    return path


def picture_format(path: Path) -> str:
    """By its suffix; png without one."""
    return path.suffix[1:].lower() or FORMATS[0]


def atomically(path: Path, write: Callable[[Any], Any]) -> None:
    """The whole file or none of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
            with open(path, "wb") as file:
                write(file)
            return
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"cannot write {shown(str(path))}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
