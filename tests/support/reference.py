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


def federate_turns(timeline, H, a, shared, private, *, gradient, eta, head_steps, body_steps, buffer=1):
    """FedRep (Collins et al. 2021, Algorithm 1): first the private part moves alone, then the shared part alone."""
    versions, memories, waiting, size = [shared], [{}], [], len(shared)
    for job in timeline:
        read = np.concatenate([versions[job.reads // buffer], memories[job.reads].get(job.client, private)])
        w = read
        for step in range(head_steps + body_steps):
            moved = eta * gradient(H[job.client], a[job.client], w, read)
            moved[:size] *= step >= head_steps
            moved[size:] *= step < head_steps
            w = w - moved
        memories.append({**memories[-1], job.client: w[size:]})
        waiting.append((read - w)[:size])
        if len(waiting) == buffer:
            versions.append(versions[-1] - sum(waiting) / buffer)
            waiting = []
    return versions[-1], memories[-1]


def federate_personal(timeline, H, a, w0, *, visit, start, buffer=1):
    """Algorithms 1 and 2 where each client keeps a personal model; keeps every version and every state of the memories.

    `visit(H_i, a_i, read, kept)` gives the client's local model and what it keeps then. Returns the last version and
    the last memories.
    """
    versions, memories, waiting = [w0], [{}], []
    for job in timeline:
        read, kept = versions[job.reads // buffer], memories[job.reads].get(job.client, start)
        w, kept = visit(H[job.client], a[job.client], read, kept)
        memories.append({**memories[-1], job.client: kept})
        waiting.append(read - w)
        if len(waiting) == buffer:
            versions.append(versions[-1] - sum(waiting) / buffer)
            waiting = []
    return versions[-1], memories[-1]


def ditto(H, a, read, v, *, gradient, eta, local_steps, lam, personal_steps, personal_eta):
    """Ditto (Li et al. 2021, Algorithm 1): the shared model as ever; v <- v - eta (grad f(v) + lam (v - w))."""
    w = read
    for _ in range(local_steps):
        w = w - eta * gradient(H, a, w, read)
    for _ in range(personal_steps):
        v = v - personal_eta * (plain(H, a, v) + lam * (v - read))
    return w, v


def apfl(H, a, read, kept, *, eta, local_steps, adapts):
    """APFL (Deng et al. 2020, Algorithm 1): v moves by the gradient of f(mixture v + (1 - mixture) w) with respect to
    v, and the mixture by that with respect to the mixture, once a visit."""
    w, (v, mixture) = read, kept
    for step in range(local_steps):
        slope = plain(H, a, mixture * v + (1 - mixture) * w)
        moved = np.clip(mixture - eta * (v - w) @ slope, 0, 1) if adapts and step == 0 else mixture
        v, w, mixture = v - eta * mixture * slope, w - eta * plain(H, a, w), moved
    return w, (v, mixture)
