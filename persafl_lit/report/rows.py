"""The rows of the tables: methods, runs, clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persafl_lit.report.aggregate import ACCURACY, LOSS, Spread, Task, Trial, as_float, final, in_summary, method_of, seed_of, spread
from persafl_lit.report.curves import mean_curve, thresholds, time_to_reach
from persafl_lit.report.keys import setting_text
from persafl_lit.report.record import Record
from persafl_lit.report.schedules import staleness
from persafl_lit.report.tables import MISSING, Table, bytes_text, number_text, with_spread

REFERENCE = "fedavg"
HELD_OUT = "held-out clients"
SUMMARY_COLUMNS = ("task", "method", "setting", "seeds", "seeds_begun", "selected_on")
RUN_COLUMNS = ("task", "run_id", "method", "setting", "seed", "status", "val", "test", "error")
CLIENT_COLUMNS = ("task", "method", "setting", "chosen", "seed", "run_id", "status", "client", "arrivals")


@dataclass(frozen=True)
class Facts:
    """What the tables tell of a method's chosen setting."""

    trial: Trial
    scores: dict[str, Spread]
    costs: dict[str, Spread]
    times: dict[float, tuple[float | None, float | None]]
    """Level: when the mean curve reaches it, and how many times sooner than the reference's."""


def levels(task: Task) -> list[float]:
    """The scores whose times are compared: those asked for, or some that the curves suggest."""
    if task.levels:
        return list(task.levels)
    curves = {trial.method: curve for trial in task.chosen if (curve := mean_curve(trial, task.measure.test)) is not None}
    return thresholds(list(curves.values()), task.measure, curves.get(REFERENCE))


def facts(task: Task) -> list[Facts]:
    wanted = levels(task)
    times = {trial.method: [_time_to(trial, level) for level in wanted] for trial in task.chosen}
    reference = times.get(REFERENCE, [None] * len(wanted))
    gains = {method: [speed_up(*pair) for pair in zip(reference, reached, strict=True)] for method, reached in times.items()}
    return [
        Facts(trial, _scores(trial), _costs(trial), dict(zip(wanted, zip(times[trial.method], gains[trial.method], strict=True), strict=True)))
        for trial in task.chosen
    ]


def _time_to(trial: Trial, level: float) -> float | None:
    curve = mean_curve(trial, trial.measure.test)
    return None if curve is None else time_to_reach(curve.times, curve.mean, level, trial.measure.sign)


def speed_up(reference: float | None, time: float | None) -> float | None:
    """None where either never arrives, or is there from the start."""
    return reference / time if reference and time else None


def _scores(trial: Trial) -> dict[str, Spread]:
    """Other than the main ones: the worst clients, the shared model, further fine-tuning rules and held-out clients, where known."""
    kind = trial.measure.kind
    found = {"global model": trial.over_seeds(f"{kind}.global")}
    if trial.measure is not LOSS:
        rules = dict.fromkeys(rule for record in trial.runs for rule in _mapping(record.summary, "beside"))
        found = {"worst decile": trial.over_seeds("accuracy.worst_decile")} | found
        found |= {f"after {rule} rule": spread(in_summary(record, "beside", rule, "test") for record in trial.runs) for rule in rules}
    return found | {HELD_OUT: spread(in_summary(record, "holdout", kind, "test") for record in trial.runs)}


