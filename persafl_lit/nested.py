"""Nested dicts under dotted keys: `method.lam`. Putting a value where there is none is refused by name."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from persafl_lit.errors import ConfigError, closest, shown

GROUPS = {"method": "method", "data": "data", "model": "model", "schedule": "schedule", "delays": "delays", "eval.finetune": "finetune"}
"""Key -> folder in conf/."""


def get(values: Mapping[str, Any], key: str) -> Any:
    node: Any = values
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            raise ConfigError(f"{key} is missing; set {key}=...")
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
        raise ConfigError(f"{key} is not set by itself; write {key.removesuffix('.name')}={shown(value).strip(chr(39))}")
    if must_exist and isinstance(node[last], dict) and not isinstance(value, dict):
        raise ConfigError(f"{key} is a group of keys ({', '.join(node[last])}), not a value; got {shown(value)}")
    node[last] = _alike(value, node.get(last))


def _alike(value: Any, default: Any) -> Any:
    """20 where the default is 25.0 is 20.0, and 3.0 where it is 5 is 3: equal settings get equal hashes."""
    if isinstance(default, list) and default and isinstance(value, (int, float)):
        value = [value]
    if isinstance(default, list) and isinstance(value, list) and default:
        return [_alike(item, default[0]) for item in value]
    if isinstance(default, float) and type(value) in (int, float):
        return float(value) + 0.0  # -0.0 is 0.0
    return int(value) if type(default) is int and type(value) is float and value.is_integer() else value


def _unknown(values: Mapping[str, Any], key: str, parents: Sequence[str], node: Any) -> typing.NoReturn:
    where = ".".join(parents)
    names = [name for name in node if name != "name"] if isinstance(node, dict) else []
    owner = f"{where}={node['name']}" if where and isinstance(node, dict) and "name" in node else where
    place = f"{owner} has {', '.join(names) or 'no keys'}" if owner else f"there are {', '.join(names)}"
    near = closest(key, [name for name, _ in flatten(values) if not name.endswith(".name")] + list(values) + list(GROUPS))
    raise ConfigError(f"unknown key {shown(key)}; {place}.{near}")


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
