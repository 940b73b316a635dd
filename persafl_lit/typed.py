"""Dataclasses from plain values: each value converted to its declared type, or refused by the name of its key."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from persafl_lit.errors import ConfigError, closest, shown

T = TypeVar("T")
LARGEST = 1e18
"""Numbers beyond this overflow somewhere; nan compares false and is refused too."""
WANTED = {float: "a finite number", int: "a whole number", bool: "true or false", str: "a text"}


def construct(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """A dataclass from plain values, each converted to its declared type or refused by name."""
    prefix = f"{where}." if where else ""
    hints = typing.get_type_hints(cls)
    known = keys(cls)
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {shown(prefix + key)}; {where or 'the config'} has {', '.join(known)}.{closest(key, known)}")
    required = [f.name for f in dataclasses.fields(cls) if f.init and f.default is f.default_factory is dataclasses.MISSING]  # type: ignore[arg-type]
    for key in required:
        if key not in values or (values[key] is None and not _allows_none(hints[key])):
            raise ConfigError(f"{prefix}{key} is missing; set {prefix}{key}=...")
    return cls(**{key: coerce(hints[key], value, prefix + key) for key, value in values.items()})


def keys(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls) if f.init]


def _allows_none(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def coerce(hint: Any, value: Any, key: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [option for option in args if option is not type(None)]
        for option in options[:-1]:
            try:
                return coerce(option, value, key)
            except ConfigError:
                continue
        return coerce(options[-1], value, key)
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        raise ConfigError(f"{key} must be one of {', '.join(map(str, args))}; got {shown(value)}.{closest(str(value), map(str, args))}")
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, Mapping):
            return construct(hint, value, key)
        raise ConfigError(f"{key} is a group of keys ({', '.join(keys(hint))}), not a value; got {shown(value)}")
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(coerce(args[0], item, key) for item in value)
    if origin is tuple and isinstance(value, (int, float)) and not isinstance(value, bool):
        return (coerce(args[0], value, key),)
    if origin is tuple and isinstance(value, str) and args[0] is str:
        return (value,)
    if origin is dict and isinstance(value, Mapping):
        return dict(value)
    if hint is Any:
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    if hint is float and number:
        return float(value) + 0.0  # -0.0 is 0.0
    if hint is int and number and value == int(value):
        return int(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    wanted = WANTED.get(hint, "a list" if origin is tuple else "keys and values")
    limit = f"; numbers end at {LARGEST:g}" if isinstance(value, (int, float)) and abs(value) > LARGEST else ""
    raise ConfigError(f"{key} must be {wanted}; got {shown(value)}{limit}")
