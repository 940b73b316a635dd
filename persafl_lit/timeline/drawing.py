"""The schedule chart: who downloads, computes, uploads and rests when, and when the server updates its model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from persafl_lit.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Teal and brown: distinct for every kind of colour vision, and none of them the colour of a method in a report.
PHASE_COLOURS = {
    "download": "#80CDC1",
    "compute": "#01665E",
    "upload": "#BF812D",
    "idle": "#F0F0F0",
    "server update": "#222222",
}
MOST_ROWS = 60


def draw_timelines(
    panels: Sequence[tuple[str, Timeline, int]],
    path: str | os.PathLike[str] | BinaryIO,
    local_steps: int,
    format: str | None = None,
) -> None:
    """One column per (title, timeline, buffer): the chart above, the share of active clients below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    rows = min(max(timeline.clients for _, timeline, _ in panels), MOST_ROWS)
    size = (6.4 * len(panels), 3.0 + 0.28 * max(rows, 6))
    figure, axes = plt.subplots(
        2, len(panels), figsize=size, squeeze=False, sharex="col", height_ratios=(max(rows, 6), 4), layout="constrained"
    )
    end = max(timeline.horizon for _, timeline, _ in panels)
    for column, (title, timeline, buffer) in enumerate(panels):
        chart, share = axes[0, column], axes[1, column]
        _chart(chart, timeline, buffer, local_steps)
        chart.set_title(title)
        times, active = timeline.concurrency()
        share.step(
            np.append(times, timeline.horizon),
            np.append(active, active[-1]),
            where="post",
            color="#222222",
            linewidth=1.2,
        )
        mean = timeline.mean_concurrency()
        share.axhline(mean, color="#777777", linestyle="--", linewidth=1)
        share.annotate(
            f"mean {mean:.2f}",
            (0.99, 0.08 if mean > 0.5 else 0.8),
            xycoords="axes fraction",
            ha="right",
            color="#777777",
        )
        share.set(xlabel="simulated time", ylim=(0, 1.05), xlim=(0, end))
    axes[0, 0].set_ylabel("client")
    axes[1, 0].set_ylabel("active share")
    handles = [
        Patch(facecolor=colour, edgecolor="#999999" if name == "idle" else colour, label=name)
        for name, colour in PHASE_COLOURS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150, format=format)
    plt.close(figure)


def _chart(axes: Axes, timeline: Timeline, buffer: int, local_steps: int) -> None:
    shown = min(timeline.clients, MOST_ROWS)
    axes.barh(
        range(shown), timeline.horizon, height=0.7, color=PHASE_COLOURS["idle"], edgecolor="#CCCCCC", linewidth=0.4
    )
    if timeline.activity is None:
        _bars(
            axes, timeline.client, timeline.read_at, timeline.arrives, PHASE_COLOURS["upload"], timeline.horizon, shown
        )
    else:
        client, read_at, downloaded, computed, received = timeline.activity
        _bars(axes, client, read_at, downloaded, PHASE_COLOURS["download"], timeline.horizon, shown)
        _bars(axes, client, downloaded, computed, PHASE_COLOURS["compute"], timeline.horizon, shown)
        _bars(axes, client, computed, received, PHASE_COLOURS["upload"], timeline.horizon, shown)
        if shown * local_steps <= 200:  # the Q local steps, where they can be told apart
            for q in range(1, local_steps):
                marks = downloaded + (computed - downloaded) * q / local_steps
                seen = (marks < timeline.horizon) & (client < shown)
                axes.vlines(marks[seen], client[seen] - 0.35, client[seen] + 0.35, colors="white", linewidth=0.8)
    updates = timeline.arrives[buffer - 1 :: buffer]
    if 0 < len(updates) <= 150:
        axes.vlines(updates, -0.5, shown - 0.5, colors=PHASE_COLOURS["server update"], linewidth=0.6, linestyles=":")
    if len(updates):
        tops = np.full(len(updates), shown - 0.4)
        axes.plot(
            updates,
            tops,
            linestyle="none",
            marker="v",
            markersize=4,
            color=PHASE_COLOURS["server update"],
            clip_on=False,
        )
    axes.set(ylim=(-0.6, shown - 0.4), yticks=range(0, shown, max(1, shown // 15)))
    if shown < timeline.clients:
        axes.set_ylabel(f"client (first {shown} of {timeline.clients})")


def _bars(
    axes: Axes, client: np.ndarray, start: np.ndarray, end: np.ndarray, colour: str, horizon: float, shown: int
) -> None:
    seen = (client < shown) & (start < horizon)
    start, end = start[seen], np.minimum(end[seen], horizon)
    axes.barh(client[seen], end - start, left=start, height=0.7, color=colour)
