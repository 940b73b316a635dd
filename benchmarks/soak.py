"""A long run of a small model: does memory stay flat? `python -m benchmarks.soak [UPDATES [METHOD]]`, in a folder of
its own.

Memory is the resident memory of the run's process and of its workers, every hundredth of the run; its slope is a
straight line fitted to all but the first fifth, when caches fill.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from persafl_lit import compose, run
from persafl_lit.engine.experiment import Experiment

SMALL = ["model=logistic", "clients=5", "local_steps=1", "batch_size=8", "workers=2"]
POINTS = 200


class Watch:
    """Samples memory and open files while a run goes on."""

    def __init__(self, updates: int) -> None:
        self.every = max(1, updates // 100)
        self.samples: list[tuple[int, float, float, int]] = []

    def on_update(self, experiment: Experiment) -> None:
        index = experiment.state.arrivals - 1
        if index % self.every == 0:
            own = os.getpid()
            workers = sum(_megabytes(child) for child in children())
            self.samples.append((index, _megabytes(own), workers, len(os.listdir(f"/proc/{own}/fd"))))


def _megabytes(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return float(line.split()[1]) / 1024
    return 0.0


def children() -> list[int]:
    """The processes that this one has started."""
    return [
        int(child) for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()
    ]


def _slope(updates: np.ndarray, megabytes: np.ndarray) -> float:
    """MB per 10,000 updates."""
    late = updates >= updates[-1] / 5
    return float(np.polyfit(updates[late] / 10_000, megabytes[late], 1)[0])


def soak(updates: int, method: str) -> dict[str, Any]:
    overrides = [*SMALL, f"method={method}", f"updates={updates}"]
    horizon = compose(overrides).timeline(5).horizon
    watch, start = Watch(updates), time.monotonic()
    result = run([*overrides, f"eval.every={horizon / POINTS}", "checkpoint.every=1000"], callbacks=[watch])
    index, own, workers, files = (np.array(column, dtype=float) for column in zip(*watch.samples, strict=True))
    store = sum(file.stat().st_size for file in Path("mlruns").rglob("*") if file.is_file())
    return {
        "updates": len(result.timeline),
        "points": len(result.points),
        "wall seconds": round(time.monotonic() - start, 1),
        "memory of the run's process, MB": {"at first": round(own[1]), "at the end": round(own[-1])},
        "memory of its workers together, MB": {"at first": round(workers[1]), "at the end": round(workers[-1])},
        "slope, MB per 10,000 updates": {
            "process": round(_slope(index, own), 3),
            "workers": round(_slope(index, workers), 3),
        },
        "open files": {"at first": int(files[1]), "most": int(files.max()), "at the end": int(files[-1])},
        "MLflow store, MB": round(store / 1e6, 2),
        "accuracy.test": result.accuracy["test"],
    }


def main() -> None:
    updates = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        print(json.dumps(soak(updates, sys.argv[2] if len(sys.argv) > 2 else "fedasync"), indent=2))


if __name__ == "__main__":
    main()
