"""`persafl ui` in a real browser: the runs, the charts and the comparison. With SCREENSHOTS=folder it leaves pictures there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from persafl_lit import run
from persafl_lit.cli import main
from persafl_lit.tracking import store_uri
from persafl_lit.tracking.mlflow_view import link
from persafl_lit.tracking.store import Store
from tests.support.browser import Browser, needs_chromium
from tests.support.ui import ui

FAST = [
    "model=logistic",
    "clients=5",
    "updates=30",
    "local_steps=2",
    "eval.every=1.0",
    "tracking.model=false",
    "executor=serial",
]
SWEEP = """name: apart
overrides: [model=logistic, clients=5, updates=30, local_steps=2, eval.every=1.0, tracking.model=false, tracking.figures=false]
grid:
  - {method: persafl_me, method.lam: [20, 30], method.beta: [0.8, 1.2], schedule.tau: [3, 10]}
  - {method: persafl_maml, method.alpha: [0.01, 0.05], method.beta: [0.8, 1.2], schedule.tau: [3, 10]}
seeds: [0]
"""
AXES = "[...document.querySelectorAll('.js-plotly-plot')].map(plot => [plot.layout.xaxis.title.text, plot.data[0].x])"
"""Of the drawn line charts: what the axis is called, and where the first curve's points are."""


def comparison(address, experiment, ids):
    runs = "[" + ",".join(f'"{run_id}"' for run_id in ids) + "]"
    return f'{address}/#/compare-runs?runs={runs}&experiments=["{experiment}"]'


@pytest.mark.slow
@needs_chromium
def test_a_browser_sees_the_runs_the_charts_and_the_comparison(tmp_path):
    results = [run([*FAST, "tracking.experiment=trial", f"method={method}"]) for method in ("fedasync", "persafl_maml")]
    ids, points = [result.run_id for result in results], results[0].points
    Path("apart.yaml").write_text(SWEEP)
    assert main(["sweep", "apart.yaml"]) == 0
    store = Store(store_uri(None))
    with ui() as (address, links), Browser(tmp_path / "browser") as browser:
        experiments = {name: store.experiment(name) for name in ("trial", "apart")}
        assert {name: links[name] for name in experiments} == {
            name: link(address, number) for name, number in experiments.items()
        }
        trials = [
            child.info.run_id for child in store.search([experiments["apart"]], "tags.`persafl.method` = 'persafl_me'")
        ]
        assert len(trials) == 8
        pages = {
            "table": (
                links["trial"].replace("&compareRunsMode=CHART", ""),
                ["fedasync", "persafl_maml", "accuracy.test", "method.beta"],
            ),
            "charts": (links["trial"], ["accuracy.test", "Relative Time", "Step", "Comparison"]),
            "compare": (
                comparison(address, experiments["trial"], ids),
                ["Parallel Coordinates Plot", "method.alpha", "fedasync", "persafl_maml"],
            ),
            "sweep": (
                links["apart"],
                [
                    "method.lam",
                    "method.alpha",
                    "method.beta",
                    "schedule.tau",
                    "lam=30.0 beta=1.2 tau=10",
                    "alpha=0.05 beta=0.8 tau=3",
                ],
            ),
            "sweep_compare": (
                comparison(address, experiments["apart"], trials),
                ["method.lam", "method.beta", "schedule.tau"],
            ),
        }
        for name, (page, words) in pages.items():
            browser.open(page, 2400, 1800)
            browser.wait_for(*words)
            if name in ("charts", "sweep"):
                browser.wait_until(f"{AXES}.length", 4)
            if name == "charts":
                over_time, over_updates, *_ = browser.evaluate(AXES)
                assert over_time == ["Relative Time", pytest.approx([point.sim_time for point in points], abs=0.002)], (
                    "simulated seconds"
                )
                assert over_updates == ["Step", [point.updates for point in points]]
            if keep := os.environ.get("SCREENSHOTS"):
                browser.screenshot(Path(keep) / f"{name}.png")


def test_the_ui_listens_on_this_machine_only_and_says_what_is_missing(tmp_path, capsys):
    assert main(["ui"]) == 2
    assert "there is no store at" in capsys.readouterr().err
    run([*FAST, "updates=5"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["ui", "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --port" in capsys.readouterr().err
    assert main(["ui", "--uri", "http://127.0.0.1:1"]) == 0
    assert "is a server already: open http://127.0.0.1:1" in capsys.readouterr().out
