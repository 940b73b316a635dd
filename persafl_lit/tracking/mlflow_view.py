"""How the MLflow UI shows an experiment of ours: chosen columns and charts, as a view that a link opens.

MLflow keeps shared views as tags of the experiment; `?viewStateShareKey=persafl` opens this one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

KEY = "persafl"
UI_COLUMNS = ("method.name", "method.lam", "method.alpha", "method.beta", "schedule.tau", "seed")
UI_AGGREGATES = ("test", "val", "worst_decile", "global")
SECTION = "persafl-comparison"


DESCRIPTION = """Runs of `persafl`. A metric's step is the number of server updates; its time is *simulated* time
(relative time in the UI, in seconds, is simulated time). `accuracy.test` is the mean over clients after fine-tuning,
`accuracy.global` without; likewise `loss.test` and those of other metrics."""


PAIRS = (("method.lam", "method.beta"), ("method.alpha", "method.beta"))
"""Keys that are worth putting side by side where nothing is known of an experiment's runs."""


def experiment_tags(
    varied: Sequence[Sequence[str]] = PAIRS, kind: str = "accuracy", lower: bool = False
) -> dict[str, str]:
    """What makes an experiment readable in the UI; with the sets of keys that its runs vary together, such as a sweep's
    blocks, and the metric that its settings are chosen by, of which `lower` values may be better."""
    return {
        "mlflow.note.content": DESCRIPTION,
        "mlflow.experimentKind": "custom_model_development",
        f"mlflow.sharedViewState.{KEY}": json.dumps(_view(varied, kind, lower)),
    }


def link(address: str, experiment: str) -> str:
    """The runs of an experiment as charts."""
    return f"{address}/#/experiments/{experiment}/runs?viewStateShareKey={KEY}&compareRunsMode=CHART"


def _view(varied: Sequence[Sequence[str]], kind: str, lower: bool) -> dict[str, Any]:
    columns = list(dict.fromkeys([*UI_COLUMNS, *(key for keys in varied for key in keys)]))
    charts = [
        _line(f"{kind}.test", "time-relative", f"personalised test {kind} over simulated time"),
        _line(f"{kind}.test", "step", f"personalised test {kind} over server updates"),
        _line(f"{kind}.global", "time-relative", f"{kind} of the shared model over simulated time"),
        *(_parallel(keys, kind) for keys in varied),
    ]
    if kind != "loss":  # what tasks without classes have
        charts.append(_line("loss.test", "time-relative", "personalised test loss over simulated time"))
    metrics = list(dict.fromkeys([*(f"{kind}.{name}" for name in UI_AGGREGATES), "loss.test"]))
    return {
        "selectedColumns": [f"params.`{name}`" for name in columns]
        + [f"metrics.`{name}`" for name in metrics]
        + ["tags.`persafl.note`"],
        # The best first; in the order of time the UI would fold a sweep's trials away under their parent.
        "orderByKey": f"metrics.`{kind}.val`",
        "orderByAsc": lower,
        "searchFilter": "",
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "runsHiddenMode": "FIRST_20_RUNS",
        "compareRunCharts": charts,
        "compareRunSections": [
            {
                "uuid": SECTION,
                "name": "Comparison",
                "display": True,
                "isReordered": False,
                "deleted": False,
                "isGenerated": False,
            }
        ],
        "isAccordionReordered": False,
        "autoRefreshEnabled": True,
        "hideEmptyCharts": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def _card(kind: str, name: str, title: str) -> dict[str, Any]:
    common = {
        "type": kind,
        "uuid": f"persafl-{name}",
        "metricSectionId": SECTION,
        "deleted": False,
        "isGenerated": False,
    }
    return {**common, "runsCountToCompare": 20, "displayName": title}


def _line(metric: str, axis: str, title: str) -> dict[str, Any]:
    own = {"metricKey": metric, "selectedMetricKeys": [metric], "xAxisKey": axis, "useGlobalXaxisKey": False}
    scales = {
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "lineSmoothness": 0,
        "useGlobalLineSmoothing": False,
        "displayPoints": True,
    }
    return {
        **_card("LINE", f"{metric}-{axis}", title),
        **own,
        **scales,
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "selectedXAxisMetricKey": "",
    }


def _parallel(keys: Sequence[str], kind: str) -> dict[str, Any]:
    """The UI leaves runs out that lack one of the keys, so each set of keys has a chart of its own."""
    settings = {
        "selectedParams": list(keys),
        "selectedMetrics": [f"{kind}.val", f"{kind}.test"],
        "showAllRuns": False,
    }
    names = ", ".join(key.rpartition(".")[2] for key in keys)
    return {**_card("PARALLEL", f"settings-{'-'.join(keys)}", f"{names} against {kind}"), **settings}
