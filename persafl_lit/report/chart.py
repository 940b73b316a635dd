"""What a chart is, whichever library draws it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from persafl_lit.report.palette import Style

LONGEST_LABEL = 60


@dataclass(frozen=True)
class Series:
    """One line, cloud or set of bars."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style
    notes: Sequence[str]
    """What each point says when pointed at."""
    spread: Sequence[float] | None = None
    hollow: bool = False
    in_legend: bool = True


@dataclass(frozen=True)
class Chart:
    """Series over a common axis."""

    name: str
    title: str
    caption: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    kind: Literal["lines", "points", "bars"] = "lines"
    spread_as: Literal["band", "bars"] = "band"
    y_range: tuple[float, float] | None = None
    ticks: tuple[tuple[float, str], ...] = ()
    log_x: bool = False
    bar_width: int = 1
    """Of a group of bars, one per series, around its x."""
    unit: str = ""
    """Of x, written with k, M, G."""
    others: tuple[tuple[str, Chart], ...] = ()
    """The same against other things than x, or of other metrics, each with the end of its file's name: a figure of its
    own, and a switch on the page."""
    switch: str = "against"
    """What the switch is about."""
    choice: str = ""
    """What the switch calls this one: what it is against, unless told."""

    def bar_offset(self, index: int) -> float:
        """Of the middle of a series' bars from their x."""
        return (index - (len(self.series) - 1) / 2) * self.bar_size

    @property
    def bar_size(self) -> float:
        return 0.9 * self.bar_width / len(self.series)


@dataclass(frozen=True)
class Heat:
    """Values by two keys: `values[row][column]`."""

    name: str
    title: str
    caption: str
    x_label: str
    y_label: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    values: list[list[float]]
    notes: list[list[str]]
    marked: tuple[int, int]
    """(row, column)."""
    sign: int
    metric: str
    """What the values are."""


def with_others(charts: Sequence[tuple[str, Chart | Heat]]) -> list[tuple[str, Chart | Heat]]:
    """Every chart with the stem of its files, and after it those that it can be switched to. One that has a name of its
    own is called by it."""
    drawn: list[tuple[str, Chart | Heat]] = []
    for stem, chart in charts:
        drawn.append((stem, chart))
        for name, other in chart.others if isinstance(chart, Chart) else ():
            own = f"{file_stem(other.name)}{stem.removeprefix(file_stem(chart.name))}"
            drawn.append((f"{stem}_{name}" if other.name == chart.name else own, other))
    return drawn


def short(text: str) -> str:
    """A label that fits: no control characters, not endless."""
    clean = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]+", " ", text)
    return clean if len(clean) <= LONGEST_LABEL else clean[: LONGEST_LABEL - 3] + "..."


def file_stem(name: str) -> str:
    """A file name from a name that may hold anything."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip(".")[:80] or "figure"
