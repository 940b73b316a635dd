"""A process that does trials for a local sweep: orders come as lines on stdin, messages about them go out as lines on
stdout.

When stdin ends, the launcher has died and this process ends at once: another one may take over its trial.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading

from persafl_lit.common.logs import LogSettings
from persafl_lit.common.plugins import really_exit
from persafl_lit.common.process_memory import gc_paused, keep_freed_memory
from persafl_lit.sweep.run_trial import TrialMessage, run_trial


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a Ctrl-C reaches the launcher, which asks us to stop
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not mix with our lines
    orders: queue.SimpleQueue[TrialMessage] = queue.SimpleQueue()
    stopping: set[str] = set()
    threading.Thread(target=_listen, args=(orders, stopping), daemon=True).start()

    def tell(message: TrialMessage) -> None:
        try:
            output.write(json.dumps(message) + "\n")
            output.flush()
        except BrokenPipeError:
            really_exit(1)

    with gc_paused():
        import persafl_lit.api  # noqa: F401  (takes seconds: while the launcher prepares)
        from persafl_lit.tracking.store import load_sqlite

        load_sqlite()

    tell({"ready": True})
    while True:
        order = orders.get()
        LogSettings(*order["log"]).apply()
        tell(run_trial(order, tell, lambda trial=order["trial"]: trial in stopping))  # type: ignore[arg-type,misc]
        stopping.clear()


def _listen(orders: queue.SimpleQueue[TrialMessage], stopping: set[str]) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "stop" in message:  # it names its trial, which may be over by now
            stopping.add(message["stop"])
        else:
            orders.put(message)
    really_exit(1)


if __name__ == "__main__":
    main()
