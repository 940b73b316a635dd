"""Schedules turn delays into a timeline: closed loop, rounds, Assumption 1, or a file."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from persafl_lit.common import limits
from persafl_lit.common.seeding import rng
from persafl_lit.errors import ConfigError, TimelineError
from persafl_lit.timeline.deadlines import Deadlines
from persafl_lit.timeline.delays import VISITS_AT_A_TIME, Delays, VisitDelays
from persafl_lit.timeline.timeline import Activity, Floats, Ints, Timeline, from_csv, jobs_to_timeline

Policy = Literal["wait", "drop", "measure"]
ARRIVES, ASKS = 0, 1  # kinds of events, in their order at equal times


class Setting(NamedTuple):
    """What every schedule needs to know. The run ends at `horizon` or after `updates` arrivals, whichever comes
    first."""

    clients: int
    local_steps: int
    delays: Delays
    seed: int
    horizon: float | None
    updates: int | None
    gradients: float = 1
    """Gradients per local step, for delays with `per_gradient`."""


class Schedule(ABC):
    """Turns delays into a timeline, which `jobs_to_timeline` makes of jobs in order of arrival."""

    @abstractmethod
    def timeline(self, setting: Setting) -> Timeline: ...


@dataclass(frozen=True)
class Asynchronous(Schedule):
    """The closed loop of Algorithm 2: read, compute, send, rest, read again; no client waits for another.

    `tau` bounds the staleness in arrivals: `wait` delays reads and arrivals so that the bound holds and nothing is
    lost, `drop` discards what comes too late, `measure` (or no tau) only counts.
    """

    tau: int | None = None
    """Most arrivals between a read and its update; null is unbounded."""
    policy: Policy = "wait"
    """How `tau` is kept: `wait` loses nothing, `drop` discards late updates, `measure` only counts."""

    def __post_init__(self) -> None:
        if self.tau is not None and self.tau < 0:
            raise ConfigError(f"schedule.tau must be >= 0 or null; got {self.tau}")
        if self.policy not in ("wait", "drop", "measure"):
            raise ConfigError(f"schedule.policy must be wait, drop or measure; got {self.policy!r}")

    def timeline(self, setting: Setting) -> Timeline:
        if self.tau is None or self.policy == "measure":
            return _free_running(setting, tau=None)
        return _free_running(setting, self.tau) if self.policy == "drop" else _waiting(setting, self.tau)


@dataclass(frozen=True)
class Rounds(Schedule):
    """Synchronous rounds: a cohort drawn without replacement; the server waits for its slowest member."""

    cohort: int = 10
    """Clients per round."""

    def __post_init__(self) -> None:
        if self.cohort < 1:
            raise ConfigError(f"schedule.cohort must be >= 1; got {self.cohort}")

    def check(self, clients: int) -> None:
        if self.cohort > clients:
            raise ConfigError(f"schedule.cohort={self.cohort} is more than the {clients} clients; lower it")

    def timeline(self, setting: Setting) -> Timeline:
        self.check(setting.clients)
        _refuse_far(setting, self.cohort)
        visits = [_Visits(setting, client) for client in range(setting.clients)]
        rows: list[tuple[int, int, _Visit]] = []
        start, count = 0.0, 0
        while not _over(setting, start, count):
            _refuse_endless(setting, count, start)
            cohort = rng(setting.seed, "cohort", count // self.cohort).choice(
                setting.clients, self.cohort, replace=False
            )
            jobs = [(visits[client].next(start), client) for client in cohort.tolist()]
            jobs.sort(key=lambda job: (job[0].received, job[1]))
            rows += [(client, count, visit) for visit, client in jobs]
            start = jobs[-1][0].received
            count += self.cohort
        client = np.array([row[0] for row in rows], dtype=np.int64)
        reads = np.array([row[1] for row in rows], dtype=np.int64)
        activity = Activity(client, *_columns([row[2] for row in rows]))
        return _cut(setting, client, reads, activity.read_at, activity.received, activity)


@dataclass(frozen=True)
class Drawn(Schedule):
    """Assumption 1 exactly: i_t ~ Uniform[n] and Omega(t) = t - s with s uniform on 0..min(t, tau). One arrival a
    second."""

    tau: int = 10
    """Largest staleness."""

    def __post_init__(self) -> None:
        if self.tau < 0:
            raise ConfigError(f"schedule.tau must be >= 0; got {self.tau}")

    def timeline(self, setting: Setting) -> Timeline:
        bounds = [bound for bound in (setting.updates, setting.horizon) if bound is not None]
        _refuse_endless(setting, min(bounds), min(bounds))
        t = np.arange(int(min(bounds)))
        client = rng(setting.seed, "drawn client").integers(setting.clients, size=len(t))
        # One uniform draw per arrival, so that tau changes the staleness but not whose turn it is.
        share = rng(setting.seed, "drawn staleness").random(len(t))
        reads = t - np.floor(share * (np.minimum(t, self.tau) + 1)).astype(np.int64)
        horizon = float(len(t)) if setting.horizon is None else min(setting.horizon, float(len(t)))
        return jobs_to_timeline(
            setting.clients, client, reads, reads.astype(np.float64), np.arange(1.0, len(t) + 1), horizon
        )


@dataclass(frozen=True)
class Replay(Schedule):
    """A timeline from a CSV file, as `persafl timeline --csv` writes it."""

    path: str
    """A CSV file as `persafl timeline --csv` writes it."""

    def timeline(self, setting: Setting) -> Timeline:
        whole = from_csv(self.path, setting.clients)
        return _cut(setting, whole.client, whole.reads, whole.read_at, whole.arrives, None)


SCHEDULES = {"asynchronous": Asynchronous, "rounds": Rounds, "drawn": Drawn, "replay": Replay}


# -- the closed loop --------------------------------------------------------------------------------------------------


def _free_running(setting: Setting, tau: int | None) -> Timeline:
    """No client ever waits, so each client's times are one cumulative sum; only `reads` needs all of them together."""
    _refuse_far(setting, setting.clients)
    until = _horizon_guess(setting)
    while True:
        activity = _busy_until(setting, until)
        activity = activity.rows(np.lexsort((activity.client, activity.received)))
        if (lost := activity.received <= activity.read_at).any():
            raise TimelineError(
                f"a visit of client {int(activity.client[lost][0])} at simulated time "
                f"{float(activity.read_at[lost][0]):g} is too short to be told "
                "from no time at all: delays and horizon are too many orders of magnitude apart"
            )
        if tau is None:
            reads, kept = (
                np.searchsorted(activity.received, activity.read_at, side="right"),
                np.ones(len(activity.client), dtype=bool),
            )
        else:
            reads, kept = _reads_with_drops(activity, tau)
        # Every visit that begins by `until` is there, so every arrival by then is.
        known = int(np.sum(kept & (activity.received <= until)))
        if until == setting.horizon or (setting.updates is not None and known >= setting.updates):
            return _cut(setting, activity.client, reads, activity.read_at, activity.received, activity, kept)
        until = min(2 * until, setting.horizon or np.inf)


