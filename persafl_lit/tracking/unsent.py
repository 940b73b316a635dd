"""Where runs are tracked, and what a lost tracking server did not take: kept in files and sent later."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from persafl_lit.errors import first_line

STORE = Path("mlruns")
SQLITE = "sqlite:///"

Message = dict[str, Any]
"""One thing to tell MLflow, as plain values: metrics, tags, a text, a table, a file or the status (see `Store.send`)."""


def store_uri(uri: str | None) -> str:
    """The tracking URI: as configured, else the environment's, else our sqlite store. Files are named in full, because
    MLflow keeps connections by URI and would take another folder's store for the same."""
    chosen = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{STORE}/mlflow.db"
    return SQLITE + str(Path(chosen.removeprefix(SQLITE)).absolute()) if chosen.startswith(SQLITE) else chosen


def _folder() -> Path:
    return STORE / "unsent"


def keep(uri: str, run_id: str, messages: Sequence[Message]) -> Path:
    """Write down what could not be sent, and the files that it names."""
    folder = _folder() / run_id
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _write(folder, uri, run_id, messages)
    except OSError:
        if not (folder / "messages.json").exists():  # half of it would help nobody, and a full disk needs the room
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(folder: Path, uri: str, run_id: str, messages: Sequence[Message]) -> Path:
    kept = []
    for number, message in enumerate(messages):
        if "path" in message:
            copy = folder / f"{number}-{Path(message['path']).name}"
            (shutil.copytree if Path(message["path"]).is_dir() else shutil.copy2)(message["path"], copy)
            message = {**message, "path": str(copy.absolute())}
        kept.append(message)
    file = folder / "messages.json"
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"uri": uri, "run_id": run_id, "messages": kept}))
    os.replace(temporary, file)
    return file


def waiting(uri: str | None = None) -> list[Path]:
    """Files of unsent messages, of one store or of all."""
    files = sorted(_folder().glob("*/messages.json"))
    return [file for file in files if uri is None or _uri_of(file) == uri]


def _uri_of(file: Path) -> str | None:
    try:
        return str(json.loads(file.read_text())["uri"])
    except (OSError, ValueError, KeyError):
        return None


def sync(uri: str | None = None) -> int:
    """Send what was kept, in the order in which it was said; returns the number of runs that are complete now."""
    from persafl_lit.tracking.store import Store

    done = 0
    for file in waiting(uri):
        try:
            content = json.loads(file.read_text())
        except FileNotFoundError:  # another process has sent it meanwhile
            continue
        store = Store(content["uri"])
        for message in content["messages"]:
            _send(store, content["run_id"], message)
        shutil.rmtree(file.parent, ignore_errors=True)
        done += 1
    return done


def _send(store: Any, run_id: str, message: Message) -> None:
    """Sending twice is harmless; what the store will never take is said and dropped."""
    try:
        store.send(run_id, message)
    except Exception as error:  # MLflow, its drivers and its servers raise their own types
        if not (isinstance(error, FileNotFoundError) or store.refuses(error)):
            raise
        print(f"persafl: {store.uri} refuses a record of run {run_id}: {first_line(error)}", file=sys.stderr)
