"""The command line: thin commands, each in its file. Heavy imports wait until they are needed."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from persafl_lit import __version__
from persafl_lit.cli import data, demo, run, sweep, theory, timeline, tracking
from persafl_lit.common.logs import shown_on_stderr
from persafl_lit.errors import PersaflError, first_line, located, shown

logger = logging.getLogger(__name__)

OVERRIDES = "group=choice or key=value, e.g. method=persafl_me method.lam=20 (see `persafl list`)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 bad input, 3 diverged or partly failed, 130 interrupted (resumable)."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if any("=" not in text or text.startswith("-") for text in rest) or (rest and "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # overrides may also follow a flag
        options.overrides += rest
    with shown_on_stderr(logging.WARNING if options.quiet else logging.DEBUG if options.verbose else logging.INFO):
        return _exit_code(options)


def _exit_code(options: argparse.Namespace) -> int:
    """What the command returns, or what its error means; an error is one sentence."""
    try:
        return _command(options)
    except SystemExit as error:
        logger.error("%s", PersaflError(f"code from outside has tried to end the program: {located(error)}"))
        return 2
    except PersaflError as error:
        logger.error("%s", error)
        return error.exit_code
    except KeyboardInterrupt:
        logger.error("interrupted")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, MemoryError) as error:  # of the machine, not of the program: a name too long, a disk that is full
        if os.environ.get("PERSAFL_TRACEBACK"):
            raise
        logger.error("%s", PersaflError(_of_the_machine(error)))
        return 2


def _command(options: argparse.Namespace) -> int:
    if not options.conf:
        return int(options.command(options))
    from persafl_lit.config.parse import conf_first

    with conf_first(options.conf):
        return int(options.command(options))


def _of_the_machine(error: OSError | MemoryError) -> str:
    if isinstance(error, MemoryError):
        return f"there is not enough memory for this: {first_line(error)}"
    where = f" {shown(str(error.filename))}" if error.filename is not None else ""
    return f"cannot read or write{where}: {error.strerror or first_line(error)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="persafl", description="Personalised asynchronous federated learning experiments."
    )
    parser.add_argument("--version", action="version", version=f"persafl_lit {__version__}")
    parser.set_defaults(conf=None, quiet=False, verbose=False)
    commands = parser.add_subparsers(required=True, metavar="command")

    run_command = commands.add_parser("run", help="run one experiment")
    run_command.add_argument("overrides", nargs="*", help=OVERRIDES)
    run_command.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    run_command.add_argument("--save-model", metavar="FILE", help="write the final model as a torch state dict")
    run_command.add_argument(
        "--save-clients",
        metavar="DIR",
        help="write each client's own model, DIR/client_0.pt, ...",
    )
    run_command.add_argument("--resume", action="store_true", help="continue the interrupted run of this config")
    run_command.set_defaults(command=run.run)

    sweep_command = commands.add_parser(
        "sweep", help="run many experiments from one file, go on where it was interrupted"
    )
    sweep_command.add_argument("file", help="a sweep file, or the name of a shipped one (see `persafl list`)")
    sweep_command.add_argument(
        "overrides", nargs="*", help=f"for all trials: {OVERRIDES}; also name=... and seeds=[0,1]"
    )
    sweep_command.add_argument(
        "--dry-run", action="store_true", help="list the trials and estimate the time, start nothing"
    )
    sweep_command.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="trials at a time (default: one per core, or what the cluster has room for)",
    )
    sweep_command.add_argument(
        "--retry-failed", action="store_true", help="also try again trials that would fail again, such as diverged ones"
    )
    sweep_command.add_argument(
        "--finished",
        action="append",
        default=[],
        metavar="FILE",
        help="a runs.csv that `persafl report` wrote elsewhere: its finished trials count as done (may be given again)",
    )
    sweep_command.add_argument(
        "--any-version",
        action="store_true",
        help="with --finished: also trials that another version of persafl_lit ran",
    )
    sweep_command.add_argument("--json", action="store_true", help="print every trial as one JSON object on stdout")
    sweep_command.add_argument(
        "--launcher", choices=("local", "ray"), default="local", help="processes of this machine, or Ray tasks"
    )
    sweep_command.add_argument(
        "--address", metavar="HOST:PORT", help="ray: the cluster (default: RAY_ADDRESS, else a local one)"
    )
    sweep_command.add_argument("--cpus", type=float, default=1.0, help="ray: CPUs per trial (default: 1)")
    sweep_command.add_argument("--gpus", type=float, default=0.0, help="ray: GPUs per trial (default: 0)")
    sweep_command.set_defaults(command=sweep.sweep)

    timeline_command = commands.add_parser(
        "timeline", help="compute, save and draw a communication schedule, without training"
    )
    timeline_command.add_argument("overrides", nargs="*", help=OVERRIDES)
    timeline_command.add_argument("--csv", metavar="FILE", help="write the jobs: client,visit,reads,read_at,arrives")
    timeline_command.add_argument("--png", metavar="FILE", help="draw the schedule, synchronous beside asynchronous")
    timeline_command.add_argument("--json", action="store_true", help="print the summary as one JSON object on stdout")
    timeline_command.set_defaults(command=timeline.timeline)

    theory.add_command(commands)

    data_command = commands.add_parser("data", help="get and verify a data set, and draw who holds what")
    data_command.add_argument(
        "name", help="mnist, fashion_mnist, cifar10, digits, or data of yours: arrays, folder, leaf, custom"
    )
    data_command.add_argument("overrides", nargs="*", help=OVERRIDES)
    data_command.add_argument(
        "--png", metavar="FILE", help="where to draw samples per client and class (default: NAME.png)"
    )
    data_command.set_defaults(command=data.data)

    report_command = commands.add_parser(
        "report", help="figures, tables and one HTML page from a sweep, an experiment or a run"
    )
    report_command.add_argument(
        "targets",
        nargs="+",
        metavar="target",
        help="a sweep's name, an experiment's name or a run id; or several, compared",
    )
    report_command.add_argument("--out", metavar="DIR", help="where to write (default: reports/TARGET)")
    report_command.add_argument(
        "--against",
        metavar="METHOD",
        help="compare with this method (default: differences with the best on validation data, times with fedavg)",
    )
    report_command.add_argument(
        "--levels",
        nargs="+",
        metavar="LEVEL",
        help="compare the times at which these scores are reached, e.g. 0.5 0.7 (default: some that suit the runs)",
    )
    report_command.add_argument(
        "--uri",
        metavar="URI",
        help="the tracking store, also as tracking.uri=URI (default: MLFLOW_TRACKING_URI, else mlruns/mlflow.db)",
    )
    report_command.set_defaults(command=tracking.report, overrides=[])

    ui_command = commands.add_parser("ui", help="open the MLflow UI on our store, on this machine only")
    ui_command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    ui_command.add_argument("--port", type=int, default=5000)
    ui_command.add_argument(
        "--uri", metavar="URI", help="the tracking store (default: MLFLOW_TRACKING_URI, else mlruns/mlflow.db)"
    )
    ui_command.set_defaults(command=tracking.ui)

    sync_command = commands.add_parser("sync", help="send what a lost tracking server did not take")
    sync_command.set_defaults(command=tracking.sync)

    listing = commands.add_parser("list", help="list methods, data sets, models, schedules, delays, ...")
    listing.set_defaults(command=data.listing)

    for command in (run_command, sweep_command, timeline_command, listing):
        command.add_argument(
            "--conf", action="append", metavar="DIR", help="a conf folder of yours, searched before ./conf and ours"
        )

    demo_command = commands.add_parser(
        "demo", help="the sweep `demo` as a table: four methods on the embedded digits, in about a minute"
    )
    demo_command.add_argument("overrides", nargs="*", help=OVERRIDES)
    demo_command.set_defaults(command=demo.demo)

    for command in (parser, *commands.choices.values()):
        loudness = command.add_mutually_exclusive_group()
        loudness.add_argument(
            "-q", "--quiet", action="store_true", default=argparse.SUPPRESS, help="on stderr, warnings and errors only"
        )
        loudness.add_argument(
            "-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="on stderr, details as well"
        )
    return parser
