"""Delays from a CSV of measured times, in a format of your own; every visit of a client draws one of its device's rows.

    python examples/measured_delays.py
    cd examples && persafl timeline delays=measured_delays.Measured delays.path=phones.csv allow_code=true

(`delays=trace` replays a CSV with the columns client,download,compute,upload,idle without any code.)
"""

import csv
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import persafl_lit

PHONES = """device,down_ms,train_ms,up_ms
pixel,210,1900,890
pixel,190,2100,1400
iphone,90,700,450
iphone,110,650,500
tablet,400,5200,2600
"""


@functools.cache
def measured(path: str) -> list[list[tuple[float, float, float]]]:
    """Seconds of each device's visits."""
    devices: dict[str, list[tuple[float, float, float]]] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            devices.setdefault(row["device"], []).append(
                (int(row["down_ms"]) / 1e3, int(row["train_ms"]) / 1e3, int(row["up_ms"]) / 1e3)
            )
    return list(devices.values())


@dataclass(frozen=True)
class Measured(persafl_lit.Delays):
    """Client i is a phone of kind i modulo their number."""

    path: str
    """The CSV file."""
    rest: float = 0.5
    """Simulated seconds between two visits."""

    def visit(self, seed, client, visit, local_steps, gradients):
        devices = measured(self.path)
        rows = devices[client % len(devices)]
        row = rows[persafl_lit.rng(seed, "measured", client, visit).integers(len(rows))]
        return *row, self.rest


if __name__ == "__main__":
    Path("phones.csv").write_text(PHONES)
    settings = ["method=persafl_me", "clients=9", "horizon=30", "tracking.experiment=phones", *sys.argv[1:]]
    result = persafl_lit.run(settings, delays=Measured("phones.csv"))
    print(result.config.label(), "arrivals per client:", result.timeline.arrivals_per_client().tolist())
