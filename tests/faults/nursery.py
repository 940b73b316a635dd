"""A process that has imported everything once and forks a child for each request, so that a run begins at once.

Requests are lines of JSON on stdin: the arguments of `persafl`, a folder, and files for stdout and stderr; answers on stdout are
the child's process id and then its exit code (-9 after kill -9).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

HEAVY = (
    "torch",
    "lightning",
    "sklearn.datasets",
    "mlflow.pytorch",
    "persafl_lit.api",
    "persafl_lit.engine.progress",
    "persafl_lit.tracking.store",
)


def live(request: dict) -> int:
    """What `python -m persafl_lit` would do from here on."""
    from persafl_lit.cli import main

    os.setsid()
    os.chdir(request["folder"])
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["clock"]:
        turn_back(*request["clock"])
    if request["points"]:
        stop_after(request["points"])
    try:
        code = main(request["arguments"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def turn_back(after: float, seconds: float) -> None:
    """The system's clock, as this process sees it, jumps back once."""
    real, start = time.time, time.monotonic()
    time.time = lambda: real() - (seconds if time.monotonic() - start > after else 0.0)


def stop_after(points: int) -> None:
    """The command line has no callbacks of the user's: its runs get this one."""
    from persafl_lit import api
    from tests.support.runs import Patience

    real = api.run
    api.run = lambda *about, callbacks=(), **more: real(*about, callbacks=[*callbacks, Patience(points)], **more)


def main() -> None:
    for name in HEAVY:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    print(json.dumps({"ready": str(Path(__file__))}), file=answers)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os._exit(live(json.loads(line)))
        print(json.dumps({"pid": pid}), file=answers)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), file=answers)


if __name__ == "__main__":
    main()
