"""Charts as plain data, drawn once by matplotlib for papers and once by plotly for the page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from persafl_lit.report.aggregate import (
    Measure,
    SettingRuns,
    Spread,
    TaskRuns,
    as_float,
    best,
    common_seeds,
    in_summary,
    on_common_seeds,
    seed_of,
    seeds_text,
    spread,
)
from persafl_lit.report.chart import Chart, Heat, Series
from persafl_lit.report.config_keys import number_of, setting_text
from persafl_lit.report.curves import AXES, FEW_POINTS, TIME, Axis, MeanCurve, mean_curve
from persafl_lit.report.evaluated_models import evaluated_models
from persafl_lit.report.palette import Style, schedule_style, style_of, value_style
from persafl_lit.report.record import UNCHANGED
from persafl_lit.report.schedules import concurrency, schedules_of, staleness_shares, usable_timeline
from persafl_lit.report.table_rows import no_results, thinned_curves
from persafl_lit.report.tables import with_spread

STALENESS_BARS = 40
MOST_PAIRS = 3
"""Heat maps per method."""
PAIRED_FIRST = ("lam", "alpha", "beta", "tau")


def charts_of(task: TaskRuns) -> list[Chart | Heat]:
    """Every chart that this task's runs have data for."""
    drawn = (
        over_time(task),
        *further_over_time(task),
        evaluated_models(task),
        active_share(task),
        *per_client(task),
        staleness_bars(task),
    )
    charts = [chart for chart in drawn if chart.series]
    return [*charts, *curves_by_value(task), *sensitivities(task), *heat_maps(task)]


def score_label(measure: Measure) -> str:
    return f"test {measure.kind} after fine-tuning" + (" (lower is better)" if measure.sign < 0 else "")


def over_time(task: TaskRuns) -> Chart:
    """Figures (b) and (c) of the paper."""
    charts = {axis.name: chart for axis in AXES if (chart := _over(task, task.measure, axis)).series}
    time = charts.pop(TIME.name, None)
    return replace(time, others=tuple(charts.items())) if time is not None else _over(task, task.measure, TIME)


def further_over_time(task: TaskRuns) -> list[Chart]:
    """What else was measured, against simulated time: one figure with a switch; none without further metrics."""
    titled = [
        replace(_over(task, measure, TIME), name=f"metrics_{measure.kind}", title=f"{measure.kind} over {TIME.label}")
        for measure in task.further
    ]
    return _switched([replace(chart, choice=measure.kind) for chart, measure in zip(titled, task.further, strict=True)])


def _switched(charts: Sequence[Chart]) -> list[Chart]:
    """The first of those that show something, with a switch to the others: charts of different metrics."""
    drawn = [chart for chart in charts if chart.series]
    return [replace(drawn[0], switch="metric", others=tuple((c.choice, c) for c in drawn[1:]))] if drawn else []


def _over(task: TaskRuns, measure: Measure, axis: Axis) -> Chart:
    """What was reached against simulated time, or against what it took."""
    curves = [(trial, curve) for trial in task.chosen if (curve := mean_curve(trial, measure.test, axis)) is not None]
    series = [_curve(trial.method, curve, trial.style, axis) for trial, curve in curves]
    caption = (
        "Mean over seeds of each method's chosen setting; the band is one standard deviation over seeds (none "
        "for a single seed)."
    )
    if axis is not TIME and any(curve.interpolated for _, curve in curves):
        caption += " Curves are linear between evaluations, and as long as the shortest of their seeds."
    if any(not curve.x.any() for _, curve in curves):
        caption += " A method that spends nothing of this is a single mark at 0: its last evaluation."
    if thinned := thinned_curves(task):
        caption += f" Evaluations were left out to keep within the evaluation budget: {thinned}."
    if task.unchanged:
        runs = ", ".join(f"{method} ({count})" for method, count in task.unchanged.items())
        caption += f" Not drawn, because the model never changed in them: runs of {runs}."
        marks = [
            Series(f"{method}: {UNCHANGED}", [math.nan], [math.nan], style_of(method), ("",))
            for method in no_results(task)
        ]
        series += marks if series else []
    return Chart(
        measure.kind,
        f"Personalised performance over {axis.label}",
        caption,
        axis.label,
        score_label(measure),
        tuple(series),
        unit=axis.unit,
    )


