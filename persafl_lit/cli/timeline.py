"""`persafl timeline`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persafl_lit.cli.files import picture, picture_format, writable, write_file
from persafl_lit.errors import ConfigError

if TYPE_CHECKING:
    from persafl_lit.config.compose import Config


def timeline(options: argparse.Namespace) -> int:
    from persafl_lit.config.compose import compose

    config = compose(options.overrides)
    csv, png = writable(options.csv), picture(options.png)
    clients = _trained_clients(config)
    timeline = config.timeline(clients)
    buffer = _buffer(config, clients, timeline)
    if csv is not None:
        write_file(csv, lambda file: file.write(timeline.to_csv().encode()))
    if png is not None:
        _draw(config, clients, timeline, buffer, png)
    summary = timeline.summary(buffer)
    if options.json:
        print(json.dumps(summary))
        return 0
    staleness: Any = summary["staleness"]
    arrivals: Any = summary["arrivals_per_client"]
    print(
        f"{summary['updates']} updates of {clients} clients by simulated time {summary['sim_time']:.6g}; "
        f"{summary['dropped']} dropped"
    )
    print(f"staleness: mean {staleness['mean']:.2f}, max {staleness['max']}")
    print(f"active clients: {summary['concurrency']:.1%} on average")
    print(f"arrivals per client: {min(arrivals)} to {max(arrivals)}")
    print(f"waves of independent jobs: {summary['waves']}")
    return 0


def _trained_clients(config: Config) -> int:
    """Clients that train; needs the data set only where it brings their number."""
    clients = config.clients
    if clients is None:
        clients = int(config.data_settings().count(None))
    held_out = int(config.data.get("holdout_clients", 0))
    if not 0 <= held_out < clients:
        raise ConfigError(f"data.holdout_clients must lie between 0 and clients - 1 = {clients - 1}; got {held_out}")
    return clients - held_out


def _buffer(config: Config, clients: int, timeline: Any) -> int:
    """Arrivals per model version under the configured method, where it fits this timeline."""
    try:
        return config.rule(clients, timeline).arrivals_per_version
    except ConfigError:
        return 1


def _draw(config: Config, clients: int, timeline: Any, buffer: int, png: Path) -> None:
    """Synchronous beside asynchronous, with the same delays; a drawn or replayed timeline alone."""
    from persafl_lit.timeline.drawing import draw_timelines

    name = config.schedule["name"]
    if name == "asynchronous":
        rounds = config.beside("rounds", clients)
        panels = [
            ("synchronous rounds", rounds.timeline(clients), rounds.schedule["cohort"]),
            ("asynchronous", timeline, buffer),
        ]
    elif name == "rounds":
        beside = config.beside("asynchronous", clients).timeline(clients)
        panels = [("synchronous rounds", timeline, config.schedule["cohort"]), ("asynchronous", beside, 1)]
    else:
        panels = [(name, timeline, buffer)]
    write_file(png, lambda file: draw_timelines(panels, file, config.local_steps, picture_format(png)))
