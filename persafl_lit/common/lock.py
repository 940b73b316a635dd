"""A lock between processes and threads. It ends with the process that holds it, however that process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_POLL = 0.05
"""Seconds of wall time between attempts to become the holder."""
_one_thread = threading.Lock()
_held: dict[Path, int] = {}
"""What this process holds, with its id: a forked process inherits this table, but not the locks."""


class Lock:
    """An exclusive lock on a file, which says in it who holds it.

    A POSIX record lock: unlike flock's it is not inherited, so worker processes that outlive a killed run do not keep
    it. The system does not keep threads of one process apart with it; `_held` does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._file = -1

    def acquire(self, wait_seconds: float = 0.0) -> bool:
        """Whether it is ours now; waits for another holder so long at most."""
        give_up_at = time.monotonic() + wait_seconds
        while not self._try():
            if time.monotonic() >= give_up_at:
                return False
            time.sleep(min(LOCK_POLL, wait_seconds))
        return True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Ours within the block; another holder is waited for, however long."""
        self.acquire(math.inf)
        try:
            yield
        finally:
            self.release()

    def holder(self) -> int | None:
        """The process that holds it, or did last, if it has said so."""
        if _held.get(self.path) == os.getpid():
            return os.getpid()  # reading the file would end the lock: a record lock ends when its process closes it
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            return None

    def release(self) -> None:
        if _held.get(self.path) == os.getpid() and self._file >= 0:
            with contextlib.suppress(OSError):
                self.path.unlink()  # before the lock is released: no other process can hold this file yet
            fcntl.lockf(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1
            del _held[self.path]

    def _try(self) -> bool:
        with _one_thread:
            return self._try_alone()

    def _try_alone(self) -> bool:
        if _held.get(self.path) == os.getpid():
            return self._file >= 0  # else another thread's; opening and closing the file here would end its lock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(file, self.path):  # else its last holder has removed it meanwhile
                    os.ftruncate(file, 0)
                    os.write(file, str(os.getpid()).encode())
                    self._file, _held[self.path] = file, os.getpid()
                    return True
            except OSError as error:
                os.close(file)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                raise
            os.close(file)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
