"""Every table of choices. A name is one of ours, an entry point of an installed package, or the dotted path of a class
of yours.

    method.objective=plain        method.objective=theirs        method.objective=package.module.Mine allow_code=true

The fields of a user's dataclass become keys with types and defaults, as those of ours. Classes and objects from Python
are recorded by the same names and values.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from persafl_lit.callbacks import Callback
from persafl_lit.common import plugins
from persafl_lit.config.coerce import construct, hints, keys
from persafl_lit.data import DATASETS
from persafl_lit.errors import ConfigError, PersaflError, closest, located, shown
from persafl_lit.learning.metric_names import FURTHER_METRICS
from persafl_lit.learning.objectives import OBJECTIVES, Objective
from persafl_lit.learning.personal_models import PERSONAL_MODELS, PersonalModel
from persafl_lit.learning.personalisation import FINETUNES, Finetune
from persafl_lit.models.networks import MODELS
from persafl_lit.server import RULES
from persafl_lit.server.rules import Rule
from persafl_lit.timeline import DELAYS, SCHEDULES, Delays, Schedule

T = TypeVar("T")
HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
LOGGERS = {"csv": "lightning.pytorch.loggers.CSVLogger", "tensorboard": "lightning.pytorch.loggers.TensorBoardLogger"}
"""By path: importing them takes long."""
LOGGER_NEEDS = ("log_hyperparams", "log_metrics", "save", "finalize")
METRICS = {name: f"persafl_lit.learning.metrics.{name}" for name in FURTHER_METRICS}
LOGS = {"save_dir": "logs"}
"""What these take unless told otherwise."""
COMMON = ("persafl_lit", "torch", "torchvision", "numpy", "builtins")
"""Packages of which every run's record has the versions."""
HELD = (float, int, bool, str, type(None), Any)
"""Types of a key, and of what its lists, unions and dicts hold."""


@dataclass(frozen=True)
class Table:
    """The choices of one key."""

    key: str
    kind: str
    """Entry points are those of the group persafl_lit.KIND."""
    ours: Mapping[str, Any]
    base: type | None = None
    """What a class of the user's must be a subclass of."""
    needs: tuple[str, ...] = ()
    """Else the methods that it must have, of which `some` suffice or not."""
    some: bool = False
    settings: bool = True
    """Whether its fields are keys of the config."""

    def names(self) -> list[str]:
        return [*self.ours, *(name for name in plugins.offered(self.kind) if name not in self.ours)]


TABLES = {
    table.key: table
    for table in (
        Table("method.objective", "objectives", OBJECTIVES, Objective),
        Table("method.rule", "rules", RULES, Rule),
        Table("method.personal", "personal_models", PERSONAL_MODELS, PersonalModel),
        Table("data", "data", DATASETS, needs=("federation",)),
        Table("model", "models", MODELS, needs=("network",)),
        Table("schedule", "schedules", SCHEDULES, Schedule),
        Table("delays", "delays", DELAYS, Delays),
        Table("eval.finetune", "finetune", FINETUNES, Finetune),
        Table("eval.metrics", "metrics", METRICS, settings=False),
        Table("callbacks", "callbacks", {}, needs=HOOKS, some=True, settings=False),
        Table("loggers", "loggers", LOGGERS, needs=LOGGER_NEEDS, settings=False),
    )
}

_given: dict[str, type] = {}
"""Classes that were passed from Python, by the path that they are recorded with."""


# -- from names to classes --------------------------------------------------------------------------------------------


def resolve(key: str, name: Any, allow_code: bool = False, said: str = "") -> Any:
    """The class that a name means; `said` is the key under which it was said, if another one."""
    table, said = TABLES[key], said or key
    if isinstance(name, str) and name in table.ours:
        found = table.ours[name]
        return plugins.import_path(found) if isinstance(found, str) else found
    if isinstance(name, str) and name in _given:
        return _checked(key, _given[name], f"{said}={name}")
    if isinstance(name, str) and name in plugins.offered(table.kind):
        return _checked(key, plugins.load_entry(table.kind, name, said), f"{said}={name}")
    if not isinstance(name, str) or not plugins.is_dotted(name):
        names = table.names()
        known = ", ".join([*names, "package.module.Class of yours"])
        raise ConfigError(f"unknown {said} {shown(name)}; there are {known}.{closest(str(name), names)}")
    if not allow_code:
        raise ConfigError(f"{said}={name} runs code from outside persafl_lit; pass allow_code=true if you trust it")
    try:
        found = plugins.import_path(name)
    except ImportError as error:
        raise ConfigError(f"{said}={name} is not there: {error}") from error
    return _checked(key, found, f"{said}={name}")


def is_class(key: str, name: str) -> bool:
    """Whether a name can mean a class; what it means may still be missing."""
    return (
        name in TABLES[key].ours
        or name in _given
        or plugins.is_dotted(name)
        or name in plugins.offered(TABLES[key].kind)
    )


def _checked(key: str, found: Any, said: str) -> Any:
    """Refuse what cannot be a choice of this table, before anything is made of it."""
    table = TABLES[key]
    kind = key.rpartition(".")[2].removesuffix("s") if key in ("callbacks", "loggers") else key.rpartition(".")[2]
    if table.kind == "metrics" and callable(found):
        return found
    if not isinstance(found, type):
        raise ConfigError(f"{said} is no class but {shown(found)}")
    if table.base is not None and not issubclass(found, table.base):
        raise ConfigError(f"{said} is no {kind}: make {found.__name__} a subclass of persafl_lit.{table.base.__name__}")
    missing = [name for name in table.needs if not callable(getattr(found, name, None))]
    if len(missing) == len(table.needs) > 0 or (missing and not table.some):
        raise ConfigError(
            f"{said} is no {kind}: {found.__name__} needs {' or '.join(missing) if table.some else ', '.join(missing)}"
        )
    if abstract := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{said} is not complete: {found.__name__} does not define {', '.join(abstract)}")
    if table.settings:
        _check_fields(found, said)
    return found


