"""Tables as text cells: for the page, for markdown and for LaTeX."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persafl_lit.common.csv_table import is_unknown
from persafl_lit.report.aggregate import Spread

MISSING = "-"
PAGE_COLUMNS, PAGE_ROWS = 8, 40
"""What fits on a page of a paper."""
LATEX_NEEDS = r"% \usepackage{booktabs,graphicx,longtable}"
LATEX = {character: f"\\{character}" for character in "{}$&#_%"} | {"±": r"$\pm$", "≥": r"$\geq$", "\ufffd": "?"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "-": "{-}",
    "[": "{[}",
    "]": "{]}",
}


@dataclass(frozen=True)
class TextTable:
    """Cells as text; columns in `numeric` are aligned to the right, those in `long` may break into lines."""

    columns: tuple[str, ...]
    rows: list[list[str]]
    numeric: frozenset[str] = frozenset()
    long: frozenset[str] = frozenset()
    caption: str = ""

    def markdown(self) -> str:
        """A table of GitHub's markdown."""
        rule = ["---:" if column in self.numeric else "---" for column in self.columns]
        lines = [
            [markdown_text(cell) for cell in self.columns],
            rule,
            *([markdown_text(cell) for cell in row] for row in self.rows),
        ]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{table}\n\n{markdown_text(self.caption)}" if self.caption else table

    def html(self) -> str:
        def cells(tag: str, row: Sequence[str]) -> str:
            marks = [
                ' class="n"' if name in self.numeric else ' class="long"' if name in self.long else ""
                for name in self.columns
            ]
            return (
                "<tr>"
                + "".join(f"<{tag}{mark}>{html_text(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))
                + "</tr>"
            )

        body = "\n".join(cells("td", row) for row in self.rows)
        head = f"<thead>{cells('th', self.columns)}</thead>"
        table = f'<div class="scroll" tabindex="0"><table>\n{head}\n<tbody>\n{body}\n</tbody></table></div>'
        return f'{table}\n<p class="hint">{html_text(self.caption)}</p>' if self.caption else table

    def latex(self) -> str:
        """For booktabs: as wide as the text if it has many columns, over several pages if it has many rows."""

        def line(row: Sequence[str]) -> str:
            return f"{' & '.join(map(latex_text, row))} \\\\"

        head, body = line(self.columns), "\n".join(line(row) for row in self.rows)
        columns = "".join("r" if name in self.numeric else "l" for name in self.columns)
        caption = f"\\caption{{{latex_text(self.caption)}}}" if self.caption else ""
        if len(self.rows) > PAGE_ROWS:
            top = f"{caption} \\\\\n\\toprule" if caption else "\\toprule"
            head = f"{top}\n{head}\n\\midrule\n\\endhead\n\\bottomrule\n\\endfoot"
            return f"\\begin{{longtable}}{{{columns}}}\n{head}\n{body}\n\\end{{longtable}}\n"
        table = f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{head}\n\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}"
        table = f"\\resizebox{{\\linewidth}}{{!}}{{%\n{table}}}" if len(self.columns) > PAGE_COLUMNS else table
        return f"\\begin{{table}}\n\\centering\n{caption}\n{table}\n\\end{{table}}\n"


def latex_file(tables: Sequence[TextTable]) -> str:
    return "\n".join([LATEX_NEEDS, *(table.latex() for table in tables if table.rows)])


def table_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> TextTable:
    """Rows as text, numbers to four digits; columns that no row has are left out."""
    kept = tuple(
        column for column in columns if any(not is_unknown(row.get(column)) and row.get(column) != "" for row in rows)
    )
    cells = [[_short_text(row.get(column)) for column in kept] for row in rows]
    numeric = frozenset(column for column in kept if any(isinstance(row.get(column), (int, float)) for row in rows))
    return TextTable(kept, cells, numeric)


def _short_text(value: Any) -> str:
    return MISSING if is_unknown(value) else f"{value:.4g}" if isinstance(value, float) else str(value)


def html_text(text: str) -> str:
    return html.escape(_printable(text), quote=True)


def markdown_text(text: str) -> str:
    """Text that stays text, also within a table: no tag, no emphasis, no link, no new cell or line."""
    plain = html.escape(" ".join(_printable(text).split()), quote=False)
    plain = re.sub(r"([\\|`*\[\]~]|(?<!\w)_|_(?!\w))", r"\\\1", plain)
    # What would begin a heading, a list or a rule.
    return re.sub(
        r"^(?:#{1,6}(?=\s|$)|[-+](?=\s)|-{3,}$|\d+(?=[.)](?:\s|$)))",
        lambda found: f"&#{ord(found[0][0])};{found[0][1:]}",
        plain,
    )


def latex_text(text: str) -> str:
    """Text that stays text in LaTeX: no command, no mathematics, no new cell or line."""
    plain = " ".join(_printable(text).split())
    return "".join(LATEX.get(character, character) for character in plain)


def interval_text(value: Spread, digits: int = 3) -> str:
    """[0.841, 0.901], or - for a single seed."""
    low, high = value.interval
    return f"[{low:.{digits}f}, {high:.{digits}f}]" if math.isfinite(low) else MISSING


def difference_text(value: Spread, digits: int = 3) -> str:
    """+0.021 [0.003, 0.039]; for a single seed the difference alone."""
    if not value.seeds:
        return MISSING
    return (
        f"{value.mean:+.{digits}f} {interval_text(value, digits)}"
        if value.seeds > 1
        else f"{value.mean:+.{digits}f} (one seed)"
    )


def ratio_text(low: float, high: float) -> str:
    """2.6x to 6.1x, rounded to the safe side: at least the first, at most the second."""
    if not math.isfinite(high):
        return f"at least {_two_digits(low, math.floor)}x" if low > 0 else "cannot be told"
    return (
        f"{_two_digits(low, math.floor)}x to {_two_digits(high, math.ceil)}x"
        if low > 0
        else f"at most {_two_digits(high, math.ceil)}x"
    )


def _two_digits(value: float, rounded: Callable[[float], int]) -> str:
    power = math.floor(math.log10(value)) - 1
    return f"{rounded(round(value / 10.0**power, 6)) * 10.0**power:.12g}"


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


def _printable(text: str) -> str:
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "�", text)
