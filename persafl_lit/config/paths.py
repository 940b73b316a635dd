"""Nested dicts under dotted keys: `method.lam`. Putting a value where there is none is refused by name."""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from persafl_lit.config.coerce import Written
from persafl_lit.errors import ConfigError, closest, shown

GROUPS = {
    "method": "method",
    "data": "data",
    "model": "model",
    "schedule": "schedule",
    "delays": "delays",
    "eval.finetune": "finetune",
}
"""Key -> folder in conf/."""


def get(values: Mapping[str, Any], key: str) -> Any:
    node: Any = values
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            raise ConfigError(f"{key} is missing; set {key}=...")
        node = node[part]
    return node


def put(values: dict[str, Any], key: str, value: Any, sections: Collection[str]) -> None:
    """Set a key that is there. `sections` are the keys that hold keys; what else is a dict (model.args) takes any."""
    *parents, last = key.split(".")
    where = ".".join(parents)
    node: Any = values
    for depth, part in enumerate(parents):
        if isinstance(node.get(part), Written):
            node[part] = node[part].value
        if not isinstance(node.get(part), dict):
            _unknown(values, key, parents[:depth], node)
        node = node[part]
    if last not in node and (where in sections or not parents):
        _unknown(values, key, parents, node)
    if last == "name" and where in GROUPS:
        raise ConfigError(f"{key} is not set by itself; write {where}={shown(value).strip(chr(39))}")
    if key in sections:
        raise ConfigError(f"{key} is a group of keys ({', '.join(node[last])}), not a value; got {shown(value)}")
    node[last] = value


def _unknown(values: Mapping[str, Any], key: str, parents: Sequence[str], node: Mapping[str, Any]) -> typing.NoReturn:
    where = ".".join(parents)
    names = [name for name in node if name != "name"]
    owner = f"{where}={node['name']}" if where and "name" in node else where
    place = f"{owner} has {', '.join(names) or 'no keys'}" if owner else f"there are {', '.join(names)}"
    near = closest(
        key, [name for name, _ in flatten(values) if not name.endswith(".name")] + list(values) + list(GROUPS)
    )
    raise ConfigError(f"unknown key {shown(key)}; {place}.{near}")


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
