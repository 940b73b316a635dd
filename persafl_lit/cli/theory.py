"""`persafl theory`: the paper's theorems against what happens, and advice for a run."""

from __future__ import annotations

import argparse
import io
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from persafl_lit.cli.files import picture, picture_format, write_file
from persafl_lit.errors import ConfigError, shown

if TYPE_CHECKING:
    from rich.console import Console

    from persafl_lit.theory.advise import Advice
    from persafl_lit.theory.study import Study, Tick

FAILED = 3
WHATS = ("a", "b", "c", "advise")


def add_command(commands: Any) -> None:
    """The command's arguments."""
    command = commands.add_parser(
        "theory", help="check the paper's theorems on problems with known constants; advise on step sizes"
    )
    command.add_argument(
        "what",
        nargs="?",
        help="a (FedAsync), b (PersA-FL-MAML), c (PersA-FL-ME) or advise; all three theorems if left out",
    )
    command.add_argument(
        "overrides",
        nargs="*",
        help=(
            "advise: constants (L, sigma_g, gamma_g, rho, sigma_h, gamma_h, G, gap, tau, T, epsilon) and the "
            "keys of a run, as key=value"
        ),
    )
    command.add_argument("--tau", type=int, default=10, metavar="N", help="largest staleness (default: 10)")
    command.add_argument("--clients", type=int, default=10, metavar="N", help="number of clients (default: 10)")
    command.add_argument("--seeds", type=int, default=20, metavar="N", help="repetitions (default: 20)")
    command.add_argument("--local-steps", type=int, default=2, metavar="Q", help="local steps per update (default: 2)")
    command.add_argument("--problem", default="quadratic", help="quadratic (default) or logistic")
    command.add_argument("--png", metavar="FILE", help="draw measured against bound, the effect of tau and the floors")
    command.add_argument("--json", action="store_true", help="print everything as one JSON object on stdout")
    command.set_defaults(command=theory)


def theory(options: argparse.Namespace) -> int:
    if options.what is not None and "=" in options.what:
        options.overrides, options.what = [options.what, *options.overrides], None
    if options.what not in (None, *WHATS):
        raise ConfigError(f"there are the options a, b and c, and advise; got {shown(options.what)}")
    if options.what == "advise":
        return _advise(options)
    if options.overrides:
        raise ConfigError(
            f"{shown(options.overrides[0])} goes with `persafl theory advise`; studies take --tau, --clients, "
            "--seeds and --local-steps"
        )
    return _studies(options)


# -- studies ----------------------------------------------------------------------------------------------------------


def _studies(options: argparse.Namespace) -> int:
    from rich.console import Console

    from persafl_lit.theory.bounds import OPTIONS
    from persafl_lit.theory.studies import studies, study_report, updates_of
    from persafl_lit.theory.study import Settings

    png = picture(options.png)
    settings = Settings(options.tau, options.clients, options.seeds, options.local_steps, problem=options.problem)
    chosen = [option for option in OPTIONS if options.what in (None, option)]
    wall_start = time.monotonic()
    with _progress(sum(updates_of(option, settings) for option in chosen), options.quiet) as tick:
        found = studies(chosen, settings, tick)
    if png is not None:
        from persafl_lit.theory.drawing import draw_studies

        drawn = io.BytesIO()
        draw_studies(found, drawn, picture_format(png))
        write_file(png, lambda file: file.write(drawn.getvalue()))
    summary = study_report(found, settings) | {"wall_seconds": time.monotonic() - wall_start}
    if options.json:
        print(json.dumps(_finite(summary), allow_nan=False))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for one in found:
            _print_study(console, one)
    return 0 if summary["passed"] else FAILED


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Tick]:
    """A bar on stderr, in server updates."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("theory", total=total)
        yield lambda what, updates: bar.update(task, advance=updates, description=what)


def _print_study(console: Console, found: Study) -> None:
    from rich.table import Table

    from persafl_lit.theory.bounds import THEOREMS

    table = Table(title=f"Option {found.option.upper()}: Theorem {THEOREMS[found.option]}", title_justify="left")
    for name in ("T", "tau", "measured", "95 %", "bound", "bound/measured", "conditions"):
        table.add_column(name, justify="right")
    for row in found.rows:
        interval = f"+-{(row['high'] - row['low']) / 2 / row['measured']:.1%}"
        holds = "hold" if row["conditions_hold"] else "fail"
        table.add_row(
            f"{row['T']:,}",
            str(row["tau"]),
            f"{row['measured']:.3e}",
            interval,
            f"{row['bound']:.3e}",
            f"{row['ratio']:.2f}",
            holds,
        )
    console.print(table)
    console.print("constants: " + ", ".join(f"{name} = {value:.3g}" for name, value in found.constants.items()))
    for check in found.checks:
        console.print(f"{'[green]pass[/green]' if check.passed else '[red]FAIL[/red]'}  {check.name}: ", end="")
        console.print(check.detail, markup=False)
    if found.uneven:
        about, last = found.uneven, -1
        shares = f"{min(about['shares']):.1%} to {max(about['shares']):.1%}"
        times = f"{about['asynchronous'][last] / about['drawn'][last]:.3g} times that of the drawn schedule"
        console.print(
            (
                f"      on schedule=asynchronous (tau = {about['tau']}) clients send {shares} of the updates "
                f"each: at T = {about['T'][last]:,} "
            ),
            end="",
        )
        console.print(f"the average is {times} and {about['times_the_bound'][last]:.3g} times the bound")
    console.print()


# -- advice -----------------------------------------------------------------------------------------------------------


def _advise(options: argparse.Namespace) -> int:
    from persafl_lit.config.compose import compose
    from persafl_lit.theory.advise import advise, split_overrides

    given, overrides = split_overrides(options.overrides)
    config = compose(overrides)
    if "L" in given:
        advice = advise(given, config)
    else:
        from persafl_lit.theory.estimate import estimate

        advice = advise(given, config, *estimate(config))
    if options.json:
        content = asdict(advice)
        content |= {"smallest_T": content.pop("least_updates"), "T_for_epsilon": content.pop("updates_for_epsilon")}
        print(json.dumps(_finite(content), allow_nan=False))
    else:
        _print_advice(advice, config.name)
    return 0


def _print_advice(advice: Advice, method: str) -> None:
    from persafl_lit.theory.bounds import THEOREMS

    print(f"{method}: Theorem {THEOREMS[advice.option]}")
    for name, value in advice.constants.items():
        print(f"  {name} = {value:.6g}" + (f" ({advice.origin})" if name == "L" else ""))
    if advice.eta is not None:
        print(f"eta of the theory: {advice.eta:.6g} for T = {advice.T:,} updates")
        print(f"smallest T that the theorem admits: {advice.least_updates:,.6g}")
    if advice.updates_for_epsilon is not None:
        print(
            "smallest T for epsilon: "
            f"{'none' if math.isinf(advice.updates_for_epsilon) else f'{advice.updates_for_epsilon:,.0f}'}"
        )
    for warning in advice.warnings:
        print(f"warning: {warning}")
    for note in advice.notes:
        print(f"note: {note}")


def _finite(value: Any) -> Any:
    """The same for JSON: numbers that are not finite are null, numpy's are plain."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
