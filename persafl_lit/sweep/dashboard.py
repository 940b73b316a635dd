"""What a sweep shows while it goes, on stderr: a table that lives in a terminal, a line per trial elsewhere."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from persafl_lit.report.record import NEVER_CHANGED
from persafl_lit.sweep.forecast import Forecast, makespan
from persafl_lit.sweep.results import Outcome, headline
from persafl_lit.sweep.run_trial import TrialMessage
from persafl_lit.sweep.trials import Trial

MOST_LINES = 8


@dataclass
class Running:
    trial: Trial
    began: float
    """When it was started; once it has said something, since then."""
    updates: int = 0
    total: int = 0
    score: str = ""
    resumed_at: float = 0.0
    """The share that its checkpoint had."""

    @property
    def share(self) -> float:
        return self.updates / self.total if self.total else 0.0

    @property
    def progress(self) -> float:
        """The share that was done here."""
        return self.share - self.resumed_at


class Dashboard:
    """Trials done, under way with their progress, failed, and the time left."""

    def __init__(
        self,
        title: str,
        total: int,
        lanes: int,
        clock: Callable[[], float] = time.monotonic,
        kind: str = "accuracy",
        quiet: bool = False,
    ) -> None:
        """`kind` is the metric that settings are chosen by, whose test score is shown; `quiet`: only failures are
        shown."""
        self.title, self.total, self.lanes, self._kind = title, total, lanes, kind
        self.running: dict[str, Running] = {}
        self.counts: Counter[str] = Counter()
        self.failures: list[Outcome] = []
        self.waiting: Sequence[Trial] = ()
        """Trials to come."""
        self.later: Sequence[Sequence[Trial]] = ()
        """Trials of a second stage that is not chosen yet: for each, those of which it will be one on another seed."""
        self._forecast = Forecast()
        self._clock = clock
        self._console = Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=2, transient=True)

    def __enter__(self) -> Dashboard:
        if self._console.is_terminal and not self._quiet:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal and not self._quiet:
            self._live.stop()

    # -- what happens -------------------------------------------------------------------------------------------------

    def say(self, text: str, failure: bool = False) -> None:
        if failure or not self._quiet:
            self._console.print(text, soft_wrap=True, markup=False)

    def starts(self, trial: Trial) -> None:
        self.running[trial.hash] = Running(trial, self._clock())

    def goes_on(self, trial: Trial, message: TrialMessage) -> None:
        running = self.running[trial.hash]
        first = not running.total
        running.updates, running.total = message["updates"], message["total"]
        if first:
            running.began, running.resumed_at = self._clock(), running.share
        if point := message.get("point"):
            running.score = headline(point.get, self._kind)

    def leaves(self, trial: Trial) -> Running:
        return self.running.pop(trial.hash)

    def ends(self, outcome: Outcome, before: bool = False) -> None:
        """A trial is done; `before` this sweep was started."""
        self.counts[outcome.status] += 1
        self.running.pop(outcome.trial.hash, None)
        if outcome.status == "failed":
            self.failures.append(outcome)
        if (
            outcome.summary is not None and outcome.summary.get("wall_seconds") and not outcome.imported
        ):  # another machine has its own pace
            self._forecast.finished(
                outcome.trial, outcome.summary["wall_seconds"], outcome.summary.get("evaluation_share") or 0.0
            )
        if before:
            return
        if not self._console.is_terminal or outcome.status == "failed":
            what = (
                f"{outcome.status}: {outcome.error}"
                if outcome.error
                else headline(outcome.value, self._kind) or outcome.status
            )
            what = what if outcome.counts or outcome.status != "finished" else f"no result: {NEVER_CHANGED}"
            self.say(
                f"{sum(self.counts.values())}/{self.total} {outcome.trial.name}: {what}{self._left(', about {} left')}",
                failure=outcome.status == "failed",
            )

    # -- the view -----------------------------------------------------------------------------------------------------

    def seconds_left(self) -> float | None:
        """Trials under way, those that wait, and the second stage after them."""
        now, runs, choices = (
            self._clock(),
            list(self.running.values()),
            [trial for trials in self.later for trial in trials],
        )
        paces = [(run.trial, (now - run.began) / run.progress) for run in runs if run.progress > 0.05]
        seconds = self._forecast.seconds([*(run.trial for run in runs), *self.waiting, *choices], paces)
        if seconds is None:
            return None
        expected = iter(seconds)
        under_way = [self._seconds_left_of(run, next(expected), now) for run in runs]
        waiting = [next(expected) for _ in self.waiting]
        later = [statistics.fmean(next(expected) for _ in trials) for trials in self.later]
        return makespan(under_way, waiting, self.lanes) + makespan([], later, self.lanes)

    def _seconds_left_of(self, run: Running, expected: float, now: float) -> float:
        """As others of its kind took, and the further it is the more by its own pace."""
        elapsed = now - run.began
        if run.progress <= 0:
            return max(expected * (1 - run.share) - elapsed, 0.0)
        return (1 - run.share) * (
            elapsed + (1 - run.progress) * expected
        )  # progress * (elapsed / progress) + (1 - progress) * expected

    def _left(self, form: str) -> str:
        seconds = self.seconds_left()
        return form.format(duration(seconds)) if seconds else ""

    def _render(self) -> Group:
        done = sum(self.counts.values())
        words = ", ".join(f"{count} {status}" for status, count in self.counts.items()) or "none done"
        head = Table.grid(padding=(0, 1))
        head.add_row(
            self.title,
            ProgressBar(self.total, done, width=30),
            f"{done}/{self.total} trials",
            f"({words})",
            self._left("about {} left"),
        )
        rows = Table.grid(padding=(0, 1))
        for run in list(self.running.values())[:MOST_LINES]:
            progress = f"{run.updates}/{run.total}" if run.total else "starting"
            rows.add_row(
                Text(f"  {run.trial.name}"), ProgressBar(max(run.total, 1), run.updates, width=20), progress, run.score
            )
        failed = [
            Text(f"  failed: {failure.trial.name}: {failure.error}", style="red") for failure in self.failures[-3:]
        ]
        return Group(head, rows, *failed)


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d}"
