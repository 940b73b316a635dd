"""Charts as plotly's JSON, for the page. Plotly reads some HTML in labels, so every text is escaped here."""

from __future__ import annotations

import html
import json
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from persafl_lit.report.chart import Chart, Heat, Series, short
from persafl_lit.report.palette import DASHES, PLOTLY_MARKERS, Style

LEGEND_WIDTH, NOTE_WIDTH, AXIS_WIDTH = 28, 50, 36
FONT = {
    "family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
    "size": 13,
    "color": "#222222",
}
GRID = {
    "gridcolor": "#E5E5E5",
    "linecolor": "#888888",
    "zeroline": False,
    "automargin": True,
    "ticks": "outside",
    "tickcolor": "#888888",
}


def label_text(text: str) -> str:
    """A label that plotly shows as it is. Quotes stay: plotly does not know &quot;. Dollars would be taken for
    mathematics."""
    return html.escape(short(text), quote=False).replace("$", "&#36;")


def block_text(text: str, width: int) -> str:
    """The same in lines of about `width` characters, for legends and notes; a long word stays whole, an endless one is
    cut."""
    lines = [line for paragraph in text.split("\n") for line in textwrap.wrap(paragraph, width, break_long_words=False)]
    return "<br>".join(label_text(line) for line in lines)


def plot(chart: Chart | Heat) -> dict[str, Any]:
    """{data, layout} for Plotly.newPlot."""
    return _heat(chart) if isinstance(chart, Heat) else _chart(chart)


