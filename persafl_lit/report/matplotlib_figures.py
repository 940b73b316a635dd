"""Charts as PNG and SVG, for papers. The only file here that draws with matplotlib, beside labels.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from persafl_lit.report.aggregate import TaskRuns
from persafl_lit.report.chart import Chart, Heat, Series, short
from persafl_lit.report.palette import Style
from persafl_lit.report.schedules import (
    SHOWN_CLIENTS,
    beginning,
    buffer_of,
    early_window,
    schedules_of,
    usable_timeline,
)
from persafl_lit.timeline import Timeline
from persafl_lit.timeline.drawing import draw_timelines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_FORMATS = ("png", "svg")
MOST_PANELS = 3
# Fixed ids and no date: the same runs give the same files.
SAME = {"svg.hashsalt": "persafl"}
LOOK = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
}
LOOK |= {"font.size": 9, "axes.titlesize": 10}


def draw_chart(chart: Chart | Heat, folder: Path, stem: str) -> list[Path]:
    """The chart in every format."""
    with _figures(SAME | LOOK) as plt:
        if isinstance(chart, Heat):
            figure = _heat(plt, chart)
        elif chart.kind == "points":
            figure = _panels(plt, chart)
        else:
            figure = _axes(plt, chart)
        return _save(figure, folder, stem)


def draw_schedules(task: TaskRuns, folder: Path, stem: str) -> tuple[list[Path], str]:
    """The beginning of each schedule, side by side, and a caption; no files if there is no timeline."""
    drawn = [(text, records[0]) for text, records in schedules_of(task).items()][:MOST_PANELS]
    timelines = [timeline for _, record in drawn if (timeline := usable_timeline(record)) is not None]
    if not timelines:
        return [], ""
    window = early_window(timelines)
    panels: list[tuple[str, Timeline, int]] = []
    for (text, record), timeline in zip(drawn, timelines, strict=True):
        panels.append((_plain(text), beginning(timeline, window), buffer_of(record)))
    phases = all(timeline.activity is not None for timeline in timelines)
    steps = drawn[0][1].config.get("local_steps", 1)
    files = [folder / f"{stem}.{suffix}" for suffix in FIGURE_FORMATS]
    with _figures(SAME):
        for file in files:
            draw_timelines(panels, file, int(steps) if phases and isinstance(steps, int) else 1)
    shown = min(SHOWN_CLIENTS, max(timeline.clients for timeline in timelines))
    caption = (
        f"The first {shown} clients until time {window:.3g}, one seed; the active share below is of these clients."
    )
    if not phases:
        caption += (
            " Recorded timelines know only when a model was read and its update applied: a visit is drawn as one bar."
        )
    return files, caption


@contextmanager
def _figures(look: dict[str, Any]) -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with matplotlib.rc_context(look):  # type: ignore[arg-type]
        yield plt
        plt.close("all")


def _save(figure: Figure, folder: Path, stem: str) -> list[Path]:
    files = [folder / f"{stem}.{suffix}" for suffix in FIGURE_FORMATS]
    for file in files:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


CROWDED = 60
"""Characters of the labels below an axis, from which on they are written aslant."""


def _axes(plt: Any, chart: Chart) -> Figure:
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    bars = chart.kind == "bars"
    for index, series in enumerate(chart.series):
        if bars:
            axes.bar(
                np.array(series.x) + chart.bar_offset(index),
                series.y,
                width=chart.bar_size,
                color=series.style.colour,
                label=_label(series),
            )
        else:
            _line(axes, chart, series)
    axes.set(xlabel=_plain(chart.x_label), ylabel=_plain(chart.y_label), title=_plain(chart.title))
    if bars:
        axes.locator_params(axis="x", integer=True)
    if chart.y_range:
        axes.set_ylim(*chart.y_range)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.unit:
        from matplotlib.ticker import EngFormatter

        axes.xaxis.set_major_formatter(EngFormatter(unit=chart.unit))
    if chart.ticks:
        crowded = {"rotation": 30, "ha": "right"} if sum(len(text) for _, text in chart.ticks) > CROWDED else {}
        axes.set_xticks([place for place, _ in chart.ticks], [_plain(text) for _, text in chart.ticks], **crowded)
        axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=2 if _long(chart.series) else 4, frameon=False)
    return figure  # type: ignore[no-any-return]


def _line(axes: Axes, chart: Chart, series: Series) -> None:
    x, y, style = np.array(series.x), np.array(series.y), series.style
    look: dict[str, Any] = {"color": style.colour, "linestyle": style.dash, "linewidth": 1.6, "label": _label(series)}
    look |= {
        "marker": _marker(style, len(x)),
        "markersize": 5,
        "markerfacecolor": "white" if series.hollow else style.colour,
    }
    spread = None if series.spread is None else np.nan_to_num(np.array(series.spread))
    if spread is not None and chart.spread_as == "bars" and spread.any():
        axes.errorbar(x, y, yerr=spread, capsize=3, elinewidth=1, **look)
        return
    axes.plot(x, y, **look)
    if spread is not None and spread.any():
        axes.fill_between(x, y - spread, y + spread, color=style.colour, alpha=0.15, linewidth=0)


def _panels(plt: Any, chart: Chart) -> Figure:
    """A cloud per panel: clouds on top of each other cannot be told apart on paper."""
    columns = min(4, len(chart.series))
    rows = math.ceil(len(chart.series) / columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(max(4.8, 2.4 * columns), 0.6 + 2.3 * rows),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for axes, series in zip(grid.flat, chart.series, strict=False):
        look: dict[str, Any] = {
            "facecolors": "none",
            "edgecolors": series.style.colour,
            "marker": series.style.marker,
            "linewidths": 0.9,
        }
        axes.scatter(series.x, series.y, s=16, alpha=0.7, **look)
        axes.set_title(_plain(series.label), fontsize=9)
        axes.tick_params(labelbottom=True)
    for axes in list(grid.flat)[len(chart.series) :]:
        axes.set_visible(False)
    figure.supxlabel(_plain(chart.x_label), fontsize=9)
    figure.supylabel(_plain(chart.y_label), fontsize=9)
    return figure  # type: ignore[no-any-return]


def _heat(plt: Any, heat: Heat) -> Figure:
    size = (2.6 + 0.8 * len(heat.columns), 1.6 + 0.5 * len(heat.rows))
    figure, axes = plt.subplots(figsize=(max(4.4, size[0]), size[1]), layout="constrained")
    values = np.array(heat.values)
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", cmap="cividis" if heat.sign > 0 else "cividis_r")
    axes.grid(visible=False)
    axes.set_xticks(range(len(heat.columns)), [_plain(text) for text in heat.columns])
    axes.set_yticks(range(len(heat.rows)), [_plain(text) for text in heat.rows])
    axes.set(xlabel=_plain(heat.x_label), ylabel=_plain(heat.y_label), title=_plain(heat.title))
    for (row, column), value in np.ndenumerate(values):
        if math.isfinite(value):
            bright = image.norm(value) > 0.55 if heat.sign > 0 else image.norm(value) < 0.45
            axes.text(
                column, row, f"{value:.3f}", ha="center", va="center", fontsize=8, color="black" if bright else "white"
            )
    row, column = heat.marked
    axes.add_patch(
        plt.Rectangle((column - 0.47, row - 0.47), 0.94, 0.94, fill=False, edgecolor="#D55E00", linewidth=2.5)
    )
    figure.colorbar(image, label=heat.metric)
    return figure  # type: ignore[no-any-return]


def _marker(style: Style, points: int) -> str:
    return style.marker if points <= 40 else ""


def _label(series: Series) -> str:
    text = _plain(series.label) if series.in_legend else "_nolegend_"
    return (
        f" {text}" if series.in_legend and text.startswith("_") else text
    )  # matplotlib hides labels that begin with _


def _long(series: Sequence[Series]) -> bool:
    return any(len(entry.label) > 16 for entry in series)


def _plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return short(text).replace("$", r"\$")