def _curve(label: str, curve: MeanCurve, style: Style, axis: Axis = TIME) -> Series:
    """A curve with few points says so in its name."""
    told = [Spread(mean, std, curve.seeds) for mean, std in zip(curve.mean.tolist(), curve.std.tolist(), strict=True)]
    notes = _notes(label, axis.name, curve.x, [with_spread(point) for point in told])
    few = f" ({curve.points} point{'s' if curve.points > 1 else ''})" if curve.points < FEW_POINTS else ""
    return Series(label + few, curve.x.tolist(), curve.mean.tolist(), style, notes, curve.std.tolist())


def active_share(task: TaskRuns) -> Chart:
    """Figure (a) of the paper."""
    series, caption = (
        [],
        "Share of clients that download, compute or upload, averaged over short windows of time and over seeds.",
    )
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
            caption += (
                " Recorded timelines hold only updates that were applied, so the curve falls towards the end of "
                "the run."
            )
    return Chart(
        "concurrency",
        "Concurrency",
        caption,
        "simulated time",
        "share of active clients",
        tuple(series),
        y_range=(0.0, 1.05),
    )


def per_client(task: TaskRuns) -> list[Chart]:
    return _switched([_per_client(task, measure) for measure in (task.measure, *task.further)])


def _per_client(task: TaskRuns, measure: Measure) -> Chart:
    series = []
    for trial in task.chosen:
        score = measure.client_column
        rows = [
            (as_float(row.get("arrivals")), as_float(row.get(score)), row.get("client"), seed_of(record))
            for record in trial.runs
            for row in record.clients
        ]
        rows = sorted((row for row in rows if math.isfinite(row[0]) and math.isfinite(row[1])), key=lambda row: row[:2])
        if rows:
            told = [
                f"client {as_float(client):.0f}, seed {seed}\n{measure.kind} {score:.3f}"
                for _, score, client, seed in rows
            ]
            notes = _notes(trial.method, "arrivals", np.array([row[0] for row in rows]), told)
            series.append(Series(trial.method, [row[0] for row in rows], [row[1] for row in rows], trial.style, notes))
    caption = "One mark per client and seed at the end of the run. Clients at 0 arrivals are held out or never came."
    return Chart(
        "clients",
        "Clients by number of arrivals",
        caption,
        "updates from the client",
        score_label(measure),
        tuple(series),
        kind="points",
        choice=measure.kind,
    )


def staleness_bars(task: TaskRuns) -> Chart:
    """Methods that are never stale would be one bar of height 1 and flatten the others: they are named instead, unless
    all are such."""
    alike: dict[tuple[float, ...], list[str]] = {}
    styles = {trial.method: trial.style for trial in task.chosen}
    for trial in task.chosen:
        shares = staleness_shares(trial.runs)
        if len(shares):
            alike.setdefault(tuple(shares.tolist()), []).append(trial.method)
    never = alike.pop((1.0,), []) if len(alike) > 1 else []
    width = math.ceil(max((len(shares) for shares in alike), default=1) / STALENESS_BARS)
    series = []
    for shares_of, methods in alike.items():
        padded = np.append(shares_of, np.zeros(-len(shares_of) % width)).reshape(-1, width).sum(axis=1)
        starts = np.arange(len(padded)) * width
        told = [
            f"{_range(start, width)}: {share:.1%} of updates"
            for start, share in zip(starts.tolist(), padded, strict=True)
        ]
        label = ", ".join(methods)
        notes = tuple(f"{label}\nstaleness {text}" for text in told)
        series.append(Series(label, (starts + (width - 1) / 2).tolist(), padded.tolist(), styles[methods[0]], notes))
    caption = "Model versions between download and upload, over the runs of the chosen settings."
    shared = any(len(methods) > 1 for methods in alike.values())
    caption += " Methods with the same staleness share bars, in the colour of the first of them." if shared else ""
    caption += f" Each bar covers {width} values." if width > 1 else ""
    caption += f" Without bars, because every update has staleness 0: {', '.join(never)}." if never else ""
    return Chart(
        "staleness",
        "Staleness",
        caption,
        "staleness (model versions)",
        "share of updates",
        tuple(series),
        kind="bars",
        bar_width=width,
    )


