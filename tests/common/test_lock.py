"""The one lock; tests/engine/test_checkpoint.py has its laws between processes."""

from __future__ import annotations

import threading

from persafl_lit.common.lock import Lock


def test_threads_of_one_process_hold_it_one_after_the_other(tmp_path):
    inside, worst = [], []

    def work():
        for _ in range(5):
            with Lock(tmp_path / "lock").held():
                inside.append(1)
                worst.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == [1] * 20
    assert not (tmp_path / "lock").exists()
