"""Config keys as a report reads them: what makes a task, what is a setting to choose, and what changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from persafl_lit.report.record import Record

KeyValues = tuple[tuple[str, str], ...]
"""(key, value as text) pairs; text, so that lists compare and 25 read back as 25.0 is the same setting."""

IGNORED_KEYS = (
    "seed",
    "method.name",
    "executor",
    "workers",
    "accelerator",
    "devices",
    "derivatives",
    "allow_code",
    "eval.every",
    "eval.beside",
    "model.args",  # without arguments; else they are keys of their own
)
NEUTRAL_GROUPS = ("tracking", "checkpoint", "loggers")
TASK = ("clients", "horizon", "updates", "schedule.path")
TASK_GROUPS = ("data", "model", "delays", "eval")
NONE = "null"


def text_of(value: Any) -> str:
    """A config value as the command line writes it."""
    if value is None or value in ("None", "null", ""):
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    number = number_of(value)
    if number is not None:
        return f"{number:.12g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def number_of(value: Any) -> float | None:
    """The value if it is a number, also one that was read back as text."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def in_group(key: str, groups: Iterable[str]) -> bool:
    return key.split(".")[0] in groups


def is_neutral(key: str) -> bool:
    """Whether a key says only where, how fast or how often: runs that differ in it alone are the same experiment."""
    return key in IGNORED_KEYS or in_group(key, NEUTRAL_GROUPS) or key.startswith(("eval.metrics", "eval.direction"))


def is_task(key: str) -> bool:
    """Whether a key changes the question (data, model, delays, length, evaluation): nothing may be chosen by it."""
    return not is_neutral(key) and (key in TASK or in_group(key, TASK_GROUPS))


def task_of(config: Mapping[str, Any]) -> KeyValues:
    return tuple((key, text_of(config[key])) for key in sorted(config) if is_task(key))


def varied_keys(records: Sequence[Record]) -> list[str]:
    """The keys that differ between these runs and can be chosen, in alphabetical order."""
    keys = sorted({key for record in records for key in record.config if not is_neutral(key) and not is_task(key)})
    return [key for key in keys if len({text_of(record.config.get(key)) for record in records}) > 1]


def setting_of(record: Record, keys: Sequence[str]) -> KeyValues:
    return tuple((key, text_of(record.config.get(key))) for key in keys)


def setting_text(setting: KeyValues) -> str:
    return ", ".join(f"{key}={value}" for key, value in setting) or "as configured"


def differing(tasks: Sequence[KeyValues]) -> list[str]:
    """The keys by which tasks differ."""
    values = [dict(task) for task in tasks]
    return [
        key
        for key in sorted({key for task in values for key in task})
        if len({task.get(key, NONE) for task in values}) > 1
    ]


def finetune_text(config: Mapping[str, Any]) -> str:
    """The fine-tuning rule by its name and keys: sgd(steps=10, lr=null)."""
    prefix = "eval.finetune."
    values = {key.removeprefix(prefix): text_of(value) for key, value in config.items() if key.startswith(prefix)}
    name = values.pop("name", None)
    if name is None:
        return "unknown (the runs do not say)"
    return f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})" if values else name
