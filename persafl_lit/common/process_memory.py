"""Settings of the allocator and of the garbage collector that make training and imports faster."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's mallopt."""
GIBIBYTE = 1 << 30


def keep_freed_memory() -> None:
    """For processes that do nothing but train: the tensors of one gradient are those of the next.

    Otherwise malloc gives megabytes back to the system and asks for them again in every gradient, and the system clears
    every page that it gives: up to a seventh of a gradient's time. Without glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for threshold in (TRIM_THRESHOLD, MMAP_THRESHOLD):
        mallopt(threshold, GIBIBYTE)


@contextmanager
def gc_paused() -> Iterator[None]:
    """For imports: Python's garbage collector would look through hundreds of thousands of new objects again and again,
    and nearly all stay.

    That is a fifth of the time of Lightning's import, and half of MLflow's after it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
