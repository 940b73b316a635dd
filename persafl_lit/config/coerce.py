"""Settings are dataclasses: each field has a type, a default and, in the string below it, its meaning.

`coerce` alone decides what a key may be, by the annotation of its field. `Annotated[int, Literal["cohort"]]` is a key
that may also be the word `cohort`, while the class itself only ever sees the number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union

from persafl_lit.errors import ConfigError, closest, shown

T = TypeVar("T")
LARGEST = 1e18
"""Numbers beyond this overflow somewhere; nan compares false and is refused too."""
WANTED = {float: "a finite number", int: "a whole number", bool: "true or false", str: "a text", type(None): "null"}
SEVERAL = {float: "finite numbers", int: "whole numbers", str: "texts"}


@dataclasses.dataclass(frozen=True, repr=False)
class Written:
    """A value as the command line has it, until the type of its key is known."""

    text: str | None
    """As it is written; None if it has several lines or control characters, and so is no text."""
    value: Any = None
    """What YAML reads in it."""
    problem: str = ""
    """Why YAML cannot read it."""

    def __repr__(self) -> str:
        return repr(self.text if self.problem else self.value)

    def read(self) -> Any:
        if self.problem:
            raise ConfigError(self.problem)
        return self.value


# -- dataclasses ------------------------------------------------------------------------------------------------------


def construct(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """A dataclass from plain values, each converted to its declared type or refused by name."""
    typed = coerced(cls, values, where)
    for key in required(cls):
        if typed[key] is None:
            name = f"{where}.{key}" if where else key
            raise ConfigError(f"{name} is missing; set {name}=...")
    return cls(**typed)


def coerced(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Every key of a dataclass: what is given, else its default, as the declared type. What is required may still be
    None."""
    prefix = f"{where}." if where else ""
    known, types_of, needed = defaults(cls), hints(cls), required(cls)
    for key in values:
        if key not in known:
            raise ConfigError(
                f"unknown key {shown(prefix + key)}; {where or 'the config'} has "
                f"{', '.join(known)}.{closest(key, known)}"
            )
    return {
        key: None if value is None and key in needed else coerce(types_of[key], value, prefix + key)
        for key, value in {**known, **values}.items()
    }


def keys(cls: type) -> list[str]:
    """The fields that a config may set."""
    return [field.name for field in _fields(cls)]


def defaults(cls: type) -> dict[str, Any]:
    """Every key and its default; None where there is none."""
    made = {
        field.name: None if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in _fields(cls)
    }
    return {
        field.name: made[field.name] if field.default is dataclasses.MISSING else field.default
        for field in _fields(cls)
    }


def required(cls: type) -> list[str]:
    """Keys without a default that cannot be null."""
    return [
        field.name
        for field in _fields(cls)
        if field.default is field.default_factory is dataclasses.MISSING
        and type(None) not in typing.get_args(hints(cls)[field.name])
    ]


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """The annotations of a class, evaluated."""
    return typing.get_type_hints(cls, include_extras=True)


@functools.cache
def _fields(cls: type) -> list[dataclasses.Field[Any]]:
    if not dataclasses.is_dataclass(cls):  # a class of the user's may have no settings
        return []
    return [field for field in dataclasses.fields(cls) if field.init and field.metadata.get("key", True)]


# -- values -----------------------------------------------------------------------------------------------------------


def coerce(hint: Any, value: Any, key: str) -> Any:
    """The value as the type that the annotation `hint` declares, or an error that names its key."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType, Annotated):
        return _first_that_fits(hint, value, key)
    if isinstance(value, Written):
        value = value.text if (hint is str or origin is Literal) and value.text is not None else value.read()
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        raise ConfigError(f"{key} must be {wanted(hint)}; got {shown(value)}.{closest(str(value), map(str, args))}")
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return construct(hint, value, key)
        raise ConfigError(f"{key} is a group of keys ({', '.join(keys(hint))}), not a value; got {shown(value)}")
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(coerce(args[0], item, key) for item in value)
    if origin is tuple and (
        (isinstance(value, (int, float)) and not isinstance(value, bool))
        or (isinstance(value, str) and _takes_text(args[0]))
    ):
        return (coerce(args[0], value, key),)
    if origin is dict and isinstance(value, Mapping):
        return {name: coerce(args[1], item, f"{key}.{name}") for name, item in value.items()}
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
    raise _refused(hint, value, key)


def _takes_text(hint: Any) -> bool:
    return hint is str or str in typing.get_args(hint)


def _first_that_fits(hint: Any, value: Any, key: str) -> Any:
    """The first type of a union that takes the value. Where a key may be more than a text, YAML decides what it is."""
    if value is None and type(None) in typing.get_args(hint):
        return None
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if isinstance(value, Written) and options != [str]:
        value = value.read()
    for option in options:
        with contextlib.suppress(ConfigError):
            return coerce(option, value, key)
    raise _refused(hint, value, key)


def _refused(hint: Any, value: Any, key: str) -> ConfigError:
    limit = f"; numbers end at {LARGEST:g}" if isinstance(value, (int, float)) and abs(value) > LARGEST else ""
    return ConfigError(f"{key} must be {wanted(hint)}; got {shown(value)}{limit}")


def wanted(hint: Any) -> str:
    """The values that an annotation allows, in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType, Annotated):
        return " or ".join(map(wanted, args))
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(str, args))
    if origin is tuple:
        return f"a list of {SEVERAL.get(args[0]) or wanted(args[0])}"
    return WANTED.get(hint, "keys and values")
