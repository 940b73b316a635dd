"""A report's content, before it becomes a page or markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from persafl_lit.common.csv_table import to_csv
from persafl_lit.errors import ConfigError, closest
from persafl_lit.report import table_rows as rows
from persafl_lit.report.aggregate import ACCURACY, SettingRuns, TaskRuns, tasks_of
from persafl_lit.report.chart import Chart, Heat, file_stem
from persafl_lit.report.config_keys import NONE, differing
from persafl_lit.report.export import curves_csv, runs_csv
from persafl_lit.report.prose import method_words, missing, verdict
from persafl_lit.report.record import Record
from persafl_lit.report.tables import TextTable, latex_file, table_of
from persafl_lit.report.task_charts import charts_of, value_chart

MOST_NAMED_KEYS = 4
ID_COLUMNS = ("method", "setting", "seed")


@dataclass(frozen=True)
class Part:
    """One task, or a comparison across tasks."""

    heading: str
    """Empty if there is only one."""
    verdict: str
    task: TaskRuns | None
    charts: list[tuple[str, Chart | Heat]]
    """With the stem of their files."""
    table: TextTable | None
    words: list[str]
    suffix: str = ""
    """Of file names."""


@dataclass(frozen=True)
class Content:
    title: str
    lead: list[str]
    parts: list[Part]
    runs: TextTable
    missing: TextTable
    words: list[tuple[str, list[str]]]
    """(heading, sentences): what holds for all parts comes first, under no heading."""
    files: dict[str, str]
    """CSV and LaTeX files by name."""


def content_of(
    records: Sequence[Record], title: str, levels: Sequence[float] = (), against: str | None = None
) -> Content:
    """`levels` are the scores whose times are asked for, `against` the method that others are compared with."""
    tasks = tasks_of(records, levels, against)
    _check_levels(tasks, levels)
    _check_reference(tasks, against)
    names = _task_names(tasks)
    parts = [
        _part(task, name, f"_{number}" if len(tasks) > 1 else "")
        for number, (task, name) in enumerate(zip(tasks, names, strict=True), 1)
    ]
    parts += _across(tasks)
    known = {id(record) for task in tasks for record in task.records}
    strangers = [record for record in records if id(record) not in known]
    run_rows = [row for task, name in zip(tasks, names, strict=True) for row in rows.run_rows(task.records, task, name)]
    run_rows += rows.run_rows(strangers, None, "")
    files = _csv_files(records, tasks, names) | _latex_files(tasks, names, parts, run_rows)
    return Content(
        title, _lead(records, tasks), parts, rows.run_table(run_rows), missing(records, tasks), _words(parts), files
    )


def _check_levels(tasks: Sequence[TaskRuns], levels: Sequence[float]) -> None:
    if tasks and max(levels, default=0.0) > 1 and all(task.measure is ACCURACY for task in tasks):
        raise ConfigError(f"no accuracy reaches a level above 1; got {max(levels):g}, write 0.7 for 70 %")


def _check_reference(tasks: Sequence[TaskRuns], against: str | None) -> None:
    methods = sorted({trial.method for task in tasks for trial in task.chosen})
    if against and methods and not any(trial.is_called(against) for task in tasks for trial in task.chosen):
        raise ConfigError(
            f"no result of {against!r} to compare with; there are {', '.join(methods)}.{closest(against, methods)}"
        )


def _words(parts: Sequence[Part]) -> list[tuple[str, list[str]]]:
    """What every task's part says is said once."""
    speaking = [part for part in parts if part.words]
    common = [text for text in speaking[0].words if all(text in part.words for part in speaking)] if speaking else []
    own = [(part.heading, [text for text in part.words if text not in common]) for part in speaking]
    return [(heading, texts) for heading, texts in [("", common), *own] if texts]


def _part(task: TaskRuns, name: str, suffix: str) -> Part:
    charts = [(file_stem(chart.name) + suffix, chart) for chart in charts_of(task)]
    table = rows.summary_table(task) if task.chosen or task.unchanged else None
    return Part(name, verdict(task), task, _unique(charts), table, method_words(task), suffix)


def _unique(charts: list[tuple[str, Chart | Heat]]) -> list[tuple[str, Chart | Heat]]:
    """Different names may give one file name: then they are numbered."""
    seen: dict[str, int] = {}
    named = []
    for stem, chart in charts:
        seen[stem.lower()] = seen.get(stem.lower(), 0) + 1
        named.append((stem if seen[stem.lower()] == 1 else f"{stem}~{seen[stem.lower()]}", chart))
    return named


