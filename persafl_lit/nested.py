"""Nested dicts under dotted keys: `method.lam`. Putting a value where there is none is refused by name."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from persafl_lit.errors import ConfigError, closest

GROUPS = {"method": "method", "data": "data", "model": "model", "schedule": "schedule", "delays": "delays", "eval.finetune": "finetune"}
"""Key -> folder in conf/."""


def get(values: Mapping[str, Any], key: str) -> Any:
    node: Any = values
    for part in key.split("."):
        node = node[part]
    return node


def put(values: dict[str, Any], key: str, value: Any, must_exist: bool = False) -> None:
    *parents, last = key.split(".")
    node: Any = values
    for depth, part in enumerate(parents):
        if not isinstance(node, dict) or part not in node or not isinstance(node[part], dict):
            _unknown(values, key, parents[:depth], node)
        node = node[part]
    if must_exist and last not in node:
        if ".".join(parents) == "model.args":
            node[last] = value
            return
        _unknown(values, key, parents, node)
    if must_exist and last == "name" and key.removesuffix(".name") in GROUPS:
        raise ConfigError(f"{key} is not set by itself; write {key.removesuffix('.name')}={value}")
    if must_exist and isinstance(node[last], dict) and not isinstance(value, dict):
        raise ConfigError(f"{key} is a group of keys ({', '.join(node[last])}), not a value; got {value!r}")
    node[last] = _alike(value, node.get(last))


def _alike(value: Any, default: Any) -> Any:
    """20 where the default is 25.0 is 20.0: equal settings get equal hashes."""
    if isinstance(default, list) and isinstance(value, list) and default:
        return [_alike(item, default[0]) for item in value]
    return float(value) if isinstance(default, float) and type(value) is int else value


def _unknown(values: Mapping[str, Any], key: str, parents: Sequence[str], node: Any) -> typing.NoReturn:
    where = ".".join(parents)
    names = [name for name in node if name != "name"] if isinstance(node, dict) else []
    owner = f"{where}={node['name']}" if where and isinstance(node, dict) and "name" in node else where
    place = f"{owner} has {', '.join(names) or 'no keys'}" if owner else f"there are {', '.join(names)}"
    near = closest(key, [name for name, _ in flatten(values) if not name.endswith(".name")] + list(values) + list(GROUPS))
    raise ConfigError(f"unknown key {key!r}; {place}.{near}")


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
