"""YAML as a sweep file needs it: plain values, each with its line number. Tags, aliases and double keys are
refused."""

from __future__ import annotations

import re
from typing import Any

import yaml

from persafl_lit.errors import ConfigError, first_line

MOST_NODES = 10_000
PLAIN = ("str", "int", "float", "bool", "null", "seq", "map")

Path = tuple[str | int, ...]
"""Where a value stands: ("grid", 0, "method.beta")."""


class _Loader(yaml.SafeLoader):
    """1e-3 is a number, as on the command line."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class Source:
    """A file's values and lines."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self._lines: dict[Path, int] = {}
        self._count = 0
        try:
            loader = _Loader(text)
            try:
                node = loader.get_single_node()
                self.values = {} if node is None else self._read(node, (), loader)
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            raise ConfigError(f"{name}{line}: {error.problem or error.context}") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: {first_line(error)}") from None
        if not isinstance(self.values, dict):
            raise ConfigError(f"{name}: expected keys and values (name, overrides, grid, seeds, select, search)")

    def refuse(self, path: Path, what: str) -> ConfigError:
        """An error at the line of a value, or of what holds it."""
        known = next((path[:size] for size in range(len(path), -1, -1) if path[:size] in self._lines), ())
        return ConfigError(f"{self.name}:{self._lines.get(known, 1)}: {what}")

    def line(self, path: Path) -> int:
        return self._lines[path]

    def _read(self, node: yaml.Node, path: Path, loader: _Loader) -> Any:
        self._lines.setdefault(path, node.start_mark.line + 1)
        self._count += 1
        if self._count > MOST_NODES:
            raise self.refuse(path, f"more than {MOST_NODES} values; this is no sweep file")
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in PLAIN:
            what = f"{str(node.value)[:40]!r} is a {kind.lstrip('!')[:40]}"
            raise self.refuse(path, f"{what}, not a number, text, list or mapping; quote it")
        if isinstance(node, yaml.SequenceNode):
            return [self._read(item, (*path, index), loader) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, loader)
        return loader.construct_object(node)  # type: ignore[no-untyped-call]

    def _mapping(self, node: yaml.MappingNode, path: Path, loader: _Loader) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str):
                raise self.refuse(path, "a key must be text")
            if key in found:
                self._lines[(*path, key)] = key_node.start_mark.line + 1
                raise self.refuse((*path, key), f"{key} is there twice")
            self._lines[(*path, key)] = key_node.start_mark.line + 1
            found[key] = self._read(value_node, (*path, key), loader)
        return found
