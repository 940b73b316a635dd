"""Charts as plain data, drawn once by matplotlib for papers and once by plotly for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from persafl_lit.report.aggregate import LOSS, Spread, Task, Trial, as_float, best, in_summary, seed_of, spread
from persafl_lit.report.curves import mean_curve
from persafl_lit.report.keys import number_of, setting_text
from persafl_lit.report.palette import schedule_style, style_of
from persafl_lit.report.schedules import concurrency, schedules_of, staleness_shares, usable_timeline
from persafl_lit.report.series import Chart, Heat, Series
from persafl_lit.report.tables import with_spread

STALENESS_BARS = 40


def charts_of(task: Task) -> list[Chart | Heat]:
    """Every chart that this task's runs have data for."""
    charts = [chart for chart in (over_time(task), active_share(task), per_client(task), staleness_bars(task)) if chart.series]
    return [*charts, *sensitivities(task), *heat_maps(task)]


def score_label(task: Task, split: str = "test") -> str:
    return f"{split} {task.measure.kind} after fine-tuning" + (" (lower is better)" if task.measure is LOSS else "")


def over_time(task: Task) -> Chart:
    """Figures (b) and (c) of the paper."""
    series = []
    for trial in task.chosen:
        curve = mean_curve(trial, task.measure.test)
        if curve is not None:
            told = [Spread(mean, std, curve.seeds) for mean, std in zip(curve.mean.tolist(), curve.std.tolist(), strict=True)]
            notes = _notes(trial.method, "time", curve.times, [with_spread(point) for point in told])
            series.append(Series(trial.method, curve.times.tolist(), curve.mean.tolist(), style_of(trial.method), notes, curve.std.tolist()))
    caption = "Mean over seeds of each method's chosen setting; the band is one standard deviation over seeds (none for a single seed)."
    return Chart("accuracy", "Personalised performance over simulated time", caption, "simulated time", score_label(task), tuple(series))


def active_share(task: Task) -> Chart:
    """Figure (a) of the paper."""
    series, caption = [], "Share of clients that download, compute or upload, averaged over short windows of time and over seeds."
    for index, (text, records) in enumerate(schedules_of(task).items()):
        timelines = [timeline for record in records if (timeline := usable_timeline(record)) is not None]
        times, shares = concurrency(timelines)
        means = [as_float(in_summary(record, "concurrency")) for record in records]
        mean = spread(means).mean
        mean = mean if math.isfinite(mean) else float(np.mean([timeline.mean_concurrency() for timeline in timelines]))
        label = f"{text}, mean {mean:.2f}"
        notes = _notes(text, "time", times, [f"active share {share:.3f}" for share in shares])
        series.append(Series(label, times.tolist(), shares.tolist(), schedule_style(index), notes))
        if any(timeline.activity is None for timeline in timelines) and "Recorded" not in caption:
            caption += " Recorded timelines hold only updates that were applied, so the curve falls towards the end of the run."
    return Chart("concurrency", "Concurrency", caption, "simulated time", "share of active clients", tuple(series), y_range=(0.0, 1.05))


def per_client(task: Task) -> Chart:
    series = []
    for trial in task.chosen:
        rows = [(as_float(row.get("arrivals")), as_float(row.get(task.measure.client_column)), row.get("client"), seed_of(record))
                for record in trial.runs for row in record.clients]  # fmt: skip
        rows = sorted((row for row in rows if math.isfinite(row[0]) and math.isfinite(row[1])), key=lambda row: row[:2])
        if rows:
            told = [f"client {as_float(client):.0f}, seed {seed}\n{task.measure.kind} {score:.3f}" for _, score, client, seed in rows]
            notes = _notes(trial.method, "arrivals", np.array([row[0] for row in rows]), told)
            series.append(Series(trial.method, [row[0] for row in rows], [row[1] for row in rows], style_of(trial.method), notes))
    caption = "One mark per client and seed at the end of the run. Clients at 0 arrivals are held out or never came."
    return Chart("clients", "Clients by number of arrivals", caption, "updates from the client", score_label(task), tuple(series), kind="points")


def staleness_bars(task: Task) -> Chart:
    alike: dict[tuple[float, ...], list[str]] = {}
    for trial in task.chosen:
        shares = staleness_shares(trial.runs)
        if len(shares):
            alike.setdefault(tuple(shares.tolist()), []).append(trial.method)
    width = math.ceil(max((len(shares) for shares in alike), default=1) / STALENESS_BARS)
    series = []
    for index, (shares_of, methods) in enumerate(alike.items()):
        padded = np.append(shares_of, np.zeros(-len(shares_of) % width)).reshape(-1, width).sum(axis=1)
        starts = np.arange(len(padded)) * width
        told = [f"{start:.0f} to {start + width - 1:.0f}: {share:.1%} of updates" for start, share in zip(starts, padded, strict=True)]
        label, style = ", ".join(methods), style_of(methods[0]) if len(methods) == 1 else schedule_style(index)
        notes = tuple(f"{label}\nstaleness {text}" for text in told)
        series.append(Series(label, (starts + (width - 1) / 2).tolist(), padded.tolist(), style, notes))
    caption = "Model versions between download and upload, over the runs of the chosen settings. Methods with the same staleness share grey bars."
    caption += f" Each bar covers {width} values." if width > 1 else ""
    return Chart("staleness", "Staleness", caption, "staleness (model versions)", "share of updates", tuple(series), kind="bars", bar_width=width)


