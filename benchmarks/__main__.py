"""`make bench`: ratios against a tight loop, medians of repeats in both orders, into benchmarks/results.json."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from persafl_lit import run
from persafl_lit.client import build_backbone
from persafl_lit.data import Digits
from persafl_lit.models import MODELS
from persafl_lit.timeline import Asynchronous, Setting
from persafl_lit.timeline.delays import Exponential

REPEATS, BATCH, EVALUATIONS = 5, 20, 1000
UPDATES = 60
HERE = Path(__file__).parent


def tight_loop(model: str, evaluations: int, batch_size: int) -> float:
    """Gradient evaluations per second of plain PyTorch, one thread: forward, backward, SGD step, nothing else."""
    federation = Digits().federation(30, 0)
    network = build_backbone(MODELS[model](), federation, 0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    batches = [batch.data for batch in federation.batches(0, "D", 0, 10, batch_size, 0)]
    torch.set_num_threads(1)
    start = time.perf_counter()
    for step in range(evaluations):
        optimizer.zero_grad()
        network.training_step(batches[step % 10], step).backward()
        optimizer.step()
    return evaluations / (time.perf_counter() - start)


def whole_run(model: str, method: str, batch_size: int) -> float:
    """Gradient evaluations per second of a run, everything but imports and the last evaluation included."""
    overrides = [f"model={model}", f"method={method}", f"updates={UPDATES}", f"batch_size={batch_size}", "eval.every=1e9", "eval.finetune=none"]
    result = run([*overrides, "tracking.enabled=false", "checkpoint.every=0"])
    return float(result.summary()["grad_evals"] / result.wall_seconds)


def ratio(ours: Callable[[], float], theirs: Callable[[], float]) -> dict[str, float]:
    """Medians and their ratio; who goes first alternates."""
    seen: dict[str, list[float]] = {"ours": [], "theirs": []}
    for repeat in range(REPEATS):
        for name, measure in (("ours", ours), ("theirs", theirs))[:: 1 if repeat % 2 == 0 else -1]:
            seen[name].append(measure())
    medians = {name: statistics.median(values) for name, values in seen.items()}
    return medians | {"ratio": medians["ours"] / medians["theirs"]}


def timeline_speed() -> float:
    """Arrivals per second of a timeline of a million arrivals of 10,000 clients."""
    start = time.perf_counter()
    Asynchronous().timeline(Setting(10_000, 10, Exponential(), 0, None, 1_000_000))
    return 1_000_000 / (time.perf_counter() - start)


def main() -> None:
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "repeats": REPEATS}
    console = Console(highlight=False)
    table = Table("what", "ours / s", "tight loop / s", "ratio", title="Gradient evaluations on digits, one thread")
    whole_run("logistic", "fedasync", BATCH)  # imports and first use
    for model in ("cnn2", "logistic"):
        for method in ("fedasync", "persafl_maml", "persafl_me"):
            name = f"{model} {method}"
            measured = ratio(partial(whole_run, model, method, BATCH), partial(tight_loop, model, EVALUATIONS, BATCH))
            results[name] = measured
            table.add_row(name, f"{measured['ours']:.0f}", f"{measured['theirs']:.0f}", f"{measured['ratio']:.2f}")
    results["timeline arrivals per second"] = statistics.median(timeline_speed() for _ in range(3))
    console.print(table)
    console.print(f"timeline: {results['timeline arrivals per second']:.0f} arrivals a second")
    (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
