"""What is written on the command line, in dicts and in the files of conf/, as plain values. The only module that knows
OmegaConf.

Values are data, never programs: `${...}` is not filled in but refused, and so are YAML's tags and aliases; what is left
is null, true, false, numbers, text, lists, and keys with values.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from persafl_lit.common.input_files import plain_file
from persafl_lit.common.plugins import conf_of_packages
from persafl_lit.config.coerce import Written
from persafl_lit.config.paths import GROUPS
from persafl_lit.errors import ConfigError, closest, first_line, one_line, shown

LONGEST, DEEPEST = 10_000, 20
"""Characters of a value, and lists within lists: beyond, it is no setting."""
CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


# -- overrides --------------------------------------------------------------------------------------------------------


def as_mapping(overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as plain values, or `Written` ones whose keys decide later how they are read."""
    if isinstance(overrides, Mapping):
        return typing.cast("dict[str, Any]", plain_value(overrides, ""))
    if isinstance(overrides, (str, bytes)):
        raise ConfigError(f"overrides are a list of 'key=value' strings or a dict; got the string {shown(overrides)}")
    asked = {}
    for text in overrides:
        key, equals, value = str(text).partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{shown(text)} is not an override; write key=value, e.g. method=persafl_me or eta=0.05")
        asked[key.strip()] = parse(value, key.strip())
    return typing.cast("dict[str, Any]", plain_value(asked, ""))


def flat_keys(values: Mapping[str, Any], sections: Collection[str]) -> dict[str, Any]:
    """The keys within `sections` as dotted keys; a group's dict with a `name` is its choice and then its values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        content = value.value if isinstance(value, Written) else value
        if key in sections and isinstance(content, Mapping) and content:
            inner = dict(content)
            if key in GROUPS and "name" in inner:
                flat[key] = inner.pop("name")
            flat.update(flat_keys({f"{key}.{name}": part for name, part in inner.items()}, sections))
        else:
            flat[key] = value
    return flat


def parse(text: str, key: str) -> Any:
    """A value as YAML means it (with 1e-3 a number), together with its text unless it is one or null:
    `experiment=2024_10` is a name."""
    as_text = None if CONTROL.search(text.strip()) else text.strip()
    try:
        _refuse_programs(text)
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[index,call-overload]
    except Exception as error:  # YAML's constructors raise anything
        problem = f"{shown(key)[1:-1]}: {shown(text)} cannot be read as a value: {first_line(error)[:200]}"
        if isinstance(error, ConfigError):
            raise ConfigError(problem) from None
        return Written(as_text, problem=problem)
    return value if value is None or isinstance(value, str) else Written(as_text, value)


def _refuse_programs(text: str) -> None:
    """Text that would grow, build objects or read the environment when it is read."""
    if len(text) > LONGEST:
        raise ConfigError(f"it has {len(text)} characters; at most {LONGEST:,} are read")
    if "${" in text:
        raise ConfigError("${...} is never filled in; write the value itself")
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ConfigError("YAML's anchors and aliases (& and *) are not read")
        if getattr(event, "tag", None):
            raise ConfigError(f"YAML's tags ({event.tag}) are not read")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ConfigError(f"lists or keys more than {DEEPEST} deep are not read")


def plain_value(value: Any, key: str, depth: int = 0) -> Any:
    """The value if it is data, with tuples as lists and paths as text; else an error that names its key."""
    if isinstance(value, Written):
        try:
            return Written(value.text, plain_value(value.value, key), value.problem)
        except ConfigError as error:
            return Written(value.text, problem=str(error))
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        if value.bit_length() > 1000:
            raise ConfigError(f"{key} is a number of {value.bit_length()} bits; that is too large")
        return value
    if isinstance(value, str):
        if "${" in value:
            raise ConfigError(
                f"{key}: {shown(value)} cannot be read as a value: ${{...}} is never filled in; write the value itself"
            )
        if len(value) > LONGEST or CONTROL.search(value):
            raise ConfigError(
                f"{key} must be a text of at most {LONGEST:,} characters without control characters; got {shown(value)}"
            )
        return value
    if depth > DEEPEST:
        raise ConfigError(f"{key}: lists or keys more than {DEEPEST} deep are not read")
    if isinstance(value, (list, tuple)):
        return [plain_value(item, key, depth + 1) for item in value]
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str) or plain_value(name, "a key") != name:
                raise ConfigError(f"the key {shown(name)} {f'in {key} ' if key else ''}is not a text")
        return {
            name: plain_value(part, f"{key}.{shown(name)[1:-1]}" if key else shown(name)[1:-1], depth + 1)
            for name, part in value.items()
        }
    raise ConfigError(f"{key or 'the config'} must be numbers, text, lists or keys with values; got {shown(value)}")


# -- files ------------------------------------------------------------------------------------------------------------


_first: list[Path] = []
"""Folders that were asked for."""


@contextlib.contextmanager
def conf_first(folders: Iterable[str | os.PathLike[str]]) -> Iterator[None]:
    """In here these folders are searched before all others."""
    asked = [Path(folder).absolute() for folder in folders]
    for folder in asked:
        if not folder.is_dir():
            raise ConfigError(f"there is no conf folder {folder}")
    before = _first[:]
    _first[:0] = asked
    try:
        yield
    finally:
        _first[:] = before


def our_conf() -> Path:
    """conf/ inside an installed package, or beside the package in a checkout."""
    here = Path(__file__).resolve().parent.parent
    return here / "conf" if (here / "conf" / "config.yaml").is_file() else here.parent / "conf"


def conf_folders() -> list[Path]:
    """What is searched, in this order: folders that were asked for, ./conf, ours. Those of installed packages come
    last."""
    ours, here = our_conf(), Path.cwd() / "conf"
    return [*_first, *([here] if here.is_dir() and here.resolve() != ours.resolve() else []), ours]


def files(group: str, folders: Sequence[Path]) -> dict[str, Path]:
    """Every choice of a group and its file: the first that is found."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted((folder / group).glob("*.yaml")):
            if path.is_file():  # a pipe would be waited for
                found.setdefault(path.stem, path)
    return found


