"""Files that commands write: refused early, and whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from persafl_lit.common.atomic_file import write_atomically
from persafl_lit.errors import ConfigError, shown

PICTURE_FORMATS = ("png", "svg", "pdf")


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
                f"cannot write {shown(name)}: "
                f"{'it is a folder' if path.is_dir() else f'{shown(str(folder))} is not a writable folder'}"
            )
    except OSError as error:  # a name that is too long
        raise ConfigError(f"cannot write {shown(name)}: {error.strerror}") from None
    return path


def writable_folder(name: str | None) -> Path | None:
    """A folder for several files, made if it is not there; refused now rather than after the work."""
    if name is None:
        return None
    if not name or "\0" in name:
        raise ConfigError(f"cannot write into {shown(name)}: that is not the name of a folder")
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write into {shown(name)}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(f"cannot write into {shown(name)}: it is not a writable folder")
    return path


def picture(name: str | None) -> Path | None:
    """The path of a picture in a format that can be drawn."""
    path = writable(name)
    if path is not None and path.suffix and picture_format(path) not in PICTURE_FORMATS:
        formats = ", ".join(PICTURE_FORMATS)
        raise ConfigError(f"cannot draw {shown(name)}: pictures are {formats}; name it *.{PICTURE_FORMATS[0]}")
    return path


def picture_format(path: Path) -> str:
    """By its suffix; png without one."""
    return path.suffix[1:].lower() or PICTURE_FORMATS[0]


def write_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """The whole file or none of it, or a sentence about why not."""
    try:
        write_atomically(path, write)
    except OSError as error:
        raise ConfigError(f"cannot write {shown(str(path))}: {error.strerror}") from None
