"""Waiting for something to come about: by asking, with a deadline that only a failure reaches."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

GENEROUS = 180.0
"""Seconds: no machine is so slow."""


def until(condition: Callable[[], Any], process: subprocess.Popen | None = None, seconds: float = GENEROUS) -> Any:
    """What `condition` returns once that is true. The process must live until then."""
    give_up_at = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up_at, f"it did not come about in {seconds} s"
        assert process is None or process.poll() is None, f"the process has ended before: {process.returncode}"
        time.sleep(0.01)
    return found