def _range(start: int, width: int) -> str:
    return str(start) if width == 1 else f"{start} to {start + width - 1}"


# -- what the choice of a setting changes -----------------------------------------------------------------------------


def sensitivities(task: TaskRuns) -> list[Chart]:
    """One chart per key that some method's finished runs vary."""
    caption = "Mean and standard deviation over seeds: filled marks are test, hollow ones validation." + _others_words(
        task
    )
    charts = []
    for key, methods in sorted(_by_value(task).items()):
        told = caption + _seed_words(task, methods)
        charts.append(value_chart(task, f"sensitivity_{key}", f"Sensitivity to {key}", told, key, methods))
    return charts


def curves_by_value(task: TaskRuns) -> list[Chart]:
    """Per key and method that varies it, a curve over time for each value."""
    charts = []
    for key, methods in sorted(_by_value(task).items()):
        for method, per_value in methods.items():
            values = sorted(per_value, key=_by_number)
            styles = {value: value_style(index, len(values)) for index, value in enumerate(values)}
            known = {
                value: curve
                for value in values
                if (curve := mean_curve(per_value[value], task.measure.test)) is not None
            }
            series = tuple(
                _curve(f"{key.split('.')[-1]}={value}", curve, styles[value]) for value, curve in known.items()
            )
            caption = (
                "Mean over seeds; the band is one standard deviation."
                + _others_words(task)
                + _seed_words(task, [method])
            )
            if series:
                name = f"curves_{key}" if len(methods) == 1 else f"curves_{key}_{method}"
                charts.append(
                    Chart(name, f"{method}: curves by {key}", caption, TIME.label, score_label(task.measure), series)
                )
    return charts


def _by_value(task: TaskRuns) -> dict[str, dict[str, dict[str, SettingRuns]]]:
    """Key, method, value: the best setting with that value, of the keys of which a method's finished runs have several
    values."""
    values: dict[str, dict[str, dict[str, SettingRuns]]] = {}
    for method, trials in task.trials.items():
        for key in task.keys[method]:
            per_value: dict[str, list[SettingRuns]] = {}
            for trial in on_common_seeds(trials):
                per_value.setdefault(dict(trial.setting)[key], []).append(trial)
            if len(per_value) > 1:
                values.setdefault(key, {})[method] = {value: best(tried) for value, tried in per_value.items()}
    return values


def _others_words(task: TaskRuns) -> str:
    if all(len(keys) < 2 for keys in task.keys.values()):
        return ""
    return (
        " Of settings that differ in other keys too, each value shows the one that is best on validation data "
        f"({task.select.val})."
    )


def _seed_words(task: TaskRuns, methods: Iterable[str]) -> str:
    """On which seeds settings are compared, of methods whose settings have different ones."""
    told: dict[str, list[str]] = {}
    for method in methods:
        trials = task.trials[method]
        if any(trial.seeds != trials[0].seeds for trial in trials):
            seeds = common_seeds(trials)
            text = (
                f"on {seeds_text(seeds)} alone, which all settings have"
                if seeds
                else "settings share no seed, so each is shown on its own seeds"
            )
            told.setdefault(text, []).append(method)
    return "".join(f" {', '.join(named)}: {text}." for text, named in told.items())


