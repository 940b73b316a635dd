"""A group's values: completed and typed by the classes that own its keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from persafl_lit.config.coerce import coerced, defaults, keys
from persafl_lit.config.paths import GROUPS, get
from persafl_lit.config.registry import TABLES as REGISTRY
from persafl_lit.config.registry import resolve
from persafl_lit.config.schema import Method
from persafl_lit.errors import ConfigError, closest, shown
from persafl_lit.learning.objectives import OBJECTIVES
from persafl_lit.learning.personal_models import PERSONAL_MODELS
from persafl_lit.learning.sharing import Sharing
from persafl_lit.server import RULES
from persafl_lit.server.buffers import Buffers

GROUP_CLASSES: dict[str, Mapping[str, Any]] = {key: table.ours for key, table in REGISTRY.items() if key in GROUPS}
"""Groups whose choices are classes, with ours; a method is an objective, a rule, what is shared and a personal
model."""


def take_defaults(content: dict[str, Any], key: str) -> dict[str, Any]:
    """What a choice brings for other keys."""
    found = content.pop("defaults", None) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"the defaults that a {key} brings must be keys and values; got {shown(found)}")
    return found


def set_group(values: dict[str, Any], key: str, content: dict[str, Any]) -> None:
    *parents, last = key.split(".")
    (get(values, ".".join(parents)) if parents else values)[last] = content


def completed(key: str, values: Mapping[str, Any], allow_code: bool, before: Iterable[type] = ()) -> dict[str, Any]:
    """A group's values with the defaults of its classes. A method leaves out what only other objectives and rules have,
    such as those `before`."""
    known = {name: default for cls in owners_of(key, values, allow_code) for name, default in defaults(cls).items()}
    others = (*OBJECTIVES.values(), *RULES.values(), *PERSONAL_MODELS.values(), *before) if key == "method" else ()
    allowed = [*known, *(name for cls in others for name in keys(cls))]
    for name in values:
        if name != "name" and name not in allowed:
            raise ConfigError(
                f"unknown key {shown(f'{key}.{name}')}; {key}={values['name']} has "
                f"{', '.join(known) or 'no keys'}.{closest(name, allowed)}"
            )
    return {"name": values["name"], **{name: values.get(name, default) for name, default in known.items()}}


def typed_group(key: str, values: Mapping[str, Any], allow_code: bool) -> dict[str, Any]:
    """A group's values as its classes declare them: schedule.tau=3.0 is 3, and the same run."""
    typed: dict[str, Any] = {"name": values["name"]}
    for cls in owners_of(key, values, allow_code):
        typed |= coerced(cls, {name: values[name] for name in keys(cls)}, key)
    return typed


def owners_of(key: str, values: Mapping[str, Any], allow_code: bool) -> list[type]:
    """The classes that own a group's keys."""
    if key != "method":
        return [resolve(key, values["name"], allow_code), *([Buffers] if key == "model" else [])]
    parts = coerced(Method, {name: values[name] for name in keys(Method) if name in values}, key)
    chosen = {name: parts.get(name, default) for name, default in defaults(Method).items()}
    owners = [Method, *(resolve(f"method.{name}", chosen[name], allow_code) for name in keys(Method)), Sharing]
    objective, personal = (resolve(f"method.{name}", chosen[name], allow_code) for name in ("objective", "personal"))
    personal.check(objective)
    for number, cls in enumerate(owners):
        for other in owners[:number]:
            if both := sorted({*keys(cls)} & {*keys(other)}):
                raise ConfigError(
                    f"method.{both[0]} would be a key of two parts of the method ({other.__name__}, {cls.__name__}); "
                    "choose other parts, or rename a field of yours"
                )
    return owners
