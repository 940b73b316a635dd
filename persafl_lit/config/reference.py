"""docs/configuration.md from the settings classes: `python -m persafl_lit.config.reference > docs/configuration.md`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from persafl_lit.common import limits
from persafl_lit.common.fields import first_paragraph
from persafl_lit.config.coerce import LARGEST, defaults, hints, keys, required, wanted
from persafl_lit.config.compose import SECTIONS, Config, choices
from persafl_lit.config.groups import GROUP_CLASSES
from persafl_lit.config.parse import load_choice, our_conf
from persafl_lit.config.paths import GROUPS
from persafl_lit.config.schema import Method
from persafl_lit.learning.objectives import OBJECTIVES
from persafl_lit.learning.personal_models import PERSONAL_MODELS
from persafl_lit.learning.sharing import Sharing
from persafl_lit.server import RULES
from persafl_lit.server.buffers import Buffers

TOP = """\
# Configuration

This page is generated from the settings classes: `python -m persafl_lit.config.reference > docs/configuration.md`.

`group=choice` takes a file of `conf/`, `key=value` sets one value; order does not matter, and the last word on a key
wins. A method brings its schedule and a data set its model, unless you choose one. `experiment=NAME` is several
settings at once; yours win over them. `persafl list` shows all choices.

Each key is a field of a dataclass, which has its type, default and meaning; the files of `conf/` hold only what a
choice changes. `null` may also be left empty (`eval.every=`). A list is written `[1, 2]`, and a single value is
a list of one."""
BOTTOM = f"""\
## Values

Values are data: `${{...}}` is refused rather than filled in, and so are YAML's tags (`!!python/...`) and aliases
(`&a`, `*a`). Text keys keep what is written: `tracking.experiment=2024_10` is a name.

Upper bounds on inputs, which the error that refuses one names: {limits.MOST_CLIENTS:,} clients;
{limits.MOST_VISITS:,} updates, or visits in a timeline; {limits.MOST_STEPS:,} local, inner or fine-tuning steps;
{limits.MOST_WORKERS:,} workers; {limits.MOST_WEIGHTS:,} weights of a network;
{limits.MOST_NUMBERS:,} numbers in quadratic clients' matrices; files of
{limits.MOST_BYTES / 1e9:g} GB; any number, {LARGEST:g}.

Exit codes: 0 done, 2 bad input, 3 diverged or workers lost for good, 130 interrupted and resumable. What survives which
fault is in [docs/reliability.md](reliability.md).

`PERSAFL_TRACEBACK=1` shows the traceback of an error in a model of yours."""

OURS = [our_conf()]
"""The page is about these files, whatever a user adds."""


def page() -> str:
    """The whole page, as Markdown."""
    parts = [TOP, "## A run", _table(("key", "type", "default", "meaning"), _rows(Config, ""))]
    for section in (key for key in keys(Config) if key in SECTIONS and key not in GROUPS):
        parts += [
            f"## `{section}`",
            _table(("key", "type", "default", "meaning"), _rows(hints(Config)[section], section)),
        ]
    parts += [
        "## `method=`",
        _table(("choice", "objective", "rule", "personal", "also sets", "brings", "what it is"), _methods()),
    ]
    parts += [
        (
            "A method has the keys of its objective, of its rule and of its personal model. Other combinations work "
            "too: `method=fedbuff method.objective=maml`, `method=ditto method.rule=mixing`."
        )
    ]
    owners = {
        f"{part} {name}": cls
        for part, table in (("objective", OBJECTIVES), ("rule", RULES), ("personal", PERSONAL_MODELS))
        for name, cls in table.items()
    }
    parts += [_table(("part", "what it is"), [(owner, first_paragraph(cls)) for owner, cls in owners.items()])]
    parts += [
        _table(
            ("key", "of", "type", "default", "meaning"),
            _shared_rows("method", {"all": Method, **owners, "every method": Sharing}),
        )
    ]
    for group, table in GROUP_CLASSES.items():
        rows = [
            (f"`{name}`", line, *map(_settings, _content(name, group)))
            for name, line in choices(GROUPS[group], OURS).items()
        ]
        parts += [f"## `{group}=`", _table(("choice", "what it is", "also sets", "brings"), rows)]
        shared = {**table, **({"every model": Buffers} if group == "model" else {})}
        parts += [_table(("key", "of", "type", "default", "meaning"), _shared_rows(group, shared))]
    described = [(f"`{name}`", line) for name, line in choices("experiment", OURS).items()]
    return "\n\n".join([*parts, "## `experiment=`", _table(("choice", "what it is"), described), BOTTOM]) + "\n"


def meanings(cls: type) -> dict[str, str]:
    """The string below each field of a class or of those it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


# -- rows -------------------------------------------------------------------------------------------------------------


def _rows(cls: type, where: str) -> list[tuple[str, str, str, str]]:
    """Key, type, default and meaning of every key of a class that is a value or a choice."""
    rows, said, needed = [], meanings(cls), required(cls)
    for name, default in defaults(cls).items():
        key = f"{where}.{name}" if where else name
        if key in GROUPS:
            rows.append((f"`{key}`", "choice", f"`{default['name']}`", said.get(name, "")))
        elif key not in SECTIONS:
            rows.append(
                (
                    f"`{key}`",
                    type_of(hints(cls)[name]),
                    "required" if name in needed else _value(default),
                    said.get(name, ""),
                )
            )
    return rows


def _shared_rows(group: str, classes: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The keys of several classes, each said once with the classes that have it alike."""
    owners: dict[tuple[str, str, str, str], list[str]] = {}
    for owner, cls in classes.items():
        for row in _rows(cls, group):
            owners.setdefault(row, []).append(owner)
    order = list(dict.fromkeys(row[0] for row in owners))
    return [
        (row[0], ", ".join(names), *row[1:])
        for row, names in sorted(owners.items(), key=lambda item: order.index(item[0][0]))
    ]


def _methods() -> list[tuple[str, ...]]:
    rows = []
    for name, line in choices("method", OURS).items():
        content, brought = _content(name, "method")
        parts = {**defaults(Method), **{key: content.pop(key) for key in keys(Method) if key in content}}
        rows.append((f"`{name}`", *parts.values(), _settings(content), _settings(brought), line))
    return rows


def _content(name: str, group: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a file of conf/ sets of its own group, and of others."""
    content = load_choice(name, group, OURS)
    brought = content.pop("defaults", {})
    return content, brought


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"`{key}={_value(value).strip('`')}`" for key, value in values.items())


# -- words ------------------------------------------------------------------------------------------------------------


def type_of(hint: Any) -> str:
    """The values that an annotation allows, for a column of a table."""
    return re.sub(r"\b(a|one of) |\bfinite ", "", wanted(hint))


def _value(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, without columns that would be empty."""
    rows = list(rows)
    kept = [column for column in range(len(head)) if any(row[column] for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line[column].replace("|", "\\|") for column in kept) + " |" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