def value_chart(
    task: TaskRuns, name: str, title: str, caption: str, key: str, methods: dict[str, dict[str, SettingRuns]]
) -> Chart:
    """Scores over the values of a key; the axis is logarithmic, linear or a list of names, as the values ask for."""
    values = sorted({value for per_value in methods.values() for value in per_value}, key=_by_number)
    numbers = [number for value in values if (number := number_of(value)) is not None and math.isfinite(number)]
    position = dict(
        zip(values, numbers if len(numbers) == len(values) else map(float, range(len(values))), strict=True)
    )
    series = []
    for method, per_value in methods.items():
        tried = sorted(per_value.items(), key=lambda item: position[item[0]])
        x = [position[value] for value, _ in tried]
        for split, scores in (
            ("test", [trial.test for _, trial in tried]),
            ("validation", [trial.val for _, trial in tried]),
        ):
            if any(score.seeds for score in scores):
                told = [
                    f"{split} {with_spread(score)}\n{setting_text(trial.setting)}"
                    for score, (_, trial) in zip(scores, tried, strict=True)
                ]
                notes = tuple(f"{method}\n{text}" for text in told)
                style = tried[0][1].style._replace(dash="-" if split == "test" else ":")
                means, stds = [score.mean for score in scores], [score.std for score in scores]
                series.append(
                    Series(
                        method, x, means, style, notes, stds, hollow=split == "validation", in_legend=split == "test"
                    )
                )
    chart = Chart(
        name,
        title,
        caption,
        key,
        f"{task.measure.kind} (filled: test, hollow: validation)",
        tuple(series),
        spread_as="bars",
    )
    wide = len(numbers) == len(values) and min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
    return replace(chart, ticks=tuple((position[value], value) for value in values), log_x=wide)


def heat_maps(task: TaskRuns) -> list[Heat]:
    """Validation score by each pair of keys that a method's finished runs vary, those of the papers first, the chosen
    pair marked."""
    maps = []
    for method, trials in task.trials.items():
        keys = [key for key in task.keys[method] if len({dict(trial.setting)[key] for trial in trials}) > 1]
        pairs = list(itertools.combinations(sorted(keys, key=_known_first), 2))
        if pairs and not best(trials).rank()[0]:
            maps += [_heat_map(task, method, pair, keys, len(pairs)) for pair in pairs[:MOST_PAIRS]]
    return maps


def _heat_map(task: TaskRuns, method: str, pair: tuple[str, str], keys: Sequence[str], pairs: int) -> Heat:
    """Each cell is the best of the settings that have its two values."""
    trials = task.trials[method]
    tried: dict[tuple[str, str], list[SettingRuns]] = {}
    for trial in on_common_seeds(trials):
        tried.setdefault(_values_of(trial, pair), []).append(trial)
    cells = {values: best(found) for values, found in tried.items()}
    down, across = (sorted({values[i] for values in cells}, key=_by_number) for i in (0, 1))
    row, column = _values_of(best(trials), pair)
    caption = f"Mean {task.select.val} over seeds; the frame marks the chosen setting." + _seed_words(task, [method])
    others = [key for key in keys if key not in pair]
    if others:
        caption += (
            f" Each cell is the best over {', '.join(others)}, "
            f"{'maximised' if task.select.sign > 0 else 'minimised'} over on validation data."
        )
    if pairs > MOST_PAIRS:
        caption += f" {MOST_PAIRS} of {pairs} pairs of keys are drawn."
    return Heat(
        f"heat_{method}" if pairs == 1 else f"heat_{method}_{pair[0]}_{pair[1]}",
        f"{method}: {pair[0]} and {pair[1]}",
        caption,
        pair[1],
        pair[0],
        tuple(across),
        tuple(down),
        [
            [cells[value, other].score.mean if (value, other) in cells else math.nan for other in across]
            for value in down
        ],
        [[_cell_note(cells.get((value, other))) for other in across] for value in down],
        (down.index(row), across.index(column)),
        task.select.sign,
        task.select.val,
    )


def _values_of(trial: SettingRuns, pair: tuple[str, str]) -> tuple[str, str]:
    setting = dict(trial.setting)
    return setting[pair[0]], setting[pair[1]]


def _known_first(key: str) -> tuple[int, str]:
    name = key.split(".")[-1]
    return (PAIRED_FIRST.index(name) if name in PAIRED_FIRST else len(PAIRED_FIRST), key)


def _cell_note(trial: SettingRuns | None) -> str:
    if trial is None:
        return "no finished run"
    return (
        f"{setting_text(trial.setting)}\n{trial.select.val} {with_spread(trial.score)}\n{trial.measure.test} "
        f"{with_spread(trial.test)}"
    )


def _by_number(value: str) -> tuple[float, str]:
    number = number_of(value)
    return (math.inf if number is None or math.isnan(number) else number, value)


def _notes(label: str, name: str, x: np.ndarray, told: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{label}\n{name} {value:.4g}\n{text}" for value, text in zip(x.tolist(), told, strict=True))
