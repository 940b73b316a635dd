"""What a sweep shows while it goes, on stderr: a table that lives in a terminal, a line per trial elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from persafl_lit.sweep.outcome import UNCHANGED, Outcome
from persafl_lit.sweep.perform import Message
from persafl_lit.sweep.trials import Trial

MOST_LINES = 8


@dataclass
class Running:
    trial: Trial
    began: float = field(default_factory=time.monotonic)
    updates: int = 0
    total: int = 0
    score: str = ""

    @property
    def share(self) -> float:
        return self.updates / self.total if self.total else 0.0


class Board:
    """Trials done, under way with their progress, failed, and the time left."""

    def __init__(self, title: str, total: int, lanes: int) -> None:
        self.title, self.total, self.lanes = title, total, lanes
        self.running: dict[str, Running] = {}
        self.counts: Counter[str] = Counter()
        self.failures: list[Outcome] = []
        self.waiting: Counter[str] = Counter()
        """Trials to come, by method."""
        self._seconds: dict[str, list[float]] = {}
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=2, transient=True)

    def __enter__(self) -> Board:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._live.stop()

    # -- what happens -------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def starts(self, trial: Trial) -> None:
        self.running[trial.hash] = Running(trial)

    def goes_on(self, trial: Trial, message: Message) -> None:
        running = self.running[trial.hash]
        running.updates, running.total = message["updates"], message["total"]
        if point := message.get("point"):
            accuracy = point.get("accuracy.test")
            running.score = f"accuracy {accuracy:.3f}" if accuracy is not None and accuracy == accuracy else f"loss {point['loss.test']:.4g}"

    def leaves(self, trial: Trial) -> Running:
        return self.running.pop(trial.hash)

    def ends(self, outcome: Outcome, before: bool = False) -> None:
        """A trial is done; `before` this sweep was started."""
        self.counts[outcome.status] += 1
        running = self.running.pop(outcome.trial.hash, None)
        if outcome.status == "failed":
            self.failures.append(outcome)
        if before:
            return
        if running is not None and outcome.status == "finished":
            self._seconds.setdefault(outcome.trial.method, []).append(time.monotonic() - running.began)
        if not self._console.is_terminal or outcome.status == "failed":
            accuracy = outcome.value("accuracy.test")
            what = f"{outcome.status}: {outcome.error}" if outcome.error else f"accuracy {accuracy:.4f}" if accuracy is not None else outcome.status
            what = what if outcome.counts or outcome.status != "finished" else f"no result: {UNCHANGED}"
            self.say(f"{sum(self.counts.values())}/{self.total} {outcome.trial.name}: {what}{self._left(', about {} left')}")

    # -- the view -----------------------------------------------------------------------------------------------------

    def seconds_left(self) -> float | None:
        """From what finished trials of the same method took, else of any, else from the progress of those under way."""
        everything = [seconds for times in self._seconds.values() for seconds in times]
        now = time.monotonic()
        guesses = [(now - run.began) / run.share for run in self.running.values() if run.share > 0.05]
        usual = sum(everything) / len(everything) if everything else sum(guesses) / len(guesses) if guesses else None
        if usual is None:
            return None

        def expected(method: str) -> float:
            times = self._seconds.get(method)
            return sum(times) / len(times) if times else usual

        work = sum(expected(method) * count for method, count in self.waiting.items())
        work += sum(expected(run.trial.method) * (1 - run.share) for run in self.running.values())
        return work / self.lanes

    def _left(self, form: str) -> str:
        seconds = self.seconds_left()
        return form.format(duration(seconds)) if seconds else ""

    def _render(self) -> Group:
        done = sum(self.counts.values())
        words = ", ".join(f"{count} {status}" for status, count in self.counts.items()) or "none done"
        head = Table.grid(padding=(0, 1))
        head.add_row(self.title, ProgressBar(self.total, done, width=30), f"{done}/{self.total} trials", f"({words})", self._left("about {} left"))
        rows = Table.grid(padding=(0, 1))
        for run in list(self.running.values())[:MOST_LINES]:
            progress = f"{run.updates}/{run.total}" if run.total else "starting"
            rows.add_row(Text(f"  {run.trial.name}"), ProgressBar(max(run.total, 1), run.updates, width=20), progress, run.score)
        failed = [Text(f"  failed: {failure.trial.name}: {failure.error}", style="red") for failure in self.failures[-3:]]
        return Group(head, rows, *failed)


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d}"
