"""One picture per run, kept with it: the curve, the staleness, who arrived how often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from persafl_lit.timeline import Timeline


def draw_run(curves: Mapping[str, Sequence[float]], timeline: Timeline, buffer: int, clients: Sequence[Mapping[str, float]], path: Path) -> None:
    """Accuracy (or loss, where the task has no classes) over simulated time, a staleness histogram, accuracy against arrivals."""
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    kind = "accuracy" if np.isfinite(curves["accuracy.test"]).all() else "loss"
    left.plot(curves["sim_time"], curves[f"{kind}.test"], marker="o", color="#0072B2", label="after fine-tuning")
    left.plot(curves["sim_time"], curves[f"{kind}.global"], marker="s", color="#999999", label="shared model")
    left.set(xlabel="simulated time", ylabel=f"test {kind}")
    left.legend(frameon=False)
    staleness = timeline.staleness(buffer)
    middle.bar(*np.unique(staleness, return_counts=True), color="#56B4E9")
    middle.set(xlabel="staleness (versions)", ylabel="updates")
    right.scatter([row["arrivals"] for row in clients], [row[f"test_{kind}"] for row in clients], color="#D55E00", s=18)
    right.set(xlabel="arrivals of a client", ylabel=f"its test {kind}")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
