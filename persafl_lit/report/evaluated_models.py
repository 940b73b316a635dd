"""The chart that answers which model was evaluated: shared or a method's own, as it is or fine-tuned."""

from __future__ import annotations

import math

from persafl_lit.report.aggregate import SettingRuns, Spread, TaskRuns, in_summary, spread
from persafl_lit.report.chart import Chart, Series
from persafl_lit.report.palette import value_style
from persafl_lit.report.tables import with_spread

EVALUATED_MODELS = {
    ("shared", "as_is"): "shared model as it is",
    ("shared", "tuned"): "shared model, fine-tuned",
    ("own", "as_is"): "method's own model as it is",
    ("own", "tuned"): "method's own model, fine-tuned",
}


def evaluated_models(task: TaskRuns) -> Chart:
    """Bars per method: the test score of each of its models at the end of the run."""
    series = []
    for number, ((model, state), label) in enumerate(EVALUATED_MODELS.items()):
        measured = [(place, _score(trial, model, state)) for place, trial in enumerate(task.chosen)]
        known = [(place, score) for place, score in measured if math.isfinite(score.mean)]
        if known:
            notes = tuple(f"{task.chosen[place].method}\n{label}\n{with_spread(score)}" for place, score in known)
            x, y = [float(place) for place, _ in known], [score.mean for _, score in known]
            series.append(Series(label, x, y, value_style(number, len(EVALUATED_MODELS)), notes))
    caption = (
        "Mean over clients and seeds, on test data, at the end of the run. A method's own model is what a client keeps "
        "(private parameters with the shared ones, a personal model), or what the method's own cost adapts the shared "
        "model to (a MAML step, a proximal point). Methods are compared by the fine-tuned one: of the model that "
        "clients keep where they keep one, else of the shared model."
    )
    return Chart(
        "models",
        "Which model was evaluated",
        caption,
        "",
        f"test {task.measure.kind}",
        tuple(series) if len(series) > 1 else (),
        kind="bars",
        ticks=tuple((float(place), trial.method) for place, trial in enumerate(task.chosen)),
    )


def _score(trial: SettingRuns, model: str, state: str) -> Spread:
    return spread(in_summary(record, "models", model, state, "test") for record in trial.runs)
