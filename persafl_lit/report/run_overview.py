"""One picture per run, kept with it: the curve, the staleness, who arrived how often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from persafl_lit.report.chart import short
from persafl_lit.report.palette import style_of
from persafl_lit.timeline import Timeline


def draw_run(
    method: str,
    curves: Mapping[str, Sequence[float]],
    timeline: Timeline,
    buffer: int,
    clients: Sequence[Mapping[str, float]],
    path: Path,
) -> None:
    """Accuracy (or loss, where the task has no classes) over simulated time, a staleness histogram, accuracy against
    arrivals.

    In the method's own colour, as in reports; what is not personalised is hollow.
    """
    figure, style = Figure(figsize=(13, 3.6), layout="constrained"), style_of(method)
    left, middle, right = figure.subplots(1, 3)
    kind = "accuracy" if np.isfinite(curves["accuracy.test"]).all() else "loss"
    look: dict[str, Any] = {"color": style.colour, "marker": style.marker}
    left.plot(curves["sim_time"], curves[f"{kind}.test"], linestyle=style.dash, label="after fine-tuning", **look)
    left.plot(
        curves["sim_time"],
        curves[f"{kind}.global"],
        linestyle=":",
        markerfacecolor="white",
        label="shared model",
        **look,
    )
    left.set(xlabel="simulated time", ylabel=f"test {kind}", title=short(method).replace("$", r"\$"))
    left.legend(frameon=False)
    staleness = timeline.staleness(buffer)
    middle.bar(*np.unique(staleness, return_counts=True), color=style.colour)
    middle.set(xlabel="staleness (versions)", ylabel="updates")
    middle.locator_params(axis="x", integer=True)
    right.scatter(
        [row["arrivals"] for row in clients], [row[f"test_{kind}"] for row in clients], s=18, alpha=0.7, **look
    )
    right.set(xlabel="arrivals of a client", ylabel=f"its test {kind}")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
