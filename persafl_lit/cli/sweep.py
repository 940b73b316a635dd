"""`persafl sweep`."""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persafl_lit.cli.run import stdout_to_stderr, stop_on_signals
from persafl_lit.common.limits import cores
from persafl_lit.errors import ConfigError, PersaflError, closest

if TYPE_CHECKING:
    from persafl_lit.sweep.finished import Exported
    from persafl_lit.sweep.plan import Plan
    from persafl_lit.sweep.results import Outcome
    from persafl_lit.sweep.scheduler import Launcher
    from persafl_lit.sweep.trials import Trial

logger = logging.getLogger(__name__)


def sweep(options: argparse.Namespace) -> int:
    from persafl_lit.sweep.plan import read_plan

    plan = read_plan(sweep_file(options.file), options.overrides)
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"--workers must be >= 1; got {options.workers}")
    finished = _finished(plan, options)
    if options.dry_run:
        return _dry_run(plan, options.workers or cores(), finished, options.retry_failed)
    with (
        stdout_to_stderr() if options.json else nullcontext(),
        stop_on_signals("trials under way write checkpoints first") as stop,
    ):
        from persafl_lit.sweep.scheduler import run_sweep
        from persafl_lit.tracking import store_uri

        uri = store_uri(plan.tracking.uri)
        outcomes = run_sweep(
            plan, _launcher(options, plan, uri), uri, stop, options.retry_failed, finished, options.quiet
        )
    if options.json:
        print(json.dumps(_as_json(plan, outcomes)))
    else:
        _print(plan, outcomes)
    return 3 if any(outcome.status == "failed" for outcome in outcomes) else 0


def _finished(plan: Plan, options: argparse.Namespace) -> Mapping[str, Exported]:
    if not options.finished:
        if options.any_version:
            raise ConfigError("--any-version is about files; give one with --finished")
        return {}
    from persafl_lit.sweep.finished import read_finished

    found = read_finished(plan, options.finished, options.any_version)
    for note in found.notes:
        logger.info("%s", note)
    return found.trials


def sweep_file(name: str) -> Path:
    """A file, or one of the shipped sweeps by its name."""
    shipped = sweeps()
    path = Path(name)
    if path.is_file():
        return path
    if path.name == name and path.stem in shipped:
        return shipped[path.stem]
    raise ConfigError(f"there is no sweep file {name}; shipped are {', '.join(shipped)}.{closest(name, shipped)}")


