"""Jobs in flight and their deadlines: who may read and who may be applied so that staleness never exceeds tau."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

SCAN = 256  # jobs looked at together when searching for a tight one


class Deadlines:
    """The jobs in flight, in order of reading. A job that read at arrival count r must be applied at index <= r + tau.

    With the jobs in flight numbered k = 0, 1, ... by deadline, all of them can still be met after t arrivals exactly if
    t + k <= r_k + tau for every k (apply the earliest deadline first). A new read has the latest deadline t + tau, so
    it is admitted while at most tau others are in flight. Applying a job takes one step from everyone before it, so it
    may be applied unless someone before it is *tight*: t + k = r_k + tau.
    """

    def __init__(self, tau: int, most: int) -> None:
        """For at most `most` jobs in flight at once."""
        self.tau = tau
        self._jobs: list[int] = []  # increasing numbers, so also in order of deadline
        self._lead = np.zeros(most, dtype=np.int64)  # r_k - k
        self._next = 0
        self._slack = tau  # a lower bound of min_k (r_k + tau - t - k): while it is positive, no deadline is near

    def admits(self) -> bool:
        """May one more job read now?"""
        return len(self._jobs) <= self.tau

    def add(self, t: int) -> int:
        """A job reads after t arrivals; returns its number."""
        in_flight = len(self._jobs)
        self._slack = min(self._slack, self.tau - in_flight)
        self._lead[in_flight] = t - in_flight
        self._jobs.append(self._next)
        self._next += 1
        return self._next - 1

    def last_reads(self, t: int) -> int:
        """Jobs that read at this arrival count or before may be arrival t; jobs that read later must wait."""
        if self._slack > 0:
            return t
        in_flight, lowest = len(self._jobs), t
        for start in range(0, in_flight, SCAN):
            lead = self._lead[start : min(start + SCAN, in_flight)]
            tight = np.flatnonzero(lead <= t - self.tau)
            if len(tight):
                # Jobs that read the same model have the same deadline and may go in any order.
                return int(lead[tight[0]] + start + tight[0])
            lowest = min(lowest, int(lead.min()))
        self._slack = lowest + self.tau - t
        return t

    def remove(self, job: int) -> None:
        """The job has been applied."""
        position = bisect_left(self._jobs, job)
        self._jobs.pop(position)
        in_flight = len(self._jobs)
        self._lead[position:in_flight] = self._lead[position + 1 : in_flight + 1] + 1
        self._slack -= 1
