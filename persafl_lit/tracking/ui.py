"""The MLflow UI for our store: on loopback, small, and gone when it is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import IO

from persafl_lit.errors import ConfigError
from persafl_lit.tracking.location import SQLITE, store_uri
from persafl_lit.tracking.mlflow_view import link

STARTS_WITHIN = 90.0
"""Seconds of wall time."""
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Our own server is never behind a proxy."""


def serve(uri: str | None, host: str, port: int) -> int:
    """Start the UI, print its address when it answers, and stay until it is stopped."""
    store = store_uri(uri)
    if store.startswith(("http://", "https://")):
        print(f"the store is a server already: open {store}")
        return 0
    if store.startswith(SQLITE) and not os.path.exists(store.removeprefix(SQLITE)):
        raise ConfigError(
            f"there is no store at {store.removeprefix(SQLITE)} yet; `persafl run` or `persafl demo` makes one here"
        )
    _check_free(host, port)
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    # One worker and no job runner: a fifth of the memory, and no process stays behind.
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        store,
        "--host",
        host,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the server is stopped then, too
        signal.signal(number, lambda *_: sys.exit(0))
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the server)
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=said, text=True, start_new_session=True
    )
    try:
        _wait_until_up(server, address, said)
        print(f"MLflow UI: {address}  (Ctrl-C stops it)")
        for name, experiment in _experiments(address).items():
            print(f"  {name}: {link(address, experiment)}")
        print("On charts, step is server updates and relative time is simulated time.", flush=True)
        return server.wait()
    finally:
        _stop(server)


def _stop(server: subprocess.Popen[str]) -> None:
    """The server and its workers: they are a process group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(5)


def _experiments(address: str) -> dict[str, str]:
    """Ids of the experiments by name; MLflow's own empty one is left out."""
    request = urllib.request.Request(
        f"{address}/api/2.0/mlflow/experiments/search", b'{"max_results": 100}', {"Content-Type": "application/json"}
    )
    with LOCAL.open(request, timeout=30) as answer:
        found = json.load(answer).get("experiments", [])
    return {experiment["name"]: experiment["experiment_id"] for experiment in found if experiment["name"] != "Default"}


def _check_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None


def _wait_until_up(server: subprocess.Popen[str], address: str, said: IO[str]) -> None:
    give_up_at = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < give_up_at:
        if server.poll() is not None:
            said.seek(0)
            last = said.read().strip().splitlines()[-1:]
            raise ConfigError(f"the MLflow server ended at once: {''.join(last)}")
        try:
            with LOCAL.open(f"{address}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise ConfigError(f"the MLflow server did not answer at {address} within {STARTS_WITHIN:.0f} s")
