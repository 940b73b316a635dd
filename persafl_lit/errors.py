"""What can go wrong, as one sentence each: what is wrong, what came in, what would do."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LONGEST, LONGEST_VALUE = 600, 80
"""Characters of a sentence, and of a value within it: what came in may be anything."""


class PersaflError(Exception):
    """An error with a sentence for the user instead of a traceback: one line, and nothing that a terminal would
    obey."""

    exit_code = 2

    def __init__(self, sentence: object = "") -> None:
        super().__init__(_middle_out(one_line(str(sentence)), LONGEST))


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


class OtherRunError(CheckpointError):
    """A checkpoint that belongs to another run."""


class TakenError(CheckpointError):
    """A run that another process is doing now."""


class UnwritableError(CheckpointError):
    """A checkpoint that could not be written or locked: a problem of the machine, not of the run."""


class DivergenceError(PersaflError):
    """A non-finite update; what was recorded before it is kept."""

    exit_code = 3


class Interrupted(PersaflError):
    """Asked to stop; a checkpoint has been written, or the message says why not."""

    exit_code = 130


class ModelError(PersaflError):
    """A model of the user's that fails while it is built, trained or evaluated."""


class CallbackError(PersaflError):
    """A callback or a logger of the user's that fails; the run's state has been kept."""


class WorkerError(PersaflError):
    """Worker processes that die again and again."""

    exit_code = 3


def one_line(text: str) -> str:
    """Line breaks and control characters as spaces, half characters as question marks."""
    return re.sub(r"[\ud800-\udfff]", "?", re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text))


def shown(value: Any) -> str:
    """repr(value), cut where it is long."""
    try:
        return _middle_out(repr(value), LONGEST_VALUE)
    except Exception:  # a number of a million digits, an object that cannot describe itself
        return f"a {type(value).__name__}"


def _middle_out(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-(most // 3 - 5) :]}"


def closest(name: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' when something known is near `name`, else nothing."""
    near = difflib.get_close_matches(str(name)[:LONGEST_VALUE], list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def first_line(error: BaseException) -> str:
    """The first line of what an exception says."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def located(error: BaseException) -> str:
    """What an exception says and where it comes from: the last line outside the libraries and this package, which is
    most likely the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [
        frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith("<frozen ")
    ]
    own = [frame for frame in outside if Path(__file__).parent not in Path(frame.filename).parents] or outside or frames
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {first_line(error)}{where}; set PERSAFL_TRACEBACK=1 to see the traceback"