def _check_fields(cls: type, said: str) -> None:
    """The fields of a dataclass are its keys: each must have a type that a config can hold."""
    plain = "__dataclass_fields__" not in vars(cls)
    if plain and (
        "__init__" in vars(cls) or any("ClassVar" not in str(hint) for hint in inspect.get_annotations(cls).values())
    ):
        raise ConfigError(f"{said}: put @dataclass(frozen=True) above {cls.__name__}, so that its fields become keys")
    try:
        known = {name: hints(cls)[name] for name in keys(cls)}
    except Exception as error:  # annotations are expressions
        raise ConfigError(f"{said}: the types of {cls.__name__}'s fields cannot be read: {located(error)}") from error
    for name, hint in known.items():
        if name == "name" or not _holds(hint):
            why = (
                "a key cannot be called name"
                if name == "name"
                else f"no key can be a {getattr(hint, '__name__', hint)}"
            )
            raise ConfigError(
                f"{said}: {cls.__name__}.{name}: {why}; use float, int, bool, str, Literal, tuple[float, "
                "...], dict[str, Any] or one of them | None"
            )


def _holds(hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return len(args) == 2 and (args[1] is Ellipsis or args[0] == args[1]) and _holds(args[0])
    if origin in (Union, types.UnionType, Annotated):
        return all(map(_holds, args))
    return origin is Literal or (origin is dict and args[0] is str and _holds(args[1])) or hint in HELD


# -- from classes to objects ------------------------------------------------------------------------------------------


def make(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """An object of a class with settings; a class of the user's may refuse its values in its own way."""
    try:
        with plugins.exits_refused():
            return construct(cls, values, where)
    except (PersaflError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything
        raise ConfigError(
            f"{where}: {cls.__name__} cannot be made of {shown(dict(values))}: {located(error)}"
        ) from error


def make_listed(key: str, described: Mapping[str, Any], allow_code: bool) -> Any:
    """A callback or a logger from its `name` and its arguments."""
    name, args = described["name"], {key: value for key, value in described.items() if key != "name"}
    cls = resolve(key, name, allow_code)
    return _called(cls, args if name not in LOGGERS else LOGS | args, f"{key}: {name}")


def make_metric(described: Mapping[str, Any], allow_code: bool) -> Any:
    """A metric as the config describes it: an object of a class, or a function, with its arguments."""
    name = described.get("metric", described["name"])
    args = {key: value for key, value in described.items() if key not in ("name", "metric")}
    found = resolve("eval.metrics", name, allow_code)
    if not (isinstance(found, type) or name in METRICS):
        return functools.partial(found, **args) if args else found
    return _called(found, args, f"eval.metrics: {name}")


def _called(cls: Any, args: Mapping[str, Any], said: str) -> Any:
    try:
        with plugins.exits_refused():
            return cls(**args)
    except (PersaflError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything
        raise ConfigError(f"{said} cannot be made with {shown(dict(args))}: {located(error)}") from error


# -- from objects to names --------------------------------------------------------------------------------------------


def record(key: str, part: Any) -> tuple[str, dict[str, Any], bool]:
    """Name and values of a class or an object from Python, and whether it is code from outside that a config must
    allow."""
    cls = part if isinstance(part, type) else type(part)
    name = next((name for name, ours in TABLES[key].ours.items() if ours is cls), None)
    outside = name is None
    if name is None:
        name = path_of(cls)
        _given[name] = _checked(key, cls, f"{key}={name}")
    values = {} if isinstance(part, type) else {field: getattr(part, field) for field in keys(cls)}
    return name, values, outside


def path_of(cls: type) -> str:
    """package.module.Class; of a script, the name under which it can be imported from its folder."""
    module = cls.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else module
    return f"{module}.{cls.__qualname__}"


def same(one: Any, other: Any) -> bool:
    """Whether two objects are alike: dataclasses by their fields, others by what they hold."""
    return bool(one == other) or (not is_dataclass(one) and vars(one) == vars(other))


def source_of(key: str, name: str, allow_code: bool = False) -> str | None:
    """Where a choice comes from, with its version: a package, or a module with the digest of its file; None if it is
    ours."""
    table = TABLES[key]
    if name in table.ours:
        return None
    if name not in _given and (entries := plugins.offered(table.kind).get(name)):
        return plugins.package_of(entries[0])
    try:
        return plugins.origin_of(resolve(key, name, allow_code))
    except ConfigError:  # of a run that is read back where its code is not
        return name


def source_of_path(path: str, allow_code: bool = False) -> str | None:
    """Likewise of `model.path` and `data.path`; None if that is no one's own, as nn.Sequential or a list of arrays."""
    if not plugins.is_dotted(path) or path.partition(".")[0] in COMMON:
        return None
    if path.rpartition(".")[0] not in sys.modules and not allow_code:
        return path
    try:
        with plugins.exits_refused():
            return plugins.origin_of(plugins.import_path(path))
    except (Exception, SystemExit):  # as above; or the user's code, whose error the run tells
        return path
