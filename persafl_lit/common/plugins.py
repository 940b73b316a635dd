"""Code from outside the package: classes by dotted path, entry points of installed packages, and what it may not do:
exit.

Entry points are looked for only when a name is unknown otherwise, and imported only when they are used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from persafl_lit.errors import ConfigError, closest, first_line, located, shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger(__name__)

PREFIX = "persafl_lit."
"""Of the groups of entry points."""
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


# -- dotted paths -----------------------------------------------------------------------------------------------------


def is_dotted(name: str) -> bool:
    return DOTTED.fullmatch(name) is not None


def import_path(path: str) -> Any:
    """What is at package.module.Class, also in a module of the current folder. An ImportError says which part is
    missing."""
    if not is_dotted(path):
        raise ImportError(f"{shown(path)} is no package.module.Class")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    first, *rest = path.split(".")
    found = _module(first)
    name = first
    for part in rest:
        try:
            found = _attribute(found, part)
        except AttributeError:
            if not hasattr(found, "__path__"):
                known = [known for known in dir(found) if not known.startswith("_")]
                kind = "module" if isinstance(found, ModuleType) else "class"
                raise ImportError(f"the {kind} {name} has no {part!r}.{closest(part, known)}") from None
            found = _module(f"{name}.{part}")
        name = f"{name}.{part}"
    return found


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except (AttributeError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a module's own __getattr__ may raise anything
        raise ImportError(
            f"{name} of {getattr(owner, '__name__', owner)} cannot be imported: {located(error)}"
        ) from error


def _module(name: str) -> ModuleType:
    try:
        with exits_refused():
            return import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing runs the user's code, which may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            package, _, last = name.rpartition(".")
            raise ImportError(
                f"the package {package} has no module or class {last!r}" if package else f"there is no module {name!r}"
            ) from None
        raise ImportError(f"the module {name} cannot be imported: {located(error)}") from error


# -- entry points -----------------------------------------------------------------------------------------------------


def offered(kind: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """What installed packages offer as `persafl_lit.KIND`, by name; one that several packages define has several."""
    return _offered(PREFIX + kind, tuple(sys.path))


@functools.lru_cache(maxsize=64)
def _offered(group: str, path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    from importlib.metadata import entry_points

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, package_of(entry))):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


def package_of(entry: EntryPoint) -> str:
    """NAME VERSION of the package that an entry point comes from."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "unknown package"


def load_entry(kind: str, name: str, key: str) -> Any:
    """The object behind an entry point."""
    entries = offered(kind)[name]
    if len(entries) > 1:
        raise ConfigError(
            f"{key}={name} is defined by several packages: {' and '.join(map(package_of, entries))}; "
            "uninstall all but one"
        )
    try:
        with exits_refused():
            return entries[0].load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing runs the package's code, which may raise anything
        raise ConfigError(
            f"{key}={name} of {package_of(entries[0])} ({entries[0].value}) cannot be imported: {located(error)}"
        ) from error


def conf_of_packages() -> dict[Path, str]:
    """Folders that installed packages offer as `persafl_lit.conf` (the dotted name of a folder), each with NAME
    VERSION."""
    folders: dict[Path, str] = {}
    for entries in offered("conf").values():
        for entry in entries:
            top, *below = entry.value.partition(":")[0].split(".")
            try:
                spec = importlib.util.find_spec(top)  # of the top only: its code is not run
            except (ImportError, ValueError):
                spec = None
            places = [Path(place, *below) for place in (spec.submodule_search_locations if spec else None) or ()]
            found = next((place for place in places if place.is_dir()), None)
            if found is None:
                warn_once(f"the conf folder {entry.value} of {package_of(entry)} is not there")
            else:
                folders[found] = package_of(entry)
    return folders


def origin_of(cls: Any) -> str:
    """The installed package of a class with its version, or its module and the digest of its file."""
    from importlib import metadata

    module = sys.modules.get(getattr(cls, "__module__", ""))
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return str(getattr(cls, "__module__", "unknown"))
    if "site-packages" in file or "dist-packages" in file:
        for name in metadata.packages_distributions().get(module.__name__.partition(".")[0], ()):
            return f"{name} {metadata.version(name)}"
    try:
        return f"{module.__name__} sha256:{hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]}"
    except OSError:
        return module.__name__


_warned: set[str] = set()


def warn_once(sentence: str) -> None:
    if sentence not in _warned:
        _warned.add(sentence)
        logger.warning("%s", first_line(ConfigError(sentence)))


# -- exits ------------------------------------------------------------------------------------------------------------

really_exit = os._exit
_refusing: Counter[tuple[int, int]] = Counter()
"""By process and thread: a forked one may exit."""


def _exit(status: int) -> NoReturn:
    if _refusing[os.getpid(), threading.get_ident()]:
        raise SystemExit(f"os._exit({status})")
    really_exit(status)


@contextlib.contextmanager
def exits_refused() -> Iterator[None]:
    """In here, in this thread, `os._exit` raises SystemExit: code of the user's cannot end a run as if all were
    well."""
    os._exit = _exit  # never restored: outside these blocks it exits as usual
    who = os.getpid(), threading.get_ident()
    _refusing[who] += 1
    try:
        yield
    finally:
        _refusing[who] -= 1
