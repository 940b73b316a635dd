"""Trials that finished elsewhere: rows of exported runs.csv files, checked, with the curves beside them."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from persafl_lit import __version__
from persafl_lit.common.input_files import plain_file
from persafl_lit.errors import ConfigError, shown
from persafl_lit.learning.metric_names import MEASURED, SIGNS
from persafl_lit.report.export import COSTS, EXPORT_COLUMNS, EXPORTED_AGGREGATES, FURTHER, RESULTS, column_of, key_of
from persafl_lit.report.record import UNCHANGED
from persafl_lit.sweep.plan import Plan, Select
from persafl_lit.sweep.trials import Trial, first_trials, on_other_seeds

Cells = dict[str, str]


@dataclass(frozen=True)
class Exported:
    """A finished trial as a file tells it."""

    file: str
    line: int
    version: str
    commit: str
    results: Mapping[str, Any]
    """By the keys of a summary: accuracy.val, updates, ...; None where the file has no value."""
    curves: dict[str, list[float]] = field(default_factory=dict)

    def summary(self, trial: Trial) -> dict[str, Any]:
        """What the run would have printed, as far as the file has it."""
        found: dict[str, Any] = {"method": trial.method, "seed": trial.seed, "beside": {}, "notes": []}
        for key, value in self.results.items():
            *groups, last = key.split(".")
            node = found
            for group in groups:
                node = node.setdefault(group, {})
            node[last] = value
        return found | {"config": trial.config.values}


@dataclass(frozen=True)
class Finished:
    """What the files of `--finished` hold, by the trials' hashes."""

    trials: Mapping[str, Exported] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Sentences about rows that do not count."""


def read_finished(plan: Plan, files: Sequence[str], any_version: bool = False) -> Finished:
    """Trials of the sweep with status FINISHED, made by this version of persafl_lit unless `any_version`."""
    if plan.search is not None and plan.search.how == "adaptive":
        raise ConfigError(
            f"--finished needs trials that are known beforehand, and an adaptive search proposes them as it goes; "
            f"copy the store and mlruns/sweeps/{plan.name}/optuna.db to this machine instead"
        )
    first = first_trials(plan)
    known = {trial.hash: trial for trial in [*first, *(on_other_seeds(plan, first) if plan.two_stages else ())]}
    found: dict[str, Exported] = {}
    notes: list[str] = []
    for file in files:
        others: dict[str, int] = {}
        elsewhere: dict[str, int] = {}
        needed = [*EXPORT_COLUMNS, *map(column_of, RESULTS), *([] if any_version else ["version"])]
        rows = list(_rows(file, needed, plan.select.metric))
        curves = _read_curves(Path(file).parent / "curves.csv", _further_names(rows[0][1]) if rows else ())
        for line, cells in rows:
            version = cells.get("version", "")
            if cells["status"] != "FINISHED":
                continue
            if version != __version__ and not (any_version and cells["trial"] in known):
                others[version] = others.get(version, 0) + 1
                continue
            target = cells.get("target", "")
            if target not in ("", plan.name) and cells["trial"] not in known:
                elsewhere[target] = elsewhere.get(target, 0) + 1
                continue
            exported = _exported(file, line, cells, known, plan.select, curves)
            _agree(found.setdefault(cells["trial"], exported), exported, cells["trial"])
        if others:
            notes.append(_of_other_versions(file, others, any_version))
        if elsewhere:
            count, names = sum(elsewhere.values()), ", ".join(map(shown, sorted(elsewhere)))
            notes.append(f"{file}: {_rows_text(count)} of other targets ({names}) are no trials of this sweep")
    return Finished(found, tuple(notes))


def _of_other_versions(file: str, versions: Mapping[str, int], any_version: bool) -> str:
    count, names = sum(versions.values()), ", ".join(sorted(version or "unknown" for version in versions))
    what = f"{file}: {_rows_text(count)} of another version ({names}; this is {__version__})"
    return f"{what} {'are no trials of this sweep' if any_version else 'do not count; --any-version counts them'}"


def _rows_text(count: int) -> str:
    return f"{count} finished {'row' if count == 1 else 'rows'}"


def _exported(
    file: str,
    line: int,
    cells: Cells,
    known: Mapping[str, Trial],
    select: Select,
    curves: Mapping[str, dict[str, list[float]]],
) -> Exported:
    place, trial = f"{file}:{line}", known.get(cells["trial"])
    if trial is None:
        raise ConfigError(
            f"{place}: {shown(cells['trial'])} is no trial of this sweep; give the files and overrides that "
            "belong together"
        )
    if (cells["method"], cells["seed"]) != (trial.method, str(trial.seed)):
        told = shown(f"{cells['method']} seed={cells['seed']}")
        raise ConfigError(f"{place}: the trial {trial.hash} is {trial.method} seed={trial.seed}, not {told}")
    further = _further_names(cells)
    metrics = [f"metrics.{name}.{about}" for name in further for about in EXPORTED_AGGREGATES]
    keys = (*RESULTS, *COSTS, *FURTHER, *keys_of_others(cells, further), *metrics)
    results: dict[str, Any] = {key: _result(place, column_of(key), cells.get(column_of(key), "")) for key in keys}
    results |= {key: _direction(place, key, cells) for name in further if (key := f"metrics.{name}.direction")}
    chosen_by = key_of(select.metric)
    if chosen_by != select.metric:  # the sweep knows which values are better, also where the file does not say
        results[chosen_by.replace(".val", ".direction")] = next(word for word in SIGNS if SIGNS[word] == select.sign)
    results = {
        key: value for key, value in results.items() if value is not None or not key.startswith(("beside.", "holdout."))
    }
    if cells.get("note") == UNCHANGED:
        results["model_changed"] = False
    for key in (*RESULTS[:4], chosen_by):
        if results[key] is None:
            raise ConfigError(f"{place}: {column_of(key)} of a finished trial is empty")
    return Exported(file, line, cells.get("version", ""), cells.get("commit", ""), results, curves.get(trial.hash, {}))


def _agree(first: Exported, second: Exported, trial: str) -> None:
    scores = [key for key in first.results if key.startswith("metrics.") and key in second.results]
    for key in (*RESULTS, *scores):
        if first.results[key] != second.results[key]:
            values = f"{column_of(key)} {second.results[key]!r} instead of {first.results[key]!r}"
            raise ConfigError(
                f"{second.file}:{second.line}: the trial {trial} has another result than in "
                f"{first.file}:{first.line}: {values}"
            )


def _result(place: str, column: str, text: str) -> float | None:
    if not text:
        return None
    value = _number(place, column, text)
    if "metrics_" in column:
        return value
    if "accuracy" in column and not 0 <= value <= 1:
        raise ConfigError(f"{place}: {column} must be from 0 to 1; got {shown(text)}")
    if value < 0 and "loss_" not in column:
        raise ConfigError(f"{place}: {column} must be >= 0; got {shown(text)}")
    return value


def _further_names(cells: Mapping[str, str]) -> list[str]:
    """Metrics beside accuracy and loss that a row has columns of."""
    found = map(re.compile(r"metrics_([A-Za-z]\w*)_(?:val|test)", re.ASCII).fullmatch, cells)
    return list(dict.fromkeys(name[1] for name in found if name))


def keys_of_others(cells: Mapping[str, str], further: Sequence[str]) -> list[str]:
    """Scores after further fine-tuning rules and of held-out clients that a row has columns of, by the keys of a
    summary."""
    kinds = {column_of(kind): kind for kind in ("loss", *(f"metrics.{name}" for name in further))}
    longest_first = "|".join(sorted(kinds, key=len, reverse=True))
    form = re.compile(rf"beside_(.+?)(?:_({longest_first}))?_(val|test)")
    keys = [
        ".".join(filter(None, ("beside", found[1], kinds.get(found[2] or ""), found[3])))
        for found in map(form.fullmatch, cells)
        if found
    ]
    held_out = [f"holdout.{kind}.{split}" for kind in ("accuracy", *kinds.values()) for split in ("val", "test")]
    return keys + [key for key in held_out if column_of(key) in cells]


def _direction(place: str, key: str, cells: Cells) -> str | None:
    text = cells.get(column_of(key), "")
    if text and text not in SIGNS:
        raise ConfigError(f"{place}: {column_of(key)} must be {' or '.join(SIGNS)}; got {shown(text)}")
    return text or None


def _number(place: str, column: str, text: str) -> float:
    """A whole number stays one."""
    try:
        value = int(text) if re.fullmatch(r"\d{1,18}", text) else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{place}: {column} must be a finite number; got {shown(text)}")
    return value


def _rows(file: str, needed: Iterable[str], metric: str = "") -> Iterator[tuple[int, Cells]]:
    """Line numbers and cells."""
    try:
        text = plain_file(file, ConfigError).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {shown(file)}: {getattr(error, 'strerror', None) or error}") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        head = next(reader, [])
        for column in needed:
            if column not in head:
                raise ConfigError(f"{file}:1: there is no column {column}; `persafl report` writes such files")
        if metric and (column := column_of(key_of(metric))) not in head:
            raise ConfigError(f"{file}:1: this sweep selects by {metric}, and there is no column {column}")
        if len(set(head)) < len(head):
            raise ConfigError(f"{file}:1: a column is there twice")
        line = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(head):
                raise ConfigError(f"{file}:{line}: {len(cells)} cells under {len(head)} columns")
            if cells:
                yield line, dict(zip(head, cells, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(f"{file}:{reader.line_num}: {error}") from None


# -- curves -----------------------------------------------------------------------------------------------------------


def _read_curves(path: Path, metrics: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """By trial, the columns over the evaluations in order of simulated time; nothing if there is no such file.
    `metrics` are the names of those beside accuracy and loss."""
    if not path.exists():
        return {}
    needed = ("method", "seed", "trial", "sim_time", "updates")
    points: dict[str, dict[float, dict[str, float]]] = {}
    for line, cells in _rows(str(path), needed):
        place = f"{path}:{line}"
        told = {column: text for column, text in cells.items() if column not in ("method", "seed", "trial")}
        values = {
            _metric(column, metrics): _number(place, column, text) if text or column in needed else math.nan
            for column, text in told.items()
        }
        points.setdefault(cells["trial"], {}).setdefault(values["sim_time"], values)  # else a second run of the trial
    found: dict[str, dict[str, list[float]]] = {}
    for trial, by_time in points.items():
        ordered = [by_time[time] for time in sorted(by_time)]
        found[trial] = {key: [values[key] for values in ordered] for key in ordered[0]}
    return found


def _metric(column: str, metrics: Sequence[str]) -> str:
    """accuracy_val is accuracy.val, own_accuracy_test is own.accuracy.test, holdout_f1_test is holdout.f1.test."""
    kinds = "|".join(sorted((*MEASURED, *metrics), key=len, reverse=True))
    form = rf"^(?:(holdout)_)?(?:(.+?)_)??({kinds})_({'|'.join(EXPORTED_AGGREGATES)})$"
    return re.sub(form, lambda parts: ".".join(part for part in parts.groups() if part), column)