def _busy_until(setting: Setting, horizon: float) -> Activity:
    """Every visit that begins by `horizon`, client after client."""
    columns: list[list[Floats]] = [[], [], [], []]
    counts: list[int] = []
    before = 0
    for client in range(setting.clients):
        block_of = setting.delays.of(setting.seed, client, setting.local_steps, setting.gradients)
        blocks = [np.zeros((1, 4))]  # ends of download, compute, upload, rest
        while (now := blocks[-1][-1, 3:])[0] <= horizon:
            _refuse_endless(setting, before + (len(blocks) - 1) * VISITS_AT_A_TIME, horizon)
            blocks.append(np.cumsum(np.concatenate([now, block_of(len(blocks) - 1).ravel()]))[1:].reshape(-1, 4))
        ends = np.concatenate(blocks)
        starts, ends = ends[:-1, 3], ends[1:]
        begun = int(np.searchsorted(starts, horizon, side="right"))
        for column, values in zip(columns, (starts, ends[:, 0], ends[:, 1], ends[:, 2]), strict=True):
            column.append(values[:begun])
        counts.append(begun)
        before += begun
    client_column = np.repeat(np.arange(setting.clients), counts)
    return Activity(client_column, *(np.concatenate(column) for column in columns))


def _horizon_guess(setting: Setting) -> float:
    if setting.updates is None:
        assert setting.horizon is not None
        return setting.horizon
    visits_of = (
        setting.delays.of(setting.seed, client, setting.local_steps, setting.gradients)
        for client in range(min(setting.clients, 200))
    )
    cycles = [float(block_of(0).sum(axis=1).mean()) for block_of in visits_of]
    rate = setting.clients * float(np.mean(1 / np.maximum(cycles, 1e-12)))
    # Not twice the longest cycle: where one client takes a day, those that take a second would go round for two.
    return min(1.1 * setting.updates / rate + 2 * min(cycles), setting.horizon or np.inf)


