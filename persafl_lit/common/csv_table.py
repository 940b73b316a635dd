"""Tables as CSV text: unknown cells are empty, floats read back to the same bits, and no cell is a formula."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FORMULA = tuple("=+-@\t\n")


def to_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Rows under `columns` and whatever other keys they have, in the order in which these first appear."""
    names = list(dict.fromkeys([*columns, *(key for row in rows for key in row)]))
    return _text(names, ([row.get(name) for name in names] for row in rows))


def columns_to_csv(columns: Mapping[str, Sequence[Any]]) -> str:
    """Columns of equal length, by name."""
    return _text(list(columns), zip(*columns.values(), strict=True))


def cell_text(value: Any) -> Any:
    """A cell of a CSV: unknown is empty, and text that a spreadsheet would take for a formula begins with an
    apostrophe."""
    if is_unknown(value):
        return ""
    if not isinstance(value, str):
        return value
    text = re.sub(r"\r\n?", "\n", value)  # csv quotes only the line ends that it writes itself
    return f"'{text}" if text[:1] in FORMULA and not _is_number(text) else text


def is_unknown(value: Any) -> bool:
    """None or nan."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _text(names: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(cell_text, names))
    writer.writerows(map(cell_text, row) for row in rows)
    return text.getvalue()


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
