"""The report as one HTML file that opens offline, and as markdown beside the figures."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from persafl_lit.report.chart import Chart, Heat, short, with_others
from persafl_lit.report.content import Content, Part
from persafl_lit.report.plotly_figures import plot, to_json
from persafl_lit.report.tables import TextTable, html_text, markdown_text

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 1180px; color: #222; background: #fff; line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid #ddd; }
h3 { font-size: 1rem; margin: 0 0 .25rem; }
h1, h2, h3, p, li, figcaption { overflow-wrap: anywhere; }
.lead { font-size: 1.05rem; max-width: 52rem; margin: .25rem 0; }
.hint { font-size: .85rem; color: #555; margin: .5rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr));
  gap: 1.75rem 1.5rem; margin: 1rem 0; }
figure { margin: 0; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure img { display: block; max-width: 100%; max-height: 520px; }
figcaption { font-size: .85rem; color: #555; margin-top: .25rem; }
.switch { display: flex; flex-wrap: wrap; align-items: center; gap: .35rem; border: 0;
  margin: .25rem 0 .5rem; padding: 0; font-size: .85rem; }
.switch legend { float: left; padding: 0; margin-right: .4rem; color: #555; }
.switch label { position: relative; }
.switch input { position: absolute; inset: 0; width: 100%; height: 100%; margin: 0; opacity: 0; cursor: pointer; }
.switch span { display: block; padding: .25rem .7rem; border: 1px solid #bbb; border-radius: 1rem; }
.switch input:hover + span { border-color: #0072B2; }
.switch input:checked + span { background: #0072B2; border-color: #0072B2; color: #fff; }
.switch input:focus-visible + span { outline: 3px solid #E69F00; outline-offset: 1px; }
.plot { width: 100%; height: 400px; }
.wide .plot { height: 460px; }
.scroll { overflow-x: auto; max-width: 100%; border: 1px solid #ddd; border-radius: 4px; }
table { border-collapse: collapse; font-size: .8rem; width: 100%; }
th, td { padding: .4rem .5rem; text-align: left; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid #eee; }
td.long { white-space: normal; min-width: 11rem; overflow-wrap: break-word; }
th { background: #f6f6f6; font-weight: 600; white-space: normal; vertical-align: bottom; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
tbody tr:last-child td { border-bottom: 0; }
/* The method stays in sight while the rest of a table scrolls under it. */
th:first-child, td:first-child { position: sticky; left: 0; z-index: 1; max-width: 9rem;
  white-space: normal; overflow-wrap: anywhere;
  box-shadow: inset -1px 0 #ddd; }
td:first-child { background: #fff; min-width: 6.5rem; }
ul { padding-left: 1.2rem; max-width: 60rem; }
li { margin: .3rem 0; }
@media (max-width: 600px) {
  body { padding: 1rem .75rem 3rem; }
  figure img { max-width: none; max-height: 320px; }
  .plot, .wide .plot { height: 380px; }
}
"""

NO_SCRIPT = "The plots need JavaScript; the PNG files written with this page show the same."
HINT = (
    "Point at a plot to read its values; click on a name in its legend to hide or show it; drag to zoom, "
    "double-click to go back."
)
# Plotly's legend sits above the plot; on a narrow page it needs more lines, so the plot gets more height. A finger
# scrolls, a mouse zooms.
SCRIPT = """
const charts = JSON.parse(document.getElementById("charts").textContent);
for (const [id, chart] of Object.entries(charts)) {
  if (matchMedia("(pointer: coarse)").matches) chart.layout.dragmode = false;
  const box = document.getElementById(id);
  if (!box) continue;
  const letters = chart.data.filter(t => t.showlegend && t.name).map(t => t.name.length * 7.5 + 45);
  const lines = Math.ceil(letters.reduce((a, b) => a + b, 0) / Math.max(box.clientWidth - 90, 200));
  box.style.height = (box.clientHeight + 20 * Math.max(0, lines - 1)) + "px";
  Plotly.newPlot(box, chart.data, chart.layout, {responsive: true, displayModeBar: false});
}
for (const group of document.querySelectorAll("fieldset.switch")) {
  group.addEventListener("change", event => {
    const {value, dataset} = event.target, figure = group.closest("figure");
    Plotly.react(group.dataset.plot, charts[value].data, charts[value].layout);
    figure.querySelector("h3").textContent = dataset.title;
    figure.querySelector("figcaption").textContent = dataset.caption;
  });
}
"""


