"""The command line: thin commands around `api`, `config` and `timeline`. Heavy imports wait until they are needed."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persafl_lit import __version__
from persafl_lit.errors import ConfigError, PersaflError, closest, first_line

if TYPE_CHECKING:
    from persafl_lit.api import Result
    from persafl_lit.config import Config

OVERRIDES = "group=choice or key=value, e.g. method=persafl_me method.lam=20 (see `persafl list`)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 bad input, 3 diverged or partly failed, 130 interrupted (resumable)."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if any("=" not in text or text.startswith("-") for text in rest) or (rest and "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # overrides may also follow a flag
        options.overrides += rest
    try:
        return int(options.command(options))
    except PersaflError as error:
        print(f"persafl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("persafl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="persafl", description="Personalised asynchronous federated learning experiments.")
    parser.add_argument("--version", action="version", version=f"persafl_lit {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    run = commands.add_parser("run", help="run one experiment")
    run.add_argument("overrides", nargs="*", help=OVERRIDES)
    run.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    run.add_argument("--save-model", metavar="FILE", help="write the final model as a torch state dict")
    run.add_argument("--resume", action="store_true", help="continue the interrupted run of this config")
    run.set_defaults(command=_run)

    timeline = commands.add_parser("timeline", help="compute, save and draw a communication schedule, without training")
    timeline.add_argument("overrides", nargs="*", help=OVERRIDES)
    timeline.add_argument("--csv", metavar="FILE", help="write the jobs: client,visit,reads,read_at,arrives")
    timeline.add_argument("--png", metavar="FILE", help="draw the schedule, synchronous beside asynchronous")
    timeline.add_argument("--json", action="store_true", help="print the summary as one JSON object on stdout")
    timeline.set_defaults(command=_timeline)

    data = commands.add_parser("data", help="get and verify a data set, and draw who holds what")
    data.add_argument("name", help="mnist, fashion_mnist, cifar10 or digits")
    data.add_argument("overrides", nargs="*", help=OVERRIDES)
    data.add_argument("--png", metavar="FILE", help="where to draw samples per client and class (default: NAME.png)")
    data.set_defaults(command=_data)

    report = commands.add_parser("report", help="figures, tables and one HTML page from a sweep, an experiment or a run")
    report.add_argument("target", help="a sweep's name, an experiment's name or a run id")
    report.add_argument("--out", metavar="DIR", help="where to write (default: reports/TARGET)")
    report.add_argument("--uri", metavar="URI", help="the tracking store (default: MLFLOW_TRACKING_URI, else mlruns/mlflow.db)")
    report.set_defaults(command=_report)

    ui = commands.add_parser("ui", help="open the MLflow UI on our store, on this machine only")
    ui.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    ui.add_argument("--port", type=int, default=5000)
    ui.add_argument("--uri", metavar="URI", help="the tracking store (default: MLFLOW_TRACKING_URI, else mlruns/mlflow.db)")
    ui.set_defaults(command=_ui)

    sync = commands.add_parser("sync", help="send what a lost tracking server did not take")
    sync.set_defaults(command=_sync)

    listing = commands.add_parser("list", help="list methods, data sets, models, schedules, delays, ...")
    listing.set_defaults(command=_list)

    demo = commands.add_parser("demo", help="compare four methods on the embedded digits, in about a minute")
    demo.add_argument("overrides", nargs="*", help=OVERRIDES)
    demo.set_defaults(command=_demo)
    return parser


# -- run --------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from persafl_lit.config import compose

    config = compose(options.overrides)
    target = _writable(options.save_model)
    with _stdout_to_stderr() if options.json else nullcontext():
        result = _run_with_progress(config, options.resume)
    if target is not None:
        import torch

        _atomically(target, lambda file: torch.save(result.state_dict(), file))
    summary = result.summary()
    if options.json:
        print(json.dumps(summary))
    else:
        _print_result(result, summary)
    return 0


def _run_with_progress(config: Config, resume: bool) -> Result:
    with _stop_on_signals() as stop:
        from persafl_lit.api import checkpoint_path, run
        from persafl_lit.progress import ProgressBar

        if checkpoint_path(config).exists() and not resume:
            print("persafl: an interrupted run of this config exists; this one starts anew (--resume would continue it)", file=sys.stderr)
        with ProgressBar(f"{config.name} on {config.data['name']}") as bar:
            return run(config, resume=resume, observers=bar.watch, should_stop=stop)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
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
def _stop_on_signals() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM asks the run to write a checkpoint and stop; the second stops it at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("\npersafl: stopping after the update under way (again to stop at once)", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_result(result: Result, summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{summary['method']}, seed {summary['seed']}", show_header=False, title_justify="left")
    accuracy = summary["accuracy"]
    if accuracy["test"] is not None:
        table.add_row("personalised test accuracy", f"{accuracy['test']:.4f} +- {accuracy['std']:.4f} over clients")
        table.add_row("worst decile of clients", f"{accuracy['worst_decile']:.4f}")
        table.add_row("personalised validation accuracy", f"{accuracy['val']:.4f}")
        table.add_row("shared model, not fine-tuned", f"{accuracy['global']:.4f}")
    table.add_row("test loss, personalised / shared", f"{summary['loss']['test']:.6g} / {summary['loss']['global']:.6g}")
    table.add_row("updates by simulated time", f"{summary['updates']} by {summary['sim_time']:.4g}")
    table.add_row("staleness, mean / max", f"{summary['staleness']['mean']:.2f} / {summary['staleness']['max']}")
    table.add_row("share of active clients", f"{summary['concurrency']:.2f}")
    table.add_row("gradient evaluations", f"{summary['grad_evals']:.0f} in {summary['wall_seconds']:.1f} s of wall time")
    if summary["holdout"]["clients"] and accuracy["test"] is not None:
        held_out = summary["holdout"]
        table.add_row(f"personalised test accuracy, {held_out['clients']} clients that never trained", f"{held_out['accuracy']['test']:.4f}")
    if summary["dropped"]:
        table.add_row("dropped as too stale", f"{summary['dropped']}")
    if summary["run_id"]:
        table.add_row("MLflow run", summary["run_id"])
    console = Console(highlight=False)
    console.print(table)
    for note in result.notes:
        console.print(f"note: {note}")


# -- timeline ---------------------------------------------------------------------------------------------------------


def _timeline(options: argparse.Namespace) -> int:
    from persafl_lit.config import compose

    config = compose(options.overrides)
    csv, png = _writable(options.csv), _writable(options.png)
    clients = _trained_clients(config)
    timeline = config.timeline(clients)
    buffer = _buffer(config, clients, timeline)
    if csv is not None:
        _atomically(csv, lambda file: file.write(timeline.to_csv().encode()))
    if png is not None:
        _draw(config, clients, timeline, buffer, png)
    summary = timeline.summary(buffer)
    if options.json:
        print(json.dumps(summary))
        return 0
    staleness: Any = summary["staleness"]
    arrivals: Any = summary["arrivals_per_client"]
    print(f"{summary['updates']} updates of {clients} clients by simulated time {summary['sim_time']:.6g}; {summary['dropped']} dropped")
    print(f"staleness: mean {staleness['mean']:.2f}, max {staleness['max']}")
    print(f"active clients: {summary['concurrency']:.1%} on average")
    print(f"arrivals per client: {min(arrivals)} to {max(arrivals)}")
    print(f"waves of independent jobs: {summary['waves']}")
    return 0


def _trained_clients(config: Config) -> int:
    """Clients that train; needs the data set only where it brings their number."""
    clients = config.clients
    if clients is None:
        from persafl_lit.data import DATASETS

        clients = int(config.build("data", DATASETS).count(None))
    held_out = config.data["holdout_clients"]
    if not (isinstance(held_out, int) and 0 <= held_out < clients):
        raise ConfigError(f"data.holdout_clients must lie between 0 and clients - 1 = {clients - 1}; got {held_out!r}")
    return clients - held_out


def _buffer(config: Config, clients: int, timeline: Any) -> int:
    """Arrivals per model version under the configured method, where it fits this timeline."""
    try:
        return config.rule(clients, timeline).arrivals_per_version
    except ConfigError:
        return 1


def _draw(config: Config, clients: int, timeline: Any, buffer: int, png: Path) -> None:
    """Synchronous beside asynchronous, with the same delays; a drawn or replayed timeline stands alone."""
    from persafl_lit.timeline.drawing import draw

    name = config.schedule["name"]
    if name == "asynchronous":
        rounds = config.beside("rounds", clients)
        panels = [("synchronous rounds", rounds.timeline(clients), rounds.schedule["cohort"]), ("asynchronous", timeline, buffer)]
    elif name == "rounds":
        beside = config.beside("asynchronous", clients).timeline(clients)
        panels = [("synchronous rounds", timeline, config.schedule["cohort"]), ("asynchronous", beside, 1)]
    else:
        panels = [(name, timeline, buffer)]
    _atomically(png, lambda file: draw(panels, file, config.local_steps))


# -- data -------------------------------------------------------------------------------------------------------------


def _data(options: argparse.Namespace) -> int:
    from persafl_lit.config import choices, compose

    if options.name not in choices("data") or options.name == "quadratic":
        known = [name for name in choices("data") if name != "quadratic"]
        raise ConfigError(f"unknown data set {options.name!r}; there are {', '.join(known)}.{closest(options.name, known)}")
    config = compose([*options.overrides, f"data={options.name}"])
    png = _writable(options.png or f"{options.name}.png")
    assert png is not None
    from persafl_lit.data import DATASETS
    from persafl_lit.report.labels import draw_labels

    settings = config.build("data", DATASETS)
    origin = _prepare(options.name, settings.root) if "root" in config.data else "embedded in scikit-learn"
    federation = settings.federation(config.clients, config.seed)
    federation.trained()
    counts, sizes = federation.label_counts(), federation.sizes()
    print(f"{options.name}: {origin}; {len(federation.labels)} images of {'x'.join(map(str, federation.shape))}, checked")
    print("samples per class: " + ", ".join(f"{kind}: {count}" for kind, count in enumerate(federation.labels.bincount().tolist())))
    print(f"{federation.clients} clients hold {sizes.sum(axis=1).min()} to {sizes.sum(axis=1).max()} samples each", end="")
    print(f" ({', '.join(f'{name} {total}' for name, total in zip(('train', 'val', 'test'), sizes.sum(axis=0), strict=True))})")
    for note in federation.notes:
        print(f"note: {note}")
    title = f"{options.name}: {config.data['partition']}, seed {config.seed}"
    _atomically(png, lambda file: draw_labels(counts, title, file, federation.holdout))
    print(f"who holds what: {png}")
    return 0


def _prepare(name: str, root: str) -> str:
    """Get the files, with a word on what is tried and how much has come."""
    from rich.console import Console

    from persafl_lit.data.sources import prepare

    console = Console(stderr=True, highlight=False)
    with console.status(f"{name}: looking in {root}") as status:
        return prepare(name, root, say=console.print, tick=lambda size: status.update(f"{name}: {size / 1e6:.0f} MB"))


# -- list -------------------------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> int:
    from persafl_lit.config import choices

    titles = {
        "method": "method=",
        "data": "data=",
        "model": "model=",
        "schedule": "schedule=",
        "delays": "delays=",
        "finetune": "eval.finetune=",
        "experiment": "experiment=  (several settings at once)",
    }
    for group, title in titles.items():
        print(title)
        for name, line in choices(group).items():
            print(f"  {name:<16} {line}")
        print()
    return 0


# -- tracking ---------------------------------------------------------------------------------------------------------


def _report(options: argparse.Namespace) -> int:
    from persafl_lit.report import write_report
    from persafl_lit.tracking import store_uri
    from persafl_lit.tracking.store import Store, open_store

    store: Store = open_store(store_uri(options.uri))
    records = store.records(options.target)
    folder = Path(options.out or Path("reports") / re.sub(r"[^\w.-]+", "_", options.target))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = write_report(records, options.target, folder)
    except OSError as error:
        raise ConfigError(f"cannot write the report to {folder}: {error.strerror}; choose another --out") from None
    store.keep_report(options.target, folder)
    print(f"{len(records)} runs of {options.target}: {folder / 'report.html'} and {len(files) - 1} more files")
    return 0


def _ui(options: argparse.Namespace) -> int:
    from persafl_lit.tracking.ui import serve

    return serve(options.uri, options.host, options.port)


def _sync(options: argparse.Namespace) -> int:
    from persafl_lit.tracking import sync

    try:
        count = sync()
    except Exception as error:  # MLflow, its drivers and its servers raise their own types
        raise ConfigError(f"cannot send yet: {first_line(error)}; nothing is lost") from None
    print(f"{count} runs are complete now" if count else "nothing is waiting to be sent")
    return 0


# -- demo -------------------------------------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> int:
    from persafl_lit.demo import demo

    return demo(options.overrides)


# -- files ------------------------------------------------------------------------------------------------------------


def _writable(name: str | None) -> Path | None:
    """The path, refused now rather than after the work if it could not be written."""
    if name is None:
        return None
    path = Path(name)
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write {name!r}: {'it is a folder' if path.is_dir() else f'{str(folder)!r} is not a writable folder'}")
    return path


def _atomically(path: Path, write: Callable[[Any], Any]) -> None:
    """The whole file or none of it."""
    if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
        with open(path, "wb") as file:
            write(file)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
