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


def browse(address, folder, *options):
    """What the page says after its requests are answered."""
    command = [CHROMIUM, *SWITCHES, f"--user-data-dir={folder}", "--virtual-time-budget=30000", "--window-size=1600,1300", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


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
        table = browse(f"{address}/#/experiments/{experiment}/runs?viewStateShareKey=persafl", tmp_path / "a", "--dump-dom")
        for name in ("fedasync", "persafl_maml", "accuracy.test", "method.beta"):
            assert name in table
        view = browse(charts, tmp_path / "b", "--dump-dom")
        for name in ("accuracy.test", "Relative Time", "Step", "Comparison"):
            assert name in view
        runs = "[" + ",".join(f'"{run_id}"' for run_id in ids) + "]"
        compared = browse(f'{address}/#/compare-runs?runs={runs}&experiments=["{experiment}"]', tmp_path / "c", "--dump-dom")
        for name in ("Parallel Coordinates Plot", "method.alpha", "fedasync", "persafl_maml"):
            assert name in compared
        keep = os.environ.get("SCREENSHOTS")
        if keep:
            pages = {
                "table": charts.replace("&compareRunsMode=CHART", ""),
                "charts": charts,
                "compare": f'{address}/#/compare-runs?runs={runs}&experiments=["{experiment}"]',
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