def choices(group: str, conf: Sequence[Path] | None = None) -> dict[str, str]:
    """Every choice of a group and the one line that its file begins with."""
    return {name: first_comment(path) for name, path in files(group, conf_folders() if conf is None else conf).items()}


def first_comment(path: Path) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return one_line(file.readline(LONGEST).strip().lstrip("# "))


def find_choice(choice: str, group: str, folders: Sequence[Path]) -> Path | None:
    """The file of a choice in these folders, else in one of an installed package."""
    for known in (
        folders,
        *([folder] for folder in (conf_of_packages() if choice not in files(group, folders) else ())),
    ):
        if (path := files(group, known).get(choice)) is not None:
            return path
    return None


def load_choice(choice: str, key: str, folders: Sequence[Path]) -> dict[str, Any]:
    group = GROUPS.get(key, key)
    if (path := find_choice(choice, group, folders)) is None:
        known = choices(group, [*folders, *conf_of_packages()])
        raise ConfigError(
            f"unknown {key} {shown(choice)}; conf/{group} has {', '.join(known)}.{closest(choice, known)}"
        )
    return load(path, key)


def find(name: str, folders: Sequence[Path]) -> Path:
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(
        f"no {name} in {', '.join(map(str, folders)) or 'any conf folder'}; the installation is incomplete"
    )


def load(path: Path, key: str) -> dict[str, Any]:
    try:
        content = copy.deepcopy(_content(plain_file(path, ConfigError).read_text(encoding="utf-8")))
    except Exception as error:  # YAML's constructors raise anything
        raise ConfigError(f"{path}: {first_line(error)[:300]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys and values for {key}; got {type(content).__name__}")
    return typing.cast("dict[str, Any]", content)


@functools.lru_cache(maxsize=256)
def _content(text: str) -> Any:
    _refuse_programs(text)
    return plain_value(OmegaConf.to_container(OmegaConf.create(text), resolve=False), "") if text.strip() else {}


def to_yaml(values: Mapping[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dict(values)))