# -- what the choice of a setting changes -----------------------------------------------------------------------------


def sensitivities(task: Task) -> list[Chart]:
    """One chart per key that some method's finished runs vary."""
    values: dict[str, dict[str, dict[str, Trial]]] = {}
    for method, trials in task.trials.items():
        for key in task.keys[method]:
            per_value: dict[str, list[Trial]] = {}
            for trial in trials:
                per_value.setdefault(dict(trial.setting)[key], []).append(trial)
            if len(per_value) > 1:
                values.setdefault(key, {})[method] = {value: best(tried) for value, tried in per_value.items()}
    caption = "Mean and standard deviation over seeds: filled marks are test, hollow ones validation."
    if any(len(keys) > 1 for keys in task.keys.values()):
        caption += " Of settings that differ in other keys too, each value shows the one that is best on validation data."
    return [value_chart(task, f"sensitivity_{key}", f"Sensitivity to {key}", caption, key, methods) for key, methods in sorted(values.items())]


def value_chart(task: Task, name: str, title: str, caption: str, key: str, methods: dict[str, dict[str, Trial]]) -> Chart:
    """Scores over the values of a key; the axis is logarithmic, linear or a list of names, as the values ask for."""
    values = sorted({value for per_value in methods.values() for value in per_value}, key=_by_number)
    numbers = [number for value in values if (number := number_of(value)) is not None and math.isfinite(number)]
    position = dict(zip(values, numbers if len(numbers) == len(values) else map(float, range(len(values))), strict=True))
    series = []
    for method, per_value in methods.items():
        tried = sorted(per_value.items(), key=lambda item: position[item[0]])
        x = [position[value] for value, _ in tried]
        for split, scores in (("test", [trial.test for _, trial in tried]), ("validation", [trial.val for _, trial in tried])):
            if any(score.seeds for score in scores):
                told = [f"{split} {with_spread(score)}\n{setting_text(trial.setting)}" for score, (_, trial) in zip(scores, tried, strict=True)]
                notes = tuple(f"{method}\n{text}" for text in told)
                style = style_of(method)._replace(dash="-" if split == "test" else ":")
                means, stds = [score.mean for score in scores], [score.std for score in scores]
                series.append(Series(method, x, means, style, notes, stds, hollow=split == "validation", in_legend=split == "test"))
    chart = Chart(name, title, caption, key, f"{task.measure.kind} (filled: test, hollow: validation)", tuple(series), spread_as="bars")
    wide = len(numbers) == len(values) and min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
    return replace(chart, ticks=tuple((position[value], value) for value in values), log_x=wide)


def heat_maps(task: Task) -> list[Heat]:
    """For each method whose finished runs vary exactly two keys: validation score by their values, the chosen pair marked."""
    maps = []
    for method, trials in task.trials.items():
        keys = [key for key in task.keys[method] if len({dict(trial.setting)[key] for trial in trials}) > 1]
        if len(keys) != 2 or best(trials).rank()[0]:
            continue
        across, down = (sorted({dict(trial.setting)[key] for trial in trials}, key=_by_number) for key in keys)
        cells = {(dict(trial.setting)[keys[1]], dict(trial.setting)[keys[0]]): trial for trial in sorted(trials, key=Trial.rank, reverse=True)}
        values = [[cells[row, col].val.mean if (row, col) in cells else math.nan for col in across] for row in down]
        winner = dict(best(trials).setting)
        maps.append(
            Heat(
                f"heat_{method}",
                f"{method}: {keys[0]} and {keys[1]}",
                f"Mean validation {task.measure.kind} over seeds; the frame marks the chosen setting.",
                keys[0],
                keys[1],
                tuple(across),
                tuple(down),
                values,
                [[_cell_note(cells.get((row, col))) for col in across] for row in down],
                (down.index(winner[keys[1]]), across.index(winner[keys[0]])),
                task.measure.sign,
            )
        )
    return maps


def _cell_note(trial: Trial | None) -> str:
    if trial is None:
        return "no finished run"
    return f"{setting_text(trial.setting)}\nvalidation {with_spread(trial.val)}\ntest {with_spread(trial.test)}"


def _by_number(value: str) -> tuple[float, str]:
    number = number_of(value)
    return (math.inf if number is None or math.isnan(number) else number, value)


def _notes(label: str, name: str, x: np.ndarray, told: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{label}\n{name} {value:.4g}\n{text}" for value, text in zip(x.tolist(), told, strict=True))
