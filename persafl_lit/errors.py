"""What can go wrong, as one sentence each: what is wrong, what came in, what would do."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


class PersaflError(Exception):
    """An error with a sentence for the user instead of a traceback."""

    exit_code = 2


class ConfigError(PersaflError):
    """A key, a value or a combination of choices that cannot be run."""


class TrackingError(ConfigError):
    """A tracking store that cannot be reached."""


class DataError(PersaflError):
    """A data set, a file or a partition that cannot be used."""


class TimelineError(PersaflError):
    """A schedule, a trace or a timeline file that cannot be walked."""


class CheckpointError(PersaflError):
    """A checkpoint that does not belong to this run or cannot be read."""


class DivergenceError(PersaflError):
    """A non-finite update; what was recorded before it is kept."""

    exit_code = 3


class Interrupted(PersaflError):
    """Asked to stop; a checkpoint has been written."""

    exit_code = 130


class ModelError(PersaflError):
    """A model of the user's that fails while it is built, trained or evaluated."""


class WorkerError(PersaflError):
    """Worker processes that die again and again."""

    exit_code = 3


def closest(name: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' when something known is near `name`, else nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def first_line(error: BaseException) -> str:
    """The first line of what an exception says."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def located(error: BaseException) -> str:
    """What an exception says and where it comes from: the last line outside the libraries, which is most likely the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {first_line(error)}{where}; set PERSAFL_TRACEBACK=1 to see the traceback"
