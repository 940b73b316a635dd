"""Memory of several processes that hold one federation: `python -m benchmarks.memory [ROOT]`, for CIFAR-10.

Each process opens the data, moves through every client's batches once, and reports its resident memory (RSS) and its share
of it (PSS: pages used by k processes count 1/k), against the same process before it opened the data.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

from persafl_lit.data import Cifar10


def _memory() -> dict[str, float]:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: float(line.split()[1]) / 1024 for line in lines[1:]}
    return {"rss": sizes["Rss"], "pss": sizes["Pss"]}


def _hold(root: str, memory: float, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)
    barrier.wait()
    before = _memory()
    federation = Cifar10(root=root, memory=memory).federation(30, 0)
    for client in range(30):
        for split in ("train", "val", "test"):
            for _ in federation.whole(client, split, 256):
                pass
    barrier.wait()
    after = _memory()
    barrier.wait()
    results.put({name: after[name] - before[name] for name in after})


def measure(root: str, workers: int, memory: float) -> dict[str, float]:
    """Megabytes that the data adds: resident in one process, and in all processes together with shared pages counted once."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(workers), context.Queue()
    processes = [context.Process(target=_hold, args=(root, memory, barrier, results)) for _ in range(workers)]
    for process in processes:
        process.start()
    seen = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return {"resident in one": max(s["rss"] for s in seen), "all together": sum(s["pss"] for s in seen)}


def main() -> None:
    root = sys.argv[1] if len(sys.argv) > 1 else "data"
    figures = {
        f"{workers} workers, {'normalised once in each' if memory else 'bytes, shared'}": measure(root, workers, memory)
        for memory in (0.0, 1e4)
        for workers in ((1, 2, 8) if not memory else (1, 2))
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
