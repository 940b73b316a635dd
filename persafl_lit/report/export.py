"""Results as data: runs.csv and curves.csv, which `persafl sweep --finished` reads back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from persafl_lit.common.csv_table import to_csv
from persafl_lit.learning.metric_names import MEASURED
from persafl_lit.report.aggregate import plain_method, seed_of
from persafl_lit.report.config_keys import is_neutral, text_of
from persafl_lit.report.record import Record, note_of

EXPORT_COLUMNS = ("method", "seed", "status", "trial")
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


EXPORTED_AGGREGATES = ("val", "test", "std", "worst_decile", "global", "weighted", "median", "gap")
"""Of a metric beside accuracy and loss, `metrics.f1.val`: the columns metrics_f1_val, ..., metrics_f1_direction."""


def column_of(key: str) -> str:
    return key.replace(".", "_")


def key_of(metric: str) -> str:
    """Where a summary has a metric that settings are chosen by: accuracy.val, metrics.f1.val."""
    return metric if metric.partition(".")[0] in MEASURED else f"metrics.{metric}"


def runs_csv(records: Sequence[Record]) -> str:
    """One row per run, finished or not; results only of finished ones. Floats read back to the same bits. Where runs
    were found by several targets, a column says by which."""
    fixed = {*EXPORT_COLUMNS, *map(column_of, (*RESULTS, *COSTS, *FURTHER))}
    varied = {key: f"config.{key}" if key in fixed else key for key in _varied(records)}
    scores = sorted({key for record in records for key in _further_scores(record)})
    targets = any(record.target for record in records)
    rows = []
    for record in _ordered(records):
        row = _identity(record) | {"status": record.status, "version": record.version, "commit": record.commit}
        row |= {column_of(key): _in_summary(record, key) for key in (*RESULTS, *COSTS, *FURTHER, *scores)}
        row |= {"error": record.error, "note": note_of(record), "run_id": record.run_id}
        row |= {"target": record.target} if targets else {}
        rows.append(row | {name: _cell(record.config[key]) for key, name in varied.items() if key in record.config})
    summary = map(column_of, (*FURTHER, *scores))
    return to_csv(
        rows,
        [
            *EXPORT_COLUMNS,
            *map(column_of, RESULTS),
            COSTS[0],
            "version",
            COSTS[1],
            *summary,
            "commit",
            "error",
            "note",
            "run_id",
            *(["target"] if targets else []),
            *varied.values(),
        ],
    )


def curves_csv(records: Sequence[Record]) -> str:
    """One row per evaluation of every run, in order; other metrics that a run's evaluations have follow the usual
    ones."""
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
    return sorted(
        records, key=lambda record: (plain_method(record), str(seed_of(record)).zfill(20), record.trial, record.run_id)
    )


def _identity(record: Record) -> dict[str, Any]:
    return {"method": plain_method(record), "seed": seed_of(record), "trial": record.trial}


def _in_summary(record: Record, key: str) -> Any:
    if record.status != "FINISHED":
        return None
    found: Any = record.summary
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _further_scores(record: Record) -> list[str]:
    """Of the end, by further fine-tuning rules, of held-out clients and of further metrics, where there are any."""
    metrics = _in_summary(record, "metrics") or ()
    kinds = ["loss", *(f"metrics.{name}" for name in metrics)]
    rules = _in_summary(record, "beside") or ()  # whose accuracies have no key of their own
    groups = [f"beside.{rule}{kind}" for rule in rules for kind in ("", *(f".{kind}" for kind in kinds))]
    groups += [f"holdout.{kind}" for kind in ("accuracy", *kinds)]
    keys = [f"{group}.{split}" for group in groups for split in ("val", "test")]
    keys += [f"metrics.{name}.{about}" for name in metrics for about in (*EXPORTED_AGGREGATES, "direction")]
    return [key for key in keys if _in_summary(record, key) is not None]


def _varied(records: Sequence[Record]) -> list[str]:
    """Keys that differ between the runs; those of the method and its schedule only if they differ between runs of one
    method."""
    methods = {plain_method(record) for record in records}
    found = set(_differing(records))
    by_method = [[record for record in records if plain_method(record) == method] for method in methods]
    own = {key for runs in by_method for key in _differing(runs)}
    return sorted(key for key in found if key in own or key.split(".")[0] not in ("method", "schedule"))


def _differing(records: Sequence[Record]) -> list[str]:
    keys = {key for record in records for key in record.config if not is_neutral(key)}
    return [key for key in keys if len({text_of(record.config.get(key)) for record in records}) > 1]


def _cell(value: Any) -> Any:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else text_of(value)
