"""Files that users hand in: plain files of a bounded size, refused with a sentence before they are read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from persafl_lit.common.limits import MOST_BYTES
from persafl_lit.errors import PersaflError, shown


def plain_file(path: str | os.PathLike[str], kind: type[PersaflError]) -> Path:
    """The path, if a plain file is there that can be read whole: a pipe would be waited for, a device never ends."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise kind(f"cannot read {shown(str(path))}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise kind(f"cannot read {shown(str(path))}: it is not a plain file")
    if found.st_size > MOST_BYTES:
        raise kind(
            f"cannot read {shown(str(path))}: it has {found.st_size:,} bytes, more than the {MOST_BYTES:,} "
            "that are read"
        )
    return Path(path)