def to_json(value: Any) -> str:
    """JSON that can stand inside a <script> element: nan is null, and no character of it can end the element."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart(chart: Chart) -> dict[str, Any]:
    draw = {"lines": _lines, "points": _points, "bars": _bars}[chart.kind]
    x_axis = GRID | {"title": {"text": label_text(chart.x_label)}}
    if chart.kind == "bars":  # of whole numbers
        x_axis |= {"tick0": 0, "dtick": max(1, math.ceil(max(max(series.x) for series in chart.series) / 10))}
    if chart.log_x:
        x_axis |= {"type": "log"}
    if chart.unit:
        x_axis |= {"tickformat": "~s", "ticksuffix": label_text(chart.unit)}
    if chart.ticks:
        x_axis |= {
            "tickmode": "array",
            "tickvals": [value for value, _ in chart.ticks],
            "ticktext": [label_text(text) for _, text in chart.ticks],
        }
    y_axis = GRID | {"title": {"text": block_text(chart.y_label.replace(" (", "\n("), AXIS_WIDTH)}}
    if chart.y_range:
        y_axis |= {"range": list(chart.y_range)}
    layout = _layout() | {"xaxis": x_axis, "yaxis": y_axis, "barmode": "overlay"}
    # By their uid, and with a legend that has not changed, hidden series stay hidden when the page switches to another
    # axis.
    traces = [
        trace | {"uid": f"{number}{trace.get('fill', '')}"}
        for number, series in enumerate(chart.series)
        for trace in draw(chart, series)
    ]
    return {"data": traces, "layout": layout}


def _lines(chart: Chart, series: Series) -> list[dict[str, Any]]:
    line = {"color": series.style.colour, "dash": DASHES[series.style.dash], "width": 1.5 if series.hollow else 2}
    marked = bool(series.style.marker) and len(series.x) <= 60
    trace = _common(series) | {"type": "scatter", "mode": "lines+markers" if marked else "lines", "line": line}
    trace["marker"] = _marker(series.style, 7, hollow=series.hollow)
    spread = [value if math.isfinite(value) else 0.0 for value in series.spread or ()]
    if not any(spread):
        return [trace]
    if chart.spread_as == "bars":
        return [
            trace
            | {"error_y": {"type": "data", "array": spread, "thickness": 1, "width": 4, "color": series.style.colour}}
        ]
    above = [y + s for y, s in zip(series.y, spread, strict=True)]
    below = [y - s for y, s in zip(series.y, spread, strict=True)]
    band: dict[str, Any] = {"x": [*series.x, *reversed(series.x)], "y": [*above, *reversed(below)]}
    band |= {"fill": "toself", "fillcolor": _faint(series.style.colour)}
    band |= {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    return [band | {"legendgroup": trace["legendgroup"]}, trace]


def _points(chart: Chart, series: Series) -> list[dict[str, Any]]:
    """Hollow, so that methods do not hide each other."""
    marker = _marker(series.style, 7, hollow=True) | {"opacity": 0.7, "line": {"width": 1.3}}
    return [_common(series) | {"type": "scatter", "mode": "markers", "marker": marker}]


def _bars(chart: Chart, series: Series) -> list[dict[str, Any]]:
    """Side by side by explicit offsets (of the left edge), where the PNG has them too."""
    left = chart.bar_offset(chart.series.index(series)) - chart.bar_size / 2
    place = {"width": chart.bar_size, "offset": left}
    return [_common(series) | {"type": "bar", "marker": {"color": series.style.colour}, "textposition": "none"} | place]


def _common(series: Series) -> dict[str, Any]:
    name = block_text(series.label, LEGEND_WIDTH)
    hover = {"text": _notes(series.notes), "hovertemplate": "%{text}<extra></extra>"}
    return {
        "name": name,
        "legendgroup": name,
        "showlegend": series.in_legend,
        "x": list(series.x),
        "y": list(series.y),
    } | hover


def _marker(style: Style, size: int, hollow: bool = False) -> dict[str, Any]:
    symbol = PLOTLY_MARKERS.get(style.marker, "circle")
    return {"color": style.colour, "symbol": f"{symbol}-open" if hollow else symbol, "size": size}


def _heat(heat: Heat) -> dict[str, Any]:
    row, column = heat.marked
    columns, rows = list(range(len(heat.columns))), list(range(len(heat.rows)))
    trace = {
        "type": "heatmap",
        "x": columns,
        "y": rows,
        "z": heat.values,
        "text": [_notes(notes) for notes in heat.notes],
        "hovertemplate": "%{text}<extra></extra>",
        "texttemplate": "%{z:.3f}",
        "colorscale": "Cividis",
        "reversescale": heat.sign < 0,
        "hoverongaps": False,
        "xgap": 2,
        "ygap": 2,
        "colorbar": {"title": {"text": label_text(heat.metric), "side": "right"}, "thickness": 14},
    }
    frame = {
        "type": "rect",
        "x0": column - 0.48,
        "x1": column + 0.48,
        "y0": row - 0.48,
        "y1": row + 0.48,
        "line": {"color": "#D55E00", "width": 4},
    }
    axes = {}
    for name, label, values in (("xaxis", heat.x_label, heat.columns), ("yaxis", heat.y_label, heat.rows)):
        ticks = {
            "tickmode": "array",
            "tickvals": list(range(len(values))),
            "ticktext": [label_text(value) for value in values],
        }
        axes[name] = GRID | ticks | {"title": {"text": label_text(label)}, "showgrid": False}
    axes["yaxis"] |= {"autorange": "reversed"}  # as in the PNG: the first value on top
    return {"data": [trace], "layout": _layout() | axes | {"shapes": [frame]}}


def _layout() -> dict[str, Any]:
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left", "uirevision": "kept"}
    hover = {"bgcolor": "#FFFFFF", "align": "left", "font": FONT | {"size": 12}}
    return {
        "font": FONT,
        "paper_bgcolor": "#FFFFFF",
        "plot_bgcolor": "#FFFFFF",
        "margin": {"l": 56, "r": 16, "t": 16, "b": 48},
        "legend": legend,
        "showlegend": True,
        "hovermode": "closest",
        "hoverlabel": hover,
    }


def _notes(notes: Sequence[str]) -> list[str]:
    return [block_text(note, NOTE_WIDTH) for note in notes]


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
