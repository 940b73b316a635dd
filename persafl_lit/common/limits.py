"""Upper bounds on inputs. Beyond these a run would fill the memory or outlast its user; each is refused where the value
enters."""

from __future__ import annotations

import os

from persafl_lit.errors import ConfigError

MOST_CLIENTS = 1_000_000
MOST_VISITS = 2_000_000
"""Of all clients together in one timeline, and so also `updates`."""
MOST_STEPS = 100_000
"""Local steps of a visit, inner steps of a local step, steps of a fine-tuning."""
MOST_WORKERS = 1024
MOST_WEIGHTS = 100_000_000
"""Of a network."""
MOST_LAYERS = 100
MOST_NUMBERS = 100_000_000
"""In the matrices of quadratic clients: n d^2."""
MOST_CACHED = 1_000_000_000
"""Values of clients' latest updates that the server keeps: n d, 4 GB in single precision."""
MOST_BYTES = 1_000_000_000
"""Of a file that is read whole."""
MOST_SECONDS = 1_000_000.0
"""Of wall time that anything waits."""


def at_most(key: str, value: float | None, most: float) -> None:
    if value is not None and not value <= most:
        raise ConfigError(f"{key} must be at most {most:,.12g}; got {value!r}")


def cores() -> int:
    """That this process may use: of a machine shared by a batch system, often not all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
