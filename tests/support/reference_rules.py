"""A slow, naive reference of the server rules: every update that ever arrived is kept, and each version is computed anew
from all of them, straight from the papers.

Here Delta = w_i - w is how far a client moved, the sign of the papers; the package sends w - w_i.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Arrived(NamedTuple):
    client: int
    version: int
    """The version that was read."""
    staleness: int
    Delta: np.ndarray


def federate(timeline, H, a, w0, *, server, gradient, eta, local_steps, buffer=1, skipped=()):
    """Walk a timeline, keeping every version; after each `buffer` arrivals the next is server(w0, batches), where batches
    are all that arrived until then, by version. Updates of `skipped` clients do not enter."""
    versions, batches, batch = [w0], [], []
    for t, job in enumerate(timeline):
        version = job.reads // buffer
        w = read = versions[version]
        for _ in range(local_steps):
            w = w - eta * gradient(H[job.client], a[job.client], w, read)
        if job.client not in skipped:
            batch.append(Arrived(job.client, version, t // buffer - version, w - read))
        if (t + 1) % buffer == 0:
            batches.append(batch)
            batch = []
            versions.append(server(w0, batches))
    return versions[-1]


def constant(staleness):
    return 1.0


def mean_updates(batches, buffer, weight):
    """Delta_t of every version: the discounted updates, divided by the size of the buffer. A version that nothing entered
    has none."""
    return [sum(weight(one.staleness) * one.Delta for one in batch) / buffer for batch in batches if batch]


def fedopt(second_moment, *, step, beta1, tau, buffer=1, weight=constant):
    """Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), Algorithm 2, without bias correction:

    m_t = beta1 m_{t-1} + (1 - beta1) Delta_t        v_{-1} = tau^2        x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)
    """

    def server(x, batches):
        m, v = np.zeros_like(x), np.full_like(x, tau**2)
        for Delta in mean_updates(batches, buffer, weight):
            m = beta1 * m + (1 - beta1) * Delta
            v = second_moment(v, Delta)
            x = x + step * m / (np.sqrt(v) + tau)
        return x

    return server


def adam(beta2):
    return lambda v, Delta: beta2 * v + (1 - beta2) * Delta**2


def yogi(beta2):
    return lambda v, Delta: v - (1 - beta2) * Delta**2 * np.sign(v - Delta**2)


def adagrad(v, Delta):
    return v + Delta**2


def fedavgm(*, step, momentum, buffer=1, weight=constant):
    """Hsu et al., "Measuring the Effects of Non-Identical Data Distribution": m <- momentum m + Delta, x <- x + step m."""

    def server(x, batches):
        m = np.zeros_like(x)
        for Delta in mean_updates(batches, buffer, weight):
            m = momentum * m + Delta
            x = x + step * m
        return x

    return server


def ca2fl(clients, *, step, buffer, weight=constant):
    """Wang et al., "... with Cached Update Calibration" (ICLR 2024): h^i is client i's latest update (zero before the first),
    h their mean over ALL clients at the last version,

    v = h + 1/K sum over the buffer of s (Delta_i - h^i)        w <- w + step v

    A client that is in the buffer twice is calibrated the second time by its first update.
    """

    def server(x, batches):
        h_i = np.zeros((clients, len(x)))
        for batch in batches:
            h = h_i.mean(axis=0)
            calibrated = np.zeros_like(x)
            for one in batch:
                calibrated = calibrated + weight(one.staleness) * (one.Delta - h_i[one.client])
                h_i[one.client] = one.Delta
            if batch:
                x = x + step * (h + calibrated / buffer)
        return x

    return server


def ace(clients, *, step, buffer=1, weight=constant, tau_algo=None, warmup=False):
    """Chang et al., "Mitigating Participation Imbalance Bias in Asynchronous Federated Learning": w <- w + step u with
    u = 1/n sum_i U_i, the mean of everybody's latest update; with tau_algo (ACED) the mean of those that were computed
    from one of the last versions, t - version <= tau_algo."""

    def server(x, batches):
        for t, batch in enumerate(batches):
            latest = {one.client: one for earlier in batches[: t + 1] for one in earlier}
            if tau_algo is not None:
                latest = {i: one for i, one in latest.items() if t - one.version <= tau_algo}
            if not batch or not latest or (warmup and len(latest) < clients):
                continue
            total = sum(weight(one.staleness) * one.Delta for one in latest.values())
            x = x + step * total / (clients if tau_algo is None else len(latest))
        return x

    return server
