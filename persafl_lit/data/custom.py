"""Data from a function of the user's, or passed from Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from persafl_lit.common.plugins import exits_refused, import_path, is_dotted
from persafl_lit.data.given import Given
from persafl_lit.errors import ConfigError, DataError, located, shown


@dataclass(frozen=True, kw_only=True)
class CustomData(Given):
    """What a function of yours returns: anything that `persafl_lit.run(data=...)` takes. Modules in the current folder
    are found."""

    path: str
    """package.module.function; it runs with allow_code=true only."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function: `data.args.year=2024`."""

    runs_code: ClassVar[bool] = True

    def load(self) -> Any:
        if not is_dotted(self.path):
            raise ConfigError(f"data.path must be package.module.function; got {shown(self.path)}")
        try:
            found = import_path(self.path)
            if not callable(found):
                raise TypeError(f"it is no function but {shown(found)}")
            with exits_refused():
                data = found(**self.args)
        except ImportError as error:
            raise ConfigError(f"data.path={self.path} is not there: {error}") from error
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise DataError(
                f"data.path={self.path} with data.args={shown(dict(self.args))} fails: {located(error)}"
            ) from error
        if data is None:
            raise DataError(f"data.path={self.path} returns None; it must return what persafl_lit.run(data=...) takes")
        return data
