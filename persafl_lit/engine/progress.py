"""What a run shows while it goes, on stderr: a bar in a terminal, a line per evaluation elsewhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from persafl_lit.engine.experiment import Experiment
    from persafl_lit.learning.scores import Point
    from persafl_lit.timeline import Job


class ProgressBar:
    """A callback that shows updates, simulated time, staleness and the last accuracy."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self._console, self._title, self._quiet = console, title, quiet
        self._lines = not console.is_terminal and not quiet
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._task = self._bar.add_task(title, total=None, status="")
        self._accuracy = ""

    def on_run_start(self, experiment: Experiment) -> None:
        self._total, self._horizon = len(experiment.timeline), experiment.timeline.horizon
        self._bar.update(self._task, total=self._total)
        self._bar.start()
        for point in experiment.points[-1:]:
            self._show(point)

    def on_update(self, experiment: Experiment, job: Job, staleness: int) -> None:
        status = f"time {job.arrives:.1f}/{self._horizon:.1f}  stale {staleness}  {self._accuracy}"
        self._bar.update(self._task, completed=experiment.state.arrivals, status=status)

    def on_evaluation(self, point: Point) -> None:
        self._show(point)

    def _show(self, point: Point) -> None:
        accuracy = point.accuracy()["test"]
        self._accuracy = f"accuracy {accuracy:.3f}" if math.isfinite(accuracy) else f"loss {point.loss()['test']:.4g}"
        self._bar.update(self._task, completed=point.updates)
        if self._lines:
            line = (
                f"{self._title}: time {point.sim_time:.1f}/{self._horizon:.1f}  update "
                f"{point.updates}/{self._total}  {self._accuracy}"
            )
            self._console.print(line, highlight=False, soft_wrap=True)

    def on_run_end(self) -> None:
        self._bar.stop()

    def on_run_error(self) -> None:
        self._bar.stop()
