"""`persafl ui` in a real browser: the runs, the charts and the comparison."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from persafl_lit import run
from persafl_lit.tracking.view import link

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FAST = ["model=logistic", "clients=5", "updates=30", "local_steps=2", "eval.every=1.0", "tracking.model=false", "executor=serial"]
SWITCHES = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def ui(port):
    command = [sys.executable, "-m", "persafl_lit", "ui", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)
        with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", port)):
            pass


def browse(address, folder, *options, patience=30):
    """What the page says after its requests are answered; `patience` is in seconds of the page's own clock."""
    budget = f"--virtual-time-budget={1000 * patience}"
    command = [CHROMIUM, *SWITCHES, f"--user-data-dir={folder}", budget, "--window-size=1600,1300", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=240).stdout


def check_shown(address, folder, *names):
    """All of these are on the page. On a busy machine its clock may run out before its scripts have drawn everything: look again."""
    for patience in (30, 60, 120, 240):
        page = browse(address, folder / str(patience), "--dump-dom", patience=patience)
        missing = [name for name in names if name not in page]
        if not missing:
            return
    raise AssertionError(f"{address} does not show {missing}")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_sees_the_runs_the_charts_and_the_comparison(tmp_path):
    ids = [run([*FAST, "tracking.experiment=trial", f"method={method}"]).run_id for method in ("fedasync", "persafl_maml")]
    port = free_port()
    with ui(port) as process:
        said = process.stdout.readline() + process.stdout.readline()
        assert f"MLflow UI: http://127.0.0.1:{port}" in said
        charts = re.search(r"trial: (\S+)", said).group(1)
        address = f"http://127.0.0.1:{port}"
        experiment = re.search(r"experiments/(\d+)", charts).group(1)
        assert charts == link(address, experiment)
        table = f"{address}/#/experiments/{experiment}/runs?viewStateShareKey=persafl"
        check_shown(table, tmp_path / "a", "fedasync", "persafl_maml", "accuracy.test", "method.beta")
        check_shown(charts, tmp_path / "b", "accuracy.test", "Relative Time", "Step", "Comparison")
        runs = "[" + ",".join(f'"{run_id}"' for run_id in ids) + "]"
        compared = f'{address}/#/compare-runs?runs={runs}&experiments=["{experiment}"]'
        check_shown(compared, tmp_path / "c", "Parallel Coordinates Plot", "method.alpha", "fedasync", "persafl_maml")
        keep = os.environ.get("SCREENSHOTS")
        if keep:
            pages = {
                "table": charts.replace("&compareRunsMode=CHART", ""),
                "charts": charts,
                "compare": compared,
            }
            for name, page in pages.items():
                browse(page, tmp_path / name, f"--screenshot={keep}/{name}.png")


def test_the_ui_listens_on_this_machine_only_and_says_what_is_missing(tmp_path, capsys):
    from persafl_lit.cli import main

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
