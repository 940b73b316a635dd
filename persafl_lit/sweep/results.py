"""Results of trials: the table of a sweep, and each method's best setting."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persafl_lit.config.paths import get
from persafl_lit.report.record import model_changed
from persafl_lit.sweep.plan import Select
from persafl_lit.sweep.trials import Trial

RESULT_COLUMNS = (
    "accuracy.val",
    "accuracy.test",
    "accuracy.std",
    "accuracy.worst_decile",
    "accuracy.global",
    "loss.val",
    "loss.test",
    "updates",
    "versions",
    "sim_time",
    "grad_evals",
    "staleness.mean",
    "staleness.max",
    "dropped",
)


def headline(value: Callable[[str], Any], kind: str) -> str:
    """One test score in words, by the key of a summary or a point: of the metric that selects, else accuracy, else
    loss; nothing where there is none."""
    for name in dict.fromkeys((kind, "accuracy", "loss")):
        found = value(f"{name}.test")
        if found is not None and math.isfinite(found):
            return f"{name} {found:.4f}" if name == "accuracy" else f"{name} {found:.4g}"
    return ""


@dataclass(frozen=True)
class Outcome:
    trial: Trial
    run_id: str
    status: str
    """finished, failed or pruned."""
    summary: Mapping[str, Any] | None = None
    error: str = ""
    imported: str = ""
    """The file that it is from, if it ran elsewhere."""

    def value(self, column: str) -> Any:
        """By the key of a summary; of a metric beside accuracy and loss, NAME.test."""
        if self.summary is None:
            return None
        name, _, about = column.partition(".")
        further: Mapping[str, Any] = self.summary.get("metrics") or {}
        return (
            further[name].get(about) if name in further else get(self.summary, column) if name in self.summary else None
        )

    @property
    def counts(self) -> bool:
        """Whether it is a result: finished, and the model changed."""
        return self.summary is not None and model_changed(self.summary)

    @property
    def note(self) -> str:
        return "; ".join(() if self.summary is None else self.summary.get("notes", ()))


@dataclass(frozen=True)
class Chosen:
    """A setting and what its seeds came to."""

    outcomes: tuple[Outcome, ...]
    score: float

    @property
    def trial(self) -> Trial:
        return self.outcomes[0].trial

    def over_seeds(self, column: str) -> tuple[float, float]:
        """Mean and sample standard deviation; nan where there is none."""
        values = [float(value) for outcome in self.outcomes if (value := outcome.value(column)) is not None]
        return (statistics.fmean(values) if values else math.nan), (
            statistics.stdev(values) if len(values) > 1 else math.nan
        )


def choose(outcomes: Sequence[Outcome], select: Select) -> list[Chosen]:
    """Each method's best setting on each task by the mean over seeds; task by task, the best method first. A setting
    with fewer finished seeds than another of its method and task has not been tried as hard, and does not compete. Of
    equal ones it is the first by name, in whatever order they ended."""
    settings: dict[Any, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        if outcome.summary is not None and math.isfinite(select.score(outcome.summary)):
            key = repr((outcome.trial.block.number, sorted(outcome.trial.setting.items())))
            settings.setdefault(outcome.trial.group, {}).setdefault(key, []).append(outcome)
    chosen = []
    for tried in settings.values():
        most = max(map(len, tried.values()))
        whole = [runs for _, runs in sorted(tried.items()) if len(runs) == most]
        scored = [
            Chosen(tuple(runs), statistics.fmean(select.score(run.summary or {}) for run in runs)) for runs in whole
        ]
        chosen.append(max(scored, key=lambda found: found.score))
    tasks = list(dict.fromkeys(task for task, *_ in settings))
    return sorted(chosen, key=lambda found: (tasks.index(found.trial.group[0]), -found.score))


def table(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row per trial, with nothing in it that would differ if the sweep were done again."""
    asked = list(dict.fromkeys(key for outcome in outcomes for key in outcome.trial.grid_values))
    metrics = dict.fromkeys(name for outcome in outcomes for name in (outcome.summary or {}).get("metrics") or ())
    columns = (*RESULT_COLUMNS, *(f"{name}.{split}" for name in metrics for split in ("val", "test")))
    rows = []
    for outcome in outcomes:
        flat = outcome.trial.config.flat()
        row = {
            "method": outcome.trial.method,
            **{key: _text(flat.get(key, flat.get(f"{key}.name"))) for key in asked},
            "seed": outcome.trial.seed,
        }
        row |= {"status": outcome.status, **{column: outcome.value(column) for column in columns}}
        rows.append(
            row
            | {"trial": outcome.trial.hash, "error": outcome.error, "note": outcome.note, "imported": outcome.imported}
        )
    return rows


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, (list, dict)) else value
