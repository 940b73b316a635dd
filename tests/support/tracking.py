"""A real tracking server that can be killed, and what a run must have left in it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import mlflow

from tests.support.waiting import until

FAST = ["model=logistic", "clients=5", "updates=15", "local_steps=2", "eval.every=1.5"]
"""A run of a second."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`mlflow server` on loopback, which can be killed and started again."""

    def __init__(self, folder):
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.start()

    def start(self):
        place = ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        place += ["--artifacts-destination", f"{self.folder}/artifacts"]
        address = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *place, *address],
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until(self.answers, self.process)

    def answers(self):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=10):
            return True
        return False

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def wait_for_run(uri, count=1):
    """Until the experiment `persafl` has so many runs."""
    client = mlflow.MlflowClient(uri)

    def there():
        found = client.get_experiment_by_name("persafl")
        return found and len(client.search_runs([found.experiment_id])) >= count

    until(there)


def check_whole(uri, result):
    """Nothing of the run is missing in the store."""
    client = mlflow.MlflowClient(uri)
    assert client.get_run(result.run_id).info.status == "FINISHED"
    history = client.get_metric_history(result.run_id, "accuracy.test")
    assert [metric.value for metric in history] == result.curves()["accuracy.test"]
    assert len(history) > 10
    names = {file.path for file in client.list_artifacts(result.run_id)}
    assert names >= {"config.yaml", "timeline.csv", "results.json", "clients.json", "figures"}
