"""What a lost tracking server did not take: kept in files and sent later."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from persafl_lit.common.atomic_file import write_text_atomically
from persafl_lit.errors import first_line
from persafl_lit.tracking.location import STORE
from persafl_lit.tracking.messages import TrackingMessage

logger = logging.getLogger(__name__)


def _folder() -> Path:
    return STORE / "unsent"


def keep(uri: str, run_id: str, messages: Sequence[TrackingMessage]) -> Path:
    """Write down what could not be sent, and the files that it names, beside what was kept of the run before."""
    folder = _folder() / run_id
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{time.time_ns():020d}.{os.getpid()}.json"
    try:
        kept = [_with_copy(message, _files_of(file) / str(number)) for number, message in enumerate(messages)]
        write_text_atomically(file, json.dumps({"uri": uri, "run_id": run_id, "messages": kept}))
    except OSError:  # half of it is of no use, and a full disk needs the room
        _forget(file)
        raise
    return file


def _with_copy(message: TrackingMessage, place: Path) -> TrackingMessage:
    if "path" not in message:
        return message
    copy = place / Path(message["path"]).name
    place.mkdir(parents=True)
    (shutil.copytree if Path(message["path"]).is_dir() else shutil.copy2)(message["path"], copy)
    return {**message, "path": str(copy.absolute())}


def _files_of(file: Path) -> Path:
    return file.with_suffix(".files")


def _forget(file: Path) -> None:
    file.unlink(missing_ok=True)
    shutil.rmtree(_files_of(file), ignore_errors=True)
    with contextlib.suppress(OSError):  # not if more was kept meanwhile
        file.parent.rmdir()


def waiting(uri: str | None = None) -> list[Path]:
    """Files of unsent messages, of one store or of all; of each run the oldest first."""
    files = sorted(_folder().glob("*/*.json"))
    return [file for file in files if uri is None or _uri_of(file) == uri]


def _uri_of(file: Path) -> str | None:
    try:
        return str(json.loads(file.read_text())["uri"])
    except (OSError, ValueError, KeyError):
        return None


def sync(uri: str | None = None) -> int:
    """Send what was kept, in the order in which it was said; returns the number of runs that are complete now."""
    from persafl_lit.tracking.store import Store

    done = set()
    for file in waiting(uri):
        try:
            content = json.loads(file.read_text())
        except FileNotFoundError:  # another process has sent it meanwhile
            continue
        store = Store(content["uri"])
        for message in content["messages"]:
            _send(store, content["run_id"], message)
        _forget(file)
        done.add(content["run_id"])
    return len(done)


def _send(store: Any, run_id: str, message: TrackingMessage) -> None:
    """Sending twice is harmless; what the store will never take is said and dropped."""
    try:
        store.send(run_id, message)
    except Exception as error:  # MLflow, its drivers and its servers raise their own types
        if not (isinstance(error, FileNotFoundError) or store.refuses(error)):
            raise
        logger.warning("%s refuses a record of run %s: %s", store.uri, run_id, first_line(error))