def sweeps() -> dict[str, Path]:
    """Shipped sweeps: sweeps/ inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    folder = next((folder for folder in (package / "sweeps", package.parent / "sweeps") if folder.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _launcher(options: argparse.Namespace, plan: Plan, uri: str) -> Launcher:
    if options.launcher == "local":
        from persafl_lit.sweep.local_launcher import LocalLauncher
        from persafl_lit.sweep.scheduler import sweep_folder

        return LocalLauncher(options.workers or cores(), sweep_folder(plan))
    try:
        from persafl_lit.sweep.ray_launcher import RayLauncher
    except ImportError:
        raise ConfigError("--launcher ray needs Ray; install it with: pip install 'persafl_lit[ray]'") from None
    return RayLauncher(options.address, uri, options.cpus, options.gpus, options.workers or 0)


# -- what it would do -------------------------------------------------------------------------------------------------


def _dry_run(plan: Plan, lanes: int, finished: Mapping[str, Exported], retry_failed: bool) -> int:
    from persafl_lit.sweep.dashboard import duration
    from persafl_lit.sweep.trials import first_trials

    adaptive = plan.search if plan.search is not None and plan.search.how == "adaptive" else None
    if adaptive:
        print(
            f"{plan.name}: {adaptive.trials} trials in each of {len(plan.blocks)} blocks, each proposed from "
            "the results of those before it"
        )
    trials = first_trials(plan)  # of an adaptive search, as many by chance: enough to time it
    from persafl_lit.sweep.scheduler import fails_again
    from persafl_lit.tracking import store_uri
    from persafl_lit.tracking.sweep_runs import Ended, ended_trials

    ended = Ended() if adaptive else ended_trials(store_uri(plan.tracking.uri), plan.name)
    places = {trial: exported.file for trial, exported in finished.items()}
    places |= dict.fromkeys(ended.summaries, "the store")
    failed = {
        trial: error
        for trial, error in ended.errors.items()
        if fails_again(error) and not retry_failed and trial not in places
    }
    done = {trial.hash: finished[trial.hash].summary(trial) for trial in trials if trial.hash in finished}
    chosen = _second_stage(plan, trials, done | ended.summaries, failed)
    trials += chosen
    for number, trial in enumerate(() if adaptive else trials, 1):
        where = f"  (in {places[trial.hash]})" if trial.hash in places else ""
        where = f"  (failed: {failed[trial.hash]})" if trial.hash in failed else where
        print(f"{number:>4}  {trial.hash}  {trial.name}{where}")
    groups, later = {trial.group for trial in trials}, len(plan.seeds) - 1 if plan.two_stages and not chosen else 0
    more = ""
    if later:
        more = f", then each method's best by {plan.select.metric} on {later} more seeds: {len(groups) * later} trials"
    left = [trial for trial in trials if trial.hash not in places and trial.hash not in failed]
    lost = sum(trial.hash in failed for trial in trials)
    words = f"; {len(trials) - len(left) - lost} are finished, {len(left)} remain" if len(left) < len(trials) else ""
    words += f", {lost} failed and would fail again (--retry-failed begins them anew)" if lost else ""
    print(f"{len(trials)} trials{words}{more}")
    if not left and not more:
        print("nothing was started")
        return 0
    try:
        logger.info("timing one visit of each kind ...")
        from persafl_lit.sweep.estimate import TimeEstimate

        estimate = TimeEstimate()
        seconds = estimate.of(left, lanes) if left else 0.0
        if more:
            seconds += (
                sum(max(estimate.one(trial.config) for trial in trials if trial.group == group) for group in groups)
                * later
                / lanes
            )
        print(f"about {duration(seconds)} with {lanes} at a time on this machine; nothing was started")
    except PersaflError as error:
        print(f"no estimate of the time: {error}")
    return 0


def _second_stage(
    plan: Plan, trials: Sequence[Trial], done: Mapping[str, Mapping[str, Any]], failed: Mapping[str, str]
) -> list[Trial]:
    """Its trials, if all of the first have ended; `done` are the summaries of those that finished."""
    from persafl_lit.sweep.results import Outcome, choose
    from persafl_lit.sweep.trials import on_other_seeds

    if not plan.two_stages or any(trial.hash not in done and trial.hash not in failed for trial in trials):
        return []
    outcomes = [Outcome(trial, "", "finished", done[trial.hash]) for trial in trials if trial.hash in done]
    return on_other_seeds(plan, [best.trial for best in choose(outcomes, plan.select)])


# -- results ----------------------------------------------------------------------------------------------------------


def _print(plan: Plan, outcomes: Sequence[Outcome]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from persafl_lit.report.record import NEVER_CHANGED
    from persafl_lit.sweep.results import choose
    from persafl_lit.sweep.scheduler import sweep_folder

    console = Console(highlight=False)
    counts = Counter(
        "without a result" if outcome.status == "finished" and not outcome.counts else outcome.status
        for outcome in outcomes
    )
    words = ", ".join(f"{count} {status}" for status, count in counts.items())
    files = Counter(outcome.imported for outcome in outcomes if outcome.imported)
    words += "".join(f", {count} of them from {file}" for file, count in files.items())
    console.print(f"{plan.name}: {len(outcomes)} trials, {words}", soft_wrap=True, markup=False)
    table = Table(
        title=f"Each method's best setting by {plan.select.metric}, mean over seeds",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    kind = plan.select.kind
    for name in ("method", "setting"):
        table.add_column(name)
    for name in ("seeds", f"{kind}.val", f"{kind}.test"):
        table.add_column(name, justify="right", no_wrap=True)
    for chosen in choose(outcomes, plan.select):
        scores = [_spread(*chosen.over_seeds(f"{kind}.{split}")) for split in ("val", "test")]
        setting = chosen.trial.setting_text or "as configured"
        table.add_row(chosen.trial.method, setting, str(len(chosen.outcomes)), *scores)
    if table.row_count:
        console.print(table)
    for outcome in outcomes:
        if outcome.status == "failed":
            console.print(f"failed: {outcome.trial.name}: {outcome.error}", soft_wrap=True, markup=False)
        elif outcome.status == "finished" and not outcome.counts:
            console.print(
                f"no result: {outcome.trial.name}: {outcome.note or NEVER_CHANGED}", soft_wrap=True, markup=False
            )
    console.print(f"every trial: {sweep_folder(plan) / 'trials.csv'}", soft_wrap=True)
    console.print(f"  persafl report {plan.name:<20} # figures, tables and one HTML page", soft_wrap=True)
    console.print(f"  persafl ui {'':<24} # compare the trials in MLflow", soft_wrap=True)


def _spread(mean: float, std: float) -> str:
    return f"{mean:.4f}" if math.isnan(std) else f"{mean:.4f} +- {std:.4f}"


def _as_json(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    from persafl_lit.sweep.results import choose, table

    chosen = [
        {"method": best.trial.method, "setting": dict(best.trial.grid_values)} for best in choose(outcomes, plan.select)
    ]
    rows = [row | {"run_id": outcome.run_id} for row, outcome in zip(table(outcomes), outcomes, strict=True)]
    return {"sweep": plan.name, "chosen": chosen, "trials": rows}
