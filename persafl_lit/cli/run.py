"""`persafl run`."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persafl_lit.cli.files import writable, writable_folder, write_file
from persafl_lit.common.process_memory import keep_freed_memory

if TYPE_CHECKING:
    from persafl_lit.config.compose import Config
    from persafl_lit.engine.experiment import Experiment
    from persafl_lit.engine.result import Result

logger = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> int:
    from persafl_lit.config.compose import compose

    config = compose(options.overrides)
    target, clients = writable(options.save_model), writable_folder(options.save_clients)
    with stdout_to_stderr() if options.json else nullcontext():
        result = _run_with_progress(config, options.resume, options.quiet)
    if target is not None:
        import torch

        write_file(target, lambda file: torch.save(result.state_dict(), file))
    if clients is not None:
        _save_clients(result, clients)
    summary = result.summary()
    if options.json:
        for note in result.notes:
            logger.info("note: %s", note)
        print(json.dumps(summary))
    else:
        _print_result(result, summary)
    return 0


def _save_clients(result: Result, folder: Path) -> None:
    """Each client's own model, as client_0.pt, ...: state dicts of tensors."""
    import torch

    for client in (score.client for score in (*result.points[-1].scores, *result.points[-1].held_out)):
        write_file(folder / f"client_{client}.pt", functools.partial(torch.save, result.client_state_dict(client)))


def _run_with_progress(config: Config, resume: bool, quiet: bool) -> Result:
    keep_freed_memory()
    with stop_on_signals() as stop:
        from persafl_lit import run
        from persafl_lit.engine.checkpoint import Checkpoint
        from persafl_lit.engine.progress import ProgressBar

        if Checkpoint(config.checkpoint_path).exists() and not resume:
            logger.warning(
                "an interrupted run of this config exists; this one starts anew (--resume would continue it)"
            )
        callbacks = [TheoryWarnings(), ProgressBar(f"{config.name} on {config.data['name']}", quiet)]
        return run(config, resume=resume, callbacks=callbacks, should_stop=stop)


class TheoryWarnings:
    """A callback that names settings outside the theory's range, where the smoothness of the clients' costs is
    known."""

    def on_run_start(self, experiment: Experiment) -> None:
        work = experiment.executor.worker.work
        if work.federation.smoothness is None:
            return
        from persafl_lit.theory.advise import warnings

        for warning in warnings(work.federation.smoothness, work.objective, work.eta, work.local_steps):
            logger.warning("warning: %s", warning)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What others print (a model of yours, Ray's daemons) must not mix with our JSON object."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(ours, 1)
        os.close(ours)


@contextmanager
def stop_on_signals(after: str = "a checkpoint is written first") -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM asks the run to write a checkpoint and stop; the second stops it at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after the terminal's ^C
        logger.warning("stopping; %s (again to stop at once)", after)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def which_models(result: Result, summary: dict[str, Any]) -> str:
    """Which model was evaluated, when, on what."""
    groups = [(f"{len(result.points[-1].scores)} clients", summary["models"])]
    if held_out := summary["holdout"]["clients"]:
        groups.append((f"{held_out} clients that never trained", summary["holdout"]["models"]))
    names = {"shared": "the shared model", "own": f"the {own_model(result)}"}
    said = []
    for clients, models in groups:
        parts = [
            f"{names[model]} "
            + " / ".join("-" if state not in states else f"{states[state]['test']:.4f}" for state in ("as_is", "tuned"))
            for model, states in models.items()
        ]
        said.append(f"{', '.join(parts)} ({clients})")
    kind = "accuracy" if summary["accuracy"]["test"] is not None else "loss"
    rule = result.config.eval.finetune["name"]
    return (
        f"Evaluated at simulated time {summary['sim_time']:.4g} on test data, {kind} as it is / after fine-tuning by "
        f"{rule}: {'; '.join(said)}."
    )


def own_model(result: Result) -> str:
    """What a method's own model is."""
    method = result.config.method
    if method["personal"] != "none":
        return f"personal model of {method['personal']}"
    if result.keeps_model:
        return f"model with private {', '.join(method['private'])}"
    return {"maml": "model after a MAML step", "moreau": "proximal point"}.get(
        method["objective"], "method's own model"
    )


def _print_result(result: Result, summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from persafl_lit.learning.scores import REST

    table = Table(title=f"{summary['method']}, seed {summary['seed']}", show_header=False, title_justify="left")
    accuracy = summary["accuracy"]
    main = "accuracy" if accuracy["test"] is not None else "loss"
    if main == "accuracy":
        table.add_row("personalised test accuracy", f"{accuracy['test']:.4f} +- {accuracy['std']:.4f} over clients")
        table.add_row("worst decile of clients", f"{accuracy['worst_decile']:.4f}")
        table.add_row("personalised validation accuracy", f"{accuracy['val']:.4f}")
    for kind, values in {"loss": summary["loss"], **summary["metrics"]}.items():
        both = f"{_number(values['test'])} / {_number(values['global'])}"
        table.add_row(f"test {kind}, personalised / shared model", both)
    for rule, values in summary["beside"].items():
        if rule not in ("own", *REST):
            found = values if main == "accuracy" else values["loss"]
            table.add_row(f"personalised test {main}, fine-tuning by {rule}", _number(found["test"], main))
    table.add_row("updates by simulated time", f"{summary['updates']} by {summary['sim_time']:.4g}")
    table.add_row(
        "versions of the model",
        f"{summary['versions']}" if result.model_changed else f"{summary['versions']}: it never changed",
    )
    table.add_row("staleness, mean / max", f"{summary['staleness']['mean']:.2f} / {summary['staleness']['max']}")
    table.add_row("share of active clients", f"{summary['concurrency']:.2f}")
    table.add_row(
        "gradient evaluations", f"{summary['grad_evals']:.0f} in {summary['wall_seconds']:.1f} s of wall time"
    )
    table.add_row("evaluation's share of the work", f"{summary['evaluation_share']:.0%}")
    if summary["holdout"]["clients"]:
        held_out = summary["holdout"]
        for kind, values in {main: held_out[main], **held_out.get("metrics", {})}.items():
            table.add_row(
                f"personalised test {kind}, {held_out['clients']} clients that never trained",
                _number(values["test"], kind),
            )
    if summary["dropped"]:
        table.add_row("dropped as too stale", f"{summary['dropped']}")
    if summary["skipped"]:
        table.add_row("skipped as not finite", f"{summary['skipped']}")
    if summary["run_id"]:
        table.add_row("MLflow run", summary["run_id"])
    console = Console(highlight=False)
    console.print(table)
    console.print(which_models(result, summary))
    for note in result.notes:
        console.print(f"note: {note}")


def _number(value: float | None, kind: str = "") -> str:
    """A score as the table shows it; an accuracy has four digits after the point."""
    return "no value" if value is None else f"{value:.4f}" if kind == "accuracy" else f"{value:.6g}"
