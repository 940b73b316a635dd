"""A slow, naive reference: every method on quadratics in plain numpy, straight from the papers.

f_i(w) = 1/2 (w - a_i)^T H_i (w - a_i)        grad f_i(w) = H_i (w - a_i)
"""

from __future__ import annotations

import numpy as np


def plain(H, a, w):
    return H @ (w - a)


def maml(H, a, w, alpha):
    """(I - alpha H) grad f(w - alpha grad f(w))"""
    return (np.eye(len(a)) - alpha * H) @ plain(H, a, w - alpha * plain(H, a, w))


def moreau_point(H, a, w, lam):
    """argmin f(theta) + lam/2 |theta - w|^2 solves (H + lam I) theta = H a + lam w"""
    return np.linalg.solve(H + lam * np.eye(len(a)), H @ a + lam * w)


def moreau_steps(H, a, w, lam, steps, lr):
    """theta after gradient steps on h from w"""
    theta = w.copy()
    for _ in range(steps):
        theta = theta - lr * (plain(H, a, theta) + lam * (theta - w))
    return theta


def federate(timeline, H, a, w0, *, gradient, eta, local_steps, beta=1.0, buffer=1, weight=lambda s: 1.0, mix=None):
    """The whole of Algorithms 1 and 2 over a timeline; keeps every version and looks up the one that was read."""
    versions = [w0]
    waiting = []
    for t, job in enumerate(timeline):
        read = versions[job.reads // buffer]
        w = read
        for _ in range(local_steps):
            w = w - eta * gradient(H[job.client], a[job.client], w, read)
        staleness = t // buffer - job.reads // buffer
        if mix is not None:
            share = mix * weight(staleness)
            versions.append((1 - share) * versions[-1] + share * w)
            continue
        waiting.append(weight(staleness) * (read - w))
        if len(waiting) == buffer:
            versions.append(versions[-1] - beta * sum(waiting) / buffer)
            waiting = []
    return versions[-1]


def scaffold(timeline, H, a, w0, *, eta, local_steps, beta, cohort):
    """SCAFFOLD, Option I, round by round."""
    n, d = a.shape
    x, c, c_i = w0, np.zeros(d), np.zeros((n, d))
    jobs = list(timeline)
    for start in range(0, len(jobs) - cohort + 1, cohort):
        models, controls = {}, {}
        for job in jobs[start : start + cohort]:
            i, y = job.client, x
            for _ in range(local_steps):
                y = y - eta * (plain(H[i], a[i], y) - c_i[i] + c)
            models[i], controls[i] = y, plain(H[i], a[i], x)
        x = x + beta * sum(models[i] - x for i in models) / cohort
        c = c + sum(controls[i] - c_i[i] for i in controls) / n
        for i in controls:
            c_i[i] = controls[i]
    return x


def federate_private(timeline, H, a, shared, private, *, gradient, eta, local_steps, beta=1.0, buffer=1):
    """Algorithms 1 and 2 where each client keeps the last values of w; keeps every version and every state of the memories.

    A job sees its client's memory as it was after `reads` arrivals. Returns the last version and the last memories.
    """
    versions, memories, waiting = [shared], [{}], []
    for job in timeline:
        read = np.concatenate([versions[job.reads // buffer], memories[job.reads].get(job.client, private)])
        w = read
        for _ in range(local_steps):
            w = w - eta * gradient(H[job.client], a[job.client], w, read)
        memories.append({**memories[-1], job.client: w[len(shared) :]})
        waiting.append((read - w)[: len(shared)])
        if len(waiting) == buffer:
            versions.append(versions[-1] - beta * sum(waiting) / buffer)
            waiting = []
    return versions[-1], memories[-1]