def _costs(trial: Trial) -> dict[str, Spread]:
    """What the runs took and saw."""
    stale = [staleness(record) for record in trial.runs]
    worst = spread(most for _, most in stale)
    return {
        "updates": trial.over_seeds("updates"),
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


def summary_rows(task: Task, name: str) -> list[dict[str, Any]]:
    """One row per method, for summary.csv."""
    rows = []
    for told in facts(task):
        trial = told.trial
        row: dict[str, Any] = {"task": name, "method": trial.method, "setting": setting_text(trial.setting)}
        row |= {"seeds": len(trial.runs), "seeds_begun": trial.begun, "selected_on": task.select.val if trial.score.seeds else "nothing"}
        scores = {"val": trial.val, "test": trial.test} | ({} if task.select == task.measure else {task.select.val: trial.score})
        for column, value in (scores | told.scores | told.costs).items():
            stem = column.replace(" ", "_").replace("-", "_")
            row |= {stem: value.mean} if column == "staleness_max" else {f"{stem}_mean": value.mean, f"{stem}_std": value.std}
        for level, (time, gain) in told.times.items():
            row[f"time_to_{level:g}"] = time
            if REFERENCE in task.trials:
                row[f"speed_up_at_{level:g}"] = gain
        rows.append(row | {f"chosen.{key}": value for key, value in trial.setting})
    return rows


def summary_table(task: Task) -> Table:
    """The same for readers: mean ± std over seeds."""
    kind, all_told = task.measure.kind, facts(task)
    known = dict.fromkeys(name for told in all_told for name, value in told.scores.items() if value.seeds)
    names = sorted(known, key=lambda name: name == HELD_OUT)
    rows = []
    for told in all_told:
        trial, cost = told.trial, {name: value.mean for name, value in told.costs.items()}
        row = {"method": trial.method, "chosen setting": setting_text(trial.setting), f"test {kind}": with_spread(trial.test)}
        row |= {name: with_spread(told.scores[name]) if name in told.scores else MISSING for name in names}
        row |= {f"validation {kind}": with_spread(trial.val), "seeds": _seeds(trial)}
        row |= {} if task.select == task.measure else {f"validation {task.select.kind} (selected on)": with_spread(trial.score)}
        for level, (time, gain) in told.times.items():
            row[f"time to {level:g}"] = number_text(time, 1) + (f" ({gain:.2f}x)" if gain is not None else "")
        row |= {"updates": number_text(cost["updates"], 0), "gradients": number_text(cost["grad_evals"], 0)}
        row["communicated"] = bytes_text(cost["bytes"])
        row["staleness mean / max"] = f"{number_text(cost['staleness'], 2)} / {number_text(cost['staleness_max'], 0)}"
        row["dropped"] = number_text(cost["dropped"], 0 if cost["dropped"] == 0 else 1)
        rows.append(row)
    columns = tuple(rows[0]) if rows else ()
    return Table(columns, [list(row.values()) for row in rows], frozenset(columns[2:]), frozenset({"chosen setting"}))


def _seeds(trial: Trial) -> str:
    return str(len(trial.runs)) if len(trial.runs) == trial.begun else f"{len(trial.runs)} of {trial.begun}"


# -- runs and clients --------------------------------------------------------------------------------------------------


def run_rows(records: Sequence[Record], task: Task | None, name: str) -> list[dict[str, Any]]:
    """Every run, finished or not; without a task those that do not say what they are."""
    measure = task.measure if task else ACCURACY
    rows = []
    for record in records:
        setting = setting_text(task.setting(record)) if task else ""
        told = (name, record.run_id, method_of(record), setting, seed_of(record), record.status)
        scores = (final(record, measure.val), final(record, measure.test))
        rows.append(dict(zip(RUN_COLUMNS, (*told, *scores, record.error), strict=True)))
    return rows


def run_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The task is named only if there are several."""
    kept = [key for key in ("method", "task", "setting", "seed", "status") if key != "task" or any(row["task"] for row in rows)]
    cells = [[*(str(row[key]) for key in kept), number_text(row["val"]), number_text(row["test"]), str(row["run_id"])] for row in rows]
    return Table((*kept, "validation", "test", "run"), cells, frozenset({"validation", "test"}), frozenset({"task", "setting"}))


def client_rows(task: Task, name: str) -> list[dict[str, Any]]:
    """The last evaluation of every run, clients in order of their arrivals."""
    rows = []
    for record, identity in _identified(task, name):
        rows += [identity | row for row in sorted(record.clients, key=lambda row: (as_float(row.get("arrivals")), as_float(row.get("client"))))]
    return rows


def _identified(task: Task, name: str) -> list[tuple[Record, dict[str, Any]]]:
    """Records, each with the columns that say which run it is."""
    chosen = {id(record) for trial in task.chosen for record in trial.runs}
    told = []
    for record in task.records:
        identity = {"task": name, "method": method_of(record), "setting": setting_text(task.setting(record)), "chosen": id(record) in chosen}
        told.append((record, identity | {"seed": seed_of(record), "run_id": record.run_id, "status": record.status}))
    return told
