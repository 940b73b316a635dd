"""`persafl demo`: four methods on the embedded digits, on the same communication setup, at equal simulated time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from persafl_lit.common.limits import cores
from persafl_lit.common.process_memory import keep_freed_memory
from persafl_lit.config.compose import Config, compose
from persafl_lit.errors import ConfigError

METHODS = {"fedavg": "FedAvg", "fedasync": "FedAsync", "persafl_maml": "PersA-FL-MAML", "persafl_me": "PersA-FL-ME"}


def demo(overrides: Sequence[str]) -> int:
    """Run the comparison and print it."""
    if any(text.startswith("method=") for text in overrides):
        raise ConfigError("the demo chooses its methods itself; for one method write `persafl run method=...`")
    configs = {
        method: compose(["experiment=demo", "executor=serial", *overrides, f"method={method}"]) for method in METHODS
    }
    if any(config.horizon is None or config.updates is not None for config in configs.values()):
        raise ConfigError("the demo compares at equal simulated time: set horizon, not updates")
    console, wall_start = Console(highlight=False), time.monotonic()
    first = configs["persafl_me"]
    console.print(
        f"{first.clients} clients, each with {first.data.get('classes_per_client', 'all')} of 10 classes of "
        f"{first.data['name']}; "
        f"Q = {first.local_steps} local steps; the same delays for every method; simulated time {first.horizon:g}."
    )
    summaries = _run_all(configs, console)
    console.print(_table(summaries))
    for method, summary in summaries.items():
        for note in summary["notes"]:
            console.print(f"note: {METHODS[method]}: {note}", soft_wrap=True)
    _explain(console, summaries, time.monotonic() - wall_start)
    return 0


def _run_all(configs: dict[str, Config], console: Console) -> dict[str, dict[str, Any]]:
    """Every method in a process of its own, as many at a time as there are cores."""
    tracking = next(iter(configs.values())).tracking
    if tracking.enabled:
        from persafl_lit.tracking import store_uri
        from persafl_lit.tracking.store import prepare

        prepare(store_uri(tracking.uri), tracking.experiment)
    done: dict[str, dict[str, Any]] = {}
    spinner = Progress(SpinnerColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True)
    with ProcessPoolExecutor(min(len(configs), cores()), mp_context=get_context("spawn")) as pool, spinner:
        # The longest first: the Moreau envelope costs ten gradients a step.
        futures: dict[Future[dict[str, Any]], str] = {
            pool.submit(_one, configs[method]): method for method in reversed(METHODS)
        }
        task = spinner.add_task("training " + ", ".join(METHODS.values()))
        for future in as_completed(futures):
            method = futures[future]
            done[method] = future.result()
            left = [METHODS[name] for name in METHODS if name not in done]
            spinner.update(task, description="training " + ", ".join(left))
            console.print(
                f"  {METHODS[method]:<14} {done[method]['updates']:>4} updates, {done[method]['wall_seconds']:.0f} s"
            )
    return {method: done[method] for method in METHODS}


def _one(config: Config) -> dict[str, Any]:
    from persafl_lit import run

    keep_freed_memory()
    result = run(config)
    return result.summary() | {"curves": result.curves()}


def _table(summaries: dict[str, dict[str, Any]]) -> Table:
    times = summaries["persafl_me"]["curves"]["sim_time"]
    shown = sorted({round(k * (len(times) - 1) / 4) for k in range(5)})
    table = Table(
        title="Test accuracy after the same fine-tuning, by simulated time",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    table.add_column("method", no_wrap=True)
    for index in shown:
        table.add_column(f"t={times[index]:g}", justify="right", no_wrap=True)
    for name in ("updates", "stale", "grads"):
        table.add_column(name, justify="right", no_wrap=True)
    for method, summary in summaries.items():
        cells = [f"{summary['curves']['accuracy.test'][index]:.3f}" for index in shown]
        table.add_row(
            METHODS[method],
            *cells,
            str(summary["updates"]),
            f"{summary['staleness']['mean']:.1f}",
            f"{summary['grad_evals']:.0f}",
        )
    return table


def _explain(console: Console, summaries: dict[str, dict[str, Any]], wall_seconds: float) -> None:
    console.print(f"Done in {wall_seconds:.0f} s. What next:")
    for command, what in (
        ("persafl run method=persafl_me method.lam=20", "change one thing"),
        ("persafl run method=persafl_maml schedule.tau=10", "bound the staleness"),
        ("persafl timeline --png schedule.png", "see who waits for whom"),
        ("persafl list", "methods, data sets, models, schedules, delays"),
        ("persafl report demo", "the comparison as figures, tables and one HTML page"),
        ("persafl ui", "compare the runs in MLflow"),
    ):
        console.print(f"  {command:<58} # {what}", soft_wrap=True)
