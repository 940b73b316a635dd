"""`persafl ui` in a process of its own."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys

import pytest

from tests.support.tracking import free_port


@contextlib.contextmanager
def ui():
    """Its address, and the links that it prints: one per experiment."""
    port = free_port()
    command = [sys.executable, "-m", "persafl_lit", "ui", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert f"MLflow UI: http://127.0.0.1:{port}" in process.stdout.readline()
        links = dict(re.findall(r"(\S+): (http\S+)", process.stdout.readline() + process.stdout.readline()))
        yield f"http://127.0.0.1:{port}", links
    finally:
        process.terminate()
        process.wait(30)
        with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", port)):
            pass
