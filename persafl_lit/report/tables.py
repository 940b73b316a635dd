"""Tables as CSV for programs and as text cells for the page and for markdown."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persafl_lit.report.aggregate import Spread

MISSING = "-"
FORMULA = tuple("=+-@\t\n")


@dataclass(frozen=True)
class Table:
    """Cells as text; columns in `numeric` are aligned to the right, those in `long` may break into lines."""

    columns: tuple[str, ...]
    rows: list[list[str]]
    numeric: frozenset[str] = frozenset()
    long: frozenset[str] = frozenset()

    def markdown(self) -> str:
        """A table of GitHub's markdown."""
        rule = ["---:" if column in self.numeric else "---" for column in self.columns]
        lines = [[markdown_text(cell) for cell in self.columns], rule, *([markdown_text(cell) for cell in row] for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def html(self) -> str:
        def cells(tag: str, row: Sequence[str]) -> str:
            marks = [' class="n"' if name in self.numeric else ' class="long"' if name in self.long else "" for name in self.columns]
            return "<tr>" + "".join(f"<{tag}{mark}>{html_text(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True)) + "</tr>"

        body = "\n".join(cells("td", row) for row in self.rows)
        return f'<div class="scroll" tabindex="0"><table>\n<thead>{cells("th", self.columns)}</thead>\n<tbody>\n{body}\n</tbody></table></div>'


def to_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows under `columns` and whatever other keys they have; what is unknown is empty."""
    extra = dict.fromkeys(key for row in rows for key in row if key not in columns)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [*columns, *extra]
    writer.writerow(map(cell_text, names))
    writer.writerows([cell_text(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def cell_text(value: Any) -> Any:
    """A cell of a CSV: unknown is empty, and text that a spreadsheet would take for a formula begins with an apostrophe."""
    if _unknown(value):
        return ""
    if not isinstance(value, str):
        return value
    text = re.sub(r"\r\n?", "\n", value)  # csv quotes only the line ends that it writes itself
    return f"'{text}" if text[:1] in FORMULA and not _is_number(text) else text


def html_text(text: str) -> str:
    return html.escape(_printable(text), quote=True)


def markdown_text(text: str) -> str:
    """Text that stays text, also within a table: no tag, no emphasis, no link, no new cell or line."""
    plain = html.escape(" ".join(_printable(text).split()), quote=False)
    plain = re.sub(r"([\\|`*\[\]~]|(?<!\w)_|_(?!\w))", r"\\\1", plain)
    # What would begin a heading, a list or a rule.
    return re.sub(r"^(?:#{1,6}(?=\s|$)|[-+](?=\s)|-{3,}$|\d+(?=[.)](?:\s|$)))", lambda found: f"&#{ord(found[0][0])};{found[0][1:]}", plain)


def with_spread(value: Spread, digits: int = 3) -> str:
    """0.871 ± 0.012, or 0.871 alone for a single seed."""
    if not math.isfinite(value.mean):
        return MISSING
    return number_text(value.mean, digits) + (f" ± {value.std:.{digits}f}" if math.isfinite(value.std) else "")


def number_text(value: float | None, digits: int = 3) -> str:
    return MISSING if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def bytes_text(value: float | None) -> str:
    """In the decimal units of networks."""
    if value is None or not math.isfinite(value):
        return MISSING
    power = min(4, int(math.log10(max(value, 1)) / 3))
    return f"{value / 1000**power:.{0 if power == 0 else 1}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _printable(text: str) -> str:
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "�", text)
