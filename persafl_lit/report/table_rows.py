"""The rows of the tables: methods, runs, clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from persafl_lit.report.aggregate import (
    ACCURACY,
    LOSS,
    Measure,
    SettingRuns,
    Spread,
    TaskRuns,
    as_float,
    final,
    in_summary,
    method_of,
    seed_of,
    spread,
)
from persafl_lit.report.config_keys import setting_text
from persafl_lit.report.curves import (
    MeanCurve,
    Reached,
    halfway,
    mean_curve,
    speed_up,
    thinned_from,
    thresholds,
    time_to_reach,
)
from persafl_lit.report.record import UNCHANGED, Record, note_of
from persafl_lit.report.schedules import staleness
from persafl_lit.report.tables import (
    MISSING,
    TextTable,
    bytes_text,
    difference_text,
    interval_text,
    number_text,
    ratio_text,
    with_spread,
)

REFERENCE = "fedavg"
"""What times are compared with unless another method is asked for."""
HELD_OUT = "held-out clients"
WORST, GLOBAL = ("worst decile", "worst_decile"), ("global model", "global")
SUMMARY_AGGREGATES = ("val", "test", "worst_decile", "global")
"""What summary.csv has of further metrics."""
SUMMARY_COLUMNS = ("task", "method", "setting", "seeds", "seeds_begun", "selected_on")
RUN_COLUMNS = ("task", "run_id", "method", "setting", "seed", "status", "versions", "val", "test", "error", "note")
CLIENT_COLUMNS = ("task", "method", "setting", "chosen", "seed", "run_id", "status", "note", "client", "arrivals")


@dataclass(frozen=True)
class Facts:
    """What the tables tell of a method's chosen setting."""

    trial: SettingRuns
    scores: dict[str, Spread]
    further: dict[str, dict[str, Spread]]
    """Of metrics beside the one that the task is judged by, by name and aggregate."""
    costs: dict[str, Spread]
    times: dict[float, Timing]
    """By level."""
    difference: Spread | None
    """Of test scores to the reference's, paired by seed; None for the reference itself, and without one."""
    evaluations: str


class Timing(NamedTuple):
    """When the mean curve reaches a level, and how many times sooner than the reference's it can have been, at least
    and at most."""

    reached: Reached | None
    gain: tuple[float, float] | None
    known: bool = True

    def text(self) -> str:
        if self.reached is None:
            return "not reached" if self.known else MISSING
        after, by = self.reached
        if by <= after:
            return "from the start"
        return f"{number_text(after, 1)} to {number_text(by, 1)}" + (
            f" ({ratio_text(*self.gain)})" if self.gain else ""
        )


def levels(task: TaskRuns) -> list[float]:
    """The scores whose times are compared: those asked for, or some that the curves suggest."""
    if task.levels:
        return list(task.levels)
    return thresholds(curves_of(task), task.measure)


def curves_of(task: TaskRuns) -> list[MeanCurve]:
    return [curve for trial in task.chosen if (curve := mean_curve(trial, task.measure.test)) is not None]


def too_low(task: TaskRuns) -> list[float]:
    """Levels at which no speed-up is given: below halfway between the untrained model's score and the best method's."""
    curves, sign = curves_of(task), task.measure.sign
    return [level for level in levels(task) if not curves or sign * level < sign * halfway(curves, sign)]


def facts(task: TaskRuns) -> list[Facts]:
    wanted, low, best = levels(task), too_low(task), task.reference(None)
    quickest = task.reference(REFERENCE)
    reached = {trial.method: _reached(trial, wanted) for trial in task.chosen}
    told = []
    for trial in task.chosen:
        times = {}
        for level in wanted:
            own, theirs = (
                reached[trial.method],
                reached[quickest.method] if quickest and quickest is not trial else None,
            )
            gain = speed_up(theirs[level], own[level]) if theirs and own and level not in low else None
            times[level] = Timing(own[level] if own else None, gain, own is not None)
        difference = trial.minus(best) if best is not None and best is not trial else None
        further = {
            measure.kind: {name: trial.over_seeds(f"{measure.kind}.{name}") for name in SUMMARY_AGGREGATES}
            for measure in task.further
        }
        told.append(Facts(trial, _scores(trial), further, _costs(trial), times, difference, _evaluations(trial)))
    return told