def _task_names(tasks: Sequence[TaskRuns]) -> list[str]:
    """What tells each task from the others: data.name=mnist; nothing if there is only one."""
    keys = differing([task.values for task in tasks])
    named = [key for key in keys if key.endswith(".name")] or keys
    names = [
        ", ".join(f"{key}={dict(task.values).get(key, NONE)}" for key in named[:MOST_NAMED_KEYS]) for task in tasks
    ]
    return (
        names if len(set(names)) == len(names) else [f"task {number}: {name}" for number, name in enumerate(names, 1)]
    )


def _across(tasks: Sequence[TaskRuns]) -> list[Part]:
    """Where exactly one key makes the tasks (say, classes per client), the methods over its values."""
    keys = differing([task.values for task in tasks])
    if len(keys) != 1 or len({task.measure for task in tasks}) != 1:
        return []
    (key,) = keys
    methods: dict[str, dict[str, SettingRuns]] = {}
    for task in tasks:
        for trial in task.chosen:
            methods.setdefault(trial.method, {})[dict(task.values).get(key, NONE)] = trial
    if not any(len(values) > 1 for values in methods.values()):
        return []
    caption = (
        "Each method with the setting chosen on validation data for each value; mean and standard deviation over seeds."
    )
    chart = value_chart(tasks[0], f"across_{key}", f"Methods over {key}", caption, key, methods)
    return [Part(f"Across {key}", "", None, [(file_stem(chart.name), chart)], None, [])]


def _lead(records: Sequence[Record], tasks: Sequence[TaskRuns]) -> list[str]:
    if not records:
        return ["There are no runs in this report."]
    lead = [_progress(records)]
    if unchanged := sum(count for task in tasks for count in task.unchanged.values()):
        lead.append(
            f"In {unchanged} of the finished runs the model never changed: "
            f"{'it is no result' if unchanged == 1 else 'they are no results'}."
        )
    if not tasks:
        return [*lead, "None of them says which method it ran, so there is nothing to compare."]
    if len(tasks) == 1:
        return [verdict(tasks[0]), *lead]
    keys = ", ".join(differing([task.values for task in tasks])[:12])
    return [
        *lead,
        f"They answer {len(tasks)} different tasks, which are compared separately; the tasks differ in {keys}.",
    ]


def _progress(records: Sequence[Record]) -> str:
    """How many runs finished; of a sweep, of all that it has, also those that it has not begun."""
    finished, counts = (
        sum(record.status == "FINISHED" for record in records),
        {record.target: record.planned for record in records},
    )
    planned = sum(count or 0 for count in counts.values()) if None not in counts.values() else None
    if (
        planned is None or planned < len(records) or finished == planned
    ):  # its second stage is planned only when the first is done
        return f"{finished} of {len(records)} runs finished."
    text = f"{finished} of {planned} planned trials finished"
    failed, pruned = (
        sum(found)
        for found in ((record.status == "FAILED" for record in records), (record.pruned for record in records))
    )
    if finished + failed + pruned < planned:
        return f"{text}; the sweep is still running or was interrupted."
    return f"{text}; {failed} failed, {pruned} pruned." if pruned else f"{text}; {failed} failed."


def _csv_files(records: Sequence[Record], tasks: Sequence[TaskRuns], names: Sequence[str]) -> dict[str, str]:
    named = list(zip(tasks, names, strict=True))
    return {
        "summary.csv": to_csv(
            [row for task, name in named for row in rows.summary_rows(task, name)], rows.SUMMARY_COLUMNS
        ),
        "runs.csv": runs_csv(records),
        "curves.csv": curves_csv(records),
        "clients.csv": to_csv(
            [row for task, name in named for row in rows.client_rows(task, name)], rows.CLIENT_COLUMNS
        ),
    }


def _latex_files(
    tasks: Sequence[TaskRuns], names: Sequence[str], parts: Sequence[Part], run_rows: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """What the page shows as tables, and the other CSV files' main columns."""
    named = list(zip(tasks, names, strict=True))
    further = dict.fromkeys(measure.client_column for task in tasks for measure in task.further)
    columns = ("task", *ID_COLUMNS, "client", "arrivals", "samples", "test_accuracy", "test_loss", *further)
    clients = table_of([row for task, name in named for row in rows.client_rows(task, name)], columns)
    tables = {
        "summary": [part.table for part in parts if part.table],
        "runs": [rows.run_table(run_rows)],
        "clients": [clients],
    }
    return {f"{name}.tex": latex_file(found) for name, found in tables.items()}