def _reads_with_drops(activity: Activity, tau: int) -> tuple[Ints, np.ndarray]:
    """Walk arrivals and reads in order of time; an arrival with more than tau applied since its read is not applied."""
    jobs = len(activity.client)
    times = np.concatenate([activity.received, activity.read_at])
    kinds = np.repeat([ARRIVES, ASKS], jobs)
    order = np.lexsort((np.tile(activity.client, 2), kinds, times)).tolist()
    reads, kept, applied = [0] * jobs, [False] * jobs, 0
    for event in order:
        if event >= jobs:
            reads[event - jobs] = applied
        elif applied - reads[event] <= tau:
            kept[event] = True
            applied += 1
    return np.array(reads, dtype=np.int64), np.array(kept)


def _waiting(setting: Setting, tau: int) -> Timeline:
    """The bound is kept by waiting: a read waits while more than tau others are in flight, an arrival is held while
    applying it would make a job in flight miss its deadline (the arrival count at its read, plus tau)."""
    _refuse_far(setting, 1)  # all may be held up by one
    visits = [_Visits(setting, client) for client in range(setting.clients)]
    events = [(0.0, ASKS, client) for client in range(setting.clients)]
    waiting: deque[int] = deque()  # clients that want to read, first come first served
    in_flight = Deadlines(tau, setting.clients)
    held: list[_Reader] = []  # a heap: the earliest deadline first
    reader: dict[int, _Reader] = {}
    begun: list[tuple[int, _Visit]] = []
    applied: list[tuple[_Reader, float]] = []

    def read(client: int) -> None:
        visit = visits[client].next(now)
        reader[client] = _Reader(len(applied), in_flight.add(len(applied)), client, len(begun))
        begun.append((client, visit))
        heapq.heappush(events, (visit.received, ARRIVES, client))

    def apply(job: _Reader) -> None:
        in_flight.remove(job.number)
        applied.append((job, now))
        heapq.heappush(events, (now + visits[job.client].rest(), ASKS, job.client))

    while events and not _over(setting, events[0][0], len(applied)):
        now, kind, client = heapq.heappop(events)
        _refuse_endless(setting, len(begun), now)
        if kind == ASKS:
            waiting.append(client)
        else:
            heapq.heappush(held, reader.pop(client))
            while held and held[0].reads <= in_flight.last_reads(len(applied)):
                apply(heapq.heappop(held))
        if not (events and events[0][:2] == (now, ARRIVES)):  # equal times: every arrival comes before the first read
            while waiting and in_flight.admits():
                read(waiting.popleft())

    activity = Activity(
        np.array([client for client, _ in begun], dtype=np.int64), *_columns([visit for _, visit in begun])
    )
    jobs = np.array([job for job, _ in applied], dtype=np.int64).reshape(-1, 4)
    reads, _, clients, rows = jobs.T
    return _cut(setting, clients, reads, activity.read_at[rows], np.array([moment for _, moment in applied]), activity)


