"""`persafl report`, `ui` and `sync`: what runs have left."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from persafl_lit.errors import ConfigError, PersaflError, first_line, shown

if TYPE_CHECKING:
    from persafl_lit.report.record import Record
    from persafl_lit.tracking.store import Store


def report(options: argparse.Namespace) -> int:
    from persafl_lit.report import write_report
    from persafl_lit.tracking import store_uri
    from persafl_lit.tracking.store import open_store

    levels = _levels(options.levels or ())
    targets, uri = _targets([*options.targets, *options.overrides], options.uri)
    store = open_store(store_uri(uri))
    found: dict[str, Record] = {}
    for number, target in enumerate(targets):
        named = target if len(targets) > 1 else ""
        for record in _records(store, target):
            found.setdefault(
                record.run_id, replace(record, target=named, target_number=number)
            )  # a run that two targets name is the first one's
    records, title = [_with_activity(record) for record in found.values()], ", ".join(targets)
    folder = Path(options.out or Path("reports") / folder_name(title))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = write_report(records, title, folder, levels, options.against)
    except OSError as error:
        raise ConfigError(
            f"cannot write the report to {shown(str(folder))}: {error.strerror}; choose another --out"
        ) from None
    store.keep_report(targets, folder)
    print(f"{len(records)} runs of {title}: {folder / 'report.html'} and {len(files) - 1} more files")
    return 0


def _targets(texts: Sequence[str], uri: str | None) -> tuple[list[str], str | None]:
    """What to report on, each once, and the store: by --uri, or by the override that other commands take."""
    key = "tracking.uri="
    stores = {text.removeprefix(key) for text in texts if text.startswith(key)} | ({uri} if uri else set())
    if len(stores) > 1:
        raise ConfigError(f"a report reads one store; got {', '.join(map(shown, sorted(stores)))}")
    targets = list(dict.fromkeys(text for text in texts if not text.startswith(key)))
    if not targets:
        raise ConfigError("persafl report needs a sweep's name, an experiment's name or a run id")
    return targets, next(iter(stores), None)


def _records(store: Store, target: str) -> list[Record]:
    try:
        return store.records(target)
    except PersaflError:
        raise
    except Exception as error:  # what a store holds may be damaged in any way
        raise ConfigError(
            f"cannot read the runs of {shown(target)}: {type(error).__name__}: {first_line(error)}"
        ) from None


def _levels(texts: Sequence[str]) -> list[float]:
    """In order, each once, to the six digits that tables show."""
    levels = set()
    for text in texts:
        try:
            level = float(f"{float(text):.6g}")
        except ValueError:
            level = math.nan
        if not (math.isfinite(level) and level > 0):
            raise ConfigError(f"--levels takes finite numbers above 0, such as 0.5 0.7; got {shown(text)}")
        levels.add(level)
    return sorted(levels)


def folder_name(target: str) -> str:
    """A folder inside reports/, whatever the target is called: never `..`, never two folders, never a hidden one."""
    return re.sub(r"[^\w.-]+", "_", target)[:80].lstrip(".") or "report"


def _with_activity(record: Record) -> Record:
    """A timeline in a file knows arrivals only; one that the config can make again also knows who was busy when."""
    if (
        not isinstance(record.summary, Mapping)
        or not isinstance(record.summary.get("config"), Mapping)
        or record.timeline is None
    ):
        return record
    from persafl_lit.config.compose import compose

    try:
        made = compose({**record.summary["config"], "allow_code": False}).timeline(record.timeline.clients)
    except PersaflError:  # a replayed file that is gone, a config of another version, or code that no report runs
        return record
    return replace(record, timeline=made) if made.digest() == record.timeline.digest() else record


def ui(options: argparse.Namespace) -> int:
    from persafl_lit.tracking.ui import serve

    return serve(options.uri, options.host, options.port)


def sync(options: argparse.Namespace) -> int:
    from persafl_lit.tracking import sync

    try:
        count = sync()
    except Exception as error:  # MLflow, its drivers and its servers raise their own types
        raise ConfigError(f"cannot send yet: {first_line(error)}; nothing is lost") from None
    print(f"{count} runs are complete now" if count else "nothing is waiting to be sent")
    return 0
