"""Numbers from records: tasks, the settings tried on each, means over seeds, and the setting chosen per method.

A setting is chosen by its mean VALIDATION score at the end of its runs, by the metric that the runs' sweep chooses by;
test scores are only ever reported.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from persafl_lit.learning.metric_names import SIGNS
from persafl_lit.report.config_keys import KeyValues, setting_of, task_of, varied_keys
from persafl_lit.report.palette import Style, style_of
from persafl_lit.report.record import Record, model_changed

UNKNOWN = "(unknown)"
CONFIDENCE = 0.95


class Spread(NamedTuple):
    """Mean and sample standard deviation over seeds; the latter is nan for fewer than two."""

    mean: float
    std: float
    seeds: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean, mean -+ t(0.975; n - 1) std / sqrt(n) with Student's t; nan for
        fewer than two seeds."""
        half = (
            float(stdtrit(self.seeds - 1, (1 + CONFIDENCE) / 2)) * self.std / math.sqrt(self.seeds)
            if self.seeds > 1
            else math.nan
        )
        return self.mean - half, self.mean + half


def spread(values: Iterable[float]) -> Spread:
    known = [value for value in values if math.isfinite(value)]
    mean = statistics.fmean(known) if known else math.nan  # as the sweep's: settings that tie there tie here
    return Spread(mean, float(np.std(known, ddof=1)) if len(known) > 1 else math.nan, len(known))


@dataclass(frozen=True)
class Measure:
    """What a task is judged by, or its settings are chosen by."""

    kind: str
    sign: int
    """+1 if higher is better, -1 if lower, 0 if unknown: such a metric is only ever shown."""

    @property
    def val(self) -> str:
        return f"{self.kind}.val"

    @property
    def test(self) -> str:
        return f"{self.kind}.test"

    @property
    def client_column(self) -> str:
        return f"test_{self.kind}"


ACCURACY, LOSS = Measure("accuracy", 1), Measure("loss", -1)
SELECTABLE = {measure.val: measure for measure in (ACCURACY, LOSS)}


def as_float(value: Any) -> float:
    """A number, nan for anything that is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def method_of(record: Record) -> str:
    """Its name, with the schedule where it is run on several, and with what the run was found by where there are
    several targets: there the same method may be tried twice."""
    name = f"{plain_method(record)}, {record.schedule}" if record.schedule else plain_method(record)
    return f"{name} ({record.target})" if record.target else name


def plain_method(record: Record) -> str:
    return str(record.config.get("method.name", UNKNOWN))


def seed_of(record: Record) -> str:
    return str(record.config.get("seed", "?"))


def column(record: Record, name: str) -> np.ndarray:
    """A column of the curves, empty if it is not there or does not fit the times."""
    values = [as_float(value) for value in record.curves.get(name) or ()]
    return np.array(values if len(values) == len(record.curves.get("sim_time") or ()) else [])


def final(record: Record, name: str) -> float:
    """A metric at the end of a run: the last point of its curve, or what its summary says, or nan."""
    values = column(record, name)
    if len(values) and math.isfinite(values[-1]):
        return float(values[-1])
    told = in_summary(record, *name.split("."))
    return in_summary(record, "metrics", *name.split(".")) if math.isnan(told) else told


def in_summary(record: Record, *path: str) -> float:
    found: Any = record.summary
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return as_float(found)


@dataclass(frozen=True)
class SettingRuns:
    """One setting of one method: its finished runs, one per seed."""

    method: str
    setting: KeyValues
    runs: tuple[Record, ...]
    begun: int
    """Seeds that were started, finished or not."""
    measure: Measure
    """What is reported."""
    select: Measure
    """What settings are chosen by."""

    @property
    def style(self) -> Style:
        """The method's own colour; of a second target, and in rounds beside another schedule, it has another dash."""
        first = self.runs[0]
        return style_of(plain_method(first), first.target_number + (first.schedule == "rounds"))

    def is_called(self, name: str) -> bool:
        return name in (self.method, plain_method(self.runs[0]))

    def over_seeds(self, name: str) -> Spread:
        return spread(final(record, name) for record in self.runs)

    @property
    def val(self) -> Spread:
        return self.over_seeds(self.measure.val)

    @property
    def test(self) -> Spread:
        return self.over_seeds(self.measure.test)

    @property
    def score(self) -> Spread:
        """What settings and methods are ranked by, a validation score."""
        return self.over_seeds(self.select.val)

    def minus(self, other: SettingRuns) -> Spread:
        """Differences of test scores, paired: one per seed that both have."""
        theirs = {seed_of(record): final(record, self.measure.test) for record in other.runs}
        return spread(final(record, self.measure.test) - theirs.get(seed_of(record), math.nan) for record in self.runs)

    @property
    def seeds(self) -> tuple[str, ...]:
        return tuple(seed_of(record) for record in self.runs)

    def on(self, seeds: Collection[str]) -> SettingRuns:
        """The same setting as if it had been run on these seeds only."""
        return replace(self, runs=tuple(record for record in self.runs if seed_of(record) in seeds))

    def rank(self) -> tuple[bool, float]:
        """Sorts the best validation score first and those without one last, in the order they came."""
        mean = self.score.mean
        return (not math.isfinite(mean), -self.select.sign * mean if math.isfinite(mean) else 0.0)


