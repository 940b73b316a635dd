"""Memory of real runs with 1, 2 and 8 workers: `python -m benchmarks.memory [ROOT]`, for CIFAR-10.

PSS counts a page that k processes share 1/k in each, so the sum over the run's process and its workers is what the
machine gives.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.soak import children
from persafl_lit.engine.experiment import Experiment

COMMON = [
    "data=cifar10",
    "model=logistic",
    "method=fedasync",
    "clients=30",
    "updates=300",
    "tracking.enabled=false",
    "checkpoint.every=0",
]


class Watch:
    """Looks once, late in the run, when every worker has seen most clients' data."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen: dict[str, float] = {}

    def on_update(self, experiment: Experiment) -> None:
        if experiment.state.arrivals == self.at:
            own, workers = _memory("self"), [_memory(str(child)) for child in children()]
            self.seen = {
                "all together": own["Pss"] + sum(worker["Pss"] for worker in workers),
                "the run's process": own["Pss"],
                "private to one worker": max(worker["Private_Clean"] + worker["Private_Dirty"] for worker in workers),
            }


def _memory(process: str) -> dict[str, float]:
    """Megabytes by kind."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: float(line.split()[1]) / 1024 for line in lines}


def measure(root: str, workers: int, memory: float) -> dict[str, float]:
    """In a process that does only this."""
    arguments = [*COMMON, f"data.root={root}", f"data.memory={memory}", f"workers={workers}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--one", *arguments], capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--one"]:
        from persafl_lit import run

        watch = Watch(280)
        run(arguments[1:], callbacks=[watch])
        print(json.dumps({what: round(megabytes) for what, megabytes in watch.seen.items()}))
        return
    root = arguments[0] if arguments else "data"
    figures: dict[str, Any] = {}
    for workers in (1, 2, 8):
        figures[f"{workers} workers, bytes"] = measure(root, workers, 0.0)
        figures[f"{workers} workers, normalised once"] = measure(root, workers, 1e4)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