def _reached(trial: SettingRuns, wanted: Sequence[float]) -> dict[float, Reached | None] | None:
    """None without a curve."""
    curve = mean_curve(trial, trial.measure.test)
    return None if curve is None else {level: time_to_reach(curve, level, trial.measure.sign) for level in wanted}


def thinned_curves(task: TaskRuns) -> str:
    """fedavg 4 of 11, fedasync 6 of 11: the chosen settings' curves from which evaluations were left out."""
    return ", ".join(f"{trial.method} {told}" for trial in task.chosen if " of " in (told := _evaluations(trial)))


def _evaluations(trial: SettingRuns) -> str:
    """Of the run that has the fewest, and of how many if some were left out."""
    curve = mean_curve(trial, trial.measure.test)
    if curve is None:
        return MISSING
    wanted = [count for record in trial.runs if (count := thinned_from(record)) is not None]
    return f"{curve.points} of {max(wanted)}" if wanted else f"{curve.points}"


FURTHER_MODELS = {
    "own": "own model",
    "own_tuned": "own model, fine-tuned",
    "shared_tuned": "shared model, fine-tuned",
}
"""Columns of what is measured beside the common fine-tuning, with `eval.beside=[own]`."""


def _scores(trial: SettingRuns) -> dict[str, Spread]:
    """Other than the main ones: the worst clients, the shared model, further fine-tuning rules and held-out clients,
    where known."""
    kind = trial.measure.kind
    found = {name: trial.over_seeds(f"{kind}.{about}") for name, about in (WORST, GLOBAL)}
    rules = dict.fromkeys(rule for record in trial.runs for rule in _mapping(record.summary, "beside"))
    found |= {
        FURTHER_MODELS.get(rule, f"after {rule} rule"): spread(
            _beside(record, rule, trial.measure) for record in trial.runs
        )
        for rule in rules
    }
    return found | {HELD_OUT: spread(_held_out(record, trial.measure) for record in trial.runs)}


def _beside(record: Record, rule: str, measure: Measure) -> float:
    """The test score after another fine-tuning rule."""
    path = () if measure is ACCURACY else ("loss",) if measure is LOSS else ("metrics", measure.kind)
    return in_summary(record, "beside", rule, *path, "test")


def _held_out(record: Record, measure: Measure) -> float:
    """The test score of clients that never train."""
    path = (measure.kind,) if measure in (ACCURACY, LOSS) else ("metrics", measure.kind)
    return in_summary(record, "holdout", *path, "test")


def _costs(trial: SettingRuns) -> dict[str, Spread]:
    """What the runs took and saw."""
    stale = [staleness(record) for record in trial.runs]
    worst = spread(most for _, most in stale)
    return {
        "updates": trial.over_seeds("updates"),
        "versions": trial.over_seeds("versions"),
        "grad_evals": trial.over_seeds("grad_evals"),
        "bytes": spread(as_float(record.bytes_communicated) for record in trial.runs),
        "staleness": spread(mean for mean, _ in stale),
        "staleness_max": worst._replace(mean=max((most for _, most in stale if math.isfinite(most)), default=math.nan)),
        "dropped": spread(_dropped(record) for record in trial.runs),
    }


def _dropped(record: Record) -> float:
    told = in_summary(record, "dropped")
    return float(record.timeline.dropped) if math.isnan(told) and record.timeline is not None else told


