"""Data from a function of the user's, or passed from Python."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

from persafl_lit.data.given import Given
from persafl_lit.errors import ConfigError, DataError, located, shown


@dataclass(frozen=True, kw_only=True)
class CustomData(Given):
    """What a function of yours returns: anything that `persafl_lit.run(data=...)` takes. Modules in the current folder are found."""

    path: str
    """package.module.function; it runs with allow_code=true only."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function: `data.args.year=2024`."""

    runs_code: ClassVar[bool] = True

    def load(self) -> Any:
        module_name, _, name = self.path.rpartition(".")
        if not module_name or not name.isidentifier():
            raise ConfigError(f"data.path must be package.module.function; got {shown(self.path)}")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            found = getattr(importlib.import_module(module_name), name)
            if not callable(found):
                raise TypeError(f"it is no function but {shown(found)}")
            data = found(**self.args)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise DataError(f"data.path={self.path} with data.args={shown(dict(self.args))} fails: {located(error)}") from error
        if data is None:
            raise DataError(f"data.path={self.path} returns None; it must return what persafl_lit.run(data=...) takes")
        return data
