"""What a run shows while it goes, on stderr: a bar in a terminal, a line per evaluation elsewhere."""

from __future__ import annotations

import math
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from persafl_lit.evaluate import Point
from persafl_lit.timeline import Job, Timeline


class ProgressBar:
    """Updates, simulated time, staleness, last accuracy."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self._console, self._title, self._quiet = console, title, quiet
        self._lines = not console.is_terminal and not quiet
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._task = self._bar.add_task(title, total=None, status="")
        self._accuracy = ""

    def watch(self, timeline: Timeline) -> list[ProgressBar]:
        """Called when the timeline is known."""
        self._total, self._horizon = len(timeline), timeline.horizon
        self._bar.update(self._task, total=len(timeline))
        return [self]

    def on_update(self, index: int, job: Job, staleness: int, loss: float) -> None:
        status = f"time {job.arrives:.1f}/{self._horizon:.1f}  stale {staleness}  {self._accuracy}"
        self._bar.update(self._task, completed=index + 1, status=status)

    def on_point(self, point: Point) -> None:
        accuracy = point.accuracy()["test"]
        self._accuracy = f"accuracy {accuracy:.3f}" if math.isfinite(accuracy) else f"loss {point.loss()['test']:.4g}"
        self._bar.update(self._task, completed=point.updates)
        if self._lines:
            line = f"{self._title}: time {point.sim_time:.1f}/{self._horizon:.1f}  update {point.updates}/{self._total}  {self._accuracy}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
