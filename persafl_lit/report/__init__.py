"""Figures and tables of what clients hold and what runs reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from persafl_lit.report.record import Record

__all__ = ["write_report"]


def write_report(
    records: Sequence[Record], title: str, folder: Path, levels: Sequence[float] = (), against: str | None = None
) -> list[Path]:
    """Write report.html, report.md, the tables (CSV, LaTeX) and the figures (PNG, SVG) into `folder`; gives their
    paths.

    Whatever the records lack, the report says so. `levels` are the scores whose times are compared; without any it
    chooses some. `against` is the method that others are compared with; without it differences are to the best on
    validation data, times to FedAvg's.
    """
    from persafl_lit.common.atomic_file import write_text_atomically
    from persafl_lit.report.chart import with_others
    from persafl_lit.report.content import content_of
    from persafl_lit.report.matplotlib_figures import draw_chart, draw_schedules
    from persafl_lit.report.page import html_page, markdown_page

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = content_of(records, title, levels, against)
    figures: list[Path] = []
    schedules: dict[str, tuple[Path, str]] = {}
    for part in content.parts:
        for stem, chart in with_others(part.charts):
            figures += draw_chart(chart, folder, stem)
        if part.task:
            files, caption = draw_schedules(part.task, folder, f"schedule{part.suffix}")
            figures += files
            if files:
                schedules[part.suffix] = (files[0], caption)
    texts = {
        "report.html": html_page(content, schedules),
        "report.md": markdown_page(content, schedules),
        **content.files,
    }
    for name, text in texts.items():
        write_text_atomically(folder / name, text)
    return [*(folder / name for name in texts), *figures]