@dataclass(frozen=True)
class TaskRuns:
    """The runs that answer one question: the same data, model, delays, length and evaluation."""

    values: KeyValues
    measure: Measure
    select: Measure
    records: tuple[Record, ...]
    keys: dict[str, list[str]]
    """The keys that each method's runs vary."""
    trials: dict[str, list[SettingRuns]]
    """Per method, settings with at least one finished run."""
    levels: tuple[float, ...] = ()
    """Scores whose times are asked for; without any the report chooses some."""
    against: str | None = None
    """The method that others are compared with, if one is asked for."""

    @property
    def further(self) -> list[Measure]:
        """What the chosen runs have beside what the task is judged by: other metrics, by name, and loss where one of
        them is it."""
        runs = [record for trials in self.trials.values() for trial in trials for record in trial.runs]
        names = sorted({name for record in runs for name in further_names(record)} - {self.measure.kind})
        shown = [_further(runs, name) or Measure(name, 0) for name in names]
        shown += [LOSS] if self.measure not in (ACCURACY, LOSS) else []
        return [measure for measure in shown if any(math.isfinite(final(record, measure.test)) for record in runs)]

    def reference(self, otherwise: str | None) -> SettingRuns | None:
        """What others are compared with: what was asked for, else this method, else the best on validation data; None
        if it is not here. Of a method that several targets have, it is the first target's, unless `METHOD (TARGET)`
        says which."""
        if (name := self.against or otherwise) is None:
            return self.chosen[0] if self.chosen and self.chosen[0].score.seeds else None
        called = [trial for trial in self.chosen if trial.is_called(name)]
        return min(called, key=lambda trial: (trial.method != name, trial.runs[0].target_number), default=None)

    @property
    def unchanged(self) -> dict[str, int]:
        """Per method, finished runs whose model never changed: they are no results."""
        return dict(
            Counter(
                method_of(record)
                for record in self.records
                if record.status == "FINISHED" and not model_changed(record.summary)
            )
        )

    @property
    def chosen(self) -> list[SettingRuns]:
        """Each method's best setting on validation data, the best method first."""
        return sorted((best(trials) for trials in self.trials.values()), key=SettingRuns.rank)

    @property
    def unselected(self) -> list[str]:
        """Methods with several settings and no validation score to choose by: their first is shown."""
        return [method for method, trials in self.trials.items() if len(trials) > 1 and best(trials).rank()[0]]

    def setting(self, record: Record) -> KeyValues:
        return setting_of(record, self.keys[method_of(record)])


def best(trials: Sequence[SettingRuns]) -> SettingRuns:
    """A setting with fewer finished seeds than another has not been tried as hard, and does not compete.

    Of equal ones it is the first by name, as the sweep chooses.
    """

    def tried(trial: SettingRuns) -> tuple[int, int]:
        return trial.score.seeds, len(trial.runs)

    most = max(map(tried, trials))
    return min((trial for trial in trials if tried(trial) == most), key=lambda trial: (trial.rank(), trial.setting))


def common_seeds(trials: Sequence[SettingRuns]) -> tuple[str, ...]:
    """The seeds that every one of these settings has finished: what can be compared fairly. In two stages that is the
    first seed."""
    return tuple(seed for seed in trials[0].seeds if all(seed in trial.seeds for trial in trials))


def on_common_seeds(trials: Sequence[SettingRuns]) -> list[SettingRuns]:
    """The settings on the seeds that all of them have; as they are if there is none."""
    seeds = common_seeds(trials)
    return [trial.on(seeds) for trial in trials] if seeds else list(trials)