def html_page(content: Content, schedules: Mapping[str, tuple[Path, str]]) -> str:
    """`schedules` holds, by part's suffix, the schedule chart's PNG and its caption."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    library = get_plotlyjs()
    # Nothing is loaded from anywhere, and only these two scripts may run, whatever a name or an error message holds.
    allowed = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (library, SCRIPT)
    )
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    charts = {f"plot-{stem}": plot(chart) for part in content.parts for stem, chart in with_others(part.charts)}
    several = len(content.parts) > 1
    body = [
        f"<h1>{html_text(short_title(content.title))}</h1>",
        *(f'<p class="lead">{html_text(text)}</p>' for text in content.lead),
    ]
    body += [f'<p class="hint">{HINT}</p><noscript><p>{NO_SCRIPT}</p></noscript>'] if charts else []
    body += [_figures(part, schedules.get(part.suffix) if part.task else None, several) for part in content.parts]
    body += [_table(_titled("Methods", part.heading), part.table) for part in content.parts if part.table]
    body.append(_table("Runs", content.runs, "There are no runs."))
    if content.missing.rows:
        body.append(_table("Runs that are in no figure", content.missing))
    for heading, texts in content.words:
        items = "".join(f"<li>{html_text(text)}</li>" for text in texts)
        body.append(f"<h2>{html_text(_titled('How to read this', heading))}</h2>\n<ul>{items}</ul>")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html_text(short_title(content.title))}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
{chr(10).join(body)}
<script type="application/json" id="charts">{to_json(charts)}</script>
<script>{library}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def short_title(title: str) -> str:
    return " ".join(title.split()) or "Report"


def _titled(text: str, heading: str) -> str:
    return f"{text}: {heading}" if heading else text


def _figures(part: Part, schedule: tuple[Path, str] | None, several: bool) -> str:
    """Plots of a part; the first, accuracy over time, is as wide as the page."""
    heading = f"<h2>{html_text(part.heading)}</h2>" if part.heading else "<h2>Figures</h2>"
    told = f'<p class="lead">{html_text(part.verdict)}</p>' if several and part.verdict else ""
    figures = []
    for index, (stem, chart) in enumerate(part.charts):
        wide = ' class="wide"' if index == 0 and len(part.charts) > 1 else ""
        caption = f"<figcaption>{html_text(chart.caption)}</figcaption>"
        box = f'<div class="plot" id="plot-{html_text(stem)}"></div>'
        figures.append(f"<figure{wide}><h3>{html_text(chart.title)}</h3>{_switch(stem, chart)}{box}{caption}</figure>")
    if schedule is not None:
        picture, caption = schedule
        data = base64.b64encode(picture.read_bytes()).decode()
        image = f'<img alt="Schedule chart: what each client does when" src="data:image/png;base64,{data}">'
        image = f'<div class="scroll" tabindex="0">{image}</div>'
        figures.insert(
            1, f'<figure class="wide"><h3>Schedules</h3>{image}<figcaption>{html_text(caption)}</figcaption></figure>'
        )
    drawn = f'<div class="figures">{chr(10).join(figures)}</div>' if figures else "<p>There is nothing to draw.</p>"
    return f"{heading}\n{told}\n{drawn}"


def _switch(stem: str, chart: Chart | Heat) -> str:
    """Radio buttons, so that the keyboard's arrows work: what the figure is drawn against, or which metric it is of."""
    if not isinstance(chart, Chart) or not chart.others:
        return ""
    buttons = []
    for name, shown in with_others([(stem, chart)]):
        told = {"value": f"plot-{name}", "title": shown.title, "caption": shown.caption}
        data = " ".join(f'{"" if key == "value" else "data-"}{key}="{html_text(value)}"' for key, value in told.items())
        checked = " checked" if shown is chart else ""
        label = shown.choice if isinstance(shown, Chart) and shown.choice else shown.x_label
        radio = f'<input type="radio" name="axis-{html_text(stem)}" {data} autocomplete="off"{checked}>'
        buttons.append(f"<label>{radio}<span>{html_text(label)}</span></label>")
    legend = f"<legend>{html_text(chart.switch)}</legend>"
    return f'<fieldset class="switch" data-plot="plot-{html_text(stem)}">{legend}{"".join(buttons)}</fieldset>'


def _table(heading: str, table: TextTable, otherwise: str = "") -> str:
    return f"<h2>{html_text(heading)}</h2>\n{table.html() if table.rows else f'<p>{otherwise}</p>'}"


def markdown_page(content: Content, schedules: Mapping[str, tuple[Path, str]]) -> str:
    """The same for a repository or a wiki; figures are the PNG files beside it."""
    lines = [f"# {markdown_text(short_title(content.title))}", *map(markdown_text, content.lead)]
    for part in content.parts:
        lines.append(f"## {markdown_text(part.heading or 'Figures')}")
        lines += [markdown_text(part.verdict)] if len(content.parts) > 1 and part.verdict else []
        drawn = with_others(part.charts)
        lines += [
            f"![{markdown_text(short(chart.title))}]({stem}.png)\n\n{markdown_text(chart.caption)}"
            for stem, chart in drawn
        ]
        if part.task and part.suffix in schedules:
            picture, caption = schedules[part.suffix]
            lines.append(f"![Schedules]({picture.name})\n\n{markdown_text(caption)}")
        lines += [] if part.charts else ["There is nothing to draw."]
    for part in content.parts:
        lines += [f"## {markdown_text(_titled('Methods', part.heading))}", part.table.markdown()] if part.table else []
    lines += ["## Runs", content.runs.markdown() if content.runs.rows else "There are no runs."]
    lines += ["## Runs that are in no figure", content.missing.markdown()] if content.missing.rows else []
    for heading, texts in content.words:
        lines += [
            f"## {markdown_text(_titled('How to read this', heading))}",
            "\n".join(f"- {markdown_text(text)}" for text in texts),
        ]
    return "\n\n".join(lines) + "\n"
