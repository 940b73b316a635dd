"""`persafl demo`: the sweep `demo`, four methods on the same communication setup, as a table by simulated time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from persafl_lit.cli.run import stop_on_signals
from persafl_lit.cli.sweep import sweep_file
from persafl_lit.common.limits import cores
from persafl_lit.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from persafl_lit.report.record import Record
    from persafl_lit.sweep.plan import Plan
    from persafl_lit.sweep.results import Outcome

TITLES = {"fedavg": "FedAvg", "fedasync": "FedAsync", "persafl_maml": "PersA-FL-MAML", "persafl_me": "PersA-FL-ME"}
"""The demo's methods in the order of the table."""


def demo(options: argparse.Namespace) -> int:
    """Run what is not done of the comparison, and print it."""
    from rich.console import Console

    plan, wall_start = _plan(options.overrides), time.monotonic()
    outcomes, records = _run(plan, options.quiet)
    console = Console(highlight=False)
    if failed := [outcome for outcome in outcomes if outcome.status == "failed"]:
        for outcome in failed:
            console.print(f"failed: {outcome.trial.name}: {outcome.error}", soft_wrap=True, markup=False)
        return 3
    console.print(_setup(outcomes[0]))
    console.print(_table(records))
    for method, record in records.items():
        for note in (record.summary or {})["notes"]:
            console.print(f"note: {TITLES[method]}: {note}", soft_wrap=True)
    _print_next_steps(console, time.monotonic() - wall_start)
    return 0


def _plan(overrides: Sequence[str]) -> Plan:
    from persafl_lit.sweep.plan import read_plan
    from persafl_lit.sweep.trials import first_trials

    if any(text.startswith("method=") for text in overrides):
        raise ConfigError("the demo chooses its methods itself; for one method write `persafl run method=...`")
    if any(text.startswith(("seeds=", "name=")) for text in overrides):
        raise ConfigError("the demo is one seed under its own name; `persafl sweep demo seeds=[0,1]` takes more")
    seeds = [f"seeds=[{text.removeprefix('seed=')}]" if text.startswith("seed=") else text for text in overrides]
    plan = read_plan(sweep_file("demo"), seeds)
    if any(trial.config.horizon is None or trial.config.updates is not None for trial in first_trials(plan)):
        raise ConfigError("the demo compares at equal simulated time: set horizon, not updates")
    return plan


def _run(plan: Plan, quiet: bool) -> tuple[list[Outcome], dict[str, Record]]:
    """The outcomes of the trials, and the records of those that finished, by method."""
    with stop_on_signals("trials under way write checkpoints first") as stop:
        from persafl_lit.sweep.local_launcher import LocalLauncher
        from persafl_lit.sweep.scheduler import run_sweep, sweep_folder
        from persafl_lit.tracking import store_uri
        from persafl_lit.tracking.store import open_store

        uri = store_uri(plan.tracking.uri)
        outcomes = run_sweep(plan, LocalLauncher(cores(), sweep_folder(plan)), uri, stop, quiet=quiet)
        records = {record.run_id: record for record in open_store(uri).records(plan.name)}
    methods = {outcome.trial.method: outcome.run_id for outcome in outcomes if outcome.status == "finished"}
    return outcomes, {method: records[methods[method]] for method in TITLES if method in methods}


def _setup(outcome: Outcome) -> str:
    config = outcome.trial.config
    return (
        f"{config.clients} clients, each with {config.data.get('classes_per_client', 'all')} of 10 classes of "
        f"{config.data['name']}; "
        f"Q = {config.local_steps} local steps; the same delays for every method; simulated time {config.horizon:g}."
    )


def _table(records: dict[str, Record]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    times = next(reversed(records.values())).curves["sim_time"]
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
    for method, record in records.items():
        summary: Any = record.summary
        cells = [f"{record.curves['accuracy.test'][index]:.3f}" for index in shown]
        table.add_row(
            TITLES[method],
            *cells,
            str(summary["updates"]),
            f"{summary['staleness']['mean']:.1f}",
            f"{summary['grad_evals']:.0f}",
        )
    return table


def _print_next_steps(console: Console, wall_seconds: float) -> None:
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