class _Reader(NamedTuple):
    """A job in flight, ordered by deadline."""

    reads: int
    number: int
    client: int
    row: int


def _columns(visits: list[_Visit]) -> list[Floats]:
    return list(np.array(visits, dtype=np.float64).reshape(-1, 4).T)


class _Visit(NamedTuple):
    """When a visit's phases end: the row of an `Activity`, without its client."""

    read_at: float
    downloaded: float
    computed: float
    received: float


class _Visits:
    """One client's visits, one after the other."""

    def __init__(self, setting: Setting, client: int) -> None:
        self._block_of: VisitDelays = setting.delays.of(setting.seed, client, setting.local_steps, setting.gradients)
        self._block: list[list[float]] = []
        self._count = 0

    def next(self, read_at: float) -> _Visit:
        index = self._count % VISITS_AT_A_TIME
        if index == 0:
            self._block = self._block_of(self._count // VISITS_AT_A_TIME).tolist()
        self._count += 1
        download, compute, upload, self._rest = self._block[index]
        downloaded = read_at + download
        computed = downloaded + compute
        return _Visit(read_at, downloaded, computed, computed + upload)

    def rest(self) -> float:
        """The pause after the visit that `next` gave last."""
        return self._rest


# -- the end of a run -------------------------------------------------------------------------------------------------


def _over(setting: Setting, now: float, arrivals: int) -> bool:
    return (setting.horizon is not None and now > setting.horizon) or (
        setting.updates is not None and arrivals >= setting.updates
    )


def _refuse_far(setting: Setting, at_once: int) -> None:
    """A horizon that is far beyond the limit, before walking there: at least `at_once` clients are busy at any time."""
    if setting.updates is None and setting.horizon is not None:
        longest = setting.delays.longest(setting.seed, setting.clients, setting.local_steps, setting.gradients)
        _refuse_endless(setting, at_once * setting.horizon / longest / 2 if longest > 0 else 0, setting.horizon)


def _refuse_endless(setting: Setting, visits: float, now: float) -> None:
    """A run that is to end by `updates` may look some way beyond them."""
    if visits > limits.MOST_VISITS * (1 if setting.updates is None else 4):
        raise TimelineError(
            f"{setting.clients} clients make more than {limits.MOST_VISITS:,} visits by simulated time "
            f"{now:g}, the most that a timeline holds; "
            "lower horizon, updates or clients, or lengthen the delays"
        )


def _cut(
    setting: Setting,
    client: Ints,
    reads: Ints,
    read_at: Floats,
    arrives: Floats,
    activity: Activity | None,
    kept: np.ndarray | None = None,
) -> Timeline:
    """The timeline up to the horizon or the last of `updates` arrivals; `kept` marks the arrivals that were not
    dropped."""
    kept = np.ones(len(client), dtype=bool) if kept is None else kept
    end = len(client) if setting.horizon is None else int(np.searchsorted(arrives, setting.horizon, side="right"))
    if setting.updates is not None and kept[:end].sum() > setting.updates:
        end = int(np.flatnonzero(kept)[setting.updates - 1]) + 1
    rows = np.flatnonzero(kept[:end])
    cut_short = setting.horizon is None or (setting.updates is not None and len(rows) == setting.updates)
    horizon = (float(arrives[end - 1]) if end else 0.0) if cut_short else setting.horizon
    assert horizon is not None
    if activity is not None:
        activity = activity.rows(activity.read_at < horizon)
    return jobs_to_timeline(
        setting.clients,
        client[rows],
        reads[rows],
        read_at[rows],
        arrives[rows],
        horizon,
        activity,
        dropped=end - len(rows),
    )
