"""Results as data: runs.csv and curves.csv, which `persafl sweep --finished` reads back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from persafl_lit.report.aggregate import method_of, seed_of
from persafl_lit.report.keys import is_neutral, text_of
from persafl_lit.report.record import Record
from persafl_lit.report.tables import to_csv

IDENTITY = ("method", "seed", "status", "trial")
RESULTS = ("sim_time", "updates", "versions", "grad_evals", "accuracy.val", "accuracy.test")
COSTS = ("bytes_communicated", "wall_seconds")
FURTHER = (
    *(f"accuracy.{name}" for name in ("std", "worst_decile", "global")),
    *(f"loss.{name}" for name in ("val", "test", "global")),
    *("staleness.mean", "staleness.max", "concurrency", "dropped", "skipped", "evaluation_share"),
)
"""Keys of a summary; in a file, `accuracy.val` is the column accuracy_val."""
CURVES = (
    *("sim_time", "updates", "grad_evals", "bytes_communicated"),
    *(f"accuracy.{name}" for name in ("val", "test", "std", "worst_decile", "global")),
    "loss.test",
)


def column_of(key: str) -> str:
    return key.replace(".", "_")


def runs_csv(records: Sequence[Record]) -> str:
    """One row per run, finished or not; results only of finished ones. Floats read back to the same bits."""
    fixed = {*IDENTITY, *map(column_of, (*RESULTS, *COSTS, *FURTHER))}
    varied = {key: f"config.{key}" if key in fixed else key for key in _varied(records)}
    scores = sorted({key for record in records for key in _further_scores(record)})
    rows = []
    for record in _ordered(records):
        row = _identity(record) | {"status": record.status, "version": record.version, "commit": record.commit}
        row |= {column_of(key): _in_summary(record, key) for key in (*RESULTS, *COSTS, *FURTHER, *scores)}
        row |= {"error": record.error, "run_id": record.run_id}
        rows.append(row | {name: _cell(record.config[key]) for key, name in varied.items() if key in record.config})
    summary = map(column_of, (*FURTHER, *scores))
    return to_csv(rows, [*IDENTITY, *map(column_of, RESULTS), COSTS[0], "version", COSTS[1], *summary, "commit", "error", "run_id", *varied.values()])


def curves_csv(records: Sequence[Record]) -> str:
    """One row per evaluation of every run, in order; other metrics that a run's evaluations have follow the usual ones."""
    rows = []
    for record in _ordered(records):
        points = len(record.curves.get("sim_time") or [])
        whole = {column_of(key): values for key, values in record.curves.items() if len(values) == points}
        rows += [_identity(record) | {key: values[i] for key, values in whole.items()} for i in range(points)]
    known = {key for row in rows for key in row}
    usual = [column_of(key) for key in CURVES if key != "bytes_communicated" or key in known]
    identity = ("method", "seed", "trial")
    return to_csv(rows, [*identity, *usual, *sorted(known - {*identity, *usual})])


def _ordered(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: (method_of(record), str(seed_of(record)).zfill(20), record.trial, record.run_id))


def _identity(record: Record) -> dict[str, Any]:
    return {"method": method_of(record), "seed": seed_of(record), "trial": record.trial}


def _in_summary(record: Record, key: str) -> Any:
    if record.status != "FINISHED":
        return None
    found: Any = record.summary
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _further_scores(record: Record) -> list[str]:
    """Of the end, by further fine-tuning rules and of held-out clients, where there are any."""
    rules = _in_summary(record, "beside")
    groups = [*(f"beside.{rule}" for rule in rules or ()), "holdout.accuracy"]
    groups += [f"metrics.{name}" for name in _in_summary(record, "metrics") or ()]
    return [key for group in groups for key in (f"{group}.val", f"{group}.test") if _in_summary(record, key) is not None]


def _varied(records: Sequence[Record]) -> list[str]:
    """Keys that differ between the runs; those of the method and its schedule only if they differ between runs of one method."""
    methods = {method_of(record) for record in records}
    found = set(_differing(records))
    own = {key for method in methods for key in _differing([record for record in records if method_of(record) == method])}
    return sorted(key for key in found if key in own or key.split(".")[0] not in ("method", "schedule"))


def _differing(records: Sequence[Record]) -> list[str]:
    keys = {key for record in records for key in record.config if not is_neutral(key)}
    return [key for key in keys if len({text_of(record.config.get(key)) for record in records}) > 1]


def _cell(value: Any) -> Any:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else text_of(value)
