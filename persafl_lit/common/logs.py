"""Logging. Every module has a logger of its own below `persafl_lit`; commands show them on stderr.

From Python the usual rules of `logging` hold: warnings appear on stderr unless the program has configured something
else, and `logging.getLogger("persafl_lit").setLevel(...)` says how much.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

PACKAGE = logging.getLogger("persafl_lit")


class StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at the moment: a progress bar replaces it, to keep its own line below ours."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("persafl: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


@contextmanager
def shown_on_stderr(level: int) -> Iterator[None]:
    """In here, records of the package from `level` on are lines on stderr, and nowhere else."""
    before = PACKAGE.level, PACKAGE.propagate, list(PACKAGE.handlers)
    LogSettings(level, prefixed=True).apply()
    try:
        yield
    finally:
        level, PACKAGE.propagate, PACKAGE.handlers = before
        PACKAGE.setLevel(level)


class LogSettings(NamedTuple):
    """How a process logs: sent to processes that do not inherit it."""

    level: int
    prefixed: bool
    """Whether lines on stderr are a command's."""

    @classmethod
    def current(cls) -> LogSettings:
        return cls(PACKAGE.getEffectiveLevel(), any(isinstance(handler, StderrHandler) for handler in PACKAGE.handlers))

    def apply(self) -> None:
        """In a process that is started for us."""
        PACKAGE.setLevel(self.level)
        if self.prefixed and not any(isinstance(handler, StderrHandler) for handler in PACKAGE.handlers):
            PACKAGE.addHandler(StderrHandler())
            PACKAGE.propagate = False


# -- loggers of others ------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_quieted: dict[str, tuple[int, int]] = {}
"""By logger: how many blocks of code want it quiet now, and its level before the first of them."""


@contextmanager
def quieted(levels: Mapping[str, int]) -> Iterator[None]:
    """In here, these loggers have these levels; when the last such block of any thread ends, the ones of before."""
    with _lock:
        for name, level in levels.items():
            count, before = _quieted.get(name, (0, logging.getLogger(name).level))
            _quieted[name] = count + 1, before
            if not count:
                logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        with _lock:
            for name in levels:
                count, before = _quieted.pop(name)
                if count > 1:
                    _quieted[name] = count - 1, before
                else:
                    logging.getLogger(name).setLevel(before)
