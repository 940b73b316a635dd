"""A timeline: who read which model when, and when the update was applied. Computed before any training."""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from persafl_lit.common.csv_table import columns_to_csv
from persafl_lit.common.input_files import plain_file
from persafl_lit.common.limits import MOST_CLIENTS, at_most
from persafl_lit.errors import TimelineError, shown

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COLUMNS = ("client", "visit", "reads", "read_at", "arrives")


class Job(NamedTuple):
    """One visit of one client: it reads the model after `reads` arrivals, at `read_at`, and is applied at `arrives`."""

    client: int
    visit: int
    reads: int
    read_at: float
    arrives: float


class Activity(NamedTuple):
    """When clients were busy, one row per visit: also the visits whose update was dropped or had not arrived at the
    end.

    A client downloads from `read_at` to `downloaded`, computes to `computed` and uploads to `received`.
    """

    client: Ints
    read_at: Floats
    downloaded: Floats
    computed: Floats
    received: Floats

    def rows(self, which: NDArray[np.bool_] | Ints) -> Activity:
        """Some of the visits, or all in another order."""
        return Activity(*(column[which] for column in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Timeline:
    """Jobs in order of arrival.

    `reads` counts arrivals, so that one timeline serves every method: a server that updates its model once per `buffer`
    arrivals has, after t of them, the version t // buffer, and the staleness of arrival t is t // buffer - reads //
    buffer. Equal times: arrivals come before reads, and a lower client number before a higher one.
    """

    clients: int
    client: Ints
    visit: Ints
    reads: Ints
    read_at: Floats
    arrives: Floats
    horizon: float
    activity: Activity | None = field(default=None, repr=False)
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.client)

    def __getitem__(self, index: int) -> Job:
        return Job(
            int(self.client[index]),
            int(self.visit[index]),
            int(self.reads[index]),
            float(self.read_at[index]),
            float(self.arrives[index]),
        )

    def __iter__(self) -> Iterator[Job]:
        columns = (self.client, self.visit, self.reads, self.read_at, self.arrives)
        return map(Job, *(column.tolist() for column in columns))

    # -- what a timeline alone can tell -------------------------------------------------------------------------------

    def staleness(self, buffer: int = 1) -> Ints:
        """t // buffer - reads // buffer for every arrival t: model versions between download and upload."""
        return np.arange(len(self)) // buffer - self.reads // buffer

    def arrivals_per_client(self) -> Ints:
        """How often each client arrived: under asynchrony fast clients weigh more, and this shows by how much."""
        return np.bincount(self.client, minlength=self.clients)

    def _busy(self) -> tuple[Floats, Floats]:
        """The (start, end) of every active interval, cut at the horizon."""
        if self.activity is None:  # drawn or replayed: a client may overlap itself, and counts once
            order = np.lexsort((self.read_at, self.client))
            apart = self.client[order] * (float(self.arrives.max(initial=0.0)) + 1.0)
            start, end = self.read_at[order] + apart, np.maximum.accumulate(self.arrives[order] + apart)
            start = np.maximum(start, np.concatenate([[0.0], end[:-1]]))
            return start - apart, np.maximum(end, start) - apart
        return np.minimum(self.activity.read_at, self.horizon), np.minimum(self.activity.received, self.horizon)

    def concurrency(self) -> tuple[Floats, Floats]:
        """(times, share of clients that are active from each time on): downloading, computing or uploading."""
        start, end = self._busy()
        times = np.concatenate([[0.0], start, end])
        change = np.concatenate([[0], np.ones(len(start)), -np.ones(len(end))])
        moments, which = np.unique(times, return_inverse=True)
        return moments, np.cumsum(np.bincount(which, weights=change)) / self.clients

    def mean_concurrency(self) -> float:
        """The share of active clients, averaged over time from 0 to the horizon."""
        start, end = self._busy()
        return float(np.sum(end - start) / (self.horizon * self.clients)) if self.horizon > 0 else 0.0

    def waves(self, buffer: int = 1) -> Ints:
        """The wave of every job: a job needs the jobs whose arrivals made its model, and jobs of one wave are
        independent.

        wave(j) = 0 if j reads the first model, else 1 + max wave(i) over the arrivals i that made the model j reads.
        """
        made_by = (self.reads // buffer * buffer).tolist()
        latest = [-1]  # latest[t]: the last wave among the first t arrivals
        waves = []
        for needed in made_by:
            wave = latest[needed] + 1
            waves.append(wave)
            latest.append(max(latest[-1], wave))
        return np.asarray(waves, dtype=np.int64)

    def last_visits(self) -> Ints:
        """For every job: the number of arrivals after which its client's last visit before `reads` has arrived; 0 if
        there is none."""
        count = len(self)
        arrivals = np.sort(self.client * (count + 1) + np.arange(count))  # by client, then by arrival
        before = np.searchsorted(arrivals, self.client * (count + 1) + self.reads) - 1
        found = arrivals[np.maximum(before, 0)]
        own = (before >= 0) & (found // (count + 1) == self.client)
        return np.where(own, found % (count + 1) + 1, 0)

    def until(self, sim_time: float, updates: int) -> Timeline:
        """The same up to a moment by which so many updates had arrived."""
        activity = None if self.activity is None else self.activity.rows(self.activity.read_at < sim_time)
        dropped = 0 if not self.dropped or activity is None else int(np.sum(activity.received <= sim_time)) - updates
        columns = {name: getattr(self, name)[:updates] for name in COLUMNS}
        return replace(self, **columns, horizon=sim_time, activity=activity, dropped=dropped)

    def digest(self) -> str:
        """A hash of everything that training can see of this timeline."""
        columns = (self.client, self.visit, self.reads, self.arrives)
        return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()

    def summary(self, buffer: int = 1) -> dict[str, object]:
        """The numbers of `persafl timeline --json`."""
        staleness, arrivals, waves = self.staleness(buffer), self.arrivals_per_client(), self.waves(buffer)
        count = len(self)
        return {
            "clients": self.clients,
            "updates": count,
            "sim_time": self.horizon,
            "dropped": self.dropped,
            "staleness": {
                "mean": float(staleness.mean()) if count else 0.0,
                "max": int(staleness.max(initial=0)),
                "histogram": np.bincount(staleness).tolist() if count else [],
            },
            "concurrency": self.mean_concurrency(),
            "arrivals_per_client": arrivals.tolist(),
            "throughput": count / self.horizon if self.horizon else 0.0,
            "waves": int(waves.max(initial=-1)) + 1,
        }

    # -- CSV ----------------------------------------------------------------------------------------------------------

    def to_csv(self) -> str:
        """The timeline as text; floats are written so that reading them gives the same bits."""
        columns = (self.client, self.visit, self.reads, self.read_at, self.arrives)
        return columns_to_csv({name: column.tolist() for name, column in zip(COLUMNS, columns, strict=True)})


def jobs_to_timeline(
    clients: int,
    client: Ints,
    reads: Ints,
    read_at: Floats,
    arrives: Floats,
    horizon: float,
    activity: Activity | None = None,
    dropped: int = 0,
) -> Timeline:
    """A timeline from jobs in order of arrival; visits are numbered per client in that order."""
    visit = np.empty(len(client), dtype=np.int64)
    by_client = np.argsort(client, kind="stable")
    counts = np.bincount(client, minlength=clients)
    starts = np.cumsum(counts) - counts
    visit[by_client] = np.arange(len(client)) - np.repeat(starts, counts)
    return Timeline(clients, client, visit, reads, read_at, arrives, horizon, activity, dropped)


def read_rows(path: str | os.PathLike[str], columns: tuple[str, ...]) -> list[tuple[int, dict[str, str]]]:
    """The rows of a CSV with exactly these columns, each with its line number."""
    try:
        text = plain_file(path, TimelineError).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise TimelineError(f"cannot read {shown(str(path))}: {getattr(error, 'strerror', None) or error}") from None
    reader = csv.reader(io.StringIO(text, newline=""))
    rows: list[tuple[int, dict[str, str]]] = []
    try:
        header = next(reader, [])
        if [name.strip() for name in header] != list(columns):
            raise TimelineError(
                f"{path}, line 1: the columns must be {','.join(columns)}; got {shown(','.join(header))}"
            )
        for row in filter(None, reader):
            if len(row) != len(columns):
                raise TimelineError(f"{path}, line {reader.line_num}: expected {len(columns)} values, got {len(row)}")
            rows.append((reader.line_num, dict(zip(columns, row, strict=True))))
    except csv.Error as error:
        raise TimelineError(f"{path}, line {reader.line_num}: {error}") from None
    return rows


def number(kind: type[int] | type[float], text: str, path: object, line: int, column: str) -> float | int:
    """`text` as a non-negative finite int or float, or an error that names the place."""
    try:
        value = kind(text)
        if not 0 <= value < 2**53:
            raise ValueError
    except ValueError:
        what = "a whole number >= 0" if kind is int else "a number >= 0"
        raise TimelineError(f"{path}, line {line}: {column} must be {what}; got {shown(text)}") from None
    return value


def from_csv(path: str | os.PathLike[str], clients: int) -> Timeline:
    """The timeline in a CSV file, refused with its line number if it could not have happened."""
    at_most("clients", clients, MOST_CLIENTS)
    rows = read_rows(path, COLUMNS)
    if not rows:
        raise TimelineError(f"{path}: no jobs in it; a timeline needs at least one row below its header")
    kinds = dict(zip(COLUMNS, (int, int, int, float, float), strict=True))
    values: dict[str, list[float | int]] = {name: [] for name in COLUMNS}
    for line, row in rows:
        for name, kind in kinds.items():
            values[name].append(number(kind, row[name], path, line, name))
    lines = [line for line, _ in rows]
    columns = (np.asarray(values[name], dtype=np.int64 if kind is int else np.float64) for name, kind in kinds.items())
    timeline = Timeline(clients, *columns, float(values["arrives"][-1]))  # type: ignore[arg-type,call-arg]
    check_timeline(timeline, lambda index: f"{path}, line {lines[index]}")
    return timeline


def check_timeline(timeline: Timeline, place: Callable[[int], str]) -> None:
    """Refuse jobs that could not have happened; `place` names the job with an index."""

    def refuse(bad: NDArray[np.bool_], why: str) -> None:
        if bad.any():
            index = int(bad.argmax())
            raise TimelineError(
                f"{place(index)}: " + why.format(index=index, clients=timeline.clients, **timeline[index]._asdict())
            )

    client, reads, read_at, arrives = timeline.client, timeline.reads, timeline.read_at, timeline.arrives
    refuse(
        (client < 0) | (client >= timeline.clients),
        "client {client} does not exist; there are {clients} clients, numbered from 0",
    )
    refuse(
        np.diff(arrives, prepend=0.0) < 0,
        "out of order: arrives={arrives} comes after a later arrival; sort the rows by arrives",
    )
    refuse(~(read_at <= arrives), "the job arrives at {arrives}, before it read the model at {read_at}")
    ahead = (reads < 0) | (reads > np.arange(len(reads)))
    refuse(ahead, "a read from the future: reads={reads}, but only {index} updates have arrived before this row")
    known = np.searchsorted(arrives, read_at, side="right")
    refuse(reads > known, "a read from the future: reads={reads}, but fewer updates had arrived by read_at={read_at}")
    usual = jobs_to_timeline(timeline.clients, client, reads, read_at, arrives, timeline.horizon)
    refuse(
        timeline.visit != usual.visit,
        "a gap: client {client} has visit {visit} here; visits count 0, 1, 2, ... per client",
    )