def seeds_text(seeds: Sequence[str]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"


def tasks_of(records: Sequence[Record], levels: Sequence[float] = (), against: str | None = None) -> list[TaskRuns]:
    """Records sorted by task, in the order in which tasks first appear. Records that do not know their method are left
    out."""
    groups: dict[KeyValues, list[Record]] = {}
    for record in records:
        if plain_method(record) != UNKNOWN:
            groups.setdefault(task_of(record.config), []).append(record)
    return [_task(values, _with_schedules(group), levels, against) for values, group in groups.items()]


def _with_schedules(records: Sequence[Record]) -> list[Record]:
    """Runs of a method on several schedules are told apart by them: they are another method to a comparison, not other
    settings to choose from."""
    schedules: dict[str, set[str]] = {}
    for record in records:
        schedules.setdefault(plain_method(record), set()).add(schedule_of(record))
    several = {method for method, found in schedules.items() if len(found) > 1}
    return [
        replace(record, schedule=schedule_of(record)) if plain_method(record) in several else record
        for record in records
    ]


def schedule_of(record: Record) -> str:
    return str(record.config.get("schedule.name", UNKNOWN))


def _task(values: KeyValues, records: Sequence[Record], levels: Sequence[float], against: str | None) -> TaskRuns:
    measure = _measure(records)
    select = _select(records, measure)
    by_method: dict[str, list[Record]] = {}
    for record in records:
        by_method.setdefault(method_of(record), []).append(record)
    # A method of several targets has the keys in which any of them differ: they tell its settings apart.
    named = {method: (plain_method(runs[0]), runs[0].schedule) for method, runs in by_method.items()}
    keys = {
        method: varied_keys([record for record in records if (plain_method(record), record.schedule) == name])
        for method, name in named.items()
    }
    trials = {method: _trials(method, runs, keys[method], measure, select) for method, runs in by_method.items()}
    tried = {method: found for method, found in trials.items() if found}
    return TaskRuns(values, measure, select, tuple(records), keys, tried, tuple(levels), against)


def _measure(records: Sequence[Record]) -> Measure:
    """Accuracy if it can be both selected on and reported, or if loss could be neither. Without accuracy, what the
    runs' sweep chooses by, or loss."""

    def known(name: str) -> bool:
        return any(record.status == "FINISHED" and math.isfinite(final(record, name)) for record in records)

    selectable = known(ACCURACY.val) or not known(LOSS.val)
    if (known(ACCURACY.test) and selectable) or not known(LOSS.test):
        return ACCURACY
    wanted = wanted_metrics(records)
    further = _further(records, wanted[0].removesuffix(".val")) if len(wanted) == 1 else None
    return further if further is not None and known(further.val) and known(further.test) else LOSS


def wanted_metrics(records: Sequence[Record]) -> list[str]:
    """What the sweeps of these runs choose by."""
    return sorted({record.select for record in records if record.select})


def _select(records: Sequence[Record], measure: Measure) -> Measure:
    """What the runs' sweep chooses by, if they agree and every finished run has it; else what is reported."""
    wanted = wanted_metrics(records)
    select = (
        SELECTABLE.get(wanted[0]) or _further(records, wanted[0].removesuffix(".val")) or measure
        if len(wanted) == 1
        else measure
    )
    known = all(math.isfinite(final(record, select.val)) for record in records if usable(record, measure))
    return select if known else measure


def _further(records: Sequence[Record], name: str) -> Measure | None:
    """A metric beside accuracy and loss, if the runs say which of its values are better."""
    told = {str(further_names(record).get(name)) for record in records}
    return Measure(name, SIGNS[direction]) if (direction := next(iter(told & set(SIGNS)), None)) else None


def further_names(record: Record) -> dict[str, Any]:
    """Metrics beside accuracy and loss, each with its direction if that is known: higher or lower."""
    told = (record.summary or {}).get("metrics")
    metrics = told.items() if isinstance(told, Mapping) else ()
    return {str(name): about.get("direction") for name, about in metrics if isinstance(about, Mapping)}


def usable(record: Record, measure: Measure) -> bool:
    """Whether the run is a result."""
    return record.status == "FINISHED" and math.isfinite(final(record, measure.test)) and model_changed(record.summary)


def _trials(
    method: str, records: Sequence[Record], keys: Sequence[str], measure: Measure, select: Measure
) -> list[SettingRuns]:
    groups: dict[KeyValues, list[Record]] = {}
    for record in records:
        groups.setdefault(setting_of(record, keys), []).append(record)
    trials = []
    for setting, runs in groups.items():
        per_seed: dict[str, Record] = {}
        for record in runs:  # a setting repeated with one seed is the same run again: the first counts
            if usable(record, measure):
                per_seed.setdefault(seed_of(record), record)
        finished = tuple(per_seed[seed] for seed in sorted(per_seed, key=lambda seed: (as_float(seed), seed)))
        if finished:
            trials.append(
                SettingRuns(method, setting, finished, len({seed_of(record) for record in runs}), measure, select)
            )
    return trials