def _mapping(values: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    inner = (values or {}).get(key)
    return inner if isinstance(inner, Mapping) else {}


def summary_rows(task: TaskRuns, name: str) -> list[dict[str, Any]]:
    """One row per method, for summary.csv."""
    rows = []
    for told in facts(task):
        trial = told.trial
        row: dict[str, Any] = {"task": name, "method": trial.method, "setting": setting_text(trial.setting)}
        row |= {
            "seeds": len(trial.runs),
            "seeds_begun": trial.begun,
            "selected_on": task.select.val if trial.score.seeds else "nothing",
        }
        scores = {"val": trial.val, "test": trial.test} | (
            {} if task.select == task.measure else {task.select.val: trial.score}
        )
        for column, value in (scores | told.scores | told.costs).items():
            stem = column.replace(" ", "_").replace("-", "_")
            row |= (
                {stem: value.mean}
                if column == "staleness_max"
                else {f"{stem}_mean": value.mean, f"{stem}_std": value.std}
            )
        for kind, values in told.further.items():
            for about, value in values.items():
                row |= {f"{kind}_{about}_mean": value.mean, f"{kind}_{about}_std": value.std}
        row |= dict(zip(("test_ci_low", "test_ci_high"), trial.test.interval, strict=True))
        if told.difference is not None and (reference := task.reference(None)) is not None:
            row |= {
                "difference_to": reference.method,
                "difference_mean": told.difference.mean,
                "difference_seeds": told.difference.seeds,
            }
            row |= dict(zip(("difference_ci_low", "difference_ci_high"), told.difference.interval, strict=True))
        for level, timing in told.times.items():
            reached = timing.reached or (None, None)
            row |= {f"time_to_{level:g}": reached[1], f"time_to_{level:g}_after": reached[0]}
            if (quickest := task.reference(REFERENCE)) is not None:
                gain = timing.gain or (None, None)
                row |= {
                    "speed_up_over": quickest.method,
                    f"speed_up_at_{level:g}_least": gain[0],
                    f"speed_up_at_{level:g}_most": gain[1],
                }
        row["evaluations"] = told.evaluations
        rows.append(row | {f"chosen.{key}": value for key, value in trial.setting})
    for method in no_results(task):
        rows.append(
            {
                "task": name,
                "method": method,
                "seeds": 0,
                "seeds_begun": task.unchanged[method],
                "versions_mean": 0,
                "note": UNCHANGED,
            }
        )
    return rows


def no_results(task: TaskRuns) -> list[str]:
    """Methods of which no run is a result, because their models never changed."""
    return [method for method in task.unchanged if method not in task.trials]


def summary_table(task: TaskRuns) -> TextTable:
    """The same for readers: mean ± std over seeds."""
    kind, all_told, best = task.measure.kind, facts(task), task.reference(None)
    known = dict.fromkeys(name for told in all_told for name, value in told.scores.items() if value.seeds)
    names = sorted(known, key=lambda name: name == HELD_OUT)
    rows = []
    for told in all_told:
        trial, cost = told.trial, {name: value.mean for name, value in told.costs.items()}
        row = {
            "method": trial.method,
            "chosen setting": setting_text(trial.setting),
            f"test {kind}": with_spread(trial.test),
        }
        row["95 % CI"] = interval_text(trial.test)
        if best is not None and len(all_told) > 1:
            row[f"difference to {best.method}"] = (
                difference_text(told.difference) if told.difference is not None else "reference"
            )
        row |= {name: with_spread(told.scores[name]) if name in told.scores else MISSING for name in names}
        row |= {f"test {name}": with_spread(values["test"]) for name, values in told.further.items()}
        row |= {f"validation {kind}": with_spread(trial.val), "seeds": _seeds(trial)}
        row |= (
            {}
            if task.select == task.measure
            else {f"validation {task.select.kind} (selected on)": with_spread(trial.score)}
        )
        row |= {f"time to {level:g}": timing.text() for level, timing in told.times.items()}
        row |= {"evaluations": told.evaluations, "versions": number_text(cost["versions"], 0)}
        row |= {"updates": number_text(cost["updates"], 0), "gradients": number_text(cost["grad_evals"], 0)}
        row["communicated"] = bytes_text(cost["bytes"])
        row["staleness mean / max"] = f"{number_text(cost['staleness'], 2)} / {number_text(cost['staleness_max'], 0)}"
        row["dropped"] = number_text(cost["dropped"], 0 if cost["dropped"] == 0 else 1)
        rows.append(row)
    columns = tuple(rows[0]) if rows else ("method", "chosen setting", "versions")
    for method in no_results(task):
        rows.append(dict.fromkeys(columns, MISSING) | {"method": method, "chosen setting": UNCHANGED, "versions": "0"})
    cells = [list(row.values()) for row in rows]
    return TextTable(columns, cells, frozenset(columns[2:]), frozenset({"chosen setting"}), _table_caption(task))


def _table_caption(task: TaskRuns) -> str:
    if not task.chosen:
        return ""
    best, alone = task.reference(None), [trial.method for trial in task.chosen if trial.test.seeds < 2]
    text = (
        "± is the sample standard deviation over seeds; 95 % CI is Student's t interval of the mean over seeds "
        "(n - 1 degrees of freedom)."
    )
    if best is not None and len(task.chosen) > 1:
        text += (
            f" Differences of test {task.measure.kind} to {best.method}: mean and 95 % interval of the paired t "
            "test over the seeds both have;"
        )
        text += " an interval without 0 is a difference at the 5 % level, not corrected for the number of methods."
    return text + (f" One seed, so no interval: {', '.join(alone)}." if alone else "")


def _seeds(trial: SettingRuns) -> str:
    return str(len(trial.runs)) if len(trial.runs) == trial.begun else f"{len(trial.runs)} of {trial.begun}"


# -- runs and clients --------------------------------------------------------------------------------------------------


def run_rows(records: Sequence[Record], task: TaskRuns | None, name: str) -> list[dict[str, Any]]:
    """Every run, finished or not; without a task those that do not say what they are."""
    measure = task.measure if task else ACCURACY
    further = [f"{other.kind}.test" for other in task.further] if task else []
    further = [task.select.val, *further] if task and task.select != measure else further
    rows = []
    for record in records:
        setting = setting_text(task.setting(record)) if task else ""
        told = (
            name,
            record.run_id,
            method_of(record),
            setting,
            seed_of(record),
            record.status,
            in_summary(record, "versions"),
        )
        scores = (final(record, measure.val), final(record, measure.test))
        row = dict(zip(RUN_COLUMNS, (*told, *scores, record.error, note_of(record)), strict=True))
        rows.append(row | {"further": {name: final(record, name) for name in further}})
    return rows


def run_table(rows: Sequence[Mapping[str, Any]]) -> TextTable:
    """The task is named only if there are several."""
    kept = [
        key
        for key in ("method", "task", "setting", "seed", "status")
        if key != "task" or any(row["task"] for row in rows)
    ]
    further = list(dict.fromkeys(name for row in rows for name in row["further"]))
    cells = []
    for row in rows:
        scores = [number_text(row[key]) for key in ("val", "test")] if not row["note"] else [MISSING, UNCHANGED]
        scores += [MISSING if row["note"] else number_text(row["further"].get(name)) for name in further]
        cells.append([*(str(row[key]) for key in kept), number_text(row["versions"], 0), *scores, str(row["run_id"])])
    numeric = ("versions", "validation", "test", *further)
    return TextTable((*kept, *numeric, "run"), cells, frozenset(numeric), frozenset({"task", "setting"}))


def client_rows(task: TaskRuns, name: str) -> list[dict[str, Any]]:
    """The last evaluation of every run, clients in order of their arrivals."""
    rows = []
    for record, identity in _identified(task, name):
        rows += [
            identity | row
            for row in sorted(
                record.clients, key=lambda row: (as_float(row.get("arrivals")), as_float(row.get("client")))
            )
        ]
    return rows


def _identified(task: TaskRuns, name: str) -> list[tuple[Record, dict[str, Any]]]:
    """Records, each with the columns that say which run it is."""
    chosen = {id(record) for trial in task.chosen for record in trial.runs}
    told = []
    for record in task.records:
        identity = {
            "task": name,
            "method": method_of(record),
            "setting": setting_text(task.setting(record)),
            "chosen": id(record) in chosen,
        }
        identity |= {"seed": seed_of(record), "run_id": record.run_id, "status": record.status}
        told.append((record, identity | {"note": note_of(record)}))
    return told
